"""What the decisions on one ledger have in common, kept from one decision to the next.

Thousands of pending requests are repeated every few seconds, while leases and pending
requests change far more rarely and few at once. So indexes, sums, sorted queues and whole
scheduling cycles are kept, and updated by what has changed. Between two changes of the
ledger one cycle answers all requests.

As Kueue's cache (`pkg/cache/scheduler`), it is an object with an owner: each ledger has one,
and passes it to its transitions. Unlike Kueue's, it is not handed each change. A transition is
applied again after a conflict, to a state that other services have changed, and the
selection of victims decides on states that never come about; changes that were handed over
would have to be taken back in all these cases. A new state mostly consists of the same
objects as the one before, so the cache finds what differs within a millisecond, and is right
for any state in any order: one that differs much only takes longer.
"""

from collections import Counter, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime, timedelta
from math import ceil
from typing import TypeVar

from tiphys_plugin.quota.lease import Lease, LedgerState, PendingRequest
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.changes import RecentChanges
from tiphys_plugin.quota.scheduler.cycle import run_cycle
from tiphys_plugin.quota.scheduler.cycle_result import CycleResult, RequestOutcome
from tiphys_plugin.quota.scheduler.derived_state import DerivedState
from tiphys_plugin.quota.scheduler.entry_index import LeaseIndex, PendingIndex
from tiphys_plugin.quota.scheduler.pending_queues import PendingQueues, drop_repeated, is_same_request

_Item = TypeVar("_Item")
FORGET_AFTER = timedelta(minutes=2)
"""A pending request that was not repeated for this long no longer delays others."""
_KEPT_STATES = 8
"""Enough for the present state and those that the selection of victims tries in turn."""
_KEPT_QUEUES = 2
"""Those of the present state, and those without the preemptor."""
_KEPT_CYCLES = 4


class SchedulerCache:
    """Indexes, sums, sorted queues and cycles of the newest states of one ledger.

    ``lock`` is reentrant and held for whole cycles, because a cycle shares the objects of the one before; None: only
    one thread uses the cache. Pending requests that were not repeated for ``forget_after`` no longer delay others.
    """

    def __init__(
        self, lock: AbstractContextManager[object] | None = None, forget_after: timedelta = FORGET_AFTER
    ) -> None:
        self.forget_after = forget_after
        self._lock = lock or nullcontext()
        self._changes = RecentChanges()
        self._leases = LeaseIndex(self._changes)
        self._pending = PendingIndex(self._changes)
        self._derived_states: deque[DerivedState] = deque(maxlen=_KEPT_STATES)
        self._queues: deque[PendingQueues] = deque(maxlen=_KEPT_QUEUES)
        self._queues_with_own: deque[tuple[PendingQueues, PendingRequest, PendingQueues]] = deque(maxlen=_KEPT_QUEUES)
        """Sorted queues, a request, and the same queues with this request."""
        self._cycles: deque[tuple[DerivedState, PendingQueues, int, CycleResult]] = deque(maxlen=_KEPT_CYCLES)

    def find_lease(self, state: LedgerState, lease_id: str) -> Lease | None:
        """The lease with this id."""
        with self._lock:
            return self._leases.find_by_id(state.leases, lease_id)

    def find_leases(self, state: LedgerState, workflow_step: tuple[str, str]) -> list[Lease]:
        """The leases of a step."""
        with self._lock:
            return self._leases.find(state.leases, workflow_step)

    def find_pending(self, state: LedgerState, workflow_step: tuple[str, str]) -> PendingRequest | None:
        """The pending request of a step."""
        with self._lock:
            return next(iter(self._pending.find(state.pending, workflow_step)), None)

    def count_entries(self, state: LedgerState, namespace: str) -> int:
        """Number of the leases and pending requests of a namespace."""
        with self._lock:
            return self._leases.count(state.leases, namespace) + self._pending.count(state.pending, namespace)

    def sum_held_gpus(self, state: LedgerState) -> Counter[str]:
        """Held GPUs of each queue that holds any."""
        with self._lock:
            return self._leases.sum_gpus(state.leases)

    def select_active(self, state: LedgerState, now: datetime) -> tuple[PendingRequest, ...]:
        """The pending requests that were repeated lately (`FORGET_AFTER`), and that their queues still accept."""
        with self._lock:
            return self._pending.select_active(state.queues, state.pending, now, self.forget_after)

    def find_changes(
        self, before: tuple[_Item, ...], after: tuple[_Item, ...]
    ) -> tuple[Sequence[_Item], Sequence[_Item]]:
        """As `tiphys_plugin.quota.scheduler.changes.find_changes`."""
        with self._lock:
            return self._changes.find(before, after)

    def evaluate(self, queues: Queues, state: LedgerState, own: PendingRequest, now: datetime) -> RequestOutcome:
        """Evaluate the request ``own`` by a scheduling cycle; its queue must be able to serve it one day.

        The pending requests of ``state`` may have an earlier version of it.

        All requests within one second are evaluated as of the end of that second, so one cycle answers all of them.
        The result is never too optimistic: a lease that should end until then counts as one without a known end, and
        starts count from then on.
        """
        with self._lock:
            derived = self.derive(queues, state)
            cycle = self._get_cycle(derived, self.sort_pending(queues, state.pending, own), ceil(now.timestamp()))
            return cycle.outcome_of(own.arrival)

    def derive(self, queues: Queues, state: LedgerState) -> DerivedState:
        """The sums over the leases of ``state``."""
        with self._lock:
            for known in self._derived_states:
                if known.queues is queues and known.leases is state.leases and known.history == state.history:
                    return known
            newest = next(iter(self._derived_states), None)
            updated = None
            if newest is not None and newest.queues is queues:
                updated = newest.with_changes(state, *self._changes.find(newest.leases, state.leases))
            self._derived_states.appendleft(updated or DerivedState(queues, state))
            return self._derived_states[0]

    def sort_pending(
        self, queues: Queues, pending: tuple[PendingRequest, ...], own: PendingRequest | None = None
    ) -> PendingQueues:
        """The sorted queues of ``pending``, in which ``own`` takes the place of the request with its arrival number.

        Their ``seen_at`` may be outdated.
        """
        with self._lock:
            known = self._get_queues(queues, pending)
            earlier = None if own is None else known.find_earlier(own)
            if own is None or (earlier is not None and is_same_request(own, earlier)):
                return known
            for others, request, with_own in self._queues_with_own:
                if others is known and request.arrival == own.arrival and is_same_request(own, request):
                    return with_own
            self._queues_with_own.appendleft((known, own, known.with_request(own)))
            return self._queues_with_own[0][-1]

    def _get_queues(self, queues: Queues, pending: tuple[PendingRequest, ...]) -> PendingQueues:
        updated: PendingQueues | None = None
        for known in self._queues:
            if known.queues is not queues:
                continue
            removed, added = drop_repeated(*self._changes.find(known.pending, pending))
            if not removed and not added:
                known.pending = pending  # so that the next comparison finds fewer differences
                return known
            updated = updated or known.with_changes(pending, removed, added)
        self._queues.appendleft(updated or PendingQueues(queues, pending))
        return self._queues[0]

    def _get_cycle(self, derived: DerivedState, pending_queues: PendingQueues, second: int) -> CycleResult:
        for known_derived, known_queues, known_second, result in self._cycles:
            if known_derived is derived and known_queues is pending_queues and known_second == second:
                return result
        result = run_cycle(derived, pending_queues, datetime.fromtimestamp(second, UTC))
        self._cycles.appendleft((derived, pending_queues, second, result))
        return result
