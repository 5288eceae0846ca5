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

Between two changes of the ledger state one cycle answers all requests, so `CycleResult`
is kept as a whole, and `CycleResult.outcome_of` computes the answer for one request.
"""

import heapq
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from math import inf
from operator import attrgetter
from typing import NamedTuple

from tiphys_plugin.quota.lease import LeaseRequest, PendingRequest, declared_end
from tiphys_plugin.quota.queue import Queue
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
    LineOrder,
    RankedRequest,
    SchedulingKey,
    SchedulingVerdict,
    WaitingGroup,
)
from tiphys_plugin.quota.scheduler.derived_state import DerivedState
from tiphys_plugin.quota.scheduler.fair_share import compute_fair_share
from tiphys_plugin.quota.scheduler.pending_queues import GroupKey, PendingEntry, PendingQueues
from tiphys_plugin.quota.scheduler.pool_options import PoolOptions, ResourceLimit, list_eligible_pools
from tiphys_plugin.quota.scheduler.queue_order import could_start_without_those_behind, find_first_since, has_seniority

PROMISE_DURATION = timedelta(minutes=2)
"""Freed GPUs of victims are kept this long for their preemptor, which repeats its request every few seconds."""
_HIGHEST_KEY: SchedulingKey = (False, False, -sys.maxsize, 0.0, 0)
_NO_VERDICT: tuple[float, SchedulingVerdict | None] = (inf, None)


def run_cycle(derived: DerivedState, pending_queues: PendingQueues, now: datetime) -> CycleResult:
    """Decide which pending requests may start now."""
    return _SchedulingCycle(derived, now).run(pending_queues)


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
        self._past_usage = derived.decayed_usage.usage_at(now)
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
        lines = self._build_lines(pending_queues)
        evaluated = [
            RankedRequest(key, entry.pending, verdict, queue, self._order_of(entry))
            for key, queue, entry, verdict in self._evaluate_in_order(lines)
        ]
        waiting = [group for line in lines for group in line.waiting]
        return CycleResult(evaluated, waiting, pending_queues, self._derived.capacity, self._scheduling_key)

    def _evaluate_in_order(
        self, lines: Sequence["_QueueLine"]
    ) -> Iterator[tuple[SchedulingKey, Queue, PendingEntry, SchedulingVerdict]]:
        """Evaluate the requests on which there is no verdict yet, by scheduling key.

        Only the first request of each queue has a key at any time, because each start of the cycle changes the keys of
        those that follow: of its own queue, which may borrow from then on, and has a larger share.
        """
        heads: list[_LineHead] = []
        for line in lines:
            self._push_next(heads, line, _HIGHEST_KEY)
        while heads:
            head = heapq.heappop(heads)
            yield head.key, head.line.queue, head.entry, self._evaluate(head.line.queue, head.entry)
            self._push_next(heads, head.line, head.key)

    def _push_next(self, heads: list["_LineHead"], line: "_QueueLine", before: SchedulingKey) -> None:
        """Push the next request of ``line`` without a verdict; requests that a verdict already covers are passed."""
        while line.groups:
            group = line.groups[0]
            entry = group.entries[group.first]
            longer_than, verdict = self._known_verdicts.get(entry.pool_options, _NO_VERDICT)
            if verdict is None or entry.max_seconds <= longer_than:
                line.advance()
                # Within a queue a later request never goes first, even if it would borrow nothing.
                key = max(before, self._key_in_line(line, entry, group.order))
                heapq.heappush(heads, _LineHead(key, line.queue.name, line, entry))
                return
            line.pass_group(longer_than, verdict, self._order_of)

    def _build_lines(self, pending_queues: PendingQueues) -> list["_QueueLine"]:
        has_promises = self._derived.has_promises or pending_queues.has_promises
        return [self._build_line(queue, groups, has_promises=has_promises) for queue, groups in pending_queues]

    def _build_line(
        self, queue: Queue, groups: Mapping[GroupKey, Sequence[PendingEntry]], *, has_promises: bool
    ) -> "_QueueLine":
        """The groups of a queue by their first requests. Promised requests stand first, each in a group of its own."""
        first: set[int] = set()
        if has_promises:
            first = self._find_promised_arrivals(queue, list(heapq.merge(*groups.values(), key=attrgetter("position"))))
            self._promised_arrivals |= first
        line = _QueueLine(queue)
        for entries in groups.values():
            rest = [entry for entry in entries if entry.pending.arrival not in first] if first else entries
            if rest:
                line.add_group(self._order_of(rest[0]), rest)
            if len(rest) < len(entries):
                for promised in (entry for entry in entries if entry.pending.arrival in first):
                    line.add_group(self._order_of(promised), [promised])
        return line

    def _order_of(self, entry: PendingEntry) -> LineOrder:
        return entry.pending.arrival not in self._promised_arrivals, entry.position

    def _find_promised_arrivals(self, queue: Queue, entries: Sequence[PendingEntry]) -> set[int]:
        """The preemptors, and the requests that were before them at the time of the preemption.

        Victims of a request before a preemptor may have ended a moment ago; its GPUs must not go to the preemptor. But
        what a preemptor takes back for its queue must not go to one that would borrow it.
        """
        promised = [entry for entry in entries if self._is_promised(entry.pending)]
        preemptors = promised if queue.preempts else []
        earlier = [
            entry
            for entry in entries
            if any(
                entry.position < preemptor.position
                and entry.pending.arrival < preemptor.pending.arrival
                and self._must_borrow_in(queue, entry) <= self._must_borrow_in(queue, preemptor)
                for preemptor in preemptors
            )
        ]
        return {entry.pending.arrival for entry in (*promised, *earlier)}

    def _is_promised(self, pending: PendingRequest) -> bool:
        """Whether the request has victims that have not ended yet, or ended within `PROMISE_DURATION`."""
        if self._derived.is_promised(pending.request):
            return True
        return pending.promised_at is not None and abs(self._now - pending.promised_at) <= PROMISE_DURATION

    def _key_in_line(self, line: "_QueueLine", entry: PendingEntry, order: LineOrder) -> SchedulingKey:
        """The scheduling key of a request, which never goes before one with a better position in its own queue."""
        key = self._scheduling_key(line.queue, entry)
        _, borrows, *_ = key
        if borrows and not has_seniority(line.queue):
            return key  # those before it have a higher priority, or the same and an earlier arrival
        passed = [group.entries[end - 1] for group in line.waiting if (end := group.index_of(order))]
        return max([key, *(self._scheduling_key(line.queue, last) for last in passed)])

    def _scheduling_key(self, queue: Queue, entry: PendingEntry) -> SchedulingKey:
        request, borrows = entry.pending.request, self._must_borrow_in(queue, entry)
        if (share := self._share_by_queue.get(queue.name)) is None:
            share = self._share_by_queue[queue.name] = compute_fair_share(queue, self._capacity, self._past_usage)
        return (
            entry.pending.arrival not in self._promised_arrivals,
            borrows,
            -request.priority,
            share,
            entry.pending.arrival,
        )

    def _must_borrow_in(self, queue: Queue, entry: PendingEntry) -> bool:
        """Whether the request exceeds what is left of the quota of its own queue in every pool."""
        options, borrows_by_options = entry.pool_options, self._must_borrow[queue.name]
        if (borrows := borrows_by_options.get(options)) is None:
            gpus, left = entry.pending.request.gpus, self._capacity.remaining_quota
            exceeds_quota = all(left(queue, option.pool) < gpus for option in options.options)
            borrows = borrows_by_options[options] = queue.cohort is not None and exceeds_quota
        return borrows

    def _evaluate(self, queue: Queue, entry: PendingEntry) -> SchedulingVerdict:
        request = entry.pending.request
        missing_limits = self._capacity.find_missing_limits(queue, request)
        fitting = [] if missing_limits else self._capacity.find_fitting_pools(queue, request)
        if not fitting:
            return self._record_shortage(queue, entry, missing_limits)
        delayed_reservations: list[Reservation] = []
        is_promised = entry.pending.arrival in self._promised_arrivals
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
        verdict = SchedulingVerdict(entry.pool_options.limits, reservation=delayed_reservations[0])
        self._known_verdicts[entry.pool_options] = max(map(self._seconds_until_start, delayed_reservations)), verdict
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
        relevant = [
            reservation for reservation in self._reservations if reservation.may_be_delayed_by(held_gpus, limits)
        ]
        return next(
            (
                reservation
                for reservation in sorted(relevant, key=self._seconds_until_start)
                if reservation.is_delayed_by(request, held_gpus, limits, end, is_promised=is_promised)
            ),
            None,
        )

    def _record_shortage(
        self, queue: Queue, entry: PendingEntry, missing_limits: frozenset[ResourceLimit]
    ) -> SchedulingVerdict:
        verdict = SchedulingVerdict(missing_limits or entry.pool_options.limits)
        self._known_verdicts[entry.pool_options] = -inf, verdict
        own = self._reserve(queue, entry.pending, missing_limits) if missing_limits else None
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
        self, queue: Queue, pending: PendingRequest, missing_limits: frozenset[ResourceLimit]
    ) -> Reservation | None:
        """Reserve the missing limits, unless its queue has a reservation of them already."""
        if not self._reserved_limits[queue.name].isdisjoint(missing_limits):
            return None
        self._reserved_limits[queue.name] |= missing_limits
        if self._snapshot is None:
            self._snapshot = self._capacity.copy()
        reservation = Reservation(
            pending,
            queue,
            missing_limits,
            self._scope(queue, pending.request),
            self._starts,
            partial(
                _find_start,
                self._derived,
                self._now,
                self._snapshot,
                may_be_overtaken=not self._is_promised(pending),
            ),
            is_promised=pending.arrival in self._promised_arrivals,
        )
        self._reservations.append(reservation)
        return reservation

    def _scope(self, queue: Queue, request: LeaseRequest) -> ReservationScope:
        eligible_pools = list_eligible_pools(self._queues, queue, request)
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
    queue, pending, capacity_at_start = reservation.queue, reservation.pending, capacity.copy()
    ends = _relevant_ends(derived, reservation.scope, starts, now)
    if (expected_start := find_first_fit(capacity_at_start, ends, queue, pending.request)) is not None:
        return ReservedStart(expected_start, capacity_at_start)
    leases = derived.leases_of(queue.name)
    if may_be_overtaken and queue.is_backfill_preemptible:
        has_turn = could_start_without_those_behind(queue, pending, leases, capacity, now)
        return ReservedStart(is_open=not has_turn)
    if may_be_overtaken and queue.is_backfill_bounded:
        has_started = any(started.held_gpus.queue == queue.name for started in starts)
        first_since = now if has_started else find_first_since(queue, pending, leases)
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


class _LineGroup(NamedTuple):
    """Requests of one queue with the same `PoolOptions`, from ``first`` on; ``order`` is that of the next one."""

    order: LineOrder
    entries: Sequence[PendingEntry]
    first: int


class _LineHead(NamedTuple):
    """The next request of a queue. ``queue_name`` decides between equal keys, so that lines are never compared."""

    key: SchedulingKey
    queue_name: str
    line: "_QueueLine"
    entry: PendingEntry


class _QueueLine:
    """The requests of one queue in their order, as a heap of groups.

    Attributes:
        queue: The queue.
        groups: Heap of the groups that have requests without a verdict.
        waiting: The groups that got the verdict on a request before them.
    """

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.groups: list[_LineGroup] = []
        self.waiting: list[WaitingGroup] = []

    def add_group(self, order: LineOrder, entries: Sequence[PendingEntry]) -> None:
        """Add requests that are sorted by position; ``order`` is that of the first."""
        heapq.heappush(self.groups, _LineGroup(order, entries, 0))

    def advance(self) -> None:
        """Go on to the next request of the first group."""
        _, entries, index = self.groups[0]
        if index + 1 == len(entries):
            heapq.heappop(self.groups)
        else:
            # Promised requests are groups of one, so those that follow in a group are not promised.
            heapq.heapreplace(self.groups, _LineGroup((True, entries[index + 1].position), entries, index + 1))

    def pass_group(
        self, longer_than: float, verdict: SchedulingVerdict, order_of: Callable[[PendingEntry], LineOrder]
    ) -> None:
        """Let the rest of the first group wait by ``verdict``, except for requests of at most ``longer_than`` seconds.

        These may still start, because they end before the reserved GPUs are needed.
        """
        order, entries, index = heapq.heappop(self.groups)
        rest = entries[index:] if longer_than > -inf else []
        if shorter := [entry for entry in rest if entry.max_seconds <= longer_than]:
            self.add_group(order_of(shorter[0]), shorter)
            entries, index = [entry for entry in rest if entry.max_seconds > longer_than], 0
        self.waiting.append(WaitingGroup(self.queue, entries, index, verdict, is_promised=not order[0]))
