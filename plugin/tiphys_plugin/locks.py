"""One call at a time about one step, within this process.

It is a courtesy: correctness between calls comes from create-only claims. But
two calls that do the same work, such as hashing a model, would do it twice.
"""

import contextlib
import threading
from collections.abc import Iterator


class Busy(Exception):  # noqa: N818  it is no error: the caller asks again
    """Another call holds the lock for longer than this one may wait."""


class KeyedLocks:
    """A lock per key; keys nobody holds or waits for take no memory."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, tuple[threading.Lock, int]] = {}

    @contextlib.contextmanager
    def hold(self, key: str, patience_seconds: float) -> Iterator[None]:
        """Hold the lock of ``key``. Raises `Busy` after ``patience_seconds``."""
        lock = self._enter(key)
        try:
            if not lock.acquire(timeout=patience_seconds):
                raise Busy
            try:
                yield
            finally:
                lock.release()
        finally:
            self._leave(key)

    def _enter(self, key: str) -> threading.Lock:
        with self._guard:
            lock, users = self._locks.get(key, (threading.Lock(), 0))
            self._locks[key] = (lock, users + 1)
            return lock

    def _leave(self, key: str) -> None:
        with self._guard:
            lock, users = self._locks.pop(key)
            if users > 1:
                self._locks[key] = (lock, users - 1)
