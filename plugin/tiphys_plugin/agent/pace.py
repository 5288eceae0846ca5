"""When is a task set patched next? No clock, no I/O.

Each patch carries the whole object to everybody who watches it, so answers that
come together should travel together; but the last one of a burst has nobody to
wait for.
"""

from dataclasses import dataclass
from math import inf

from tiphys_plugin.agent.settings import AgentSettings


@dataclass
class Pace:
    """Of one task set. Times are seconds on one monotonic clock."""

    settings: AgentSettings
    failures: int = 0
    """Patches in a row that did not get through."""
    _ends: tuple[float, float] = (-inf, -inf)
    """When the last two patches ended."""
    _took: float = 0.0

    def wrote(self, began_at: float, now: float) -> None:
        """A patch got through."""
        self.failures = 0
        self._ends = self._ends[1], now
        self._took = now - began_at

    def due(self, now: float, last: bool) -> float:
        """When to send what is known now; ``last``: no further answer is on its way."""
        settings = self.settings
        if self.failures:
            return now + min(settings.retry_seconds * 2.0 ** (self.failures - 1), settings.most_retry_seconds)
        interval = min(max(settings.collect_seconds, 4 * self._took), settings.most_collect_seconds)
        # One after another may be the last, so only every second patch may come before its time.
        return max(now, self._ends[0] + interval) if last else now + interval
