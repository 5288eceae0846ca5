"""Progress of a run: one row per task of the pipeline.

The engine reports every node, and a person thinks in tasks. `ProgressTable` sums
the node changes up by task. `show_live_progress` shows it as a table that refreshes
on a terminal, or as plain lines in a pipe.
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from hera_pipelines.cli.screen import Screen, guard_streams
from hera_pipelines.local.nodes import WORKFLOW_KIND, NodeChange, NodePhase
from tiphys.lineage.training_progress import describe_step, describe_training_progress
from tiphys.protocol.compiled_workflow import STOPPED_STATUS, is_shutdown_message
from tiphys.protocol.fan_out import parse_argo_item_name
from tiphys.protocol.operations import parse_failure_summary, try_number
from tiphys.protocol.quantities import format_duration
from tiphys.protocol.workflow_nodes import without_try
from tiphys.records import TrainingProgress, utc_now

_MAX_FOLLOWED = 4
"""Most items whose steps are shown, which costs two requests for each, once a second."""
_FAILED = (NodePhase.FAILED, NodePhase.ERROR)


class TrainingSnapshot(NamedTuple):
    """What storage shows of a training while it runs."""

    saved_step: int | None = None
    """Global step of its newest checkpoint."""
    progress: TrainingProgress | None = None
    items: Mapping[str, TrainingProgress] = {}
    """Newest reports of running items of a fan-out, by name."""


@dataclass
class TaskRow:
    """Current state of one task. ``attempt`` counts from 1 within this submission."""

    task: str
    phase: NodePhase | None = None
    """None until the engine has reported the task."""
    attempt: int = 1
    tries: int = 1
    """Number of the newest try of a step without a gate, from 1; all are of one attempt."""
    message: str = ""
    saved_step: int | None = None
    """Global step of the newest committed checkpoint."""
    training: TrainingProgress | None = None
    """Newest report of its program."""
    item_trainings: Mapping[str, TrainingProgress] = field(default_factory=dict)
    """Newest reports of the programs of its first running items, by name."""
    stopped: bool = False
    """Whether a node of it was shut down with the run."""
    items: dict[str, NodePhase] = field(default_factory=dict)
    """Phase of each item of a fan-out, by its name such as ``sweep[0]``."""
    begun_tries: set[str] = field(default_factory=set)
    """Names of the nodes of these tries."""
    last_messages: dict[str, str] = field(default_factory=dict)
    """Last message of the task and of each item, by display name."""
    log_tail: tuple[str, ...] = ()
    """Last log lines of the container that failed last."""
    started_at: datetime | None = None
    attempt_at: datetime | None = None
    """Start of the newest attempt."""
    ended_at: datetime | None = None

    def seconds(self, now: datetime) -> float:
        """Seconds from the task's start to its end, or to ``now`` if it has not ended."""
        return ((self.ended_at or now) - self.started_at).total_seconds() if self.started_at else 0.0

    @property
    def running(self) -> bool:
        return self.phase is not None and not self.phase.finished

    @property
    def failed(self) -> bool:
        return self.phase in _FAILED

    @property
    def phase_name(self) -> str:
        return STOPPED_STATUS if self.failed and self.stopped else str(self.phase)

    @property
    def followed_items(self) -> list[str]:
        """The first items that run."""
        return [name for name, phase in self.items.items() if not phase.finished][:_MAX_FOLLOWED]

    @property
    def items_done(self) -> int:
        return sum(phase is NodePhase.SUCCEEDED for phase in self.items.values())

    @property
    def items_failed(self) -> int:
        return 0 if self.stopped else sum(phase in _FAILED for phase in self.items.values())


