"""The scheduling cycle: decides for all pending requests, in scheduling order, which may start.

Requests within the quota of their queue go before requests that borrow; then
higher priority, then the queue with the smaller fair share, then earlier arrival.
A queue with ``order: attained`` puts less attained service before earlier arrival.
A request that fits starts. The first request that does not fit gets a reservation
(EASY backfill: D. Lifka, "The ANL/IBM SP Scheduling System", JSSPP 1995):

* If the ends of the relevant leases are known, the request is expected to start at
  the first instant at which it fits. Later requests start only if they do not
  delay it.
* Without such deadlines later requests of the same queue and priority may take the
  resources that it lacks, until it has been the first of its queue for
  ``backfill_hours``. Then the line closes: nothing starts on these before it does.
  With ``backfill: strict`` the line is never open.
* In a queue with preemptible backfill, later requests of the same queue may take
  them, because the first one may preempt these. When its turn has come, that is, when
  it lacks only what trainings behind it hold, nothing more starts on what it lacks:
  the youngest of them are preempted once ``min_runtime_seconds`` have passed.

So the wait of a request is bounded by the running leases, by the requests before it, and
by ``backfill_hours``, or with preemptible backfill by one ``min_runtime_seconds`` and one
save.

Thousands of pending requests are repeated every few seconds. Between two changes
of the ledger state one cycle answers all of them, so `CycleResult` is cached as a
whole, and `CycleResult.outcome_of` computes the answer for one request on demand.
"""

import heapq
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache, partial
from math import ceil, inf
from operator import attrgetter

from tiphys_plugin.quota.lease import EndedUsage, Lease, LeaseRequest, PendingRequest, declared_end
from tiphys_plugin.quota.queue import Queue
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler import pools
from tiphys_plugin.quota.scheduler.backfill import (
    LeaseEnd,
    Reservation,
    ReservationScope,
    ReservedStart,
    StartedRequest,
    end_time,
    find_first_fit,
)
from tiphys_plugin.quota.scheduler.capacity import Capacity, HeldGpus
from tiphys_plugin.quota.scheduler.cycle_result import (
    CycleResult,
    EvaluatedRequest,
    LineOrder,
    PoolAssignment,
    RankedRequest,
    RequestOutcome,
    SchedulingKey,
    SchedulingVerdict,
    WaitingGroup,
)
from tiphys_plugin.quota.scheduler.fair_share import FairShares
from tiphys_plugin.quota.scheduler.pools import PoolOptions, ResourceLimit
from tiphys_plugin.quota.scheduler.queue_order import could_start_without_those_behind, find_first_since, has_seniority
from tiphys_plugin.quota.scheduler.snapshot import (
    DerivedState,
    GroupKey,
    PendingEntry,
    PendingQueues,
    derive_state,
    get_pending_queues,
)

PROMISE_DURATION = timedelta(minutes=2)
"""Freed GPUs of victims are kept this long for their preemptor, which repeats its request every few seconds."""
_HIGHEST_KEY: SchedulingKey = (False, False, -sys.maxsize, 0.0, 0)
_NO_VERDICT: tuple[float, SchedulingVerdict | None] = (inf, None)


