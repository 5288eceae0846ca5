"""Output of the demo: numbered actions with the time, the observations after each, and a timeline of events."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tiphys.records import Event


class DemoConsole:
    """Prints actions and observations on ``console``; ``clock`` returns seconds from any origin."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._started_at = clock()
        self._actions = 0

    def print_introduction(self, sentence: str) -> None:
        """Print the introduction."""
        self._console.print(Text(sentence), soft_wrap=True)

    def print_action(self, sentence: str) -> None:
        """Print the next numbered action, with the seconds since the start."""
        self._actions += 1
        text = Text.assemble((f"\n{self._actions}  ", "bold cyan"), (sentence, "bold"))
        text.append(f"  [{self._clock() - self._started_at:.1f} s]", style="dim")
        self._console.print(text, soft_wrap=True)

    def print_observation(self, sentence: str) -> None:
        """Print an observation that follows the last action."""
        self._console.print(Text(f"   {sentence}"), soft_wrap=True)

    def print_result(self, sentence: str) -> None:
        """Print the last line."""
        self._console.print(Text(f"\n{sentence}", style="bold green"), soft_wrap=True)

    @contextmanager
    def show_status(self, sentence: str) -> Iterator[Callable[[str], None]]:
        """Show ``sentence`` on a terminal while the body runs; the yielded function replaces it."""
        if not self._console.is_terminal:
            yield lambda _: None
            return
        with self._console.status(sentence) as status:
            yield lambda changed: status.update(changed)


_SHOWN_EVENTS = (
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
    """Build a table of the main events with seconds since the first; checkpoints in between are counted."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 3))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    if not events:
        return table
    started_at, commits = events[0].at, 0
    for event in events:
        if event.name == "checkpoint.committed":
            commits += 1
        if event.name not in _SHOWN_EVENTS:
            continue
        if commits:
            table.add_row("", "", Text(f"{commits} checkpoints committed", style="dim"))
            commits = 0
        seconds = (event.at - started_at).total_seconds()
        table.add_row(f"{seconds:.1f} s", event.name, Text(event.message, style=_STYLES.get(event.name, "")))
    return table
