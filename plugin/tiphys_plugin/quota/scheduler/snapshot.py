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
from datetime import datetime, timedelta
from math import inf
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

from tiphys_plugin.quota.lease import EndedUsage, Lease, LeaseRequest, PendingRequest
from tiphys_plugin.quota.queues import Queue, Queues
from tiphys_plugin.quota.scheduler.backfill import LeaseEnd, end_time
from tiphys_plugin.quota.scheduler.capacity import Capacity
from tiphys_plugin.quota.scheduler.fair_share import DecayedUsage, QueuePosition, queue_position
from tiphys_plugin.quota.scheduler.pools import PoolOptions, get_pool_options

_Known = TypeVar("_Known")


class RecentResults(Generic[_Known]):
    """Cache of the last ``size`` results. Threads need no lock; a race loses at most one cached result."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._results: tuple[_Known, ...] = ()

    @property
    def newest(self) -> _Known | None:
        return next(iter(self._results), None)

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


class PendingQueues:
    """The sorted pending requests of each queue that exists and is not stopped. Immutable; see `with_changes`."""

    def __init__(self, queues: Queues, pending: Sequence[PendingRequest] = ()) -> None:
        self.queues = queues
        self._fingerprint = _fingerprint_of(pending)
        self.has_promises = any(one.promised_at for one in pending)
        """Whether GPUs of ended victims are kept for one of the requests."""
        self._pending_by_arrival: dict[int, PendingRequest] = {one.arrival: one for one in pending}
        self._entries_by_queue: dict[str, list[PendingEntry]] = {}
        for one in pending:
            if (entry := self._build_entry(one)) is not None:
                self._entries_by_queue.setdefault(one.request.queue, []).append(entry)
        for entries in self._entries_by_queue.values():
            entries.sort(key=_by_position)

    def __iter__(self) -> Iterator[tuple[Queue, Sequence[PendingEntry]]]:
        """Each queue with pending requests, and its entries in order."""
        return (
            (queue, entries)
            for name, entries in self._entries_by_queue.items()
            if (queue := self.queues.find(name)) and entries
        )

    def matches(self, queues: Queues, pending: Sequence[PendingRequest]) -> bool:
        """Whether these are the queues of ``pending``; ``seen_at`` times may differ."""
        return self.queues is queues and self._fingerprint == _fingerprint_of(pending)

    def with_changes(self, pending: Sequence[PendingRequest]) -> "PendingQueues | None":
        """The queues for the new ``pending`` requests; None if so much changed that a new sort is faster."""
        after, before = {one.arrival: one for one in pending}, self._pending_by_arrival
        removed = [one for arrival, one in before.items() if arrival not in after or not _is_same(after[arrival], one)]
        added = [one for arrival, one in after.items() if arrival not in before or not _is_same(one, before[arrival])]
        if 4 * (len(added) + len(removed)) > len(before):
            return None
        twin = PendingQueues(self.queues)
        twin._fingerprint, twin._pending_by_arrival = _fingerprint_of(pending), after
        twin.has_promises = any(one.promised_at for one in pending)
        twin._entries_by_queue = {name: entries.copy() for name, entries in self._entries_by_queue.items()}
        for one in removed:
            twin._remove(one)
        for one in added:
            twin._add(one)
        return twin

    def _build_entry(self, one: PendingRequest) -> PendingEntry | None:
        request, queue = one.request, self.queues.find(one.request.queue)
        if queue is None or queue.stopped:
            return None
        seconds = inf if request.seconds is None else request.seconds
        return PendingEntry(
            queue_position(queue, request, one.arrival), one, get_pool_options(self.queues, queue, request), seconds
        )

    def _add(self, one: PendingRequest) -> None:
        if (entry := self._build_entry(one)) is not None:
            insort(self._entries_by_queue.setdefault(one.request.queue, []), entry, key=_by_position)

    def _remove(self, one: PendingRequest) -> None:
        if (entry := self._build_entry(one)) is not None:
            entries = self._entries_by_queue[one.request.queue]
            del entries[bisect_left(entries, entry.position, key=_by_position)]


def get_pending_queues(queues: Queues, pending: Sequence[PendingRequest]) -> PendingQueues:
    """The sorted pending queues of ``pending``, cached for the last few calls. Their ``seen_at`` may be outdated."""
    cached = _latest_queues.find(lambda one: one.matches(queues, pending))
    if cached is not None:
        return cached
    last = _latest_queues.newest
    updated = last.with_changes(pending) if last is not None and last.queues is queues else None
    return _latest_queues.remember(updated or PendingQueues(queues, pending))


_latest_queues: RecentResults[PendingQueues] = RecentResults(4)
_arrival = attrgetter("arrival")
_request = attrgetter("request")
_by_position = attrgetter("position")


_promised_at = attrgetter("promised_at")


def _fingerprint_of(pending: Sequence[PendingRequest]) -> tuple[list[object], ...]:
    """The fields that identify pending requests: arrival numbers alone may be reused."""
    return tuple(list(map(field, pending)) for field in (_arrival, _request, _promised_at))


def _is_same(one: PendingRequest, before: PendingRequest) -> bool:
    return one.request is before.request and one.promised_at == before.promised_at


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
        self._promised_steps = _find_promised_steps(leases)
        for lease in leases:
            if (end := latest_lease_end(lease)) is not None:
                held_gpus = self.capacity.held_gpus_of_lease(lease)
                self._ends[held_gpus.quota_key].append((end, held_gpus))
        for ends in self._ends.values():
            ends.sort(key=end_time)

    def matches(self, queues: Queues, leases: Sequence[Lease], history: Sequence[EndedUsage]) -> bool:
        """Whether this is the state derived from these queues, leases and history."""
        return self.queues is queues and self.leases == tuple(leases) and self.history == tuple(history)

    def with_changes(self, leases: Sequence[Lease], history: Sequence[EndedUsage]) -> "DerivedState | None":
        """The state for new leases and history; None if so much changed that a new computation is faster."""
        after, before = set(map(id, leases)), set(map(id, self.leases))
        added = [one for one in leases if id(one) not in before]
        removed = [one for one in self.leases if id(one) not in after]
        if 4 * (len(added) + len(removed)) > len(self.leases):
            return None
        twin = DerivedState.__new__(DerivedState)
        twin.queues, twin.leases, twin.history = self.queues, tuple(leases), tuple(history)
        has_victims = self._promised_steps or any(one.preemption for one in added)
        twin._promised_steps = _find_promised_steps(leases) if has_victims else self._promised_steps
        twin.capacity = self.capacity.copy()
        twin.decayed_usage = self.decayed_usage.with_changes(added, removed, history)
        twin._ends = defaultdict(list, {key: ends.copy() for key, ends in self._ends.items()})
        for lease in removed:
            twin._remove(lease)
        for lease in added:
            twin._add(lease)
        return twin

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
        if (end := latest_lease_end(lease)) is not None:
            insort(self._ends[held_gpus.quota_key], (end, held_gpus), key=end_time)

    def _remove(self, lease: Lease) -> None:
        held_gpus = self.capacity.held_gpus_of_lease(lease)
        self.capacity.remove(held_gpus)
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


def declared_end(request: LeaseRequest, started_at: datetime) -> datetime | None:
    """Latest end of a lease that started at ``started_at``; None without a declared time limit."""
    return started_at + timedelta(seconds=request.seconds) if request.seconds is not None else None


def latest_lease_end(lease: Lease) -> datetime | None:
    """Latest end of a lease by its time limit or its preemption; None: unknown."""
    declared = declared_end(lease.request, lease.granted_at)
    if lease.preemption is None or lease.preemption.keeps is not None:
        return declared
    return lease.preemption.deadline if declared is None else min(declared, lease.preemption.deadline)


_latest_states: RecentResults[DerivedState] = RecentResults(8)


def _find_promised_steps(leases: Sequence[Lease]) -> frozenset[tuple[str, str]]:
    return frozenset(one.preemption.preemptor for one in leases if one.preemption is not None)
