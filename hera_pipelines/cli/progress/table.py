"""What a run looks like to whoever watches it: one row per task of the pipeline.

The engine reports every node; a person thinks in tasks. This folds the one into
the other, and is the same for the live view and for plain lines.

Shows a run while it happens: a table that refreshes on a terminal, plain lines elsewhere.
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from hera_pipelines.cli.screen import Screen
from hera_pipelines.local.nodes import WORKFLOW, NodeChange, NodePhase
from tiphys.protocol.operations import retry_of


@dataclass
class TaskRow:
    """The present state of one task. ``attempt`` counts within this submission, from 1."""

    task: str
    phase: NodePhase | None = None
    """None before the engine has come to it."""
    attempt: int = 1
    message: str = ""
    saved_step: int | None = None
    """Global step of the newest committed checkpoint."""
    items: dict[str, NodePhase] = field(default_factory=dict)
    """Phase of each item of a fan-out, by its display name such as ``sweep(0:lr:0.1)``."""
    told: dict[str, str] = field(default_factory=dict)
    """The last message of the task and of each item."""
    log_tail: tuple[str, ...] = ()
    """What the container that failed last had written."""
    started_at: datetime | None = None
    ended_at: datetime | None = None

    def seconds(self, now: datetime) -> float:
        """How long the task has run, or did run."""
        return ((self.ended_at or now) - self.started_at).total_seconds() if self.started_at else 0.0

    @property
    def running(self) -> bool:
        return self.phase is not None and not self.phase.finished

    @property
    def failed(self) -> bool:
        return self.phase in (NodePhase.FAILED, NodePhase.ERROR)

    @property
    def items_finished(self) -> int:
        return sum(phase.finished for phase in self.items.values())


class Board:
    """All rows, in the order of the pipeline."""

    def __init__(self, tasks: Iterable[str]) -> None:
        self.rows = {task: TaskRow(task) for task in tasks}
        self.notice = ""
        """What the engine says about the whole run, such as that it is stopping."""

    def apply(self, change: NodeChange) -> list[str]:
        """Take one change in; the lines that tell it, none if it says nothing new to a person."""
        if not change.task:
            return self._hear(change)
        row = self.rows.setdefault(change.task, TaskRow(change.task))
        row.log_tail = change.log_tail or row.log_tail
        if retry_of(change.node) + 1 > row.attempt:
            row.attempt, row.message = retry_of(change.node) + 1, ""
            row.told.clear()
        lines = []
        speaker, message = _speaker(change), _message(change)
        if message and message != row.told.get(speaker):
            row.message = row.told[speaker] = message
            lines.append(f"{speaker}: {message}")
        place = _within_workflow(change)
        if place == change.task and change.phase != row.phase:
            _enter(row, change)
            lines.append(f"{row.task}: {change.phase}")
        elif place == speaker:
            row.items[place] = change.phase
        return lines

    def _hear(self, change: NodeChange) -> list[str]:
        if change.kind != WORKFLOW:
            return []
        self.notice = change.message
        return [change.message]

    def saved(self, task: str, global_step: int) -> list[str]:
        """Take in that ``task`` has committed a checkpoint; the line that tells it, if it is news."""
        row = self.rows[task]
        if row.saved_step == global_step:
            return []
        row.saved_step = global_step
        return [f"{task}: step {global_step} is saved"]

    def failures(self) -> list[str]:
        """One sentence per task that failed."""
        return [f"{row.task}: {row.message or row.phase}" for row in self.rows.values() if row.failed]


def _message(change: NodeChange) -> str:
    """What the plugin answers, how a pod ended, and how long a retry waits.

    Composite nodes, and a retry that is over, only repeat that a child failed.
    """
    waits = change.kind == "Retry" and not change.phase.finished
    return " ".join(change.message.split()) if waits or change.kind in ("Plugin", "Pod") else ""


def _within_workflow(change: NodeChange) -> str:
    """The node's name from its task on: ``sweep(0:lr:0.1)[0].admit``."""
    return change.node[change.node.find(f".{change.task}") + 1 :]


