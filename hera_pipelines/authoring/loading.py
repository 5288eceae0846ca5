"""Loads the pipeline from a Python file, or from YAML with marks, for the commands of the CLI.

Every error names the file, and the line where there is one.
"""

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from hera_pipelines.authoring.adoption import YamlPipeline, read_argo_documents
from hera_pipelines.authoring.cron import CronPipeline
from hera_pipelines.authoring.pipeline import Pipeline
from tiphys.errors import TiphysError, UsageError, unknown_name_message

AnyPipeline = Pipeline | CronPipeline | YamlPipeline
_YAML_SUFFIXES = (".yaml", ".yml", ".json")


def load_pipeline(path: Path, name: str | None = None) -> AnyPipeline:
    """Run the Python file ``path`` and return the pipeline that it defines; of a YAML file, that with marks.

    Args:
        path: The file. The folder of a Python file is on the import path while it runs, and so is that of its package.
        name: Variable or name of the pipeline, for a file that defines several.

    Raises:
        UsageError: the file does not exist or fails, or it defines no pipeline or several.
    """
    is_yaml = path.suffix in _YAML_SUFFIXES
    pipelines = _find_documents(path) if is_yaml else _find_pipelines(_import_file(path))
    if not pipelines:
        raise UsageError(f"{path} defines no pipeline at its top level; write `with Pipeline(…) as pipeline:`")
    if name is None and len(pipelines) == 1:
        return next(iter(pipelines.values()))
    if name is None:
        raise UsageError(
            f"{path} defines several pipelines: {', '.join(pipelines)}; say which one with --pipeline NAME"
        )
    for variable, pipeline in pipelines.items():
        if name in (variable, pipeline.pipeline_name):
            return pipeline
    raise UsageError(unknown_name_message(str(path), "pipeline", name, pipelines))


def _find_documents(path: Path) -> dict[str, AnyPipeline]:
    documents = read_argo_documents(path)
    # A library of templates runs nothing. A file with nothing else is refused with that reason.
    runnable = [item for item in documents if item.workflow_spec.keys() & {"entrypoint", "workflowTemplateRef"}]
    return {pipeline.pipeline_name: pipeline for pipeline in map(YamlPipeline, runnable or documents)}


def _find_pipelines(module: ModuleType) -> dict[str, AnyPipeline]:
    """Pipelines of ``module`` by variable; two variables of one pipeline count once, under the first."""
    pipelines: dict[str, AnyPipeline] = {}
    for variable, value in vars(module).items():
        if isinstance(value, AnyPipeline) and not any(value is pipeline for pipeline in pipelines.values()):
            pipelines[variable] = value
    return pipelines


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise UsageError(f"{path} {problem}; name the Python file that defines the pipeline")
    root, name = _find_package(path.resolve())
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file; name the .py file that defines the pipeline")
    module = importlib.util.module_from_spec(spec)
    is_new = sys.modules.setdefault(name, module) is module  # data classes look for their module there
    sys.path[:0] = folders = list(dict.fromkeys((str(path.parent.resolve()), str(root))))
    try:
        spec.loader.exec_module(module)
    except TiphysError as error:
        raise type(error)(f"{path}{_error_line(path, error)}: {error}") from error
    except SystemExit as error:
        raise UsageError(
            f"{path}{_error_line(path, error)}: the file exits while it is loaded (exit {error.code}); "
            "move code that only runs the file under `if __name__ == '__main__':`"
        ) from error
    except Exception as error:
        raise UsageError(f"{path}{_error_line(path, error)}: {type(error).__name__}: {error}") from error
    finally:
        for folder in folders:
            sys.path.remove(folder)
        if is_new:
            sys.modules.pop(name, None)
    return module


def _find_package(path: Path) -> tuple[Path, str]:
    """The folder in which the outermost package of a file is, and the name of the file as a module."""
    root, name = path.parent, path.stem.replace("-", "_")
    while (root / "__init__.py").exists():
        root, name = root.parent, f"{root.name}.{name}"
    return root, name


def _error_line(path: Path, error: BaseException) -> str:
    """``:12``, the last line of the file in the traceback of ``error``; empty where there is none."""
    names = (str(path), str(path.absolute()))  # the import system makes paths absolute
    if isinstance(error, SyntaxError) and error.filename in names:
        return f":{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename in names]
    return f":{lines[-1]}" if lines else ""
