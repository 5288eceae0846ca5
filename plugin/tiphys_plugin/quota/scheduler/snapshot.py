"""Caches of the scheduler: derived state of the leases, and sorted pending queues.

Thousands of pending requests are repeated every few seconds, while leases and
pending requests change far more rarely and few at once. So `DerivedState` (held
GPUs, usage and known ends) and `PendingQueues` are computed once, kept for the last
few ledger states (`RecentResults`), and updated by the few changes.

A new ledger state mostly consists of the same objects as the one before. This
makes the comparison of two states fast, however long they are.
"""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from math import inf
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

from tiphys_plugin.quota.lease import EndedUsage, Lease, LeaseRequest, PendingRequest, declared_end
from tiphys_plugin.quota.queue import Queue
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.backfill import LeaseEnd, end_time
from tiphys_plugin.quota.scheduler.capacity import Capacity
from tiphys_plugin.quota.scheduler.changes import find_changes
from tiphys_plugin.quota.scheduler.fair_share import DecayedUsage
from tiphys_plugin.quota.scheduler.pools import PoolOptions, get_pool_options
from tiphys_plugin.quota.scheduler.queue_order import QueuePosition, has_seniority, queue_position

_Known = TypeVar("_Known")


class RecentResults(Generic[_Known]):
    """Cache of the last ``size`` results. Threads need no lock; a race loses at most one cached result."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._results: tuple[_Known, ...] = ()

    @property
    def newest(self) -> _Known | None:
        return next(iter(self._results), None)

    @property
    def results(self) -> tuple[_Known, ...]:
        return self._results

    def find(self, matches: Callable[[_Known], bool]) -> _Known | None:
        return next(filter(matches, self._results), None)

    def remember(self, result: _Known) -> _Known:
        self._results = (result, *self._results[: self._size - 1])
        return result

    def clear(self) -> None:
        self._results = ()


class PendingEntry(NamedTuple):
    """A pending request with its position in its queue, which is unique there, and its pool options."""

    position: QueuePosition
    pending: PendingRequest
    pool_options: PoolOptions
    max_seconds: float
    """Declared time limit; infinite if none is declared."""


GroupKey = tuple[PoolOptions, float | None]
"""Pool options, and in a queue that `has_seniority` also the time limit. There a later position may have an earlier
arrival, and the cycle takes the last position of a group for its latest arrival: smaller groups are nearer to it."""


class PendingQueues:
    """The pending requests of each queue that exists and is not stopped, in groups of which each is sorted.

    Thousands of requests form a few groups, so a scheduling cycle does not look at each of them.
    """

    def __init__(self, queues: Queues, pending: Sequence[PendingRequest] = ()) -> None:
        self.queues = queues
        self.pending = tuple(pending)
        """The requests, in order of arrival."""
        self._own: PendingRequest | None = None
        """The one of `with_request`, which ``pending`` lacks, or has in an earlier version."""
        self._promises = sum(1 for one in pending if one.promised_at)
        self._groups_by_queue: dict[str, dict[GroupKey, list[PendingEntry]]] = {}
        for one in pending:
            if (entry := self._build_entry(one)) is not None:
                groups = self._groups_by_queue.setdefault(one.request.queue, {})
                groups.setdefault(self._group_key(entry), []).append(entry)
        for groups in self._groups_by_queue.values():
            for entries in groups.values():
                entries.sort(key=_by_position)

    def __iter__(self) -> Iterator[tuple[Queue, dict[GroupKey, list[PendingEntry]]]]:
        """Each queue with pending requests, and its groups, in which requests are sorted by position."""
        return (
            (queue, groups)
            for name, groups in self._groups_by_queue.items()
            if (queue := self.queues.find(name)) and groups
        )

    @property
    def has_promises(self) -> bool:
        """Whether GPUs of ended victims are kept for one of the requests."""
        return self._promises > 0

    def entry_of(self, arrival: int) -> PendingEntry | None:
        """The entry of the request with this arrival number; None if its queue does not exist or is stopped."""
        if self._own is not None and self._own.arrival == arrival:
            return self._build_entry(self._own)
        index = bisect_left(self.pending, arrival, key=_arrival)
        return self._build_entry(self.pending[index])

    def find_changes(
        self, pending: tuple[PendingRequest, ...]
    ) -> tuple[Sequence[PendingRequest], Sequence[PendingRequest]]:
        """The requests that are not among ``pending``, and those that are new there; ``seen_at`` may differ."""
        removed, added = find_changes(self.pending, pending)
        if not removed or not added:
            return removed, added
        before, after = {one.arrival: one for one in removed}, {one.arrival: one for one in added}
        same = {arrival for arrival, one in after.items() if arrival in before and _is_same(one, before[arrival])}
        return [one for one in removed if one.arrival not in same], [one for one in added if one.arrival not in same]

    def with_changes(
        self, pending: tuple[PendingRequest, ...], removed: Sequence[PendingRequest], added: Sequence[PendingRequest]
    ) -> "PendingQueues | None":
        """The queues for the new ``pending`` requests; None if so much changed that a new sort is faster."""
        return None if 4 * (len(added) + len(removed)) > len(self.pending) else self._change(pending, removed, added)

    def with_request(self, own: PendingRequest, earlier: Sequence[PendingRequest]) -> "PendingQueues":
        """The queues with ``own`` in the place of its ``earlier`` version, if they have one."""
        twin = self._change(self.pending, earlier, (own,))
        twin._own = own
        return twin

    def _change(
        self, pending: tuple[PendingRequest, ...], removed: Sequence[PendingRequest], added: Sequence[PendingRequest]
    ) -> "PendingQueues":
        twin = PendingQueues(self.queues)
        twin.pending = pending
        twin._promises = self._promises + sum(1 for one in added if one.promised_at)
        twin._promises -= sum(1 for one in removed if one.promised_at)
        twin._groups_by_queue = {name: groups.copy() for name, groups in self._groups_by_queue.items()}
        copied: set[tuple[str, GroupKey]] = set()
        for change, requests in ((_remove_entry, removed), (_add_entry, added)):
            for one in requests:
                if (entry := twin._build_entry(one)) is not None:
                    twin._change_group(one.request.queue, entry, change, copied)
        return twin

    def _change_group(
        self,
        queue: str,
        entry: PendingEntry,
        change: Callable[[list[PendingEntry], PendingEntry], None],
        copied: set[tuple[str, GroupKey]],
    ) -> None:
        """Change a group in place, after its first copy: the queues before the change share it."""
        groups, key = self._groups_by_queue.setdefault(queue, {}), self._group_key(entry)
        if (queue, key) not in copied:
            copied.add((queue, key))
            groups[key] = groups[key].copy() if key in groups else []
        change(groups[key], entry)
        if not groups[key]:
            del groups[key]
            copied.discard((queue, key))

    def _build_entry(self, one: PendingRequest) -> PendingEntry | None:
        request, queue = one.request, self.queues.find(one.request.queue)
        if queue is None or queue.stopped:
            return None
        seconds = inf if request.seconds is None else request.seconds
        return PendingEntry(queue_position(queue, one), one, get_pool_options(self.queues, queue, request), seconds)

    def _group_key(self, entry: PendingEntry) -> GroupKey:
        queue = self.queues.find(entry.pending.request.queue)
        return entry.pool_options, entry.max_seconds if queue is not None and has_seniority(queue) else None


def _add_entry(entries: list[PendingEntry], entry: PendingEntry) -> None:
    insort(entries, entry, key=_by_position)


def _remove_entry(entries: list[PendingEntry], entry: PendingEntry) -> None:
    del entries[bisect_left(entries, entry.position, key=_by_position)]


def get_pending_queues(
    queues: Queues, pending: tuple[PendingRequest, ...], own: PendingRequest | None = None
) -> PendingQueues:
    """The sorted pending queues of ``pending`` and ``own``, cached for the last few calls.

    Their ``seen_at`` may be outdated. ``own`` takes the place of the request with its arrival number.
    """
    known = _get_known_queues(queues, pending)
    if own is None:
        return known
    index = bisect_left(pending, own.arrival, key=_arrival)
    earlier = pending[index : index + 1]
    if not earlier or earlier[0].arrival != own.arrival:
        earlier = ()
    elif _is_same(own, earlier[0]):
        return known
    cached = _latest_with_own.find(lambda one: one.others is known and _is_same(own, one.own))
    if cached is None:
        cached = _latest_with_own.remember(_WithOwn(known, own, known.with_request(own, earlier)))
    return cached.queues


def _get_known_queues(queues: Queues, pending: tuple[PendingRequest, ...]) -> PendingQueues:
    updated: PendingQueues | None = None
    for known in _latest_queues.results:
        if known.queues is not queues:
            continue
        removed, added = known.find_changes(pending)
        if not removed and not added:
            known.pending = pending  # so that the next comparison finds fewer differences
            return known
        updated = updated or known.with_changes(pending, removed, added)
    return _latest_queues.remember(updated or PendingQueues(queues, pending))


class _WithOwn(NamedTuple):
    others: PendingQueues
    own: PendingRequest
    queues: PendingQueues


_latest_queues: RecentResults[PendingQueues] = RecentResults(2)
_latest_with_own: RecentResults[_WithOwn] = RecentResults(2)
_arrival = attrgetter("arrival")
_by_position = attrgetter("position")
_granted_at = attrgetter("granted_at")


def _is_same(one: PendingRequest, before: PendingRequest) -> bool:
    return one.request is before.request and (one.since, one.promised_at) == (before.since, before.promised_at)


class DerivedState:
    """State derived from leases and usage history. Shared between threads: copy ``capacity`` before a change.

    Attributes:
        capacity: GPUs held by the leases.
        decayed_usage: Past usage of the queues.
    """

    def __init__(self, queues: Queues, leases: Sequence[Lease] = (), history: Sequence[EndedUsage] = ()) -> None:
        self.queues = queues
        self.leases = tuple(leases)
        self.history = tuple(history)
        self.capacity = Capacity(queues, leases)
        self.decayed_usage = DecayedUsage(queues, leases, history)
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

    def matches(self, queues: Queues, leases: Sequence[Lease], history: Sequence[EndedUsage]) -> bool:
        """Whether this is the state derived from these queues, leases and history."""
        if self.queues is not queues or len(self.leases) != len(leases):
            return False
        # Tuples are compared object by object, even one with itself.
        return (self.leases is leases or self.leases == tuple(leases)) and self.history == tuple(history)

    def with_changes(self, leases: Sequence[Lease], history: Sequence[EndedUsage]) -> "DerivedState | None":
        """The state for new leases and history; None if so much changed that a new computation is faster."""
        removed, added = find_changes(self.leases, tuple(leases))
        if 4 * (len(added) + len(removed)) > len(self.leases):
            return None
        twin = DerivedState.__new__(DerivedState)
        twin.queues, twin.leases, twin.history = self.queues, tuple(leases), tuple(history)
        has_victims = self._promised_steps or any(one.preemption for one in added)
        twin._promised_steps = _find_promised_steps(leases) if has_victims else self._promised_steps
        twin.capacity = self.capacity.copy()
        twin.decayed_usage = self.decayed_usage.with_changes(added, removed, history)
        twin._ends = defaultdict(list, {key: ends.copy() for key, ends in self._ends.items()})
        twin._by_queue = defaultdict(list, {name: some.copy() for name, some in self._by_queue.items()})
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


def derive_state(queues: Queues, leases: Sequence[Lease], history: Sequence[EndedUsage]) -> DerivedState:
    """The state derived from these leases, cached for the last few calls."""
    cached = _latest_states.find(lambda one: one.matches(queues, leases, history))
    if cached is not None:
        return cached
    last = _latest_states.newest
    updated = last.with_changes(leases, history) if last is not None and last.queues is queues else None
    return _latest_states.remember(updated or DerivedState(queues, leases, history))


def latest_lease_end(lease: Lease) -> datetime | None:
    """Latest end of a lease by its time limit or its preemption; None: unknown."""
    declared = declared_end(lease.request, lease.granted_at)
    if lease.preemption is None or lease.preemption.keeps is not None:
        return declared
    return lease.preemption.deadline if declared is None else min(declared, lease.preemption.deadline)


_latest_states: RecentResults[DerivedState] = RecentResults(8)


def _find_promised_steps(leases: Sequence[Lease]) -> frozenset[tuple[str, str]]:
    return frozenset(one.preemption.preemptor for one in leases if one.preemption is not None)
