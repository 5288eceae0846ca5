"""The ledger in a `GPULedger` object and its log, shared by any number of plugin services.

The spec of the object holds the quotas, and its status the head of the log
(`tiphys.kube.ledger_log`). A decision reads the object, applies one transition to
the ledger state that the service keeps, and appends what changed: it replaces the
head under the resourceVersion that was read (optimistic concurrency). After a
conflict the service applies what others appended, and decides again. If an answer
got lost, the repeated request finds its lease.

`WriteBatcher`: calls that arrive during a write or a back-off wait; the next write
applies and stores their transitions together. `WriteBackoff`: a replica that writes
back-to-back starves slower ones under compare-and-swap, so each waits a random
back-off after a write. The back-off costs little, because calls that arrive
meanwhile share the next write.
"""

import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Generic, TypeVar

import structlog

from tiphys.errors import ConflictError, StoreError, TiphysError
from tiphys.faults import failpoint
from tiphys.kube.api import KubeApi
from tiphys.kube.resources import DEFAULT_LEDGER_NAME
from tiphys.records import utc_now
from tiphys_plugin.quota.lease import Admission, AdmissionReason, Deferred, Lease, LeaseRequest, LedgerState
from tiphys_plugin.quota.ledger.backend import CHECK_EVERY, BaseLedger, Transition
from tiphys_plugin.quota.ledger.ledger_object import LedgerObject, LedgerVersion
from tiphys_plugin.quota.ledger.log_entry import needs_write
from tiphys_plugin.quota.ledger.room import find_room_objection, find_share_objection
from tiphys_plugin.quota.ledger.transitions import admit_or_queue, record_repeats
from tiphys_plugin.quota.queues import QueueRules
from tiphys_plugin.quota.scheduler.cache import FORGET_AFTER


