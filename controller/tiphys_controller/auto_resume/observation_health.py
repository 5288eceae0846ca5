"""Decides whether observed failures can be trusted.

An API server that times out, an incomplete list, an unreachable store or an
outage of the whole cluster makes healthy runs look failed. Resuming them would
start a second training beside the first, so the controller waits until its
observations have been reliable for a while and no mass failure is under way.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tiphys_controller.auto_resume.state import AutoResumeLimits, RunKey


class ObservationHealth(NamedTuple):
    """How reliable the controller's observations of runs are."""

    blind_reason: str = ""
    """Why the watch cache may lack Workflows; empty if it is complete."""
    healthy_seconds: float = float("inf")
    """Seconds since API server or store last failed to answer."""
    failed_runs: int = 0
    """Runs that failed within ``mass_failure_seconds`` (`AutoResumeLimits`)."""
    vanished_workflows: int = 0
    """Runs whose Workflow vanished within ``mass_vanished_seconds``."""
    running_runs: int = 0


def find_distrust_reason(health: ObservationHealth, limits: AutoResumeLimits, *, vanished: bool) -> str:
    """Why a failure must not be trusted now; empty if it may be. ``vanished``: the run's Workflow is gone."""
    if health.blind_reason:
        return f"the controller does not see all Workflows: {health.blind_reason}"
    if health.healthy_seconds < limits.healthy_seconds:
        return f"API server or store failed to answer within the last {limits.healthy_seconds:g} s"
    if vanished and _is_mass_failure(health.vanished_workflows, health, limits):
        return (
            f"{health.vanished_workflows} Workflows vanished at once and {health.running_runs} are running: the API "
            "server may have been restored from a backup"
        )
    if _is_mass_failure(health.failed_runs, health, limits):
        return (
            f"{health.failed_runs} runs failed at once and {health.running_runs} are running: an outage of the cluster "
            "may still be under way"
        )
    return ""


def _is_mass_failure(count: int, health: ObservationHealth, limits: AutoResumeLimits) -> bool:
    return count >= limits.mass_failure_count and count > health.running_runs


@dataclass
class ObservationHealthTracker:
    """Collects outages and ends of runs. Thread-safe."""

    find_blind_reason: Callable[[], str]
    """Returns why the watch cache may lack Workflows; empty if it is complete."""
    count_running: Callable[[], int]
    limits: AutoResumeLimits
    """How far back ends are counted."""
    monotonic: Callable[[], float]
    _outage_at: dict[str, float] = field(default_factory=dict)
    _recent_ends: dict[RunKey, tuple[float, bool]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._global_outage_at = self.monotonic()

    def record_outage(self, namespace: str = "") -> None:
        """API server or store did not answer for one namespace; for all without one."""
        with self._lock:
            if namespace:
                self._outage_at[namespace] = self.monotonic()
            else:
                self._global_outage_at = self.monotonic()

    def record_end(self, key: RunKey, *, vanished: bool) -> None:
        """A run seems to have failed, or with ``vanished`` its Workflow to be gone."""
        with self._lock:
            self._recent_ends[key] = (self.monotonic(), vanished)

    def clear_end(self, key: RunKey) -> None:
        """The run had not failed, or runs again."""
        with self._lock:
            self._recent_ends.pop(key, None)

    def measure_health(self, namespace: str) -> ObservationHealth:
        """Health of the observations of ``namespace`` now."""
        blind_reason = self.find_blind_reason()
        if blind_reason:
            self.record_outage()
        with self._lock:
            now = self.monotonic()
            self._recent_ends = {
                key: end for key, end in self._recent_ends.items() if now - end[0] < self._retention_seconds(end[1])
            }
            failed = [
                vanished for at, vanished in self._recent_ends.values() if now - at < self.limits.mass_failure_seconds
            ]
            return ObservationHealth(
                blind_reason=blind_reason,
                healthy_seconds=now
                - max(self._global_outage_at, self._outage_at.get(namespace, self._global_outage_at)),
                failed_runs=len(failed),
                vanished_workflows=sum(vanished for _, vanished in self._recent_ends.values()),
                running_runs=self.count_running(),
            )

    def _retention_seconds(self, vanished: bool) -> float:
        return self.limits.mass_vanished_seconds if vanished else self.limits.mass_failure_seconds


class TokenBucket:
    """Rate limiter: holds at most ``burst`` tokens and gains ``per_second``. Thread-safe.

    It starts full with ``starts_full``; otherwise with one token, so that restarts gain no burst.
    """

    def __init__(
        self, per_second: float, burst: int, monotonic: Callable[[], float], *, starts_full: bool = False
    ) -> None:
        self._per_second = per_second
        self._burst = max(burst, 1)
        self._monotonic = monotonic
        self._tokens = float(self._burst) if starts_full else 1.0
        self._filled_at = monotonic()
        self._lock = threading.Lock()

    def take(self) -> float:
        """Take a token and return 0; without a token, return the seconds until the next one."""
        with self._lock:
            now = self._monotonic()
            self._tokens = min(self._burst, self._tokens + max(now - self._filled_at, 0.0) * self._per_second)
            self._filled_at = now
            if self._tokens >= 1:
                self._tokens -= 1
                return 0.0
            return (1 - self._tokens) / self._per_second
