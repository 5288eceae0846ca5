"""Changed code and parameters, as ``tiphys resume`` and ``tiphys fork`` take them.

Reads the options that change a run (a new pipeline file, parameters, drift
actions), compiles the changed Workflow, and prints the differences.
"""

import difflib
import importlib.metadata
import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from tiphys_controller import DriftFinding, WorkflowChange, format_drift
from tiphys_controller.submit.authored_facts import author_parameters

from hera_pipelines.cli.progress.local import read_code_folder, record_code_folder
from hera_pipelines.cli.screen import Screen
from hera_pipelines.cli.shared_options import (
    PipelineOption,
    compile_to_workflow,
    declared_parameters,
    load_pipeline_file,
    parse_parameters,
    require_values,
    with_parameters,
)
from tiphys.errors import UsageError
from tiphys.lineage.run_history import RunHistory
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.drift_policy import DriftAction, DriftClass
from tiphys.store import Store

if TYPE_CHECKING:
    from hera_pipelines.authoring.loading import AnyPipeline

FromOption = Annotated[
    list[str] | None,
    typer.Option(
        "--from",
        metavar="STEP",
        help="Run this finished step, or item of a fan-out such as 'fit[2]', again, and all steps that depend on it; "
        "may be repeated.",
    ),
]
FileArgument = Annotated[
    Path | None, typer.Argument(metavar="PIPELINE.py", help="Use this file instead of the submitted one.")
]
DriftOption = Annotated[
    list[str] | None,
    typer.Option(
        "--drift",
        metavar="CLASS=ACTION",
        help="Action for one class of changes, instead of the pipeline's own setting. "
        f"Classes: {', '.join(DriftClass)}; actions: {', '.join(DriftAction)}; may be repeated.",
    ),
]

_CONTEXT_LINES = 1
_MAX_LINES = 40


@dataclass(frozen=True)
class RunEdits:
    """The changes to a run that the command line names."""

    file: FileArgument = None
    pipeline_name: PipelineOption = None
    rerun_steps: FromOption = None
    drift: DriftOption = None
    parameters: Sequence[str] = ()
    """Values of parameters, which a resume cannot change."""

    @property
    def rerun(self) -> tuple[str, ...]:
        """The steps to run again."""
        return tuple(self.rerun_steps or ())

    @cached_property
    def pipeline(self) -> "AnyPipeline | None":
        """The pipeline of the file; None without a file."""
        return load_pipeline_file(self.file, self.pipeline_name) if self.file else None

    @property
    def store(self) -> str:
        """URL of the store that the pipeline names; empty if none."""
        return self.pipeline.store if self.pipeline else ""

    def code_folder(self, store: Store, run: str) -> Path | None:
        """Folder of the modules of the pipeline, for programs on this machine; None if it is not known here."""
        return self.file.parent if self.file else read_code_folder(store, run)

    def build_change(
        self, store: Store, run: str, *, runs_locally: bool = True, note: Callable[[str], None] = lambda _: None
    ) -> WorkflowChange:
        """Build the changed Workflow of ``run``.

        A changed file keeps the run's parameter values for the parameters that it still declares; ``note`` is told of
        the values of the file that give way. ``runs_locally``: whether the programs run on this machine, with the
        packages installed here.

        Raises:
            UsageError: the file does not define the named pipeline, or a parameter, class or action is unknown.
        """
        parameters, actions = parse_parameters(self.parameters), _parse_drift_actions(self.drift or ())
        version_lookup = installed_version if runs_locally else None
        if self.pipeline is None and not parameters:
            return WorkflowChange(None, actions, version_lookup)
        before = RunHistory(store, run).workflow
        if self.file is None or self.pipeline is None:
            return WorkflowChange(with_parameters(before, parameters), actions, version_lookup)
        changed = compile_to_workflow(self.pipeline, store=store.url)
        declared = {parameter["name"] for parameter in declared_parameters(changed)}
        inherited = {name: value for name, value in author_parameters(before).items() if name in declared}
        values = {**inherited, **parameters}
        if kept := _describe_kept(run, self.file, inherited, values, author_parameters(changed)):
            note(kept)
        return WorkflowChange(
            _complete(changed, self.pipeline, self.file.parent, before, values), actions, version_lookup
        )


def _describe_kept(
    run: str, file: Path, inherited: Mapping[str, str], values: Mapping[str, str], in_file: Mapping[str, str]
) -> str:
    """Which values of the file give way to those of the run, and how to use them; empty if none do."""
    kept = {
        name: text for name, text in in_file.items() if name in inherited and values[name] == inherited[name] != text
    }
    if not kept:
        return ""
    differences = ", ".join(f"{name}={inherited[name]} (the file: {text})" for name, text in kept.items())
    words = [word for name, text in kept.items() for word in ("-p", f"{name}={text}")]
    fork = shlex.join(["tiphys", "fork", run, str(file), *words])
    return f"parameters keep the values of run {run}: {differences}; with those of the file: {fork}"


def _complete(
    manifest: Manifest, pipeline: "AnyPipeline", folder: Path, before: Manifest, values: dict[str, str]
) -> Manifest:
    """The compiled Workflow with parameter values, and with what it has from its folder and the Workflow before."""
    from hera_pipelines.compile.output import read_git_commit, record_code_version

    manifest = with_parameters(manifest, values, pipeline)
    require_values(manifest)
    record_code_version(manifest, read_git_commit(folder))
    record_code_folder(manifest, folder)
    if account := before["spec"].get("serviceAccountName"):
        manifest["spec"].setdefault("serviceAccountName", account)
    return manifest


def installed_version(package: str) -> str:
    """Version of an installed package, or of ``python``; empty if the package is not installed."""
    if package == "python":
        return platform.python_version()
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def show_drift(screen: Screen, differences: Sequence[DriftFinding]) -> None:
    """Print every difference on stderr; a difference in source code is followed by its diff."""
    for difference in differences:
        screen.note(f"{difference.action}: {format_drift(difference)}")
        if "\n" in difference.before + difference.after:
            for line in _diff_lines(difference):
                screen.note(f"  {line}")


def _diff_lines(difference: DriftFinding) -> list[str]:
    texts = (difference.before.splitlines(), difference.after.splitlines())
    lines = list(difflib.unified_diff(*texts, lineterm="", n=_CONTEXT_LINES))[2:]
    omitted = len(lines) - _MAX_LINES
    return [*lines[:_MAX_LINES], f"… and {omitted} more lines"] if omitted > 0 else lines


def _parse_drift_actions(options: Sequence[str]) -> dict[str, str]:
    actions = {}
    for text in options:
        name, equals, action = text.partition("=")
        if not equals:
            raise UsageError(f"drift {text!r} is not CLASS=ACTION; write, for example, --drift image=warn")
        actions[name.replace("-", "_")] = action
    return actions
