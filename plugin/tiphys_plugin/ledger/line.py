"""One look along the line of all who wait, in the order in which GPUs are given.

Whoever stays within the quota of its queue goes before whoever borrows; then
higher priority, then the queue that uses the smaller share, then the earlier
arrival. In a queue that goes by GPU time, who has had less of it goes before who
came earlier. Who is next and fits is taken to start. Who is next and does not fit
keeps what it waits for:

* If all that it waits for ends at times that are known, it is expected to start
  at the first instant at which it fits, and those behind it may start before it
  as far as that does not delay it (EASY backfill: D. Lifka, "The ANL/IBM SP
  Scheduling System", JSSPP 1995).
* If somebody said no end, nobody behind it may take what it is short of.

So a request is overtaken by none that would hold it up, whatever comes after
it: its wait is bounded by what runs, and by what is before it in the line.
"""

import heapq
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from math import ceil, inf

from tiphys_plugin.ledger import pools
from tiphys_plugin.ledger.attained import Place, place_in_queue
from tiphys_plugin.ledger.capacity import Hold, Limit
from tiphys_plugin.ledger.model import Lease, LeaseRequest, Waiting
from tiphys_plugin.ledger.reservation import Reservation, Scope, first_fit
from tiphys_plugin.ledger.same import Same
from tiphys_plugin.ledger.shares import Consumed, Shares
from tiphys_plugin.ledger.standing import End, Standing, end_of, end_time, standing
from tiphys_plugin.ledger.verdict import Look, Rank, Seen, Start, Turn, Verdict
from tiphys_plugin.queues import Queue, Queues

Alike = tuple[str, str | None, int, int, int, int | None, str]
"""All of a request that decides whether it fits."""


def turn(
    queues: Queues,
    leases: Sequence[Lease],
    history: Sequence[Consumed],
    waiting: Sequence[Waiting],
    arrival: int,
    now: datetime,
) -> Turn:
    """What comes of number ``arrival`` of ``waiting``; its queue exists and could serve it one day.

    Whoever asks within one second gets the answer of the end of that second: of
    what ends until then it is not known when it ends, and what starts is taken to
    start then. So nobody is promised too much, and one look answers all of them.
    """
    return _look(_Question(queues, leases, history, waiting, ceil(now.timestamp()))).turn(arrival)


def admissible(
    queues: Queues, leases: Sequence[Lease], history: Sequence[Consumed], waiting: Iterable[Waiting], now: datetime
) -> list[Start]:
    """Everybody who may start now, in the order of their turns.

    Requests that their queue could never serve must not be among them.
    """
    return list(_Walk(queues, standing(queues, leases, history), now).look(waiting).starts)


class _Question(Same):
    """Signs of life do not matter to the answer, so those who wait are told by what they asked."""

    def __init__(
        self,
        queues: Queues,
        leases: Sequence[Lease],
        history: Sequence[Consumed],
        waiting: Sequence[Waiting],
        second: int,
    ) -> None:
        asked = [one.request for one in waiting]
        super().__init__((queues,), leases, history, asked, values=(second, tuple(one.arrival for one in waiting)))
        self.book = (queues, leases, history)
        self.waiting = waiting
        self.now = datetime.fromtimestamp(second, UTC)


@lru_cache(maxsize=4)
def _look(question: _Question) -> Look:
    queues, _, _ = question.book
    return _Walk(queues, standing(*question.book), question.now).look(question.waiting)


