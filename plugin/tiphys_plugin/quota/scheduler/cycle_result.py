"""The result of a scheduling cycle: a verdict on each request, and the position of a request that waits.

A cycle decides on a few requests; its verdicts also hold for the groups behind
them. `CycleResult.outcome_of` finds the verdict on one request, and counts those
before it by bisection.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import NamedTuple

from tiphys_plugin.quota.lease import PendingRequest
from tiphys_plugin.quota.queue import Queue
from tiphys_plugin.quota.scheduler.backfill import Reservation
from tiphys_plugin.quota.scheduler.capacity import Capacity
from tiphys_plugin.quota.scheduler.pending_queues import PendingEntry, PendingQueues
from tiphys_plugin.quota.scheduler.pool_options import PoolOptions, ResourceLimit
from tiphys_plugin.quota.scheduler.queue_order import QueuePosition

SchedulingKey = tuple[bool, bool, int, float, int]
"""Not promised, borrows, negated priority, fair share of the queue, arrival; the smallest key is served first.

A request is promised GPUs if it has victims, or precedes such a request in its queue."""


@dataclass(frozen=True)
class SchedulingVerdict:
    """Verdict of a cycle on a request. A verdict to wait also holds for later requests with the same `PoolOptions`.

    ``pool`` is the pool in which the request may start; None if it has to wait. ``reservation`` is the one that the
    request would delay.
    """

    contended_limits: frozenset[ResourceLimit]
    """Limits that other requests may lack because of this one."""
    pool: str | None = None
    nodes: tuple[str, ...] = ()
    """The node of each member, where nodes are declared."""
    reservation: Reservation | None = None
    own_reservation: Reservation | None = None
    """The reservation for the request itself, if it is the first blocked one of its queue."""


class PoolAssignment(NamedTuple):
    """A request that may start, its pool, and the node of each member where nodes are declared."""

    pending: PendingRequest
    pool: str
    nodes: tuple[str, ...] = ()


LineOrder = tuple[bool, QueuePosition]
"""Order in a queue: not promised, position."""


class RankedRequest(NamedTuple):
    """A request of ``queue`` with its scheduling key, its verdict, and its order in the queue."""

    key: SchedulingKey
    pending: PendingRequest
    verdict: SchedulingVerdict
    queue: Queue
    order: LineOrder

    @property
    def is_promised(self) -> bool:
        """Whether the request is promised GPUs; see `SchedulingKey`."""
        return not self.key[0]

    def goes_before(self, other: "RankedRequest") -> bool:
        """Whether it is decided before ``other``: by the order of their queue, or between queues by the keys."""
        if self.queue is other.queue:
            return self.order < other.order
        return self.key < other.key


class WaitingGroup(NamedTuple):
    """Requests of one queue from ``first`` on, to which the verdict on a request before them applies.

    They are not promised; a promised request is a group of its own.
    """

    queue: Queue
    entries: Sequence[PendingEntry]
    first: int
    verdict: SchedulingVerdict
    is_promised: bool

    def index_of(self, order: LineOrder) -> int:
        """Number of requests of the group, from its beginning, that go before ``order``."""
        is_later, position = order
        if self.is_promised and is_later:
            return len(self.entries)
        if not self.is_promised and not is_later:
            return self.first
        return bisect_left(self.entries, position, self.first, key=_position)

    def has(self, entry: PendingEntry) -> bool:
        """Whether the request is one of the group."""
        index = bisect_left(self.entries, entry.position, self.first, key=_position)
        return index < len(self.entries) and self.entries[index].position == entry.position


@dataclass(frozen=True)
class RequestOutcome:
    """Result of a cycle for one request.

    ``position`` counts from 1 among the requests that compete for the same limits, and ``first_ahead`` is the first of
    those before it.
    """

    verdict: SchedulingVerdict
    position: int
    first_ahead: RankedRequest | None
    capacity: Capacity
    """GPUs held by leases, without the starts of this cycle."""
    is_promised: bool
    """Whether the request is promised GPUs; see `SchedulingKey`."""

    @property
    def expected_start(self) -> datetime | None:
        """Expected start; None if no reservation gives one."""
        own = self.verdict.own_reservation
        return None if own is None else own.start.expected_start


class CycleResult:
    """The verdicts of a cycle; ``capacity`` has the GPUs held by leases before the cycle."""

    def __init__(
        self,
        evaluated: Sequence[RankedRequest],
        waiting: Sequence[WaitingGroup],
        pending_queues: PendingQueues,
        capacity: Capacity,
        scheduling_key: Callable[[Queue, PendingEntry], SchedulingKey],
    ) -> None:
        self.capacity = capacity
        self._evaluated = sorted(evaluated, key=attrgetter("key"))
        self._by_arrival = {request.pending.arrival: request for request in self._evaluated}
        self._waiting = waiting
        self._waiting_by_options: defaultdict[PoolOptions, list[WaitingGroup]] = defaultdict(list)
        for group in waiting:
            self._waiting_by_options[group.entries[group.first].pool_options].append(group)
        self._pending_queues = pending_queues
        self._scheduling_key = scheduling_key

    @property
    def assignments(self) -> Iterator[PoolAssignment]:
        """The requests that may start, in scheduling order."""
        return (
            PoolAssignment(ranked.pending, ranked.verdict.pool, ranked.verdict.nodes)
            for ranked in self._evaluated
            if ranked.verdict.pool is not None
        )

    def outcome_of(self, arrival: int) -> RequestOutcome:
        """The outcome for the request with this arrival number, which must be part of the cycle."""
        own = self._by_arrival.get(arrival) or self._rank_waiting(arrival)
        entry = self._pending_queues.entry_of(arrival)
        assert entry is not None
        limits = entry.pool_options.limits
        ahead = [
            ranked
            for ranked in self._evaluated
            if not limits.isdisjoint(ranked.verdict.contended_limits) and ranked.goes_before(own)
        ]
        waiting_ahead = sum(
            self._count_before(group, own)
            for group in self._waiting
            if not limits.isdisjoint(group.verdict.contended_limits)
        )
        if not ahead and own.verdict.pool is None and self.capacity.fits(own.queue, own.pending.request):
            # Leases without a type count against every type, so a start on one type can take the last GPU of another.
            ahead = [
                ranked for ranked in self._evaluated if ranked.verdict.pool is not None and ranked.goes_before(own)
            ]
        first_ahead = next(iter(ahead), None)
        return RequestOutcome(own.verdict, len(ahead) + waiting_ahead + 1, first_ahead, self.capacity, own.is_promised)

    def _rank_waiting(self, arrival: int) -> RankedRequest:
        """The request of a group with its own key, which is never before that of one before it in its queue."""
        entry = self._pending_queues.entry_of(arrival)
        assert entry is not None
        group = next(option for option in self._waiting_by_options[entry.pool_options] if option.has(entry))
        own_key = self._scheduling_key(group.queue, entry)
        order = (own_key[0], entry.position)
        earlier = (ranked.key for ranked in self._evaluated if ranked.queue is group.queue and ranked.order < order)
        return RankedRequest(max([own_key, *earlier]), entry.pending, group.verdict, group.queue, order)

    def _count_before(self, group: WaitingGroup, own: RankedRequest) -> int:
        """Requests of ``group`` that go before ``own``."""
        if group.queue is own.queue:
            return group.index_of(own.order) - group.first
        index = bisect_left(
            group.entries, own.key, group.first, key=lambda entry: self._scheduling_key(group.queue, entry)
        )
        return index - group.first


_position = attrgetter("position")