class ProgressTable:
    """Rows of all tasks, in the order of the pipeline."""

    def __init__(self, tasks: Iterable[str]) -> None:
        self.rows = {task: TaskRow(task) for task in tasks}
        self.failure_summary = ""
        """What finalize says of a failed run; it includes the verdicts on steps without a conclude."""
        self.notice = ""
        """Last message of the engine about the whole run, such as that it is stopping, or of a running program."""

    def apply_change(self, change: NodeChange) -> list[str]:
        """Apply one change and return the lines to print for it; no lines if a person learns nothing new."""
        if not change.task:
            return self._set_notice(change)
        row = self.rows.setdefault(change.task, TaskRow(change.task))
        row.log_tail = change.log_tail or row.log_tail
        row.stopped = row.stopped or is_shutdown_message(change.message)
        if try_number(change.node) + 1 > row.attempt:
            row.attempt, row.message = try_number(change.node) + 1, ""
            row.attempt_at, row.training = change.changed_at, None
            row.last_messages.clear()
        lines = []
        path = _task_path(change)
        place = without_try(path)
        node, message = _task_or_item(change.task, place), _shown_message(change)
        item = parse_argo_item_name(node)
        display_name = item.display_name if item else node
        if change.kind == "Pod" and path != place == node and path not in row.begun_tries:
            row.begun_tries.add(path)
            row.message, row.last_messages[display_name] = "", ""
            row.tries = row.tries if item else len(row.begun_tries)
        if message and message != row.last_messages.get(display_name):
            row.message = row.last_messages[display_name] = message
            lines.append(_named(display_name, message))
            if change.kind == "Pod" and not change.phase.finished:
                self.notice = lines[-1]  # the row of a running training shows its progress
        if path == change.task and change.phase != row.phase:
            _set_phase(row, change)
            lines.append(f"{row.task}: {row.phase_name}")
        elif path == node != change.task:
            row.items[display_name] = change.phase
        return lines

    def _set_notice(self, change: NodeChange) -> list[str]:
        if change.kind == "Plugin":
            self.failure_summary = parse_failure_summary(change.message) or self.failure_summary
        if change.kind != WORKFLOW_KIND:
            return []
        self.notice = change.message
        return [change.message]

    def record_training(self, task: str, state: TrainingSnapshot) -> list[str]:
        """Record the state of the training ``task`` and return the line to print, if a checkpoint is new."""
        row = self.rows[task]
        # Until an attempt reports, storage shows the report of the one before.
        is_current = state.progress and row.attempt_at and state.progress.written_at >= row.attempt_at
        row.training = state.progress if is_current else None
        row.item_trainings = {
            name: report
            for name, report in state.items.items()
            if row.started_at and report.written_at >= row.started_at
        }
        if state.saved_step in (None, row.saved_step):
            return []
        row.saved_step = state.saved_step
        return [f"{task}: step {state.saved_step} is saved"]

    def running_lines(self, now: datetime) -> list[str]:
        """One line per running task: for how long it runs, and its progress."""
        return [
            ": ".join([row.task, ", ".join([f"{row.phase} for {_elapsed(row, now)}", *_progress_parts(row, now)])])
            for row in self.rows.values()
            if row.running
        ]

    def failure_sentences(self) -> list[str]:
        """The verdicts on the failed tasks, or what is known of each where the run was not finalized."""
        if self.failure_summary:
            return [self.failure_summary]
        return [_named(row.task, row.message or row.phase_name) for row in self.rows.values() if row.failed]


def _named(name: str, message: str) -> str:
    """``message`` with the name of its task or item in front; a verdict of the plugin begins with it already."""
    is_named = re.match(rf"{re.escape(name)}[\[ ]", message)
    return message if is_named else f"{name}: {message}"


def _shown_message(change: NodeChange) -> str:
    """Message to show: the plugin's answer, the end of a pod, the back-off of a retry, or why a node could not start.

    Composite nodes and finished retries only repeat that a child failed, so their messages are not shown.
    """
    if change.kind == "Retry":
        is_shown = not change.phase.finished
    else:
        is_error = change.phase is NodePhase.ERROR and not change.message.startswith("child '")
        is_shown = change.kind in ("Plugin", "Pod") or is_error
    if not is_shown:
        return ""
    return STOPPED_STATUS.lower() if is_shutdown_message(change.message) else " ".join(change.message.split())


def _task_path(change: NodeChange) -> str:
    """The node's name from the task name on, as in ``sweep(0:lr:0.1).admit``."""
    return change.node[change.node.find(f".{change.task}") + 1 :]


def _task_or_item(task: str, path: str) -> str:
    """Argo's name of the task, or of the fan-out item, that the node at ``path`` belongs to."""
    item = re.match(rf"{re.escape(task)}\(\d+:.*?\)(?=[\[.(]|$)", path)
    return item[0] if item else task


def _set_phase(row: TaskRow, change: NodeChange) -> None:
    row.phase = change.phase
    row.started_at = row.started_at or change.changed_at
    row.attempt_at = row.attempt_at or row.started_at
    row.ended_at = change.changed_at if change.phase.finished else None


_GLYPHS = {
    NodePhase.SUCCEEDED: ("✓", "green"),
    NodePhase.FAILED: ("✗", "bold red"),
    NodePhase.ERROR: ("✗", "bold red"),
    NodePhase.SKIPPED: ("–", "dim"),
    NodePhase.OMITTED: ("–", "dim"),
    NodePhase.PENDING: ("…", "yellow"),
}
_POLL_SECONDS = 1.0
_QUIET_SECONDS = 8.0
"""A pipe gets a line for each running task after this time without any, so that ten seconds never pass in silence."""
_ECHO_WIDTH = 4
"""Columns left free for the ``^C`` that a terminal prints at the end; a line wrap would shift the table."""

TrainingLookup = Callable[[str, Sequence[str]], TrainingSnapshot]
"""State of the training of a task; of a fan-out that of the named items."""