def evaluate_request(
    queues: Queues,
    leases: Sequence[Lease],
    history: Sequence[EndedUsage],
    pending: tuple[PendingRequest, ...],
    own: PendingRequest,
    now: datetime,
) -> RequestOutcome:
    """Evaluate the request ``own``; its queue must exist and be able to serve it one day.

    ``pending`` has the other requests, and may have an earlier version of it, in order of arrival.

    All requests within one second are evaluated as of the end of that second, so one cycle answers all of them. The
    result is never too optimistic: a lease that should end until then counts as one without a known end, and starts
    count from then on.
    """
    derived, pending_queues = derive_state(queues, leases, history), get_pending_queues(queues, pending, own)
    return _run_cycle(derived, pending_queues, ceil(now.timestamp())).outcome_of(own.arrival)


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
        self._starts: list[StartedRequest] = []
        self._snapshot: Capacity | None = None
        """Copy of the capacity after the present starts, which reservations share."""
        self._known_verdicts: dict[PoolOptions, tuple[float, SchedulingVerdict]] = {}
        """Verdict to wait for requests with these options that may hold GPUs for more than this many seconds."""
        self._must_borrow: defaultdict[str, dict[PoolOptions, bool]] = defaultdict(dict)
        """By queue, because the held GPUs of its own queue decide whether a request borrows."""
        self._share_by_queue: dict[str, float] = {}
        self._reservations: list[Reservation] = []
        self._reserved_limits: defaultdict[str, set[ResourceLimit]] = defaultdict(set)
        """By queue, the limits of which its reservations keep something."""
        self._promised_arrivals: set[int] = set()
        """Arrival numbers of the requests that go first; see `_find_promised_arrivals`."""

    def run(self, pending_queues: PendingQueues) -> CycleResult:
        evaluated: list[EvaluatedRequest] = []
        waiting: list[WaitingGroup] = []
        for key, queue, entry in self._iterate_by_key(pending_queues, waiting):
            ranked = RankedRequest(key, entry.pending, self._evaluate(queue, entry))
            evaluated.append(EvaluatedRequest(ranked, queue, self._order_of(entry)))
        return CycleResult(evaluated, waiting, pending_queues, self._derived.capacity, self._scheduling_key)

    def _iterate_by_key(
        self, pending_queues: PendingQueues, waiting: list[WaitingGroup]
    ) -> Iterator[tuple[SchedulingKey, Queue, PendingEntry]]:
        """Requests without a verdict, by scheduling key; each start of the cycle updates the keys that follow.

        Groups of requests that get the verdict on another request are appended to ``waiting``.
        """
        heads: list[tuple[SchedulingKey, str, Queue, _Line, PendingEntry, list[WaitingGroup]]] = []

        def push(queue: Queue, line: _Line, own_waiting: list[WaitingGroup], before: SchedulingKey) -> None:
            while line:
                order, entries, index = line[0]
                one = entries[index]
                longer_than, verdict = self._known_verdicts.get(one.pool_options, _NO_VERDICT)
                if verdict is None or one.max_seconds <= longer_than:
                    _advance(line)
                    key = max(before, self._key_in_line(queue, one, order, own_waiting))
                    heapq.heappush(heads, (key, queue.name, queue, line, one, own_waiting))
                    return
                heapq.heappop(line)
                # Shorter ones may still start, because they end before the reserved GPUs are needed.
                rest = entries[index:] if longer_than > -inf else []
                if shorter := [other for other in rest if other.max_seconds <= longer_than]:
                    heapq.heappush(line, (self._order_of(shorter[0]), shorter, 0))
                    entries, index = [other for other in rest if other.max_seconds > longer_than], 0
                group = WaitingGroup(queue, entries, index, verdict, is_promised=not order[0])
                own_waiting.append(group)
                waiting.append(group)

        has_promises = self._derived.has_promises or pending_queues.has_promises
        for queue, groups in pending_queues:
            push(queue, self._build_line(queue, groups, has_promises=has_promises), [], _HIGHEST_KEY)
        while heads:
            key, _, queue, line, entry, own_waiting = heapq.heappop(heads)
            yield key, queue, entry
            push(queue, line, own_waiting, key)

    def _build_line(
        self, queue: Queue, groups: Mapping[GroupKey, Sequence[PendingEntry]], *, has_promises: bool
    ) -> "_Line":
        """The groups of a queue by their first requests. Promised requests stand first, each in a group of its own."""
        first: set[int] = set()
        if has_promises:
            first = self._find_promised_arrivals(queue, list(heapq.merge(*groups.values(), key=attrgetter("position"))))
            self._promised_arrivals |= first
        line: _Line = []
        for entries in groups.values():
            rest = [one for one in entries if one.pending.arrival not in first] if first else entries
            if rest:
                line.append((self._order_of(rest[0]), rest, 0))
            if len(rest) < len(entries):
                promised = (one for one in entries if one.pending.arrival in first)
                line += [(self._order_of(one), [one], 0) for one in promised]
        heapq.heapify(line)
        return line

    def _order_of(self, entry: PendingEntry) -> LineOrder:
        return entry.pending.arrival not in self._promised_arrivals, entry.position

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

    def _key_in_line(
        self, queue: Queue, one: PendingEntry, order: LineOrder, own_waiting: Sequence[WaitingGroup]
    ) -> SchedulingKey:
        """The scheduling key of a request, which never goes before one with a better position in its own queue."""
        key = self._scheduling_key(queue, one)
        _, borrows, *_ = key
        if borrows and not has_seniority(queue):
            return key  # those before it have a higher priority, or the same and an earlier arrival
        passed = [group.entries[end - 1] for group in own_waiting if (end := group.index_of(order))]
        return max([key, *(self._scheduling_key(queue, entry) for entry in passed)])

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
        missing_limits = self._capacity.find_missing_limits(queue, request)
        fitting = [] if missing_limits else self._capacity.find_fitting_pools(queue, request)
        if not fitting:
            return self._record_shortage(queue, one, missing_limits)
        delayed_reservations: list[Reservation] = []
        is_promised = one.pending.arrival in self._promised_arrivals
        end = declared_end(request, self._now)
        for pool in fitting:
            held_gpus = self._capacity.held_gpus_if_placed(request, pool)
            limits = self._capacity.find_consumed_limits(queue, request, pool)
            delayed = self._find_delayed(request, held_gpus, limits, end, is_promised=is_promised)
            if delayed is None:
                self._start(request, held_gpus, end)
                nodes = held_gpus.placement.nodes if held_gpus.placement is not None else ()
                return SchedulingVerdict(limits, pool, nodes)
            delayed_reservations.append(delayed)
        verdict = SchedulingVerdict(one.pool_options.limits, reservation=delayed_reservations[0])
        self._known_verdicts[one.pool_options] = max(map(self._seconds_until_start, delayed_reservations)), verdict
        return verdict

    def _find_delayed(
        self,
        request: LeaseRequest,
        held_gpus: HeldGpus,
        limits: frozenset[ResourceLimit],
        end: datetime | None,
        *,
        is_promised: bool,
    ) -> Reservation | None:
        """The first reservation that a lease until ``end`` would delay, by expected start; see `is_delayed_by`."""
        relevant = [one for one in self._reservations if one.may_be_delayed_by(held_gpus, limits)]
        return next(
            (
                one
                for one in sorted(relevant, key=self._seconds_until_start)
                if one.is_delayed_by(request, held_gpus, limits, end, is_promised=is_promised)
            ),
            None,
        )

    def _record_shortage(
        self, queue: Queue, one: PendingEntry, missing_limits: frozenset[ResourceLimit]
    ) -> SchedulingVerdict:
        verdict = SchedulingVerdict(missing_limits or one.pool_options.limits)
        self._known_verdicts[one.pool_options] = -inf, verdict
        own = self._reserve(queue, one.pending, missing_limits) if missing_limits else None
        return verdict if own is None else replace(verdict, own_reservation=own)

    def _seconds_until_start(self, reservation: Reservation) -> float:
        """Seconds until the expected start, during which backfill may use the kept GPUs; -inf without such a start."""
        expected_start = reservation.start.expected_start
        return -inf if expected_start is None else (expected_start - self._now).total_seconds()

    def _start(self, request: LeaseRequest, held_gpus: HeldGpus, end: datetime | None) -> None:
        self._capacity.add(held_gpus)
        self._starts.append(StartedRequest(held_gpus, end))
        self._snapshot = None
        self._must_borrow.pop(request.queue, None)
        self._share_by_queue.pop(request.queue, None)

    def _reserve(
        self, queue: Queue, one: PendingRequest, missing_limits: frozenset[ResourceLimit]
    ) -> Reservation | None:
        """Reserve the missing limits, unless its queue has a reservation of them already."""
        if not self._reserved_limits[queue.name].isdisjoint(missing_limits):
            return None
        self._reserved_limits[queue.name] |= missing_limits
        if self._snapshot is None:
            self._snapshot = self._capacity.copy()
        reservation = Reservation(
            one,
            queue,
            missing_limits,
            self._scope(queue, one.request),
            self._starts,
            partial(
                _find_start,
                self._derived,
                self._now,
                self._snapshot,
                may_be_overtaken=not self._is_promised(one),
            ),
            is_promised=one.arrival in self._promised_arrivals,
        )
        self._reservations.append(reservation)
        return reservation

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


