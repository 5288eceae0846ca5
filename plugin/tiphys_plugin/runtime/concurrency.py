"""One look for all who want to know the same thing at the same time.

The steps of a workflow come together, and each has to ask what may have changed
a moment ago. An answer may serve several of them as long as none gets one that
is older than its question: whoever comes while somebody looks waits for the
next look, and shares that one with all who came meanwhile.

One call at a time about one step, within this process.

It is a courtesy: correctness between calls comes from create-only claims. But
two calls that do the same work, such as hashing a model, would do it twice.
"""

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar


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


AnswerT = TypeVar("AnswerT")


class Together:
    """Looks at each thing once at a time. Thread-safe; nothing is remembered."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._gathering: dict[Hashable, Future[Any]] = {}
        """By question: the look that has not begun yet."""
        self._turns = KeyedLocks()

    def ask(self, question: str, look: Callable[[], AnswerT], patience_seconds: float) -> AnswerT:
        """What a ``look`` finds that began after this call, and was perhaps that of another caller.

        All who share a look that fails get its error.

        Raises:
            Busy: the look before this one takes longer than ``patience_seconds``.
        """
        with self._guard:
            answer = self._gathering.get(question)
            leads = answer is None
            if answer is None:
                answer = self._gathering[question] = Future()
        if leads:
            self._lead(question, look, patience_seconds, answer)
        found: AnswerT = answer.result()
        return found

    def _lead(
        self, question: str, look: Callable[[], AnswerT], patience_seconds: float, answer: Future[AnswerT]
    ) -> None:
        try:
            with contextlib.ExitStack() as turn:
                try:
                    turn.enter_context(self._turns.hold(question, patience_seconds))
                finally:  # nobody joins any more
                    self._close(question)
                answer.set_result(look())
        except BaseException as error:  # noqa: BLE001  those who wait must hear of it, whatever it is
            answer.set_exception(error)

    def _close(self, question: str) -> None:
        with self._guard:
            del self._gathering[question]
