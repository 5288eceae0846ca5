"""The scheduling cycle: decides for all pending requests, in scheduling order, which may start.

Requests within the quota of their queue go before requests that borrow; then
higher priority, then the queue with the smaller fair share, then earlier arrival.
A queue with ``order: attained`` puts less attained service before earlier arrival.
A request that fits starts. The first request that does not fit gets a reservation
(EASY backfill: D. Lifka, "The ANL/IBM SP Scheduling System", JSSPP 1995):

* If the ends of the relevant leases are known, the request is expected to start at
  the first instant at which it fits. Later requests start only if they do not
  delay it.
* Without such deadlines no later request may take the resources that it lacks.

So no later request delays a pending one: its wait is bounded by the running
leases and by the requests before it.

Thousands of pending requests are repeated every few seconds. Between two changes
of the ledger state one cycle answers all of them, so `CycleResult` is cached as a
whole, and `CycleResult.outcome_of` computes the answer for one request on demand.
"""

import heapq
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property, lru_cache
from math import ceil, inf
from operator import itemgetter
from typing import NamedTuple

from tiphys_plugin.quota.lease import EndedUsage, Lease, LeaseRequest, PendingRequest
from tiphys_plugin.quota.queues import Queue, Queues
from tiphys_plugin.quota.scheduler import pools
from tiphys_plugin.quota.scheduler.backfill import LeaseEnd, Reservation, ReservationScope, end_time, find_first_fit
from tiphys_plugin.quota.scheduler.capacity import Capacity, HeldGpus
from tiphys_plugin.quota.scheduler.fair_share import FairShares
from tiphys_plugin.quota.scheduler.pools import PoolOptions, ResourceLimit, get_pool_options
from tiphys_plugin.quota.scheduler.snapshot import (
    DerivedState,
    PendingEntry,
    PendingQueues,
    declared_end,
    derive_state,
    get_pending_queues,
)

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
    expected_start: datetime | None = None
    """When the request will fit, if it has a reservation of its own with a known start."""


class PoolAssignment(NamedTuple):
    """A request that may start, its pool, and the node of each member where nodes are declared."""

    pending: PendingRequest
    pool: str
    nodes: tuple[str, ...] = ()


class RankedRequest(NamedTuple):
    """A request with its scheduling key and its verdict."""

    key: SchedulingKey
    pending: PendingRequest
    verdict: SchedulingVerdict

    @property
    def is_promised(self) -> bool:
        """Whether the request is promised GPUs; see `SchedulingKey`."""
        return not self.key[0]


@dataclass(frozen=True)
class RequestOutcome:
    """Result of a cycle for one request.

    ``pool`` is the pool in which it may start; None if it has to wait. ``position`` counts from 1 among the requests
    that compete for the same limits, and ``first_ahead`` is the first of those before it. ``reservation`` is the one
    that the request would delay.
    """

    pool: str | None
    nodes: tuple[str, ...]
    position: int
    first_ahead: RankedRequest | None
    reservation: Reservation | None
    expected_start: datetime | None
    """Expected start; None if no reservation gives one."""
    capacity: Capacity
    """GPUs held by leases, without the starts of this cycle."""
    is_promised: bool
    """Whether the request is promised GPUs; see `SchedulingKey`."""


@dataclass(frozen=True)
class CycleResult:
    """All requests of a cycle with key and verdict; ``capacity`` has the GPUs held by leases before the cycle."""

    ranked: tuple[RankedRequest, ...]
    capacity: Capacity
    possible_limits: Callable[[LeaseRequest], frozenset[ResourceLimit]]

    @property
    def assignments(self) -> Iterator[PoolAssignment]:
        """The requests that may start, in scheduling order."""
        return (
            PoolAssignment(one.pending, one.verdict.pool, one.verdict.nodes)
            for one in self.ranked
            if one.verdict.pool is not None
        )

    def outcome_of(self, arrival: int) -> RequestOutcome:
        """The outcome for the request with this arrival number, which must be part of the cycle."""
        index, pending, verdict = self._positions[arrival]
        limits = self.possible_limits(pending.request)
        ahead = [before for before in self._sorted[:index] if not limits.isdisjoint(before.verdict.contended_limits)]
        if not ahead and verdict.pool is None and self._would_start_alone(pending.request):
            # Leases without a type count against every type, so a start on one type can take the last GPU of another.
            ahead = [before for before in self._sorted[:index] if before.verdict.pool is not None]
        first = ahead[0] if ahead else None
        return RequestOutcome(
            verdict.pool,
            verdict.nodes,
            len(ahead) + 1,
            first,
            verdict.reservation,
            verdict.expected_start,
            self.capacity,
            self._sorted[index].is_promised,
        )

    def _would_start_alone(self, request: LeaseRequest) -> bool:
        queue = self.capacity.queues.find(request.queue)
        return queue is not None and bool(self.capacity.find_fitting_pools(queue, request))

    @cached_property
    def _sorted(self) -> list[RankedRequest]:
        return sorted(self.ranked, key=itemgetter(0))

    @cached_property
    def _positions(self) -> dict[int, tuple[int, PendingRequest, SchedulingVerdict]]:
        return {one.pending.arrival: (index, one.pending, one.verdict) for index, one in enumerate(self._sorted)}