class _Walk:
    """One walk along the line. What is found out about a request holds for all like it that come later.

    Nothing comes free on the way, so who does not fit will not fit later, and a
    line of thousands costs little more than its starts.
    """

    def __init__(self, queues: Queues, known: Standing, now: datetime) -> None:
        self._queues = queues
        self._now = now
        self._known = known
        self._capacity = known.held.copy()
        self._shares = Shares(queues, known.means, now)
        self._started_ends: defaultdict[tuple[str, str], list[End]] = defaultdict(list)
        self._hopeless: dict[Alike, tuple[float, Verdict]] = {}
        self._borrows: dict[Alike, bool] = {}
        self._share: dict[str, float] = {}
        self._reserved: list[Reservation] = []
        """The one that can spare least of what is kept for it comes first."""
        self._seen: list[Seen] = []
        self._first: set[int] = set()
        """Arrivals of those who go before all others, see `_go_first`."""

    def look(self, waiting: Iterable[Waiting]) -> Look:
        for rank, queue, one in self._in_order(waiting):
            self._seen.append(Seen(rank, one, self._judge(queue, one)))
        return Look(tuple(self._seen), self._known.held, self._wants)

    def _in_order(self, waiting: Iterable[Waiting]) -> Iterator[tuple[Rank, Queue, Waiting]]:
        """Everybody for whom there may be hope, each when nobody goes before it; starts in between are heeded."""
        lines: dict[str, list[Waiting]] = defaultdict(list)
        for one in waiting:
            lines[one.request.queue].append(one)
        heads: list[tuple[Rank, str, Queue, Iterator[Waiting], Waiting]] = []

        def push(queue: Queue, rest: Iterator[Waiting], before: Rank) -> None:
            for one in rest:
                # Nobody goes before those of its own queue that have the better place there.
                alike = alike_of(one.request)
                before = max(before, self._rank(queue, one, alike))
                if (verdict := self._known_verdict(one.request, alike)) is None:
                    heapq.heappush(heads, (before, queue.name, queue, rest, one))
                    return
                self._seen.append(Seen(before, one, verdict))

        for name, line in lines.items():
            queue = self._queues.find(name)
            if queue is not None and not queue.stopped:
                self._first |= self._go_first(queue, line)
                push(queue, iter(sorted(line, key=self._place_in(queue))), (False, False, 0, 0.0, 0))
        while heads:
            rank, _, queue, rest, one = heapq.heappop(heads)
            yield rank, queue, one
            push(queue, rest, rank)

    def _place_in(self, queue: Queue) -> Callable[[Waiting], tuple[bool, Place]]:
        """Where one stands in the line of ``queue``."""
        return lambda one: (one.arrival not in self._first, place_in_queue(queue, one.request, one.arrival))

    def _go_first(self, queue: Queue, line: Sequence[Waiting]) -> set[int]:
        """Those for whom somebody was asked to leave, and those that were before them when that was decided.

        For one of the latter others may have left a moment ago: what it has come
        to have must not go to the next for whom somebody leaves.
        """
        if not self._known.promises:
            return set()
        places = {one.arrival: place_in_queue(queue, one.request, one.arrival) for one in line}
        promised = [one.arrival for one in line if self._known.is_promised(one.request)]
        others = promised if queue.preempts else []
        before = [
            arrival
            for arrival, place in places.items()
            if any(place < places[other] and arrival < other for other in others)
        ]
        return {*promised, *before}

    def _rank(self, queue: Queue, one: Waiting, alike: Alike) -> Rank:
        request = one.request
        if (borrows := self._borrows.get(alike)) is None:
            open_to = pools.of(self._queues, queue, request)
            short = all(self._capacity.left(queue, pool) < request.gpus for pool in open_to)
            borrows = self._borrows[alike] = queue.cohort is not None and short
        if (share := self._share.get(queue.name)) is None:
            share = self._share[queue.name] = self._shares.of(queue, self._capacity)
        return one.arrival not in self._first, borrows, -request.priority, share, one.arrival

    def _known_verdict(self, request: LeaseRequest, alike: Alike) -> Verdict | None:
        """What was found out about one like it, if that holds for as long as this one takes."""
        known = self._hopeless.get(alike)
        return known[1] if known is not None and _length(request) > known[0] else None

    def _judge(self, queue: Queue, one: Waiting) -> Verdict:
        request = one.request
        fitting = self._capacity.fitting(queue, request)
        if not fitting:
            return self._lacks(queue, one, self._capacity.short_of(queue, request))
        held_up: list[Reservation] = []
        for pool in fitting:
            hold, draws = self._capacity.placed(request, pool), self._capacity.draws_on(queue, request, pool)
            end = end_of(request, self._now)
            delayed = next((kept for kept in self._reserved if kept.is_delayed_by(hold, draws, end)), None)
            if delayed is None:
                self._start(request, hold, end)
                return Verdict(draws, pool, hold.placement.nodes if hold.placement is not None else ())
            held_up.append(delayed)
        verdict = Verdict(self._wants(request), reserved=held_up[0])
        self._hopeless[alike_of(request)] = max(map(self._leaves, held_up)), verdict
        return verdict

    def _lacks(self, queue: Queue, one: Waiting, short: frozenset[Limit]) -> Verdict:
        verdict = Verdict(short or self._wants(one.request))
        self._hopeless[alike_of(one.request)] = -inf, verdict
        return replace(verdict, start=self._reserve(queue, one, short)) if short else verdict

    def _leaves(self, reservation: Reservation) -> float:
        """Seconds for which what is kept may still be used; none if it is not known when it is needed."""
        return -inf if reservation.start is None else (reservation.start - self._now).total_seconds()

    def _start(self, request: LeaseRequest, hold: Hold, end: datetime | None) -> None:
        self._capacity.take(hold)
        self._borrows.clear()
        self._share.pop(request.queue, None)
        if end is not None:
            insort(self._started_ends[hold.account], (end, hold), key=end_time)
        for one in self._reserved:
            if one.start is not None and one.then is not None and (end is None or end > one.start):
                one.then.take(hold)

    def _reserve(self, queue: Queue, one: Waiting, short: frozenset[Limit]) -> datetime | None:
        """Keep what the request is short of, unless somebody of its queue has that before it; when it will start."""
        if any(other.queue is queue and other.short & short for other in self._reserved):
            return None
        then = self._capacity.copy()
        scope = self._scope(queue, one.request)
        start = first_fit(then, self._ends_in(scope), queue, one.request)
        known = (start, then, scope) if start is not None else ()
        insort(self._reserved, Reservation(one, queue, short, *known), key=self._leaves)
        return start

    def _ends_in(self, scope: Scope) -> Iterable[End]:
        """What ends, in order of time, and makes a difference there."""
        accounts = [one for one in {*self._known.accounts, *self._started_ends} if scope.may_have(one)]
        known = [self._known.ends(account, self._now) for account in accounts]
        ends = heapq.merge(*known, *(self._started_ends[account] for account in accounts), key=end_time)
        return (end for end in ends if scope.has(end[1]))

    def _scope(self, queue: Queue, request: LeaseRequest) -> Scope:
        open_to = pools.of(self._queues, queue, request)
        accounts = frozenset((queue.cohort or queue.name, pool) for pool in open_to)
        if self._queues.stock is None:
            return Scope(accounts)
        # Of a type of which more is held than there is, others have to do without.
        every = self._known.held.is_overdrawn
        return Scope(accounts, frozenset(self._queues.stock if every else pools.fitting_types(self._queues, request)))

    def _wants(self, request: LeaseRequest) -> frozenset[Limit]:
        """All that it could lack, beside what leases hold."""
        queue, held = self._queues.find(request.queue), self._known.held
        if queue is None:
            return frozenset()
        open_to = pools.of(self._queues, queue, request)
        limits = {limit for pool in open_to for limit in held.draws_on(queue, request, pool)}
        # Whether it has to borrow may change while those before it start.
        return frozenset(limits | {Limit("cohort", queue.cohort, pool) for pool in open_to if queue.cohort is not None})


def alike_of(request: LeaseRequest) -> Alike:
    """Requests for which this is the same fit where one of them does."""
    shape = (request.gpus, request.members, request.tensor_parallel)
    return request.queue, request.gpu_type, *shape, request.min_gpu_memory_mb, request.spot


def _length(request: LeaseRequest) -> float:
    """The longest that it holds its GPUs, in seconds; infinite if nobody said."""
    return inf if request.seconds is None else request.seconds
