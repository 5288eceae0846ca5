"""The part that all ledgers share: each call is one transition of the GPU ledger state.

A ledger only implements how it reads the state and how it replaces it
atomically, so the rules cannot differ between ledgers. `MemoryLedger` keeps
the state in memory, for tests and for programs that embed the plugin.
"""

import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TypeVar

from tiphys.records import utc_now
from tiphys_plugin.quota.lease import Admission, Lease, LeaseRequest, LedgerState
from tiphys_plugin.quota.ledger import transitions
from tiphys_plugin.quota.queues import QueueRules
from tiphys_plugin.quota.scheduler.cache import FORGET_AFTER, SchedulerCache

_Answer = TypeVar("_Answer")
Transition = Callable[[LedgerState], tuple[LedgerState, _Answer]]
CHECK_EVERY = timedelta(seconds=30)
"""Shortest time between two checks of one lease by `BaseLedger.release_dead_leases`."""


class BaseLedger(ABC):
    """`AdmissionBackend` over a GPU ledger state.

    A lease never expires by time: `release_dead_leases` ends it after a check
    found it gone, and checks each lease at most once in ``check_every``. A pending
    request that was not repeated for ``forget_after`` delays no others; it keeps
    its place in case it comes back.

    Attributes:
        cache: What decisions on its states have in common. It lives and ends with the ledger.
    """

    def __init__(
        self,
        clock: Callable[[], datetime],
        check_every: timedelta = CHECK_EVERY,
        forget_after: timedelta = FORGET_AFTER,
    ) -> None:
        self.cache = SchedulerCache(threading.RLock(), forget_after)
        self._clock = clock
        self._check_every = check_every
        self._sweep = threading.Lock()

    @abstractmethod
    def _transact(self, transition: Transition[_Answer]) -> _Answer:
        """Apply ``transition`` to the newest state, and return its answer once the new state is stored.

        ``transition`` may be applied several times, because a concurrent writer may win.
        """

    @abstractmethod
    def snapshot(self) -> LedgerState:
        """The newest state, with the queues under which the scheduler decides."""

    def request(self, request: LeaseRequest) -> Admission:
        lease = secrets.token_hex(8)
        return self._transact(
            lambda state: transitions.admit_or_queue(state, request, self._clock(), lease, self.cache)
        )

    def restore(
        self,
        lease: str,
        request: LeaseRequest,
        gpu_type: str | None,
        nodes: tuple[str, ...] = (),
        running_members: int | None = None,
    ) -> int:
        running = request.members if running_members is None else running_members
        return self._transact(
            lambda state: transitions.restore(state, lease, request, gpu_type, nodes, running, self._clock())
        )

    def withdraw(self, uid: str) -> None:
        self._update(lambda state: transitions.withdraw(state, uid))

    def release(self, lease: str) -> None:
        self._update(lambda state: transitions.release(state, lease, self._clock(), self.cache))

    def shrink(self, lease: str, members: int, nodes: tuple[str, ...] = (), made: int | None = None) -> None:
        self._update(lambda state: transitions.shrink(state, lease, members, nodes, made, self._clock(), self.cache))

    def grow(self, lease: str, made: int) -> Lease | None:
        return self._transact(lambda state: transitions.grow(state, lease, made, self._clock(), self.cache))

    def release_workflow(self, uid: str) -> None:
        self._update(lambda state: transitions.release_workflow(state, uid, self._clock()))

    def mark_preempted(self, preemptor: tuple[str, str], grace_seconds: Mapping[str, float]) -> tuple[Lease, ...]:
        return self._transact(
            lambda state: transitions.mark_victims(state, preemptor, grace_seconds, self._clock(), self.cache)
        )

    def release_dead_leases(
        self, is_gone: Callable[[Lease], bool], leases: Sequence[Lease] | None = None
    ) -> list[Lease]:
        # `is_gone` calls the cluster, so it runs between two transactions and not within one.
        now = self._clock()
        if leases is not None:
            return self._record_checks(gone := [lease for lease in leases if is_gone(lease)], gone, now)
        # Where hundreds wait, each of their calls comes here, and all would check the same leases at once.
        if not self._sweep.acquire(blocking=False):
            return []
        try:
            due = transitions.find_due_leases(self.snapshot(), now, self._check_every)
            return self._record_checks(due, [lease for lease in due if is_gone(lease)], now)
        finally:
            self._sweep.release()

    def _record_checks(self, checked: Sequence[Lease], gone: list[Lease], now: datetime) -> list[Lease]:
        if checked:
            next_check = now + self._check_every
            self._update(lambda state: transitions.record_check(state, checked, gone, next_check, now))
        return gone

    def _update(self, transition: Callable[[LedgerState], LedgerState]) -> None:
        self._transact(lambda state: (transition(state), None))


class MemoryLedger(BaseLedger):
    """A thread-safe ledger that ends with its process. ``queues`` None means that nothing is limited.

    Attributes:
        state: The ledger state. Tests may replace it, as if another service had written.
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
        self.state = LedgerState()

    def _transact(self, transition: Transition[_Answer]) -> _Answer:
        with self._lock:
            self.state, answer = transition(self.snapshot())
            return answer

    def snapshot(self) -> LedgerState:
        return replace(self.state, queues=self._queues)
