"""From a file that a person names to the pipeline in it."""

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from hera_pipelines.authoring.cron import CronPipeline
from hera_pipelines.authoring.pipeline import Pipeline
from tiphys.errors import TiphysError, UsageError

AnyPipeline = Pipeline | CronPipeline


def load_pipeline(path: Path, name: str | None = None) -> AnyPipeline:
    """Run the Python file ``path`` and return the pipeline that it defines.

    Args:
        path: The file. Its folder is on the import path while it runs.
        name: Variable or pipeline name, where the file defines several.

    Raises:
        UsageError: there is no such file, it fails, or which pipeline is meant
            is not clear.
    """
    found = _pipelines(_import(path))
    if not found:
        raise UsageError(f"{path} defines no pipeline at its top level; write `with Pipeline(…) as pipeline:`")
    if name is None and len(found) == 1:
        return next(iter(found.values()))
    if name is None:
        raise UsageError(f"{path} defines several pipelines: {', '.join(found)}; say which one with --pipeline NAME")
    for variable, pipeline in found.items():
        if name in (variable, pipeline.pipeline_name):
            return pipeline
    raise UsageError(f"{path} defines no pipeline {name!r}; it has: {', '.join(found)}")


def _pipelines(module: ModuleType) -> dict[str, AnyPipeline]:
    """Pipelines by the first variable that holds each."""
    found: dict[str, AnyPipeline] = {}
    for variable, value in vars(module).items():
        if isinstance(value, AnyPipeline) and not any(value is known for known in found.values()):
            found[variable] = value
    return found


def _import(path: Path) -> ModuleType:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise UsageError(f"{path} {what}; name the Python file that defines the pipeline")
    spec = importlib.util.spec_from_file_location(path.stem.replace("-", "_"), path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file; name the .py file that defines the pipeline")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except TiphysError as error:
        raise type(error)(f"{path}{_line(path, error)}: {error}") from error
    except SystemExit as error:
        raise UsageError(
            f"{path}{_line(path, error)}: the file ends the program by itself (exit {error.code}); "
            "put what is only for running it under `if __name__ == '__main__':`"
        ) from error
    except Exception as error:
        raise UsageError(f"{path}{_line(path, error)}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module


def _line(path: Path, error: BaseException) -> str:
    """``:12``, the last line of the file that took part in ``error``; empty where none did."""
    names = (str(path), str(path.absolute()))  # the import system makes paths absolute
    if isinstance(error, SyntaxError) and error.filename in names:
        return f":{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename in names]
    return f":{lines[-1]}" if lines else ""
