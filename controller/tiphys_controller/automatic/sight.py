"""What the controller has noticed about its own sight, and about many runs that fail at once."""

import threading
from collections.abc import Callable

from tiphys_controller.automatic.health import Health
from tiphys_controller.automatic.limits import Limits
from tiphys_controller.automatic.observed import RunKey


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
