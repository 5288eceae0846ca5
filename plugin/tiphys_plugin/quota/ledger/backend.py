"""The part that all ledgers share: each call is one transition of the GPU ledger state.

A ledger only implements how it reads the state and how it replaces it
atomically, so the rules cannot differ between ledgers. `MemoryLedger` keeps
the state in memory, for tests and for programs that embed the plugin.
"""

import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TypeVar

from tiphys.records import utc_now
from tiphys_plugin.quota.lease import Admission, Lease, LeaseRequest, LedgerSnapshot
from tiphys_plugin.quota.ledger.state import LedgerState
from tiphys_plugin.quota.ledger.transitions import FORGET_AFTER, admit_or_queue, mark_victims
from tiphys_plugin.quota.queues import QueueRules

_Answer = TypeVar("_Answer")
Transition = Callable[[LedgerState, QueueRules], tuple[LedgerState, _Answer]]
CHECK_EVERY = timedelta(seconds=30)
"""Shortest time between two checks of one lease by `BaseLedger.release_dead_leases`."""


class BaseLedger(ABC):
    """`AdmissionBackend` over a GPU ledger state.

    A lease never expires by time: `release_dead_leases` ends it after a check
    found it gone, and checks each lease at most once in ``check_every``. A pending
    request that was not repeated for ``forget_after`` delays no others; it keeps
    its place in case it comes back.
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
    def _transact(self, transition: Transition[_Answer]) -> _Answer:
        """Apply ``transition`` to the newest state, and return its answer once the new state is stored.

        ``transition`` may be applied several times, because a concurrent writer may win.
        """

    @abstractmethod
    def _read(self) -> tuple[LedgerState, QueueRules]:
        """The newest state, and the queues under which the scheduler decides."""

    def request(self, request: LeaseRequest) -> Admission:
        lease = secrets.token_hex(8)
        return self._transact(
            lambda state, rules: admit_or_queue(state, rules, request, self._clock(), lease, self._forget_after)
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
            lambda state, rules: state.restore(lease, request, gpu_type, nodes, running, rules, self._clock())
        )

    def withdraw(self, uid: str) -> None:
        self._update(lambda state, _: state.withdraw(uid))

    def release(self, lease: str) -> None:
        self._update(lambda state, rules: state.release(lease, rules, self._clock()))

    def shrink(self, lease: str, members: int, nodes: tuple[str, ...] = ()) -> None:
        self._update(lambda state, rules: state.shrink(lease, members, nodes, rules, self._clock()))

    def release_workflow(self, uid: str) -> None:
        self._update(lambda state, _: state.release_workflow(uid, self._clock()))

    def mark_preempted(self, preemptor: tuple[str, str], grace_seconds: Mapping[str, float]) -> tuple[Lease, ...]:
        return self._transact(
            lambda state, rules: mark_victims(state, rules, preemptor, grace_seconds, self._clock(), self._forget_after)
        )

    def release_dead_leases(
        self, is_gone: Callable[[Lease], bool], leases: Sequence[Lease] | None = None
    ) -> list[Lease]:
        # `is_gone` calls the cluster, so it runs between two transactions and not within one.
        now = self._clock()
        due = self._read()[0].leases_due_for_check(now, self._check_every) if leases is None else leases
        gone = [lease for lease in due if is_gone(lease)]
        checked = due if leases is None else gone
        if checked:
            self._update(lambda state, rules: state.record_check(checked, gone, now + self._check_every, rules, now))
        return gone

    def snapshot(self) -> LedgerSnapshot:
        state, rules = self._read()
        return state.snapshot(rules)

    def _update(self, transition: Callable[[LedgerState, QueueRules], LedgerState]) -> None:
        self._transact(lambda state, rules: (transition(state, rules), None))


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
            self.state, answer = transition(self.state, self._queues)
            return answer

    def _read(self) -> tuple[LedgerState, QueueRules]:
        return self.state, self._queues
