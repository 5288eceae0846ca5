"""Running a submission here while somebody watches: what `run` and `resume` share."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from tiphys_plugin import DirectoryCluster

from hera_pipelines.cli.error_messages import RunFailedError, RunInterruptedError
from hera_pipelines.cli.progress.table import Board, NewestStep, watching
from hera_pipelines.cli.screen import Screen
from hera_pipelines.cli.shared_options import DEFAULT_STATE
from hera_pipelines.local.nodes import NodeChange, NodePhase
from hera_pipelines.local.run_session import LocalSession
from tiphys.errors import NotFoundError, StoreError, UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.store import LineageLayout, Store, lineage_of, read_run

BEGUN_BEFORE = "it was begun before, under the same idempotency key"
_CODE_ANNOTATION = "tiphys.dev/code"

StateOption = Annotated[
    Path, typer.Option("--state", metavar="DIR", help="Folder of the local engine: its workflows, logs and leases.")
]
QueuesOption = Annotated[
    Path | None,
    typer.Option("--queues", metavar="FILE", help="YAML file of GPU queues; without it nothing is limited."),
]
PortOption = Annotated[
    int, typer.Option("--plugin-port", help="Loopback port of the plugin; 0 takes a free one.", min=0, max=65535)
]
SpeedOption = Annotated[
    float, typer.Option("--speed", help="Divides waits such as back-off; programs run as they are.", min=0.01)
]
CodeOption = Annotated[
    Path | None,
    typer.Option("--code", metavar="DIR", help="Folder whose modules the programs can import; else that of the file."),
]


@dataclass(frozen=True)
class EngineOptions:
    """How the local engine is set up; see `LocalSession`."""

    state: Path = DEFAULT_STATE
    queues: Path | None = None
    plugin_port: int = 0
    speed: float = 1.0
    code: Path | None = None


@dataclass(frozen=True)
class Job:
    """A submission that was created here, and where it lies."""

    run: str
    workflow: str
    store: Store
    state: Path
    store_must_be_named: bool
    """Later commands find the store only by ``--store``."""

    def command(self, verb: str) -> str:
        """A command about this run, as a person types it in the same folder."""
        words = ["tiphys", verb, self.run]
        words += ["--store", self.store.url] if self.store_must_be_named else []
        words += ["--state", str(self.state)] if verb == "resume" and self.state != DEFAULT_STATE else []
        return f"`{shlex.join(words)}`"


class Watch:
    """Passes the engine's reports on to whatever shows them; nobody looks before `watching` begins."""

    def __init__(self) -> None:
        self._observe: Callable[[NodeChange], None] = _ignore

    def __call__(self, change: NodeChange) -> None:
        self._observe(change)

    @contextmanager
    def shown(self, screen: Screen, board: Board, newest_step: NewestStep) -> Iterator[None]:
        with watching(screen, board, newest_step) as observe:
            self._observe = observe
            yield
        self._observe = _ignore


def _ignore(_: NodeChange) -> None:
    """Nobody looks."""


@contextmanager
def local_engine(store: Store, options: EngineOptions) -> Iterator[tuple[LocalSession, Watch]]:
    """A local session, and the hook by which it is watched."""
    try:
        options.state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot keep the engine's state in {options.state}: {error.strerror}; name another folder with --state"
        ) from error
    watch = Watch()
    with LocalSession(
        store,
        options.state,
        options.queues,
        options.plugin_port,
        options.speed,
        watch,
        code=options.code,
    ) as session:
        yield session, watch


def remember_code(manifest: Manifest, folder: Path) -> None:
    """Keep with the run where its modules are, so that a resume from any folder finds them."""
    manifest["metadata"].setdefault("annotations", {})[_CODE_ANNOTATION] = str(folder.absolute())


def remembered_code(store: Store, run: str) -> Path | None:
    """The folder that `remember_code` kept, if there is such a run and this machine has the folder."""
    try:
        annotations = read_run(store, run).workflow.get("metadata", {}).get("annotations") or {}
    except NotFoundError:
        return None  # resuming it says so, and more
    folder = annotations.get(_CODE_ANNOTATION)
    return Path(folder) if folder and Path(folder).is_dir() else None


def carry_out(screen: Screen, session: LocalSession, watch: Watch, job: Job) -> None:
    """Run a Workflow that has been created, to its end, and say how it went.

    Raises:
        RunFailedError: it failed, with the reason of every task that did.
        RunInterruptedError: a person stopped it.
    """
    run, workflow, state = job.run, job.workflow, job.state
    manifest = DirectoryCluster(state / "cluster").workflow("default", workflow) or {}
    pipeline = CompiledPipeline.from_manifest(manifest)
    board = Board(task["name"] for task in pipeline.tasks())
    with watch.shown(screen, board, newest_step(job.store, run, pipeline)):
        phase = session.run(workflow)
    if phase is NodePhase.SUCCEEDED:
        screen.note(f"run {run} succeeded; see {job.command('get')} and {job.command('lineage')}")
        return
    if "shutdown" in (DirectoryCluster(state / "cluster").workflow("default", workflow) or {}).get("spec", {}):
        raise RunInterruptedError(
            f"run {run} was stopped; what is finished is kept; go on with {job.command('resume')}"
        )
    for row in board.rows.values():
        for line in row.log_tail if row.failed else ():
            screen.note(f"{row.task} | {line}")
    failures = "; ".join(board.failures()) or f"its Workflow {workflow} ended as {phase}"
    raise RunFailedError(
        f"run {run} failed: {failures}; logs are in {state / 'logs'}, and {job.command('get')} says more"
    )


def newest_step(store: Store, run: str, pipeline: CompiledPipeline) -> NewestStep:
    """Looks up the newest checkpoint of a task, as far as it lies in the run's store."""
    # Items of a fan-out have lineages of their own, and a volume is not seen from here.
    shown = {
        spec.name: LineageLayout(lineage_of(run, spec.name))
        for spec in pipeline.steps.values()
        if spec.checkpoints and not spec.checkpoints.store and not spec.fan_out
    }

    def newest(task: str) -> int | None:
        layout = shown.get(task)
        try:
            first = next(iter(store.list(layout.manifests)), None) if layout else None
        except StoreError:
            return None  # whoever only watches must not end the run
        checkpoint = layout.parse_checkpoint(first.key) if layout and first else None
        return checkpoint.global_step if checkpoint else None

    return newest
