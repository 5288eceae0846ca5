"""The ledger of a process that keeps nothing: for tests and rehearsals of whoever embeds the plugin."""

import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TypeVar

from tiphys.records import utc_now
from tiphys_plugin.ledger.admission import FORGET_AFTER
from tiphys_plugin.ledger.backend import CHECK_EVERY, BookLedger, Transition
from tiphys_plugin.ledger.book import Book
from tiphys_plugin.queues import QueueRules

_Answer = TypeVar("_Answer")


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