PROMISE_DURATION = timedelta(minutes=2)
"""Freed GPUs of victims are kept this long for their preemptor, which repeats its request every few seconds."""
_HIGHEST_KEY: SchedulingKey = (False, False, 0, 0.0, 0)
_NO_VERDICT: tuple[float, SchedulingVerdict | None] = (inf, None)


def evaluate_request(
    queues: Queues,
    leases: Sequence[Lease],
    history: Sequence[EndedUsage],
    pending: Sequence[PendingRequest],
    arrival: int,
    now: datetime,
) -> RequestOutcome:
    """Evaluate the request with arrival number ``arrival``; its queue must exist and be able to serve it one day.

    All requests within one second are evaluated as of the end of that second, so one cycle answers all of them. The
    result is never too optimistic: a lease that should end until then counts as one without a known end, and starts
    count from then on.
    """
    derived, pending_queues = derive_state(queues, leases, history), get_pending_queues(queues, pending)
    return _run_cycle(derived, pending_queues, ceil(now.timestamp())).outcome_of(arrival)


def select_admissible(
    queues: Queues,
    leases: Sequence[Lease],
    history: Sequence[EndedUsage],
    pending: Iterable[PendingRequest],
    now: datetime,
) -> list[PoolAssignment]:
    """The requests that may start now, in scheduling order.

    ``pending`` must not contain requests that their queue could never serve.
    """
    return list(
        _SchedulingCycle(derive_state(queues, leases, history), now)
        .run(PendingQueues(queues, list(pending)))
        .assignments
    )


@lru_cache(maxsize=4)
def _run_cycle(derived: DerivedState, pending_queues: PendingQueues, second: int) -> CycleResult:
    return _SchedulingCycle(derived, datetime.fromtimestamp(second, UTC)).run(pending_queues)


