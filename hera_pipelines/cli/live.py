"""Shows a run while it happens: a table that refreshes on a terminal, plain lines elsewhere."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime

from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from hera_pipelines.cli.board import Board, TaskRow
from hera_pipelines.cli.screen import Screen
from hera_pipelines.local.changes import NodeChange, NodePhase

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
