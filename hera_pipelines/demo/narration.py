"""Output of the demo: numbered actions with the time, and the observations after each."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text


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
