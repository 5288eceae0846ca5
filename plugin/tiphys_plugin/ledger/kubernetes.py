"""The ledger as one `GPULedger` object, on which any number of services decide together.

The API of Kubernetes has no transaction over several objects, so there is one:
its spec holds the quotas, its status the book. A decision reads the object,
applies one transition, and replaces the status under the version that was read.
If somebody was faster the API server refuses, and it is decided again on what
is there now. A lease whose answer got lost is found again by the rule that a
node gets the lease that it holds.
"""

import contextlib
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar

from tiphys.errors import ConflictError, StoreError
from tiphys.faults import failpoint
from tiphys.kube.api import KubeApi
from tiphys.records import utc_now
from tiphys_plugin.ledger.admission import FORGET_AFTER, admit
from tiphys_plugin.ledger.book import Book
from tiphys_plugin.ledger.model import Admission, Deferred, Lease, LeaseRequest, Reason, Snapshot
from tiphys_plugin.ledger.stored import LedgerFullError, StoredBook, Version
from tiphys_plugin.preemption.marking import mark
from tiphys_plugin.queues import QueueRules

_TRIES = 16
_LONGEST_PAUSE_SECONDS = 0.5
_TURN_SECONDS = 15.0
"""How long a call waits for the others of this process; Argo gives up on a call after 30 s."""
_SPARE_BYTES = 200_000
"""Left free by those who come to wait, so that there is room for their leases."""

_Answer = TypeVar("_Answer")
Transition = Callable[[Book, QueueRules], tuple[Book, _Answer]]


class Turn(Generic[_Answer]):
    """One who waits for the book, and the answer that will be given."""

    def __init__(self, transition: Transition[_Answer], spare_bytes: int) -> None:
        self.transition = transition
        self.spare_bytes = spare_bytes
        self.answer: Future[_Answer] = Future()


class KubernetesLedger:
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

    Raises:
        StoreError: the API server does not answer, or the object must not be trusted.
    """

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        name: str = "default",
        *,
        clock: Callable[[], datetime] = utc_now,
        check_every: timedelta = timedelta(seconds=30),
        forget_after: timedelta = FORGET_AFTER,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._stored = StoredBook(api, namespace, name)
        self._clock = clock
        self._check_every = check_every
        self._forget_after = forget_after
        self._pause = pause
        self._lock = threading.Lock()
        self._asked: dict[tuple[str, str, str], datetime] = {}
        self._turns: deque[Turn[Any]] = deque()

    def request(self, request: LeaseRequest) -> Admission:
        lease = secrets.token_hex(8)

        def decide(book: Book, rules: QueueRules) -> tuple[Book, Admission]:
            now = self._asked[request.key] = self._clock()
            return admit(book, rules, request, now, lease, self._forget_after)

        try:
            return self._turn(decide, _SPARE_BYTES)
        except LedgerFullError as full:
            return Deferred(Reason.LEDGER_FULL, str(full), position=len(self.snapshot().waiting) + 1)

    def restore(self, lease: str, request: LeaseRequest, gpu_type: str | None, nodes: tuple[str, ...] = ()) -> None:
        self._turn(lambda book, rules: (book.restore(lease, request, gpu_type, nodes, rules, self._clock()), None))

    def withdraw(self, uid: str) -> None:
        self._turn(lambda book, _: (book.withdraw(uid), None))

    def release(self, lease: str) -> None:
        self._turn(lambda book, rules: (book.release(lease, rules, self._clock()), None))

    def release_workflow(self, uid: str) -> None:
        self._turn(lambda book, _: (book.release_workflow(uid, self._clock()), None))

    def ask_to_leave(self, waiting: tuple[str, str], grace_seconds: Mapping[str, float]) -> tuple[Lease, ...]:
        def asked(book: Book, rules: QueueRules) -> tuple[Book, tuple[Lease, ...]]:
            return mark(book, rules, waiting, grace_seconds, self._clock(), self._forget_after)

        return self._turn(asked)

    def sweep(self, is_gone: Callable[[Lease], bool]) -> list[Lease]:
        now = self._clock()
        due = self._stored.read().book.due(now, self._check_every)
        gone = [lease for lease in due if is_gone(lease)]
        if due:
            check_at = now + self._check_every
            self._turn(lambda book, rules: (book.checked(due, gone, check_at, rules, now), None))
        return gone

    def snapshot(self) -> Snapshot:
        version = self._stored.read()
        return version.book.snapshot(version.rules)

    def _turn(self, transition: Transition[_Answer], spare_bytes: int = 0) -> _Answer:
        """Apply ``transition`` to the newest book; ``spare_bytes`` must be left if it makes the line longer."""
        turn = Turn(transition, spare_bytes)
        self._turns.append(turn)
        try:
            with self._alone():
                if not turn.answer.done():
                    self._serve([self._turns.popleft() for _ in range(len(self._turns))])
        except StoreError:
            turn.answer.cancel()
            raise
        return turn.answer.result()

    def _serve(self, turns: Sequence[Turn[Any]]) -> None:
        """Give everybody who came while another wrote an answer, by one write for all of them."""
        still_there = [turn for turn in turns if turn.answer.set_running_or_notify_cancel()]
        try:
            answers = self._apply(still_there)
        except LedgerFullError as full:
            for turn in still_there:
                self._serve_alone(turn, full, len(still_there) > 1)
        except Exception as error:  # noqa: BLE001: it belongs to those who asked
            for turn in still_there:
                turn.answer.set_exception(error)
        else:
            for turn, answer in zip(still_there, answers, strict=True):
                turn.answer.set_result(answer)

    def _serve_alone(self, turn: Turn[Any], full: LedgerFullError, again: bool) -> None:
        """What has no room together with others may have it alone."""
        try:
            if not again:
                raise full
            turn.answer.set_result(*self._apply([turn]))
        except Exception as error:  # noqa: BLE001: it belongs to the one who asked
            turn.answer.set_exception(error)

    def _apply(self, turns: Sequence[Turn[Any]]) -> list[Any]:
        """The answers to ``turns``, one after the other, once all of them are stored."""
        for tried in range(_TRIES):
            version = self._stored.read()
            after, spare_bytes, answers = version.book.asked_again(self._asked), 0, []
            for turn in turns:
                before = after
                after, answer = turn.transition(before, version.rules)
                answers.append(answer)
                if len(after.waiting) > len(before.waiting):
                    spare_bytes = max(spare_bytes, turn.spare_bytes)
            if not after.differs(version.book, self._forget_after / 3) or self._write(version, after, spare_bytes):
                return answers
            self._pause(random.uniform(0, min(_LONGEST_PAUSE_SECONDS, 0.01 * 2**tried)))  # noqa: S311
        raise StoreError(f"{self._stored} was changed by others {_TRIES} times in a row; ask again")

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

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One write at a time: those of one process would only be refused in favour of each other."""
        if not self._lock.acquire(timeout=_TURN_SECONDS):
            raise StoreError(f"{self._stored} is busy: others have waited for the API server for {_TURN_SECONDS:g} s")
        try:
            yield
        finally:
            self._lock.release()