class _SchedulingCycle:
    """One scheduling cycle. A verdict to wait also holds for all later requests with the same `PoolOptions`.

    No GPUs come free during a cycle, so a request that does not fit will not fit later in the cycle, and a pending
    queue of thousands costs little more than the requests that start.
    """

    def __init__(self, derived: DerivedState, now: datetime) -> None:
        self._queues = derived.queues
        self._now = now
        self._derived = derived
        self._capacity = derived.capacity.copy()
        self._shares = FairShares(derived.queues, derived.decayed_usage, now)
        self._started_ends: defaultdict[tuple[str, str], list[LeaseEnd]] = defaultdict(list)
        self._known_verdicts: dict[PoolOptions, tuple[float, SchedulingVerdict]] = {}
        """Verdict to wait for requests with these options that may hold GPUs for more than this many seconds."""
        self._must_borrow: defaultdict[str, dict[PoolOptions, bool]] = defaultdict(dict)
        """By queue, because the held GPUs of its own queue decide whether a request borrows."""
        self._share_by_queue: dict[str, float] = {}
        self._reservations: list[Reservation] = []
        """Sorted by expected start; reservations without one come first."""
        self._reserved_limits: defaultdict[str, set[ResourceLimit]] = defaultdict(set)
        """By queue, the limits of which its reservations keep something."""
        self._ranked: list[RankedRequest] = []
        self._promised_arrivals: set[int] = set()
        """Arrival numbers of the requests that go first; see `_find_promised_arrivals`."""

    def run(self, pending_queues: PendingQueues) -> CycleResult:
        for key, queue, entry in self._iterate_by_key(pending_queues):
            self._ranked.append(RankedRequest(key, entry.pending, self._evaluate(queue, entry)))
        return CycleResult(tuple(self._ranked), self._derived.capacity, self._possible_limits)

    def _iterate_by_key(self, pending_queues: PendingQueues) -> Iterator[tuple[SchedulingKey, Queue, PendingEntry]]:
        """Requests without a verdict, by scheduling key; each start of the cycle updates the keys that follow."""
        heads: list[tuple[SchedulingKey, str, Queue, Iterator[PendingEntry], PendingEntry]] = []

        def push(queue: Queue, rest: Iterator[PendingEntry], before: SchedulingKey) -> None:
            for one in rest:
                # A request never goes before one with a better position in its own queue.
                before = max(before, self._scheduling_key(queue, one))
                longer_than, verdict = self._known_verdicts.get(one.pool_options, _NO_VERDICT)
                if verdict is None or one.max_seconds <= longer_than:
                    heapq.heappush(heads, (before, queue.name, queue, rest, one))
                    return
                self._ranked.append(RankedRequest(before, one.pending, verdict))

        has_promises = self._derived.has_promises or pending_queues.has_promises
        for queue, entries in pending_queues:
            push(queue, iter(self._sort_promised_first(queue, entries) if has_promises else entries), _HIGHEST_KEY)
        while heads:
            key, _, queue, rest, entry = heapq.heappop(heads)
            yield key, queue, entry
            push(queue, rest, key)

    def _sort_promised_first(self, queue: Queue, entries: Sequence[PendingEntry]) -> Sequence[PendingEntry]:
        first = self._find_promised_arrivals(queue, entries)
        self._promised_arrivals |= first
        return sorted(entries, key=lambda one: one.pending.arrival not in first) if first else entries

    def _find_promised_arrivals(self, queue: Queue, entries: Sequence[PendingEntry]) -> set[int]:
        """The preemptors, and the requests that were before them at the time of the preemption.

        Victims of a request before a preemptor may have ended a moment ago; its GPUs must not go to the preemptor.
        """
        promised = [one for one in entries if self._is_promised(one.pending)]
        preemptors = promised if queue.preempts else []
        earlier = [
            one
            for one in entries
            if any(
                one.position < other.position and one.pending.arrival < other.pending.arrival for other in preemptors
            )
        ]
        return {one.pending.arrival for one in (*promised, *earlier)}

    def _is_promised(self, pending: PendingRequest) -> bool:
        """Whether the request has victims that have not ended yet, or ended within `PROMISE_DURATION`."""
        if self._derived.is_promised(pending.request):
            return True
        return pending.promised_at is not None and abs(self._now - pending.promised_at) <= PROMISE_DURATION

    def _scheduling_key(self, queue: Queue, one: PendingEntry) -> SchedulingKey:
        request, options, borrows_by_options = one.pending.request, one.pool_options, self._must_borrow[queue.name]
        if (borrows := borrows_by_options.get(options)) is None:
            exceeds_quota = all(
                self._capacity.remaining_quota(queue, option.pool) < request.gpus for option in options.options
            )
            borrows = borrows_by_options[options] = queue.cohort is not None and exceeds_quota
        if (share := self._share_by_queue.get(queue.name)) is None:
            share = self._share_by_queue[queue.name] = self._shares.share_of(queue, self._capacity)
        return (
            one.pending.arrival not in self._promised_arrivals,
            borrows,
            -request.priority,
            share,
            one.pending.arrival,
        )

    def _evaluate(self, queue: Queue, one: PendingEntry) -> SchedulingVerdict:
        request = one.pending.request
        fitting = self._capacity.find_fitting_pools(queue, request)
        if not fitting:
            return self._record_shortage(queue, one, self._capacity.find_missing_limits(queue, request))
        delayed_reservations: list[Reservation] = []
        is_promised = one.pending.arrival in self._promised_arrivals
        end = declared_end(request, self._now)
        for pool in fitting:
            held_gpus = self._capacity.held_gpus_if_placed(request, pool)
            limits = self._capacity.find_consumed_limits(queue, request, pool)
            delayed = next(
                (
                    reservation
                    for reservation in self._reservations
                    if reservation.is_delayed_by(held_gpus, limits, end, is_promised=is_promised)
                ),
                None,
            )
            if delayed is None:
                self._start(request, held_gpus, end)
                nodes = held_gpus.placement.nodes if held_gpus.placement is not None else ()
                return SchedulingVerdict(limits, pool, nodes)
            delayed_reservations.append(delayed)
        verdict = SchedulingVerdict(one.pool_options.limits, reservation=delayed_reservations[0])
        self._known_verdicts[one.pool_options] = max(map(self._seconds_until_start, delayed_reservations)), verdict
        return verdict

    def _record_shortage(
        self, queue: Queue, one: PendingEntry, missing_limits: frozenset[ResourceLimit]
    ) -> SchedulingVerdict:
        verdict = SchedulingVerdict(missing_limits or one.pool_options.limits)
        self._known_verdicts[one.pool_options] = -inf, verdict
        start = self._reserve(queue, one.pending, missing_limits) if missing_limits else None
        return verdict if start is None else replace(verdict, expected_start=start)

    def _seconds_until_start(self, reservation: Reservation) -> float:
        """Seconds until the expected start, during which backfill may use the kept GPUs; -inf without such a start."""
        return -inf if reservation.expected_start is None else (reservation.expected_start - self._now).total_seconds()

    def _start(self, request: LeaseRequest, held_gpus: HeldGpus, end: datetime | None) -> None:
        self._capacity.add(held_gpus)
        self._must_borrow.pop(request.queue, None)
        self._share_by_queue.pop(request.queue, None)
        if end is not None:
            insort(self._started_ends[held_gpus.quota_key], (end, held_gpus), key=end_time)
        for one in self._reservations:
            if (
                one.expected_start is not None
                and one.capacity_at_start is not None
                and (end is None or end > one.expected_start)
            ):
                one.capacity_at_start.add(held_gpus)

    def _reserve(self, queue: Queue, one: PendingRequest, missing_limits: frozenset[ResourceLimit]) -> datetime | None:
        """Reserve the missing limits, unless its queue has a reservation of them already; returns the expected start.

        None if there is no new reservation, or no expected start.
        """
        if not self._reserved_limits[queue.name].isdisjoint(missing_limits):
            return None
        self._reserved_limits[queue.name] |= missing_limits
        capacity_at_start = self._capacity.copy()
        scope = self._scope(queue, one.request)
        start = find_first_fit(capacity_at_start, self._relevant_ends(scope), queue, one.request)
        reservation = Reservation(one, queue, missing_limits, is_promised=one.arrival in self._promised_arrivals)
        if start is not None:
            reservation = replace(reservation, expected_start=start, capacity_at_start=capacity_at_start, scope=scope)
        insort(self._reservations, reservation, key=self._seconds_until_start)
        return start

    def _relevant_ends(self, scope: ReservationScope) -> Iterable[LeaseEnd]:
        """Known ends of the leases in ``scope``, in order of time."""
        quota_keys = [one for one in {*self._derived.quota_keys, *self._started_ends} if scope.may_include_account(one)]
        lease_ends = [self._derived.known_ends(key, self._now) for key in quota_keys]
        ends = heapq.merge(*lease_ends, *(self._started_ends[key] for key in quota_keys), key=end_time)
        return (end for end in ends if scope.includes(end[1]))

    def _scope(self, queue: Queue, request: LeaseRequest) -> ReservationScope:
        eligible_pools = pools.find_eligible_pools(self._queues, queue, request)
        quota_keys = frozenset((queue.cohort or queue.name, pool) for pool in eligible_pools)
        if self._queues.gpu_inventory is None:
            return ReservationScope(quota_keys)
        # If more GPUs of a kind are held than exist, the total over all kinds limits every request.
        any_kind = self._derived.capacity.exceeds_inventory
        return ReservationScope(
            quota_keys,
            frozenset(self._queues.gpu_inventory if any_kind else pools.find_suitable_kinds(self._queues, request)),
        )

    def _possible_limits(self, request: LeaseRequest) -> frozenset[ResourceLimit]:
        """All limits that the request could lack, whatever leases hold."""
        queue = self._queues.find(request.queue)
        return get_pool_options(self._queues, queue, request).limits if queue is not None else frozenset()
