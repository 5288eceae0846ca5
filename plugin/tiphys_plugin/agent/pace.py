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
    _ended_at: float = -inf
    _took: float = 0.0

    def wrote(self, began_at: float, now: float) -> None:
        """A patch got through."""
        self.failures = 0
        self._ended_at, self._took = now, now - began_at

    def due(self, now: float, last: bool) -> float:
        """When to send what is known now; ``last``: no further answer is on its way."""
        settings = self.settings
        if self.failures:
            return now + min(settings.retry_seconds * 2.0 ** (self.failures - 1), settings.most_retry_seconds)
        if last:  # yet no server shall be busy with one task set all the time
            return max(now, self._ended_at + min(self._took, settings.most_collect_seconds))
        return now + min(max(settings.collect_seconds, 4 * self._took), settings.most_collect_seconds)
