"""The ledger as one `GPULedger` object, on which any number of services decide together.

The API of Kubernetes has no transaction over several objects, so there is one:
its spec holds the quotas, its status the book. A decision reads the object,
applies one transition, and replaces the status under the version that was read.
If somebody was faster the API server refuses, and it is decided again on what
is there now. A lease whose answer got lost is found again by the rule that a
node gets the lease that it holds.

Gaps between writes, without which the quickest of several services keeps the others out.

Each decides on what it has read and loses if somebody else writes meanwhile. One
that writes without a pause makes every other lose that takes as long as itself,
again and again. It cannot know of them, for it never meets a write of theirs. So
whoever writes once more right after a write leaves a gap first. Little is lost
by it: those who come in the meantime share the next write.

Many threads want to change one book, and one write can store what all of them want.

Whoever comes while another writes waits. Who goes on then takes everybody along
that has come in the meantime: their transitions are applied one after the other
to the same book, and stored together.
"""

import random
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar

from tiphys.errors import ConflictError, StoreError
from tiphys.faults import failpoint
from tiphys.kube.api import KubeApi
from tiphys.kube.resources import LEDGER_NAME
from tiphys.records import utc_now
from tiphys_plugin.quota.lease import Admission, Deferred, LeaseRequest, Reason
from tiphys_plugin.quota.ledger.backend import CHECK_EVERY, BookLedger, Transition
from tiphys_plugin.quota.ledger.ledger_object import LedgerFullError, StoredBook, Version
from tiphys_plugin.quota.ledger.state import Book
from tiphys_plugin.quota.ledger.transitions import FORGET_AFTER, admit
from tiphys_plugin.quota.queues import QueueRules


class Gaps:
    """One service's gaps, each up to as long as its last round of reading, deciding and writing took.

    Args:
        pause: Waits for so many seconds.
        clock: Seconds since any fixed moment.
    """

    def __init__(self, pause: Callable[[float], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._pause = pause
        self._clock = clock
        self._ended_at = float("-inf")
        self._took = 0.0

    def leave(self) -> None:
        """Wait, unless nothing was written for that long anyway."""
        idle = self._clock() - self._ended_at
        if (gap := random.uniform(0, self._took) - idle) > 0:  # noqa: S311  two services must not keep step
            self._pause(gap)

    def wrote(self, took_seconds: float) -> None:
        """A round is over, and its write was in time."""
        self._ended_at = self._clock()
        self._took = took_seconds


_Answer = TypeVar("_Answer")


class Turn(Generic[_Answer]):
    """One who waits for the book. If ``transition`` makes the line longer, ``spare_bytes`` must be left."""

    def __init__(self, transition: Transition[_Answer], spare_bytes: int) -> None:
        self.transition = transition
        self.spare_bytes = spare_bytes
        self.answer: Future[_Answer] = Future()


class Turns:
    """Gives everybody a turn.

    Args:
        apply: The answers to these turns in their order, once all of them are stored.
        patience_seconds: How long one waits for the others.
        what: Whose turns, for the error.
    """

    def __init__(
        self, apply: Callable[[Sequence[Turn[Any]]], list[Any]], patience_seconds: float, what: object
    ) -> None:
        self._apply = apply
        self._patience_seconds = patience_seconds
        self._what = what
        self._changed = threading.Condition()
        self._is_serving = False
        self._waiting: list[Turn[Any]] = []

    def take(self, transition: Transition[_Answer], spare_bytes: int = 0) -> _Answer:
        """The answer of ``transition``, once it is stored.

        Raises:
            StoreError: the others do not come to an end; or what ``apply`` raises.
        """
        turn = Turn(transition, spare_bytes)
        if turns := self._when_free(turn):
            try:
                self._serve(turns)
            finally:
                with self._changed:
                    self._is_serving = False
                    self._changed.notify_all()
        return turn.answer.result()

    def _when_free(self, turn: Turn[Any]) -> list[Turn[Any]]:
        """Everybody who waits, to be served by the caller; nobody if another has served it in the meantime."""
        with self._changed:
            self._waiting.append(turn)
            if not self._changed.wait_for(lambda: turn.answer.done() or not self._is_serving, self._patience_seconds):
                if turn in self._waiting:  # else it is being decided, and found by who asks again
                    self._waiting.remove(turn)
                waited = f"others have waited for the API server for {self._patience_seconds:g} s"
                raise StoreError(f"{self._what} is busy: {waited}")
            if turn.answer.done():
                return []
            self._is_serving, turns, self._waiting = True, self._waiting, []
            return turns

    def _serve(self, turns: Sequence[Turn[Any]]) -> None:
        try:
            answers = self._apply(turns)
        except LedgerFullError as full:
            if len(turns) == 1:
                turns[0].answer.set_exception(full)
                return
            for turn in turns:  # what has no room together with others may have it alone
                self._serve([turn])
        except Exception as error:  # noqa: BLE001 - it belongs to those who asked
            for turn in turns:
                turn.answer.set_exception(error)
        else:
            for turn, answer in zip(turns, answers, strict=True):
                turn.answer.set_result(answer)


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