class TimedLines:
    """Prints lines with the time of day; ``now`` is injected for tests."""

    def __init__(self, note: Callable[[str], object], now: Callable[[], datetime] = utc_now) -> None:
        self._note = note
        self._now = now
        self._printed_at = now()

    def write(self, lines: list[str]) -> None:
        for line in lines:
            self._printed_at = self._now()
            self._note(f"{self._printed_at.astimezone():%H:%M:%S} {line}")

    def break_silence(self, progress: ProgressTable) -> None:
        """Print how the running tasks stand, if nothing was printed for `_QUIET_SECONDS`."""
        if (self._now() - self._printed_at).total_seconds() >= _QUIET_SECONDS:
            self.write(progress.running_lines(self._now()))


def _ignore_line(_: str) -> None:
    """Drop a line that the live table shows."""


@contextmanager
def show_live_progress(
    screen: Screen, progress: ProgressTable, training_of: TrainingLookup
) -> Iterator[Callable[[NodeChange], None]]:
    """Show ``progress`` while the body runs; the body passes each node change to the yielded function."""
    lock = threading.Lock()
    animated = screen.err.is_terminal and not screen.quiet
    lines = TimedLines(_ignore_line if animated else screen.note)

    def observe(change: NodeChange) -> None:
        with lock:
            lines.write(progress.apply_change(change))

    def update_trainings(tasks: list[str]) -> None:
        for task in tasks:
            state = training_of(task, progress.rows[task].followed_items)
            with lock:
                lines.write(progress.record_training(task, state))

    def update_running_tasks() -> None:
        update_trainings([row.task for row in progress.rows.values() if row.running])

    def break_silence() -> None:
        with lock:
            lines.break_silence(progress)

    view = Live(
        get_renderable=lambda: render_progress(progress, screen.err.width), console=screen.err, refresh_per_second=8
    )
    # The view prints what others write above the table, and obeys the colours in it: so it is guarded once more.
    with view if animated else nullcontext(), guard_streams():
        # In two threads: storage that does not answer must not silence the display.
        with _repeat_in_background(update_running_tasks), _repeat_in_background(break_silence):
            yield observe
        # The last checkpoint may have been committed after the last poll.
        update_trainings([row.task for row in progress.rows.values() if row.phase])


@contextmanager
def _repeat_in_background(action: Callable[[], None]) -> Iterator[None]:
    """Call ``action`` every `_POLL_SECONDS` in a thread while the body runs."""
    stopped = threading.Event()

    def repeat() -> None:
        while not stopped.wait(_POLL_SECONDS):
            action()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(_POLL_SECONDS)  # storage that does not answer must not keep the command alive


def render_progress(progress: ProgressTable, width: int) -> Table:
    """Render the table for a terminal of ``width`` columns; messages are cut to fit."""
    table = Table(
        box=None,
        show_header=False,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        width=max(1, width - _ECHO_WIDTH),
        caption=progress.notice or None,
        caption_justify="left",
    )
    table.add_column(width=1)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True)
    table.add_column(overflow="ellipsis", no_wrap=True, ratio=1)
    now = datetime.now(UTC)
    for row in progress.rows.values():
        table.add_row(
            _glyph(row), Text(row.task), Text(_elapsed(row, now), style="dim"), _counts_text(row), _state_text(row, now)
        )
    return table


def _glyph(row: TaskRow) -> Text | Spinner:
    if row.phase == NodePhase.RUNNING:
        return Spinner("dots", style="cyan")
    if row.failed and row.stopped:
        return Text("■", style="yellow")
    character, style = _GLYPHS[row.phase] if row.phase else ("·", "dim")
    return Text(character, style=style)


def _elapsed(row: TaskRow, now: datetime) -> str:
    return format_duration(round(row.seconds(now))) if row.started_at else ""


def _counts_text(row: TaskRow) -> Text:
    is_training = row.running and row.training
    return Text(", ".join([*_count_parts(row), *([] if is_training else _saved_parts(row))]))


def _state_text(row: TaskRow, now: datetime) -> Text:
    """The progress of a running training, or else the last message."""
    if row.running and row.training:
        return Text(describe_training_progress(row.training, now))
    if row.running and row.item_trainings:
        return Text(", ".join(_item_parts(row)))
    return Text(row.message, style="dim")


def _progress_parts(row: TaskRow, now: datetime) -> list[str]:
    training = [describe_training_progress(row.training, now)] if row.training else _saved_parts(row)
    return [*_count_parts(row), *training, *_item_parts(row)]


def _item_parts(row: TaskRow) -> list[str]:
    return [f"{name} {describe_step(report)}" for name, report in row.item_trainings.items()]


def _count_parts(row: TaskRow) -> list[str]:
    attempt = [f"attempt {row.attempt}"] if row.attempt > 1 else [f"try {row.tries}"] if row.tries > 1 else []
    items = [f"{row.items_done} of {len(row.items)} items"] if row.items else []
    return [*attempt, *items, *([f"{row.items_failed} failed"] if row.items_failed else [])]


def _saved_parts(row: TaskRow) -> list[str]:
    return [] if row.saved_step is None else [f"step {row.saved_step} saved"]
