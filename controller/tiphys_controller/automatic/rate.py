"""A token bucket: a limit on how often something happens, with some room for bursts."""

import threading
from collections.abc import Callable


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
