"""How busy and how patient the agent is. Times in seconds.

When is a task set patched next? No clock, no I/O.

Each patch carries the whole object to everybody who watches it, so answers that
come together should travel together; but the last one of a burst has nobody to
wait for.
"""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class AgentSettings:
    """The defaults suit a cluster with some hundred open steps."""

    workers: int = 32
    """Calls at the same time. One task set gets at most half of them, one namespace three quarters, so that neither a
    slow workflow nor a tenant whose store hangs holds up the others; `tenants` has a limit of its own, no lower."""
    writers: int = 4
    """Patches at the same time, each to another task set."""
    collect_seconds: float = 0.5
    """Answers to one task set that come within this time are one patch, as long as more of them are on their way."""
    most_collect_seconds: float = 1.0
    """Patching a large task set is slow, and each patch is read by everybody who watches it; so the time between
    two patches of one task set grows with what the last one took, up to this."""
    fade_seconds: float = 60.0
    """A Pending is taken back after this time: the node has its message by then. Argo looks at a task set whenever
    it changes, and every ten seconds by default."""
    lost_seconds: float = 10.0
    """An answer that went while its task stayed: after this time the Workflow is asked whether it still waits."""
    other_uid_seconds: float = 30.0
    """How long a task may wait whose body names another workflow than the one that owns the task set. It is what a
    workflow looks like that was deleted and made again under its name, until Kubernetes has collected the old set."""
    retry_seconds: float = 1.0
    most_retry_seconds: float = 30.0
    """Between these two, doubling, whatever failed is tried again."""
    silent_failures: int = 3
    """So many failed calls about a node are repeated in silence; then its message says why it waits."""
    drain_seconds: float = 25.0
    """Calls under way are given this long when the agent ends."""
    watch_seconds: int = 60
    """The server ends a watch after this time, and it goes on where it ended."""
    renew_seconds: float = 2.0
    """Between two renewals of the Lease; a standby looks as often whether it may take over."""


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
