"""Finds leases and pending requests of the newest ledger state without a look at all of them.

A ledger state follows from the one before by few changes, so an index is kept from
one call to the next, and updated by what differs. The answer for any other state is
right too; it only takes longer.
"""

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Generic, TypeVar

from tiphys_plugin.quota.lease import Lease, PendingRequest
from tiphys_plugin.quota.queues import QueueRules, Queues
from tiphys_plugin.quota.scheduler.changes import RecentChanges

_Entry = TypeVar("_Entry", Lease, PendingRequest)
_arrival = attrgetter("arrival")
_FEW = 64
_SPARE_TIMES = 10_000
"""Times of earlier states that the heap may hold beside those of the present one."""


class EntryIndex(Generic[_Entry]):
    """Entries by step, and their number by namespace. ``changes`` finds what differs between two states."""

    def __init__(self, changes: RecentChanges) -> None:
        self._changes = changes
        self._entries: tuple[_Entry, ...] = ()
        self._by_step: dict[tuple[str, str], list[_Entry]] = {}
        self._namespaces: Counter[str] = Counter()
        self._gpus: Counter[str] = Counter()

    def find(self, entries: tuple[_Entry, ...], workflow_step: tuple[str, str]) -> list[_Entry]:
        """The entries of a step."""
        self._follow(entries)
        return list(self._by_step.get(workflow_step, ()))

    def count(self, entries: tuple[_Entry, ...], namespace: str) -> int:
        """Number of the entries of a namespace."""
        self._follow(entries)
        return self._namespaces[namespace]

    def sum_gpus(self, entries: tuple[_Entry, ...]) -> Counter[str]:
        """GPUs of the entries of each queue that has any."""
        self._follow(entries)
        return +self._gpus

    def _follow(self, entries: tuple[_Entry, ...]) -> None:
        removed, added = self._changes.find(self._entries, entries)
        self._entries = entries
        for entry in removed:
            self._remove(entry)
        for entry in added:
            self._add(entry)

    def _add(self, entry: _Entry) -> None:
        self._by_step.setdefault(entry.request.workflow_step, []).append(entry)
        self._namespaces[entry.request.namespace] += 1
        self._gpus[entry.request.queue] += entry.request.gpus

    def _remove(self, entry: _Entry) -> None:
        step = entry.request.workflow_step
        if of_step := [other for other in self._by_step.pop(step, ()) if other != entry]:
            self._by_step[step] = of_step
        self._namespaces[entry.request.namespace] -= 1
        self._gpus[entry.request.queue] -= entry.request.gpus


class LeaseIndex(EntryIndex[Lease]):
    """Also finds a lease by its id."""

    def __init__(self, changes: RecentChanges) -> None:
        super().__init__(changes)
        self._by_id: dict[str, Lease] = {}

    def find_by_id(self, leases: tuple[Lease, ...], lease_id: str) -> Lease | None:
        self._follow(leases)
        return self._by_id.get(lease_id)

    def _add(self, entry: Lease) -> None:
        super()._add(entry)
        self._by_id[entry.id] = entry

    def _remove(self, entry: Lease) -> None:
        super()._remove(entry)
        del self._by_id[entry.id]


class PendingIndex(EntryIndex[PendingRequest]):
    """Also knows the pending requests that delay no others."""

    def __init__(self, changes: RecentChanges) -> None:
        super().__init__(changes)
        self._active: tuple[PendingRequest, ...] = ()
        self._selected_from: tuple[tuple[PendingRequest, ...], Collection[int]] = ((), ())
        """The pending requests, and the arrival numbers of the inactive ones, of which ``_active`` are the rest."""
        self._rules: QueueRules = None
        self._refused: set[int] = set()
        """Arrival numbers of requests that their queues no longer accept."""
        self._times: list[tuple[datetime, int]] = []
        """Heap of ``seen_at`` and arrival number. Those of earlier states are dropped when they come up."""
        self._forgotten: set[int] = set()
        """Arrival numbers of requests that were seen before ``_forgotten_before`` only."""
        self._forgotten_before = datetime.min.replace(tzinfo=UTC)

    def select_active(
        self, rules: QueueRules, pending: tuple[PendingRequest, ...], now: datetime, forget_after: timedelta
    ) -> tuple[PendingRequest, ...]:
        """The requests that were repeated within ``forget_after``, and that their queues still accept.

        As long as these are the same, the tuple is the same object.
        """
        if rules is not self._rules:
            self._rules = rules
            self._refused = {entry.arrival for entry in self._entries if _is_refused(rules, entry)}
        self._follow(pending)
        self._forget(now - forget_after)
        selected_from, inactive = self._selected_from, self._forgotten | self._refused
        if pending is not selected_from[0] or inactive != selected_from[1]:
            self._selected_from, self._active = (pending, inactive), without_arrivals(pending, inactive)
        return self._active

    def _forget(self, before: datetime) -> None:
        if before < self._forgotten_before or len(self._times) > 2 * len(self._entries) + _SPARE_TIMES:
            self._times = [(entry.seen_at, entry.arrival) for entry in self._entries]
            heapq.heapify(self._times)
            self._forgotten.clear()
        self._forgotten_before = before
        while self._times and self._times[0][0] < before:
            seen_at, arrival = heapq.heappop(self._times)
            index = bisect_left(self._entries, arrival, key=_arrival)
            if index < len(self._entries) and self._entries[index].seen_at == seen_at:
                self._forgotten |= {arrival} & {self._entries[index].arrival}

    def _add(self, entry: PendingRequest) -> None:
        super()._add(entry)
        heapq.heappush(self._times, (entry.seen_at, entry.arrival))
        if _is_refused(self._rules, entry):
            self._refused.add(entry.arrival)

    def _remove(self, entry: PendingRequest) -> None:
        super()._remove(entry)
        self._forgotten.discard(entry.arrival)
        self._refused.discard(entry.arrival)


def without_arrivals(pending: tuple[PendingRequest, ...], arrivals: Collection[int]) -> tuple[PendingRequest, ...]:
    """``pending``, which must be in order of arrival, without the requests with these arrival numbers."""
    if len(arrivals) > _FEW:
        return tuple(entry for entry in pending if entry.arrival not in arrivals)
    for arrival in arrivals:
        index = bisect_left(pending, arrival, key=_arrival)
        if index < len(pending) and pending[index].arrival == arrival:
            pending = pending[:index] + pending[index + 1 :]
    return pending


def _is_refused(rules: QueueRules, pending: PendingRequest) -> bool:
    if not isinstance(rules, Queues) or not rules.restricts_use:
        return False
    queue = rules.find(pending.request.queue)
    return queue is None or not queue.accepts(pending.request.namespace, pending.request.priority)
