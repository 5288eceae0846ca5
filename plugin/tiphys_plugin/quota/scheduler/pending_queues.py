"""The pending requests as a scheduling cycle goes through them: by queue, in sorted groups.

Thousands of pending requests are repeated every few seconds, and few of them change. So
the queues of a new ledger state are those of the state before with these few changes.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from math import inf
from operator import attrgetter
from typing import NamedTuple

from tiphys_plugin.quota.lease import PendingRequest
from tiphys_plugin.quota.queue import Queue
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.pool_options import PoolOptions, get_pool_options, is_feasible
from tiphys_plugin.quota.scheduler.queue_order import QueuePosition, has_seniority, queue_position


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
    """The pending requests of each queue that exists and is not stopped, in sorted groups.

    Thousands of requests form a few groups, so a scheduling cycle does not look at each of them.
    """

    def __init__(self, queues: Queues, pending: Sequence[PendingRequest] = ()) -> None:
        self.queues = queues
        self._drops_infeasible = queues.has_current_nodes  # a private attribute of pydantic is slow to read
        self.pending = tuple(pending)
        """The requests, in order of arrival."""
        self._own: PendingRequest | None = None
        """The one of `with_request`, which ``pending`` lacks, or has in an earlier version."""
        self._promises = sum(1 for request in pending if request.promised_at)
        self._groups_by_queue: dict[str, dict[GroupKey, list[PendingEntry]]] = {}
        for waiting_request in pending:
            if (entry := self._build_entry(waiting_request)) is not None:
                groups = self._groups_by_queue.setdefault(waiting_request.request.queue, {})
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
        """The entry of the request with this arrival number; None if its queue cannot serve it."""
        if self._own is not None and self._own.arrival == arrival:
            return self._build_entry(self._own)
        index = bisect_left(self.pending, arrival, key=_arrival)
        return self._build_entry(self.pending[index])

    def find_earlier(self, own: PendingRequest) -> PendingRequest | None:
        """The request with the arrival number of ``own``; None if there is none."""
        index = bisect_left(self.pending, own.arrival, key=_arrival)
        found = self.pending[index] if index < len(self.pending) else None
        return found if found is not None and found.arrival == own.arrival else None

    def with_changes(
        self, pending: tuple[PendingRequest, ...], removed: Sequence[PendingRequest], added: Sequence[PendingRequest]
    ) -> "PendingQueues | None":
        """The queues for the new ``pending`` requests; None if so much changed that a new sort is faster."""
        return None if 4 * (len(added) + len(removed)) > len(self.pending) else self._change(pending, removed, added)

    def with_request(self, own: PendingRequest) -> "PendingQueues":
        """The queues with ``own`` in the place of its earlier version, if they have one."""
        earlier = self.find_earlier(own)
        twin = self._change(self.pending, () if earlier is None else (earlier,), (own,))
        twin._own = own
        return twin

    def _change(
        self, pending: tuple[PendingRequest, ...], removed: Sequence[PendingRequest], added: Sequence[PendingRequest]
    ) -> "PendingQueues":
        twin = PendingQueues(self.queues)
        twin.pending = pending
        twin._promises = self._promises + sum(1 for request in added if request.promised_at)
        twin._promises -= sum(1 for request in removed if request.promised_at)
        twin._groups_by_queue = {name: groups.copy() for name, groups in self._groups_by_queue.items()}
        copied: set[tuple[str, GroupKey]] = set()
        for change, requests in ((_remove_entry, removed), (_add_entry, added)):
            for request in requests:
                if (entry := twin._build_entry(request)) is not None:
                    twin._change_group(request.request.queue, entry, change, copied)
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

    def _build_entry(self, pending: PendingRequest) -> PendingEntry | None:
        request, queue = pending.request, self.queues.find(pending.request.queue)
        if queue is None or queue.stopped:
            return None
        if self._drops_infeasible and not is_feasible(self.queues, queue, request):
            return None  # a request that waits for new nodes must not delay others
        seconds = inf if request.seconds is None else request.seconds
        options = get_pool_options(self.queues, queue, request)
        return PendingEntry(queue_position(queue, pending), pending, options, seconds)

    def _group_key(self, entry: PendingEntry) -> GroupKey:
        queue = self.queues.find(entry.pending.request.queue)
        return entry.pool_options, entry.max_seconds if queue is not None and has_seniority(queue) else None


def _add_entry(entries: list[PendingEntry], entry: PendingEntry) -> None:
    insort(entries, entry, key=_by_position)


def _remove_entry(entries: list[PendingEntry], entry: PendingEntry) -> None:
    del entries[bisect_left(entries, entry.position, key=_by_position)]


def is_same_request(request: PendingRequest, before: PendingRequest) -> bool:
    """Whether the scheduler decides alike on both; only ``seen_at`` may differ."""
    times = (request.since, request.promised_at) == (before.since, before.promised_at)
    return request.request is before.request and times


def drop_repeated(
    removed: Sequence[PendingRequest], added: Sequence[PendingRequest]
) -> tuple[Sequence[PendingRequest], Sequence[PendingRequest]]:
    """Both without the requests of which only ``seen_at`` has changed."""
    if not removed or not added:
        return removed, added
    before, after = {pending.arrival: pending for pending in removed}, {pending.arrival: pending for pending in added}
    same = {arrival for arrival in before.keys() & after.keys() if is_same_request(after[arrival], before[arrival])}
    return (
        [pending for pending in removed if pending.arrival not in same],
        [pending for pending in added if pending.arrival not in same],
    )


_arrival = attrgetter("arrival")
_by_position = attrgetter("position")
