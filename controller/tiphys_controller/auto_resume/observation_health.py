"""What the controller has noticed about its own sight, and about many runs that fail at once.

Can what looks like a failure be believed? A controller that sees badly must not act on what it does not see. Pure.

Recoveries of healthy runs come from there: an API server that times out, a
list that is not complete, a store that is out of reach, or an outage that takes
everything at once and is somebody else's to repair first.

A token bucket: a limit on how often something happens, with some room for bursts.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple

from tiphys_controller.auto_resume.state import Limits, RunKey


class Health(NamedTuple):
    """What the controller knows of its own sight."""

    blind: str = ""
    """Why the watches do not show all that there is; empty if they do."""
    calm_seconds: float = float("inf")
    """Since when API server and store have answered everything."""
    failed: int = 0
    """Runs that were seen to have ended without success a short time ago: within the times of `Limits`."""
    vanished: int = 0
    """Those of them whose Workflow is gone."""
    running: int = 0


def distrust(health: Health, limits: Limits, *, vanished: bool) -> str:
    """Why nothing is to be concluded now; empty if something may be. ``vanished``: the run's Workflow is gone."""
    if health.blind:
        return f"not all Workflows are seen at the moment: {health.blind}"
    if health.calm_seconds < limits.calm_seconds:
        return "API server or store did not answer a moment ago"
    if vanished and _is_mass(health.vanished, health, limits):
        return (
            f"{health.vanished} Workflows are gone at once, while {health.running} go on: was the API server restored?"
        )
    if _is_mass(health.failed, health, limits):
        return f"{health.failed} runs failed at once, while {health.running} go on: whatever it is may not be over"
    return ""


def _is_mass(count: int, health: Health, limits: Limits) -> bool:
    return count >= limits.mass and count > health.running


class Sight:
    """Gathers what `Health` is made of. Thread-safe.

    Args:
        blind: Why the watches do not show everything; empty if they do.
        running: How many runs go on.
        limits: How far back to count.
        monotonic: A clock in seconds that never jumps.
    """

    def __init__(
        self, blind: Callable[[], str], running: Callable[[], int], limits: Limits, monotonic: Callable[[], float]
    ) -> None:
        self._blind = blind
        self._running = running
        self._limits = limits
        self._monotonic = monotonic
        self._trouble: dict[str, float] = {}
        self._everywhere = monotonic()
        self._ended: dict[RunKey, tuple[float, bool]] = {}
        self._lock = threading.Lock()

    def trouble(self, namespace: str = "") -> None:
        """API server or store did not answer, about one namespace or all."""
        with self._lock:
            if namespace:
                self._trouble[namespace] = self._monotonic()
            else:
                self._everywhere = self._monotonic()

    def ended(self, key: RunKey, *, vanished: bool) -> None:
        """A run seems to have failed, or its Workflow to be gone."""
        with self._lock:
            self._ended[key] = (self._monotonic(), vanished)

    def explained(self, key: RunKey) -> None:
        """It had not, or goes on again."""
        with self._lock:
            self._ended.pop(key, None)

    def health(self, namespace: str) -> Health:
        """What can be believed now about runs of ``namespace``."""
        blind = self._blind()
        if blind:
            self.trouble()
        with self._lock:
            now = self._monotonic()
            self._ended = {key: one for key, one in self._ended.items() if now - one[0] < self._memory(one[1])}
            failed = [vanished for at, vanished in self._ended.values() if now - at < self._limits.mass_seconds]
            return Health(
                blind=blind,
                calm_seconds=now - max(self._everywhere, self._trouble.get(namespace, self._everywhere)),
                failed=len(failed),
                vanished=sum(vanished for _, vanished in self._ended.values()),
                running=self._running(),
            )

    def _memory(self, vanished: bool) -> float:
        return self._limits.mass_absent_seconds if vanished else self._limits.mass_seconds


class TokenBucket:
    """Holds at most ``burst`` tokens, and gets ``per_second`` new ones. Thread-safe.

    Args:
        per_second: Tokens that come in each second.
        burst: The most that it holds.
        monotonic: A clock in seconds that never jumps.
        full: Whether it begins full; else it holds one, so that a process that restarts gains nothing by it.
    """

    def __init__(self, per_second: float, burst: int, monotonic: Callable[[], float], *, full: bool = False) -> None:
        self._per_second = per_second
        self._burst = max(burst, 1)
        self._monotonic = monotonic
        self._tokens = float(self._burst) if full else 1.0
        self._filled_at = monotonic()
        self._lock = threading.Lock()

    def take(self) -> float:
        """Take a token and answer 0; or take none, and answer the seconds until there may be one."""
        with self._lock:
            now = self._monotonic()
            self._tokens = min(self._burst, self._tokens + max(now - self._filled_at, 0.0) * self._per_second)
            self._filled_at = now
            if self._tokens >= 1:
                self._tokens -= 1
                return 0.0
            return (1 - self._tokens) / self._per_second
