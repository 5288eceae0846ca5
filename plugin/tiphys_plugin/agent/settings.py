"""The settings of the agent, and the debouncing of patches that follows from them. No clock, no I/O.

Each patch sends the whole object to every watcher, so answers that arrive
together should be one patch. The last answer of a burst has nothing to wait for,
so it is sent at once.
"""

from dataclasses import dataclass
from math import inf

from tiphys_plugin.sidecar.outages import OUTAGE_LIMIT_SECONDS

_MAX_DOUBLINGS = 64
"""No delay is doubled more often. An outage of hours makes a thousand failures, and 2.0**1024 is no float."""


@dataclass(frozen=True)
class AgentSettings:
    """Times in seconds. The defaults suit a cluster with some hundred open steps."""

    workers: int = 32
    """Concurrent calls. One task set gets at most half of them, one namespace three quarters, so that neither a slow
    workflow nor a tenant whose store hangs delays the others; `MAX_CALLS_PER_TENANT` of the server is no lower."""
    writers: int = 4
    """Concurrent patches, each of another task set."""
    batch_seconds: float = 0.2
    """Answers to one task set within this time are one patch, as long as more answers are expected."""
    max_batch_seconds: float = 1.0
    """Patching a large task set is slow, and every watcher reads each patch. So the time between two patches of one
    task set grows with the duration of the last one, up to this limit."""
    pending_lifetime_seconds: float = 60.0
    """A Pending entry is removed after this time, when the node has its message. Argo reconciles a task set whenever
    it changes, and every ten seconds by default."""
    lost_answer_check_seconds: float = 10.0
    """If a stored answer disappears while its task remains, the Workflow is read after this time to see whether it
    still waits."""
    stale_task_seconds: float = 30.0
    """Delay before calling for a task whose body names another workflow than the owner of the task set. This happens
    if a workflow was deleted and created again with its name, until Kubernetes has collected the old task set."""
    retry_seconds: float = 1.0
    max_retry_seconds: float = 30.0
    """The first and the longest delay before a failed call or patch is repeated; see `retry_delay_seconds`."""
    outage_limit_seconds: float = OUTAGE_LIMIT_SECONDS
    """How long a step waits for storage, API server or ledger. A new leader begins to count again."""
    drain_seconds: float = 25.0
    """Time for the calls in progress when the agent shuts down."""
    watch_seconds: int = 60
    """The server ends a watch after this time; the agent then resumes it from the last version."""
    renew_seconds: float = 2.0
    """Time between two renewals of the Lease; a standby checks it as often."""

    def retry_delay_seconds(self, earlier_failures: int) -> float:
        """Delay before a repetition; it doubles with each of ``earlier_failures``, up to ``max_retry_seconds``."""
        doublings = min(earlier_failures, _MAX_DOUBLINGS)
        return min(self.retry_seconds * 2.0**doublings, self.max_retry_seconds)


@dataclass
class PatchDebounce:
    """When to patch one task set next. Times are seconds on one monotonic clock."""

    settings: AgentSettings
    failures: int = 0
    """Consecutive patches that failed."""
    _last_end_times: tuple[float, float] = (-inf, -inf)
    """When the last two patches ended."""
    _last_duration_seconds: float = 0.0

    def record_patch(self, began_at: float, now: float) -> None:
        """Note a successful patch."""
        self.failures = 0
        self._last_end_times = self._last_end_times[1], now
        self._last_duration_seconds = now - began_at

    def next_patch_at(self, now: float, is_last: bool) -> float:
        """When to send the pending changes; ``is_last`` says that no further answer is expected."""
        settings = self.settings
        if self.failures:
            return now + settings.retry_delay_seconds(self.failures - 1)
        interval = min(max(settings.batch_seconds, 4 * self._last_duration_seconds), settings.max_batch_seconds)
        # Several answers in a row may each look like the last, so only every second patch may be sent early.
        return max(now, self._last_end_times[0] + interval) if is_last else now + interval
