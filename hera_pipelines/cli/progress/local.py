"""Runs a submission on this machine and shows its progress, for ``tiphys run``, ``resume`` and ``fork``."""

import contextlib
import math
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hera_pipelines.cli.error_messages import RunFailedError, RunInterruptedError
from hera_pipelines.cli.progress.table import ProgressTable, TrainingLookup, TrainingSnapshot, show_live_progress
from hera_pipelines.cli.screen import Screen
from hera_pipelines.cli.shared_options import DEFAULT_STATE
from hera_pipelines.cli.start.detach import Detachment
from tiphys.errors import NotFoundError, StoreError
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.step_names import StepNames
from tiphys.lineage.training_progress import read_training_progress
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.protocol.step_spec import StepKind
from tiphys.records import TrainingProgress
from tiphys.store import LineageLayout, Store, lineage_name, read_run

if TYPE_CHECKING:
    from hera_pipelines.local.run_session import LocalSession

LocalDetachOption = Annotated[
    bool, typer.Option("--detach", help="Continue in the background; `tiphys attach` shows the progress.")
]
ALREADY_STARTED_MESSAGE = "the run was started before, under the same idempotency key"
_CODE_ANNOTATION = "tiphys.dev/code"
_ITEMS_SECONDS = 10.0
"""Names of items that are made at run time cost a read for each, so they are read no more often."""

StateOption = Annotated[
    Path, typer.Option("--state", metavar="DIR", help="Folder of the local engine for workflows, logs and leases.")
]
QueuesOption = Annotated[
    Path | None,
    typer.Option("--queues", metavar="FILE", help="YAML file of GPU queues; without it, GPUs are not limited."),
]
PortOption = Annotated[
    int, typer.Option("--plugin-port", help="Loopback port of the plugin; 0 chooses a free port.", min=0, max=65535)
]
SpeedOption = Annotated[
    float, typer.Option("--speed", help="Divides waits such as back-off; programs run at normal speed.", min=0.01)
]
CodeOption = Annotated[
    Path | None,
    typer.Option(
        "--code", metavar="DIR", help="Folder whose modules the programs can import. Default: the pipeline file's."
    ),
]


@dataclass(frozen=True)
class EngineOptions:
    """Options of the local engine; see `LocalSession`."""

    state: StateOption = DEFAULT_STATE
    queues: QueuesOption = None
    plugin_port: PortOption = 0
    speed: SpeedOption = 1.0
    code: CodeOption = None


@dataclass(frozen=True)
class FollowedSubmission:
    """A submission whose progress is shown."""

    run: str
    workflow_name: str
    store: Store
    store_arguments: tuple[str, ...]
    """The ``--store`` option that a later command needs to find the store; empty if it needs none."""

    def command(self, verb: str) -> str:
        """The command line for ``verb`` on this run in the same working directory, in backticks."""
        return f"`{shlex.join(['tiphys', verb, self.run, *self.store_arguments, *self.options_of(verb)])}`"

    def options_of(self, verb: str) -> tuple[str, ...]:  # noqa: ARG002  a submission of either kind has its own
        """Further options that ``verb`` needs."""
        return ()

    @property
    def failure_hint(self) -> str:
        """What to do after a failure."""
        return f"{self.command('get')} shows the details, and {self.command('resume')} continues"


@dataclass(frozen=True)
class LocalSubmission(FollowedSubmission):
    state: Path
    """Folder of the engine."""

    def options_of(self, verb: str) -> tuple[str, ...]:
        is_needed = verb == "resume" and self.state.absolute() != DEFAULT_STATE.absolute()
        return ("--state", str(self.state)) if is_needed else ()

    @property
    def failure_hint(self) -> str:
        return f"logs are in {self.state / 'logs'}, and {self.command('get')} shows the details"


def record_code_folder(manifest: Manifest, folder: Path) -> None:
    """Record the folder of the run's modules, so that a resume from another working directory finds them."""
    manifest["metadata"].setdefault("annotations", {})[_CODE_ANNOTATION] = str(folder.absolute())


def read_code_folder(store: Store, run: str) -> Path | None:
    """Folder that `record_code_folder` recorded; None if the run or the folder does not exist on this machine."""
    try:
        annotations = read_run(store, run).workflow.get("metadata", {}).get("annotations") or {}
    except NotFoundError:
        return None  # the resume itself reports the missing run
    folder = annotations.get(_CODE_ANNOTATION)
    return Path(folder) if folder and Path(folder).is_dir() else None


