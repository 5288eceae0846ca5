"""What happened, told once more with times, and what it cost."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from tiphys.records import Event

_TOLD = (
    "run.submitted",
    "run.resumed",
    "submission.bound",
    "submission.ended",
    "attempt.started",
    "attempt.ended",
    "checkpoint.restored",
    "checkpoint.skipped",
)
_STYLES = {"checkpoint.skipped": "red", "run.resumed": "cyan"}


def timeline_table(events: Sequence[Event]) -> Table:
    """The events that matter, with seconds since the first; commits are counted in between."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 3))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    if not events:
        return table
    began, commits = events[0].at, 0
    for event in events:
        if event.name == "checkpoint.committed":
            commits += 1
        if event.name not in _TOLD:
            continue
        if commits:
            table.add_row("", "", Text(f"{commits} checkpoints committed", style="dim"))
            commits = 0
        seconds = (event.at - began).total_seconds()
        table.add_row(f"{seconds:.1f} s", event.name, Text(event.message, style=_STYLES.get(event.name, "")))
    return table
