"""The ledger as one `GPULedger` object, on which any number of services decide together.

The API of Kubernetes has no transaction over several objects, so there is one:
its spec holds the quotas, its status the book. A decision reads the object,
applies one transition, and replaces the status under the version that was read.
If somebody was faster the API server refuses, and it is decided again on what
is there now. A lease whose answer got lost is found again by the rule that a
node gets the lease that it holds.
"""

import random
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeVar

from tiphys.errors import ConflictError, StoreError
from tiphys.faults import failpoint
from tiphys.kube.api import KubeApi
from tiphys.kube.resources import LEDGER_NAME
from tiphys.records import utc_now
from tiphys_plugin.ledger.admission import FORGET_AFTER, admit
from tiphys_plugin.ledger.backend import CHECK_EVERY, BookLedger, Transition
from tiphys_plugin.ledger.book import Book
from tiphys_plugin.ledger.gaps import Gaps
from tiphys_plugin.ledger.model import Admission, Deferred, LeaseRequest, Reason
from tiphys_plugin.ledger.stored import LedgerFullError, StoredBook, Version
from tiphys_plugin.ledger.turns import Turn, Turns
from tiphys_plugin.queues import QueueRules

_Answer = TypeVar("_Answer")
_TRIES = 16
_LONGEST_PAUSE_SECONDS = 0.5
_TURN_SECONDS = 15.0
"""How long a call waits for the others of this process; Argo gives up on a call after 30 s."""
_SPARE_BYTES = 200_000
"""Left free by those who come to wait, so that there is room for their leases."""


class KubernetesLedger(BookLedger):
    """`AdmissionBackend` over the object ``name`` in ``namespace``; safe to use from many threads.

    A decision costs one GET, and one PUT if it changes more than a sign of life;
    those who come while another writes are decided together and share both.
    Those who wait ask again every few seconds. That they did is remembered here
    and stored with the next change, at the latest when a third of ``forget_after``
    has passed: another service may therefore think that somebody has gone after
    two thirds of it.

    Args:
        api: The API server.
        namespace: Namespace of the object.
        name: Name of the object.
        clock: Time of day.
        check_every: A lease is looked at by a `sweep` at most this often.
        forget_after: A waiting request that has not asked for so long stands in nobody's way.
        pause: Waits between two tries.
        rules: The queues that a decision goes by, from those that were declared.

    Raises:
        StoreError: the API server does not answer, or the object must not be trusted.
    """

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        name: str = LEDGER_NAME,
        *,
        clock: Callable[[], datetime] = utc_now,
        check_every: timedelta = CHECK_EVERY,
        forget_after: timedelta = FORGET_AFTER,
        pause: Callable[[float], object] = time.sleep,
        rules: Callable[[QueueRules], QueueRules] = lambda declared: declared,
    ) -> None:
        super().__init__(clock, check_every, forget_after)
        self._stored = StoredBook(api, namespace, name)
        self._pause = pause
        self._gaps = Gaps(pause)
        self._rules = rules
        self._asked: dict[tuple[str, str, str], datetime] = {}
        self._turns = Turns(self._apply, _TURN_SECONDS, self._stored)

    def request(self, request: LeaseRequest) -> Admission:
        lease = secrets.token_hex(8)

        def decide(book: Book, rules: QueueRules) -> tuple[Book, Admission]:
            now = self._asked[request.key] = self._clock()
            return admit(book, rules, request, now, lease, self._forget_after)

        try:
            return self._turns.take(decide, _SPARE_BYTES)
        except LedgerFullError as full:
            return Deferred(Reason.LEDGER_FULL, str(full), position=len(self.snapshot().waiting) + 1)

    def _take(self, transition: Transition[_Answer]) -> _Answer:
        return self._turns.take(transition)

    def _read(self) -> tuple[Book, QueueRules]:
        version = self._stored.read()
        return version.book, self._rules(version.rules)

    def _apply(self, turns: Sequence[Turn[Any]]) -> list[Any]:
        """The answers to ``turns``, one after the other, once all of them are stored."""
        self._gaps.leave()
        for tried in range(_TRIES):
            if (answers := self._try(turns)) is not None:
                return answers
            self._pause(random.uniform(0, min(_LONGEST_PAUSE_SECONDS, 0.01 * 2**tried)))  # noqa: S311
        raise StoreError(f"{self._stored} was changed by others {_TRIES} times in a row; ask again")

    def _try(self, turns: Sequence[Turn[Any]]) -> list[Any] | None:
        """The answers, if nobody else has written while they were made."""
        began = time.monotonic()
        version = self._stored.read()
        rules = self._rules(version.rules)
        after, spare_bytes, answers = version.book.asked_again(self._asked), 0, []
        for turn in turns:
            before = after
            after, answer = turn.transition(before, rules)
            answers.append(answer)
            if len(after.waiting) > len(before.waiting):
                spare_bytes = max(spare_bytes, turn.spare_bytes)
        if not after.differs(version.book, self._forget_after / 3):
            return answers
        if not self._write(version, after, spare_bytes):
            return None
        self._gaps.wrote(time.monotonic() - began)
        return answers

    def _write(self, version: Version, after: Book, spare_bytes: int) -> bool:
        """Whether ``version`` was still the newest."""
        failpoint("ledger.before_commit")
        try:
            self._stored.write(version, after, spare_bytes)
        except ConflictError:
            return False
        failpoint("ledger.after_commit")
        waiting = {one.request.key for one in after.waiting}
        self._asked = {key: seen for key, seen in self._asked.items() if key in waiting}
        return True