def _find_start(
    derived: DerivedState,
    now: datetime,
    capacity: Capacity,
    reservation: Reservation,
    starts: Sequence[StartedRequest],
    *,
    may_be_overtaken: bool,
) -> ReservedStart:
    """The expected start of a reservation after these ``starts`` of the cycle, or how far it is open to backfill.

    ``capacity`` has the held GPUs after the ``starts``.
    """
    queue, one, capacity_at_start = reservation.queue, reservation.pending, capacity.copy()
    ends = _relevant_ends(derived, reservation.scope, starts, now)
    if (expected_start := find_first_fit(capacity_at_start, ends, queue, one.request)) is not None:
        return ReservedStart(expected_start, capacity_at_start)
    leases = derived.leases_of(queue.name)
    if may_be_overtaken and queue.is_backfill_preemptible:
        has_turn = could_start_without_those_behind(queue, one, leases, capacity, now)
        return ReservedStart(is_open=not has_turn)
    if may_be_overtaken and queue.is_backfill_bounded:
        has_started = any(started.held_gpus.queue == queue.name for started in starts)
        first_since = now if has_started else find_first_since(queue, one, leases)
        closes_at = first_since + timedelta(hours=queue.backfill_hours)
        return ReservedStart(is_open=now < closes_at, closes_at=closes_at)
    return ReservedStart()


def _relevant_ends(
    derived: DerivedState, scope: ReservationScope, starts: Sequence[StartedRequest], now: datetime
) -> Iterable[LeaseEnd]:
    """Known ends of the leases in ``scope``, those of ``starts`` included, in order of time."""
    lease_ends = [derived.known_ends(key, now) for key in derived.quota_keys if scope.may_include_account(key)]
    started_ends = sorted(((end, held_gpus) for held_gpus, end in starts if end is not None), key=end_time)
    return (end for end in heapq.merge(*lease_ends, started_ends, key=end_time) if scope.includes(end[1]))


_Line = list[tuple[LineOrder, Sequence[PendingEntry], int]]
"""Heap of the groups of a queue: order of the next request, the group, and the index of the request in it."""


def _advance(line: _Line) -> None:
    """Go on to the next request of the first group."""
    _, entries, index = line[0]
    if index + 1 == len(entries):
        heapq.heappop(line)
        return
    heapq.heapreplace(line, ((True, entries[index + 1].position), entries, index + 1))