class WriteBackoff:
    """Random back-off after a write, so that the other services get their turns.

    It is at most as long as the last round of reading, deciding and writing took, and as many such rounds longer as
    others have written since the write before.
    """

    def __init__(self, pause: Callable[[float], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._pause = pause
        self._clock = clock
        self._ended_at = float("-inf")
        self._longest_seconds = 0.0

    def wait(self) -> None:
        """Sleep for the rest of a random back-off since the last write."""
        idle_seconds = self._clock() - self._ended_at
        backoff_seconds = random.uniform(0, self._longest_seconds)  # noqa: S311  services must not keep in step
        if backoff_seconds > idle_seconds:
            self._pause(backoff_seconds - idle_seconds)

    def record_write(self, duration_seconds: float, others: int) -> None:
        """Note that a round of ``duration_seconds`` ended now with a write, after ``others`` of other services."""
        self._ended_at = self._clock()
        self._longest_seconds = duration_seconds * (1 + min(others, _MOST_OTHERS))


_MOST_OTHERS = 4
"""Writes of others that lengthen the back-off: a service that writes seldom does not wait for all since its last."""


_Answer = TypeVar("_Answer")


class QueuedWrite(Generic[_Answer]):
    """A transition that waits for its write."""

    def __init__(self, transition: Transition[_Answer]) -> None:
        self.transition = transition
        self.answer: Future[_Answer] = Future()


class WriteBatcher:
    """Combines the writes of concurrent threads.

    ``apply`` stores a batch of writes, and returns their answers in order; it may add to the batch by `add_waiting`. A
    call waits for the batch before it for at most ``wait_seconds``.
    """

    def __init__(
        self, apply: Callable[[list[QueuedWrite[Any]]], list[Any]], wait_seconds: float, ledger_name: object
    ) -> None:
        self._apply = apply
        self._wait_seconds = wait_seconds
        self._ledger_name = ledger_name
        self._changed = threading.Condition()
        self._is_writing = False
        self._waiting: list[QueuedWrite[Any]] = []

    def submit(self, transition: Transition[_Answer]) -> _Answer:
        """Apply ``transition`` with the next batch, and return its answer once it is stored.

        Raises:
            StoreError: the batch before it did not end in time; or an error of ``apply``.
        """
        write = QueuedWrite(transition)
        if batch := self._wait_for_batch(write):
            try:
                self._write_batch(batch)
            finally:
                with self._changed:
                    self._is_writing = False
                    self._changed.notify_all()
        return write.answer.result()

    def add_waiting(self, batch: list[QueuedWrite[Any]]) -> None:
        """Add the calls that have arrived meanwhile to the ``batch`` that is being written."""
        with self._changed:
            batch += self._waiting
            self._waiting = []

    def _wait_for_batch(self, write: QueuedWrite[Any]) -> list[QueuedWrite[Any]]:
        """The queued writes, which the caller must write; empty if another thread has written ``write``."""
        with self._changed:
            self._waiting.append(write)
            if not self._changed.wait_for(lambda: write.answer.done() or not self._is_writing, self._wait_seconds):
                if write in self._waiting:  # else another thread is writing it; a repeated request finds the result
                    self._waiting.remove(write)
                waited = f"others have waited for the API server for {self._wait_seconds:g} s"
                raise StoreError(f"{self._ledger_name} is busy: {waited}")
            if write.answer.done():
                return []
            self._is_writing, batch, self._waiting = True, self._waiting, []
            return batch

    def _write_batch(self, writes: list[QueuedWrite[Any]]) -> None:
        try:
            answers = self._apply(writes)
        except Exception as error:  # noqa: BLE001 - every waiting caller raises it
            for write in writes:
                write.answer.set_exception(error)
        else:
            for write, answer in zip(writes, answers, strict=True):
                write.answer.set_result(answer)


_log = structlog.get_logger()
_MAX_TRIES = 16
_TRIES_OF_ALL = 3
"""Conflicts in a row after which a service decides on fewer requests together."""
_RETRY_SECONDS = 0.02
"""Longest pause after a conflict. The service that has won the conflict waits longer, see `WriteBackoff`."""
_BATCH_WAIT_SECONDS = 15.0
"""Longest time that a call waits for the batch before it; Argo gives up on a call after 30 s."""


LONGEST_HOLD = timedelta(minutes=1)
"""Shorter than `FORGET_AFTER`, so that waiting requests keep their places."""


class KubernetesLedger(BaseLedger):
    """`AdmissionBackend` over the object ``name`` in ``namespace``; safe to use from many threads.

    A decision costs one GET, and one PUT if it changes more than a ``seen_at``;
    calls that arrive during a write share the next GET and PUT, and one entry of
    the log. Pending requests are repeated every few seconds. The service keeps their ``seen_at`` in memory
    and stores them with the next change, at the latest after a third of
    ``forget_after``. Another service may therefore ignore a pending request
    after two thirds of ``forget_after``.

    ``rules`` maps the declared queues and the leases to the queues under which the scheduler decides; the leases are
    None while they are being recovered. ``run_in_background`` runs what takes seconds; None: in a thread of its own.

    Raises:
        StoreError: the API server does not answer, or the object must not be trusted.
    """

    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        name: str = DEFAULT_LEDGER_NAME,
        *,
        clock: Callable[[], datetime] = utc_now,
        check_every: timedelta = CHECK_EVERY,
        forget_after: timedelta = FORGET_AFTER,
        pause: Callable[[float], object] = time.sleep,
        rules: Callable[[QueueRules, Sequence[Lease] | None], QueueRules] = lambda declared, _: declared,
        run_in_background: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        super().__init__(clock, check_every, forget_after)
        self._ledger_object = LedgerObject(api, namespace, name, clock, self.cache)
        self._run_in_background = run_in_background or _start_thread
        self._pause = pause
        self._backoff = WriteBackoff(pause)
        self._last_entry = 0
        """Number of the last entry of this service in the log."""
        self._rules = rules
        self._last_asked: dict[tuple[str, str, str], datetime] = {}
        self._seen_at_entered = clock()
        self._recovering_until: datetime | None = None
        """Until when nothing is granted, because the leases of live pods are being recorded."""
        self._write_batcher = WriteBatcher(self._apply_batch, _BATCH_WAIT_SECONDS, self._ledger_object)

    def request(self, request: LeaseRequest) -> Admission:
        lease = secrets.token_hex(8)

        def decide(state: LedgerState) -> tuple[LedgerState, Admission]:
            if self._is_recovering:
                message = "the leases of live pods are being recorded in the GPU ledger, which lacked them"
                return state, Deferred(AdmissionReason.LEDGER_RECOVERING, message, position=len(state.pending) + 1)
            now = self._last_asked[request.key] = self._clock()
            after, admission = admit_or_queue(state, request, now, lease, self.cache)
            position = len(state.pending) + 1
            if (objection := find_room_objection(state, after)) is not None:
                return state, Deferred(AdmissionReason.LEDGER_FULL, objection, position)
            if (objection := find_share_objection(state, after, request, self.cache)) is not None:
                return state, Deferred(AdmissionReason.LEDGER_SHARE_EXCEEDED, objection, position)
            return after, admission

        return self._write_batcher.submit(decide)

    def build_indexes(self) -> None:
        """Build what decisions look up; without it the first decision does, in half a second for 50,000 requests.

        Raises:
            StoreError: the ledger cannot be read.
        """
        state = self.snapshot()
        if state.pending:  # few leases need no preparation
            admit_or_queue(state, state.pending[0].request, self._clock(), "", self.cache)

    def hold_grants(self) -> None:
        """Grant nothing until `end_recovery`, or `LONGEST_HOLD` has passed: one namespace may not stop the others."""
        self._recovering_until = self._clock() + LONGEST_HOLD

    def begin_recovery(self) -> None:
        """Take the object that is there now for the ledger, and hold grants.

        Raises:
            LedgerLostError: there is no object, or it has no queues.
            StoreError: it cannot be read.
        """
        self.hold_grants()
        self._ledger_object.accept_replacement()

    def end_recovery(self) -> None:
        """Grant GPUs again: the leases of live pods are recorded."""
        self._recovering_until = None

    def replace_damaged_log(self) -> None:
        """Write all leases and requests to a new log if records of the present one were deleted or changed.

        A running service does not read these records again. A service that starts needs them, and so does
        `tiphys queues show`.

        Raises:
            StoreError: the ledger cannot be read or written.
        """
        if lost := self._ledger_object.find_lost_record():
            _log.warning("ledger.log_replaced", ledger=str(self._ledger_object), record=lost)
            self._update(lambda state: state)

    def _transact(self, transition: Transition[_Answer]) -> _Answer:
        return self._write_batcher.submit(transition)

    def snapshot(self) -> LedgerState:
        version = self._ledger_object.read()
        if version.needs_write:
            self._update(lambda state: state)
            version = self._ledger_object.read()
        return self._resolve_rules(version)

    def _resolve_rules(self, version: LedgerVersion) -> LedgerState:
        """The state with the queues under which the scheduler decides."""
        state = version.state
        return replace(state, queues=self._rules(version.rules, None if self._is_recovering else state.leases))

    @property
    def _is_recovering(self) -> bool:
        return self._recovering_until is not None and self._clock() < self._recovering_until

    def _apply_batch(self, writes: list[QueuedWrite[Any]]) -> list[Any]:
        """Apply ``writes`` in order, store the result, and return the answers.

        Calls that arrive during the back-off, or before another try, join the batch: services take turns, so each write
        has to serve as many calls as it can. After several conflicts in a row fewer of them are decided together: the
        less time a decision takes, the more likely no other service has written meanwhile.
        """
        answers: list[Any] = []
        size, failed_tries = sys.maxsize, 0
        while len(answers) < len(writes):
            if not failed_tries:
                self._backoff.wait()
            if not answers:
                self._write_batcher.add_waiting(writes)
            found = self._try_batch(writes[len(answers) : len(answers) + size])
            if found is not None:
                answers += found
                failed_tries, size = 0, 2 * size
                continue
            failed_tries += 1
            if failed_tries == _MAX_TRIES:
                raise StoreError(f"{self._ledger_object} was changed by others {_MAX_TRIES} times in a row; ask again")
            if failed_tries >= _TRIES_OF_ALL:
                size = max(1, min(size, len(writes) - len(answers)) // 2)
            self._pause(random.uniform(0, _RETRY_SECONDS))  # noqa: S311  services must not keep in step
        return answers

    def _try_batch(self, writes: Sequence[QueuedWrite[Any]]) -> list[Any] | None:
        """The answers; None if another service has written meanwhile."""
        began = time.monotonic()
        version = self._ledger_object.read()
        after, answers = self._enter_repeats(self._resolve_rules(version)), []
        for write in writes:
            after, answer = write.transition(after)
            answers.append(answer)
        if not self._ledger_object.needs_write(version) and not needs_write(
            version.state, after, self.cache.forget_after / 3, self.cache
        ):
            return answers
        if not self._write(version, after):
            return None
        number = 0 if version.head is None else version.head.number
        self._backoff.record_write(time.monotonic() - began, max(0, number - self._last_entry))
        self._last_entry = number + 1
        return answers

    def _enter_repeats(self, state: LedgerState) -> LedgerState:
        """The state with the times at which requests were repeated here, which are entered from time to time."""
        now = self._clock()
        if abs(now - self._seen_at_entered) < self.cache.forget_after / 12:
            return state
        self._seen_at_entered = now
        pending_keys = {pending.request.key for pending in state.pending}
        self._last_asked = {key: seen_at for key, seen_at in self._last_asked.items() if key in pending_keys}
        return record_repeats(state, self._last_asked)

    def _write(self, version: LedgerVersion, after: LedgerState) -> bool:
        """Store ``after``; whether ``version`` was still the newest."""
        failpoint("ledger.before_commit")
        try:
            written = self._ledger_object.write(version, after)
        except ConflictError:
            return False
        failpoint("ledger.after_commit")
        if written.makes_snapshot_due(version):
            self._run_in_background(lambda: self._take_snapshot(written))
        return True

    def _take_snapshot(self, version: LedgerVersion) -> None:
        """Store a snapshot, and delete the records before it. After a failure, the next snapshot does it."""
        try:
            self._ledger_object.take_snapshot(version)
            # The head must name the snapshot before records go: a crash here may leave too many, and never too few.
            self._update(lambda state: state)
            self._ledger_object.delete_unused_records()
        except TiphysError as error:
            _log.warning("ledger.snapshot_failed", ledger=str(self._ledger_object), error=str(error))


def _start_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="ledger_snapshot", daemon=True).start()
