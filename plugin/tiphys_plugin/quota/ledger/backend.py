"""What all ledgers do alike: each call is one transition of the book, whatever keeps the book.

So a ledger says no more than how it reads its book, and how it puts another in
its place in one step. The rules cannot differ from one to the other.

The ledger of a process that keeps nothing: for tests and rehearsals of whoever embeds the plugin.
"""

import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import TypeVar

from tiphys.records import utc_now
from tiphys_plugin.quota.lease import Admission, Lease, LeaseRequest, Snapshot
from tiphys_plugin.quota.ledger.state import Book
from tiphys_plugin.quota.ledger.transitions import FORGET_AFTER, admit, mark
from tiphys_plugin.quota.queues import QueueRules

_Answer = TypeVar("_Answer")
Transition = Callable[[Book, QueueRules], tuple[Book, _Answer]]
CHECK_EVERY = timedelta(seconds=30)
"""A lease is looked at by a `sweep` at most this often."""


class BookLedger(ABC):
    """`AdmissionBackend` over a book.

    No time takes a lease away: only a `sweep` that finds it gone does, and it asks
    about each lease at most once in ``check_every``. A waiting request that has
    not asked for ``forget_after`` no longer stands in anybody's way; it keeps its
    place in case it comes back.
    """

    def __init__(
        self,
        clock: Callable[[], datetime],
        check_every: timedelta = CHECK_EVERY,
        forget_after: timedelta = FORGET_AFTER,
    ) -> None:
        self._clock = clock
        self._check_every = check_every
        self._forget_after = forget_after

    @abstractmethod
    def _take(self, transition: Transition[_Answer]) -> _Answer:
        """Apply ``transition`` to the newest book; its answer, once the book that it gave is stored.

        It may be applied several times, until nobody was faster.
        """

    @abstractmethod
    def _read(self) -> tuple[Book, QueueRules]:
        """The newest book, and the queues that a decision goes by."""

    def request(self, request: LeaseRequest) -> Admission:
        lease = secrets.token_hex(8)
        return self._take(lambda book, rules: admit(book, rules, request, self._clock(), lease, self._forget_after))

    def restore(self, lease: str, request: LeaseRequest, gpu_type: str | None, nodes: tuple[str, ...] = ()) -> None:
        self._change(lambda book, rules: book.restore(lease, request, gpu_type, nodes, rules, self._clock()))

    def withdraw(self, uid: str) -> None:
        self._change(lambda book, _: book.withdraw(uid))

    def release(self, lease: str) -> None:
        self._change(lambda book, rules: book.release(lease, rules, self._clock()))

    def shrink(self, lease: str, members: int, nodes: tuple[str, ...] = ()) -> None:
        self._change(lambda book, rules: book.shrink(lease, members, nodes, rules, self._clock()))

    def release_workflow(self, uid: str) -> None:
        self._change(lambda book, _: book.release_workflow(uid, self._clock()))

    def ask_to_leave(self, waiting: tuple[str, str], grace_seconds: Mapping[str, float]) -> tuple[Lease, ...]:
        return self._take(
            lambda book, rules: mark(book, rules, waiting, grace_seconds, self._clock(), self._forget_after)
        )

    def sweep(self, is_gone: Callable[[Lease], bool]) -> list[Lease]:
        # The question goes to the cluster, so it is asked between two steps of the book and not within one.
        now = self._clock()
        due = self._read()[0].due(now, self._check_every)
        gone = [lease for lease in due if is_gone(lease)]
        if due:
            self._change(lambda book, rules: book.checked(due, gone, now + self._check_every, rules, now))
        return gone

    def snapshot(self) -> Snapshot:
        book, rules = self._read()
        return book.snapshot(rules)

    def _change(self, transition: Callable[[Book, QueueRules], Book]) -> None:
        self._take(lambda book, rules: (transition(book, rules), None))


class MemoryLedger(BookLedger):
    """Safe to use from many threads; gone with the process. ``queues`` None means that nothing is limited.

    Attributes:
        book: What is held and who waits. It may be exchanged, as if another service had written.
    """

    def __init__(
        self,
        queues: QueueRules,
        clock: Callable[[], datetime] = utc_now,
        check_every: timedelta = CHECK_EVERY,
        forget_after: timedelta = FORGET_AFTER,
    ) -> None:
        super().__init__(clock, check_every, forget_after)
        self._queues = queues
        self._lock = threading.Lock()
        self.book = Book()

    def _take(self, transition: Transition[_Answer]) -> _Answer:
        with self._lock:
            self.book, answer = transition(self.book, self._queues)
            return answer

    def _read(self) -> tuple[Book, QueueRules]:
        return self.book, self._queues