def run_to_end(
    screen: Screen,
    session: "LocalSession",
    submission: LocalSubmission,
    detachment: Detachment | None = None,
) -> None:
    """Run a created Workflow to its end with a progress display, then report the result.

    With ``detachment`` the process in the terminal ends first, and the display goes to a file. That
    process ends once other commands can follow and stop the run: the next line of a script may do so.

    Raises:
        RunFailedError: the run failed; the message names each failed task and its reason.
        RunInterruptedError: a person stopped the run.
        StoreError: the state folder cannot be written, or the store when a person stopped the run.
    """
    run, workflow, state = submission.run, submission.workflow_name, submission.state
    manifest = session.read("default", workflow) or {}
    pipeline = CompiledPipeline.from_manifest(manifest)
    progress = ProgressTable(task["name"] for task in pipeline.tasks())
    with contextlib.ExitStack() as shown:

        def show() -> None:
            if detachment is not None:
                log = state / "logs" / f"engine-{workflow}.log"
                screen.note(
                    f"run {run} continues in the background; follow it with {submission.command('attach')}, stop it "
                    f"with {submission.command('stop')}; what it says is in {log}"
                )
                detachment.continue_in_background(log)
            training_of = build_training_lookup(submission.store, run, pipeline)
            session.observer = shown.enter_context(show_live_progress(screen, progress, training_of))

        try:
            session.run(workflow, show)
        except StoreError as error:
            raise StoreError(f"{error}; continue with {submission.command('resume')}") from error
    report_end(screen, submission, progress, session.read("default", workflow) or {})


def report_end(screen: Screen, submission: FollowedSubmission, progress: ProgressTable, workflow: Manifest) -> None:
    """Report the result of a Workflow that has ended.

    Raises:
        RunFailedError: the run failed; the message names each failed task and its reason.
        RunInterruptedError: a person stopped the run.
    """
    run, status = submission.run, workflow.get("status") or {}
    if status.get("phase") == "Succeeded":
        screen.note(f"run {run} succeeded; see {submission.command('get')} and {submission.command('lineage')}")
        return
    if (workflow.get("spec") or {}).get("shutdown"):
        raise RunInterruptedError(
            f"run {run} was stopped; finished steps and checkpoints are kept; "
            f"continue with {submission.command('resume')}"
        )
    for row in progress.rows.values():
        for line in row.log_tail if row.failed else ():
            screen.note(f"{row.task} | {line}")
    ended = f"its Workflow {submission.workflow_name} ended as {status.get('phase')}"
    handler = f"{submission.workflow_name}.onExit."
    handler_failures = [
        f"its exit handler: {node['displayName']}: {node.get('message') or node['phase']}"
        for node in (status.get("nodes") or {}).values()
        if node["name"].startswith(handler) and node["type"] == "Pod" and node["phase"] in ("Failed", "Error")
    ]
    reasons = progress.failure_sentences() or handler_failures
    failures = "; ".join(reasons) or f"{ended}: {status.get('message') or 'it has no message'}"
    raise RunFailedError(f"run {run} failed: {failures}; {submission.failure_hint}")


def build_training_lookup(store: Store, run: str, pipeline: CompiledPipeline) -> TrainingLookup:
    """Build the lookup of the trainings of a pipeline; it covers what is in the run's own store."""
    layouts = {
        spec.name: LineageLayout(lineage_name(run, spec.name))
        for spec in pipeline.steps.values()
        if spec.checkpoints and not spec.fan_out
    }
    find_item = _build_item_lookup(store, run, pipeline)

    def read_items(items: Sequence[str]) -> Iterator[tuple[str, TrainingProgress]]:
        for item in items:  # each has a lineage of its own
            step = find_item(item)
            if step and (progress := read_training_progress(store, lineage_name(run, step))):
                yield item, progress

    def training_of(task: str, items: Sequence[str]) -> TrainingSnapshot:
        try:
            if (layout := layouts.get(task)) is None:
                is_training = task in pipeline.steps and pipeline.steps[task].kind is StepKind.TRAIN
                return TrainingSnapshot(items=dict(read_items(items if is_training else ())))
            first = next(iter(store.list(layout.manifests)), None)
            checkpoint = layout.parse_checkpoint(first.key) if first else None
            progress = read_training_progress(store, layout.lineage)
        except StoreError:
            return TrainingSnapshot()  # a failed read of the display must not end the run
        return TrainingSnapshot(checkpoint.global_step if checkpoint else None, progress)

    return training_of


def _build_item_lookup(store: Store, run: str, pipeline: CompiledPipeline) -> Callable[[str], str]:
    """Build the lookup of the step ids of items by name; it gives an empty one for an item that is not bound yet."""
    names, read_at = StepNames(run, pipeline), -math.inf

    def find_item(item: str) -> str:
        nonlocal names, read_at
        for is_fresh in (False, True):
            if is_fresh and time.monotonic() - read_at < _ITEMS_SECONDS:
                break
            if is_fresh:
                names, read_at = RunHistory.for_display(store, run).build_names(pipeline), time.monotonic()
            with contextlib.suppress(NotFoundError):
                return names.resolve(item)
        return ""

    return find_item
