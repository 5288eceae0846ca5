"""Avoids duplicate work of concurrent calls within one process.

`KeyedLocks` lets one call at a time work on a step. Correctness comes from
create-only claims, but two calls of one step would do the same work twice, such
as hashing a model.

`SingleFlight` shares lookups. The steps of a workflow call together, and each
must read what may have changed a moment ago. A caller may share a result only if
its lookup started after the call. So a caller that arrives during a lookup waits
for the next one, and shares that with all callers that arrived meanwhile.
"""

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar


class LockTimeoutError(Exception):
    """Another call held the lock for longer than the timeout."""


class KeyedLocks:
    """A lock per key; a key that no call holds or waits for takes no memory."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[str, tuple[threading.Lock, int]] = {}

    @contextlib.contextmanager
    def hold(self, key: str, timeout_seconds: float) -> Iterator[None]:
        """Hold the lock of ``key``. Raises `LockTimeoutError` after ``timeout_seconds``."""
        lock = self._check_out(key)
        try:
            if not lock.acquire(timeout=timeout_seconds):
                raise LockTimeoutError
            try:
                yield
            finally:
                lock.release()
        finally:
            self._check_in(key)

    def _check_out(self, key: str) -> threading.Lock:
        with self._guard:
            lock, users = self._locks.get(key, (threading.Lock(), 0))
            self._locks[key] = (lock, users + 1)
            return lock

    def _check_in(self, key: str) -> None:
        with self._guard:
            lock, users = self._locks.pop(key)
            if users > 1:
                self._locks[key] = (lock, users - 1)


AnswerT = TypeVar("AnswerT")


class SingleFlight:
    """Runs one lookup per key at a time. Thread-safe; results are not cached."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._pending: dict[Hashable, Future[Any]] = {}
        """The lookups that have not started yet, by key."""
        self._locks = KeyedLocks()

    def lookup(self, key: str, look: Callable[[], AnswerT], timeout_seconds: float) -> AnswerT:
        """Result of a lookup started after this call; concurrent callers share it, also if it is an error.

        Raises:
            LockTimeoutError: the lookup before this one takes longer than ``timeout_seconds``.
        """
        with self._guard:
            answer = self._pending.get(key)
            leads = answer is None
            if answer is None:
                answer = self._pending[key] = Future()
        if leads:
            self._run_lookup(key, look, timeout_seconds, answer)
        result: AnswerT = answer.result()
        return result

    def _run_lookup(
        self, key: str, look: Callable[[], AnswerT], timeout_seconds: float, answer: Future[AnswerT]
    ) -> None:
        try:
            with contextlib.ExitStack() as lock:
                try:
                    lock.enter_context(self._locks.hold(key, timeout_seconds))
                finally:  # from here on, callers wait for the next lookup
                    self._close_joining(key)
                answer.set_result(look())
        except BaseException as error:  # noqa: BLE001  every waiting caller must get the error, whatever it is
            answer.set_exception(error)

    def _close_joining(self, key: str) -> None:
        with self._guard:
            del self._pending[key]
