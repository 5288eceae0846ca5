"""Sums and orders over the leases of a ledger state: held GPUs, decayed usage and known ends.

A new ledger state differs from the one before by few leases, so its sums are those of
the state before with these few changes.
"""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from operator import attrgetter

from tiphys_plugin.quota.lease import Lease, LeaseRequest, LedgerState, declared_end
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.backfill import LeaseEnd, end_time
from tiphys_plugin.quota.scheduler.capacity import Capacity
from tiphys_plugin.quota.scheduler.fair_share import DecayedUsage


class DerivedState:
    """What a scheduling cycle needs of leases and usage history. Decisions share it: copy ``capacity`` before a change.

    Attributes:
        capacity: GPUs held by the leases.
        decayed_usage: Past usage of the queues.
    """

    def __init__(self, queues: Queues, state: LedgerState) -> None:
        self.queues = queues
        self.leases = leases = state.leases
        self.history = state.history
        self.capacity = Capacity(queues, leases)
        self.decayed_usage = DecayedUsage(queues, leases, state.history)
        self._ends: defaultdict[tuple[str, str], list[LeaseEnd]] = defaultdict(list)
        self._by_queue: defaultdict[str, list[Lease]] = defaultdict(list)
        self._promised_steps = _find_promised_steps(leases)
        for lease in sorted(leases, key=_granted_at):
            self._by_queue[lease.request.queue].append(lease)
        for lease in leases:
            if (end := latest_lease_end(lease)) is not None:
                held_gpus = self.capacity.held_gpus_of_lease(lease)
                self._ends[held_gpus.quota_key].append((end, held_gpus))
        for ends in self._ends.values():
            ends.sort(key=end_time)

    def with_changes(
        self, state: LedgerState, removed: Sequence[Lease], added: Sequence[Lease]
    ) -> "DerivedState | None":
        """The same for ``state`` under these queues; None if so much changed that a new computation is faster."""
        if 4 * (len(added) + len(removed)) > len(self.leases):
            return None
        twin = DerivedState.__new__(DerivedState)
        twin.queues, twin.leases, twin.history = self.queues, state.leases, state.history
        has_victims = self._promised_steps or any(lease.preemption for lease in added)
        twin._promised_steps = _find_promised_steps(state.leases) if has_victims else self._promised_steps
        twin.capacity = self.capacity.copy()
        twin.decayed_usage = self.decayed_usage.with_changes(added, removed, state.history)
        twin._ends = defaultdict(list, {key: ends.copy() for key, ends in self._ends.items()})
        twin._by_queue = defaultdict(list, {name: leases.copy() for name, leases in self._by_queue.items()})
        for lease in removed:
            twin._remove(lease)
        for lease in added:
            twin._add(lease)
        return twin

    def leases_of(self, queue: str) -> Sequence[Lease]:
        """The leases of a queue, in order of their grants."""
        return self._by_queue.get(queue, ())

    @property
    def quota_keys(self) -> list[tuple[str, str]]:
        """Quota keys (see `HeldGpus`) with known ends of leases."""
        return list(self._ends)

    def known_ends(self, quota_key: tuple[str, str], now: datetime) -> Sequence[LeaseEnd]:
        """Known ends of leases after ``now``, in order. The end of an overdue lease counts as unknown."""
        ends = self._ends.get(quota_key, [])
        return ends[bisect_right(ends, now, key=end_time) :]

    @property
    def has_promises(self) -> bool:
        """Whether any lease is that of a victim."""
        return bool(self._promised_steps)

    def is_promised(self, request: LeaseRequest) -> bool:
        """Whether the request has victims."""
        return bool(self._promised_steps) and request.workflow_step in self._promised_steps

    def _add(self, lease: Lease) -> None:
        held_gpus = self.capacity.held_gpus_of_lease(lease)
        self.capacity.add(held_gpus)
        insort(self._by_queue[lease.request.queue], lease, key=_granted_at)
        if (end := latest_lease_end(lease)) is not None:
            insort(self._ends[held_gpus.quota_key], (end, held_gpus), key=end_time)

    def _remove(self, lease: Lease) -> None:
        held_gpus = self.capacity.held_gpus_of_lease(lease)
        self.capacity.remove(held_gpus)
        of_queue = self._by_queue[lease.request.queue]
        first = bisect_left(of_queue, lease.granted_at, key=_granted_at)
        del of_queue[next(index for index in range(first, len(of_queue)) if of_queue[index].id == lease.id)]
        if (end := latest_lease_end(lease)) is not None:
            ends = self._ends[held_gpus.quota_key]
            first = bisect_left(ends, end, key=end_time)
            del ends[ends.index((end, held_gpus), first)]


def latest_lease_end(lease: Lease) -> datetime | None:
    """Latest end of a lease by its time limit or its preemption; None: unknown."""
    declared = declared_end(lease.request, lease.granted_at)
    if lease.preemption is None or lease.preemption.keeps is not None:
        return declared
    return lease.preemption.deadline if declared is None else min(declared, lease.preemption.deadline)


def _find_promised_steps(leases: Sequence[Lease]) -> frozenset[tuple[str, str]]:
    return frozenset(lease.preemption.preemptor for lease in leases if lease.preemption is not None)


_granted_at = attrgetter("granted_at")
