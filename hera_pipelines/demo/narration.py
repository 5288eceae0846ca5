"""How the demo talks: numbered acts, one sentence for what was done, one for what is seen.

What happened, told once more with times, and what it cost.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tiphys.records import Event


class Narrator:
    """Prints the story on ``console``; ``clock`` gives seconds from any origin."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._began = clock()
        self._acts = 0

    def begin(self, sentence: str) -> None:
        """What this is about."""
        self._console.print(Text(sentence), soft_wrap=True)

    def act(self, sentence: str) -> None:
        """Begin the next numbered act: what is done."""
        self._acts += 1
        text = Text.assemble((f"\n{self._acts}  ", "bold cyan"), (sentence, "bold"))
        text.append(f"  [{self._clock() - self._began:.1f} s]", style="dim")
        self._console.print(text, soft_wrap=True)

    def seen(self, sentence: str) -> None:
        """What follows from it, as found in storage."""
        self._console.print(Text(f"   {sentence}"), soft_wrap=True)

    def verdict(self, sentence: str) -> None:
        """The last line."""
        self._console.print(Text(f"\n{sentence}", style="bold green"), soft_wrap=True)

    @contextmanager
    def waiting(self, sentence: str) -> Iterator[Callable[[str], None]]:
        """Show ``sentence`` while the body runs, on a terminal only; call what it gives to change it."""
        if not self._console.is_terminal:
            yield lambda _: None
            return
        with self._console.status(sentence) as status:
            yield lambda changed: status.update(changed)


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