def _speaker(change: NodeChange) -> str:
    """The task, or the item of its fan-out, that the node belongs to."""
    item = re.match(rf"{re.escape(change.task)}\(.*?\)(?=\[|$)", _within_workflow(change))
    return item[0] if item else change.task


def _enter(row: TaskRow, change: NodeChange) -> None:
    row.phase = change.phase
    row.started_at = row.started_at or change.at
    row.ended_at = change.at if change.phase.finished else None


_GLYPHS = {
    NodePhase.SUCCEEDED: ("✓", "green"),
    NodePhase.FAILED: ("✗", "bold red"),
    NodePhase.ERROR: ("✗", "bold red"),
    NodePhase.SKIPPED: ("–", "dim"),
    NodePhase.OMITTED: ("–", "dim"),
    NodePhase.PENDING: ("…", "yellow"),
}
_POLL_SECONDS = 1.0
_ECHO_WIDTH = 4
"""Room for the ``^C`` that a terminal writes behind the last line; wrapped, it would shift the view."""

NewestStep = Callable[[str], int | None]
"""Global step of a task's newest checkpoint; None if it has none."""


@contextmanager
def watching(screen: Screen, board: Board, newest_step: NewestStep) -> Iterator[Callable[[NodeChange], None]]:
    """Show ``board`` while the body runs; the body hands each change to what it gets."""
    lock = threading.Lock()
    animated = screen.err.is_terminal and not screen.quiet

    def tell(lines: list[str]) -> None:
        for line in lines if not animated else ():
            screen.note(f"{datetime.now().astimezone():%H:%M:%S} {line}")

    def observe(change: NodeChange) -> None:
        with lock:
            tell(board.apply(change))

    def look_for_checkpoints(tasks: list[str]) -> None:
        for task in tasks:
            step = newest_step(task)
            with lock:
                tell(board.saved(task, step) if step is not None else [])

    def look_at_running() -> None:
        look_for_checkpoints([row.task for row in board.rows.values() if row.running])

    view = Live(get_renderable=lambda: table_of(board, screen.err.width), console=screen.err, refresh_per_second=8)
    with view if animated else nullcontext():
        with _repeating(look_at_running):
            yield observe
        look_for_checkpoints([row.task for row in board.rows.values() if row.phase])


@contextmanager
def _repeating(action: Callable[[], None]) -> Iterator[None]:
    """Do ``action`` again and again beside the body."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(_POLL_SECONDS):
            action()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def table_of(board: Board, width: int) -> Table:
    """The board for a terminal of ``width`` columns: what does not fit is cut from the messages."""
    table = Table(
        box=None,
        show_header=False,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        width=max(1, width - _ECHO_WIDTH),
        caption=board.notice or None,
        caption_justify="left",
    )
    table.add_column(width=1)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True)
    table.add_column(overflow="ellipsis", no_wrap=True, ratio=1)
    now = datetime.now(UTC)
    for row in board.rows.values():
        table.add_row(_glyph(row), Text(row.task), _seconds(row, now), _standing(row), Text(row.message, style="dim"))
    return table


def _glyph(row: TaskRow) -> Text | Spinner:
    if row.phase == NodePhase.RUNNING:
        return Spinner("dots", style="cyan")
    character, style = _GLYPHS[row.phase] if row.phase else ("·", "dim")
    return Text(character, style=style)


def _seconds(row: TaskRow, now: datetime) -> Text:
    return Text(f"{row.seconds(now):.0f} s" if row.started_at else "", style="dim")


def _standing(row: TaskRow) -> Text:
    parts = [f"attempt {row.attempt}"] if row.attempt > 1 else []
    if row.items:
        parts.append(f"{row.items_finished} of {len(row.items)} items")
    if row.saved_step is not None:
        parts.append(f"step {row.saved_step} saved")
    return Text(", ".join(parts))
