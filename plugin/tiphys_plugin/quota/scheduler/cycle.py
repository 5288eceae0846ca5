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

What one look along the line has found: who may start, and how it stands with all others.

Thousands wait and ask again every few seconds, and between two changes of the
book the same look answers all of them. So it is kept whole, and what a person
wants to know (who is ahead, which place) is worked out from it when somebody asks.
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

from tiphys_plugin.quota.lease import Lease, LeaseRequest, Waiting
from tiphys_plugin.quota.queues import Queue, Queues
from tiphys_plugin.quota.scheduler import pools
from tiphys_plugin.quota.scheduler.backfill import Reservation, Scope, first_fit
from tiphys_plugin.quota.scheduler.capacity import Capacity, Hold
from tiphys_plugin.quota.scheduler.fair_share import Consumed, Shares
from tiphys_plugin.quota.scheduler.pools import Limit, Terms, terms_of
from tiphys_plugin.quota.scheduler.snapshot import End, Entry, Lines, Standing, end_of, end_time, lines_of, standing

Rank = tuple[bool, bool, int, float, int]
"""Nobody was asked to leave for it, nor for one behind it; borrows, priority from the highest, share of the queue,
arrival."""


@dataclass(frozen=True)
class Verdict:
    """How it stands with a request, and with all that want the same and come after it, while it has to wait.

    ``pool`` is what it may start on; None if it has to wait: then ``reserved`` says for whom what it wants is kept.
    """

    uses: frozenset[Limit]
    """What others may lack because of it."""
    pool: str | None = None
    nodes: tuple[str, ...] = ()
    """The node of each member, where nodes are declared."""
    reserved: Reservation | None = None
    start: datetime | None = None
    """When it will fit, if it is the one that something is kept for."""


class Start(NamedTuple):
    """Who may start, on GPUs of which pool, and on which nodes, where nodes are declared."""

    waiting: Waiting
    pool: str
    nodes: tuple[str, ...] = ()


class Seen(NamedTuple):
    """A request, its place among all, and what came of it."""

    rank: Rank
    waiting: Waiting
    verdict: Verdict

    @property
    def is_promised(self) -> bool:
        """Whether somebody was asked to leave for it."""
        return not self.rank[0]


@dataclass(frozen=True)
class Turn:
    """How it stands with one request when its turn has come.

    ``pool`` is what it may start on; None if it has to wait. ``position`` counts from 1 those that want what it
    wants, ``first`` is the first of them before it; ``reserved`` is for whom what it wants is kept.
    """

    pool: str | None
    nodes: tuple[str, ...]
    position: int
    first: Seen | None
    reserved: Reservation | None
    start: datetime | None
    """When it is expected to start, where that can be said."""
    held: Capacity
    """What leases hold, without those who only could start."""
    is_promised: bool
    """Whether somebody was asked to leave for it."""


@dataclass(frozen=True)
class Look:
    """Everybody who was looked at, with rank and verdict; ``held`` is what leases hold."""

    seen: tuple[Seen, ...]
    held: Capacity
    wants: Callable[[LeaseRequest], frozenset[Limit]]

    @property
    def starts(self) -> Iterator[Start]:
        """Who may start, in the order of their turns."""
        given = ((one, verdict) for _, one, verdict in self.seen)
        return (Start(one, verdict.pool, verdict.nodes) for one, verdict in given if verdict.pool is not None)

    def turn(self, arrival: int) -> Turn:
        """How it stands with the request that arrived as this number, which was looked at."""
        place, one, verdict = self._places[arrival]
        wanted = self.wants(one.request)
        ahead = [before for before in self._in_order[:place] if not wanted.isdisjoint(before.verdict.uses)]
        first = ahead[0] if ahead else None
        return Turn(
            verdict.pool,
            verdict.nodes,
            len(ahead) + 1,
            first,
            verdict.reserved,
            verdict.start,
            self.held,
            self._in_order[place].is_promised,
        )

    @cached_property
    def _in_order(self) -> list[Seen]:
        return sorted(self.seen, key=itemgetter(0))

    @cached_property
    def _places(self) -> dict[int, tuple[int, Waiting, Verdict]]:
        return {one.arrival: (place, one, verdict) for place, (_, one, verdict) in enumerate(self._in_order)}


PROMISE_LASTS = timedelta(minutes=2)
"""What has come free for somebody is kept for so long; who waits asks every few seconds."""
_FIRST_OF_ALL: Rank = (False, False, 0, 0.0, 0)
_HOPEFUL: tuple[float, Verdict | None] = (inf, None)


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
    known, lines = standing(queues, leases, history), lines_of(queues, waiting)
    return _look(known, lines, ceil(now.timestamp())).turn(arrival)


def admissible(
    queues: Queues, leases: Sequence[Lease], history: Sequence[Consumed], waiting: Iterable[Waiting], now: datetime
) -> list[Start]:
    """Everybody who may start now, in the order of their turns.

    Requests that their queue could never serve must not be among them.
    """
    return list(_Walk(standing(queues, leases, history), now).look(Lines(queues, list(waiting))).starts)


@lru_cache(maxsize=4)
def _look(known: Standing, lines: Lines, second: int) -> Look:
    return _Walk(known, datetime.fromtimestamp(second, UTC)).look(lines)


class _Walk:
    """One walk along the line. What is found out about a request holds for all like it that come later.

    Nothing comes free on the way, so who does not fit will not fit later, and a
    line of thousands costs little more than its starts.
    """

    def __init__(self, known: Standing, now: datetime) -> None:
        self._queues = known.queues
        self._now = now
        self._known = known
        self._capacity = known.held.copy()
        self._shares = Shares(known.queues, known.means, now)
        self._started_ends: defaultdict[tuple[str, str], list[End]] = defaultdict(list)
        self._hopeless: dict[Terms, tuple[float, Verdict]] = {}
        """What holds for all of these terms that take longer than so many seconds."""
        self._borrows: defaultdict[str, dict[Terms, bool]] = defaultdict(dict)
        """By queue: whether somebody borrows follows from what its own queue holds."""
        self._share: dict[str, float] = {}
        self._reserved: list[Reservation] = []
        """The one that can spare least of what is kept for it comes first."""
        self._kept: defaultdict[str, set[Limit]] = defaultdict(set)
        """By queue, what something is reserved of."""
        self._seen: list[Seen] = []
        self._first: set[int] = set()
        """Arrivals of those who go before all others, see `_go_first`."""

    def look(self, lines: Lines) -> Look:
        for rank, queue, one in self._in_order(lines):
            self._seen.append(Seen(rank, one.waiting, self._judge(queue, one)))
        return Look(tuple(self._seen), self._known.held, self._wants)

    def _in_order(self, lines: Lines) -> Iterator[tuple[Rank, Queue, Entry]]:
        """Everybody for whom there may be hope, each when nobody goes before it; starts in between are heeded."""
        heads: list[tuple[Rank, str, Queue, Iterator[Entry], Entry]] = []

        def push(queue: Queue, rest: Iterator[Entry], before: Rank) -> None:
            for one in rest:
                # Nobody goes before those of its own queue that have the better place there.
                before = max(before, self._rank(queue, one))
                longer_than, verdict = self._hopeless.get(one.terms, _HOPEFUL)
                if verdict is None or one.seconds <= longer_than:
                    heapq.heappush(heads, (before, queue.name, queue, rest, one))
                    return
                self._seen.append(Seen(before, one.waiting, verdict))

        anybody = self._known.promises or lines.has_promises
        for queue, line in lines:
            push(queue, iter(self._promised_first(queue, line) if anybody else line), _FIRST_OF_ALL)
        while heads:
            rank, _, queue, rest, one = heapq.heappop(heads)
            yield rank, queue, one
            push(queue, rest, rank)

    def _promised_first(self, queue: Queue, line: Sequence[Entry]) -> Sequence[Entry]:
        first = self._go_first(queue, line)
        self._first |= first
        return sorted(line, key=lambda one: one.waiting.arrival not in first) if first else line

    def _go_first(self, queue: Queue, line: Sequence[Entry]) -> set[int]:
        """Those for whom somebody was asked to leave, and those that were before them when that was decided.

        For one of the latter others may have left a moment ago: what it has come
        to have must not go to the next for whom somebody leaves.
        """
        promised = [one for one in line if self._is_promised(one.waiting)]
        others = promised if queue.preempts else []
        before = [
            one
            for one in line
            if any(one.place < other.place and one.waiting.arrival < other.waiting.arrival for other in others)
        ]
        return {one.waiting.arrival for one in (*promised, *before)}

    def _is_promised(self, one: Waiting) -> bool:
        """Whether somebody was asked to leave for it, be he there or gone a moment ago."""
        if self._known.is_promised(one.request):
            return True
        return one.promised_at is not None and abs(self._now - one.promised_at) <= PROMISE_LASTS

    def _rank(self, queue: Queue, one: Entry) -> Rank:
        request, terms, known = one.waiting.request, one.terms, self._borrows[queue.name]
        if (borrows := known.get(terms)) is None:
            short = all(self._capacity.left(queue, source.pool) < request.gpus for source in terms.sources)
            borrows = known[terms] = queue.cohort is not None and short
        if (share := self._share.get(queue.name)) is None:
            share = self._share[queue.name] = self._shares.of(queue, self._capacity)
        return one.waiting.arrival not in self._first, borrows, -request.priority, share, one.waiting.arrival

    def _judge(self, queue: Queue, one: Entry) -> Verdict:
        request = one.waiting.request
        fitting = self._capacity.fitting(queue, request)
        if not fitting:
            return self._lacks(queue, one, self._capacity.short_of(queue, request))
        held_up: list[Reservation] = []
        is_promised = one.waiting.arrival in self._first
        for pool in fitting:
            hold, draws = self._capacity.placed(request, pool), self._capacity.draws_on(queue, request, pool)
            end = end_of(request, self._now)
            delayed = next(
                (kept for kept in self._reserved if kept.is_delayed_by(hold, draws, end, is_promised=is_promised)), None
            )
            if delayed is None:
                self._start(request, hold, end)
                return Verdict(draws, pool, hold.placement.nodes if hold.placement is not None else ())
            held_up.append(delayed)
        verdict = Verdict(one.terms.wants, reserved=held_up[0])
        self._hopeless[one.terms] = max(map(self._leaves, held_up)), verdict
        return verdict

    def _lacks(self, queue: Queue, one: Entry, short: frozenset[Limit]) -> Verdict:
        verdict = Verdict(short or one.terms.wants)
        self._hopeless[one.terms] = -inf, verdict
        start = self._reserve(queue, one.waiting, short) if short else None
        return verdict if start is None else replace(verdict, start=start)

    def _leaves(self, reservation: Reservation) -> float:
        """Seconds for which what is kept may still be used; none if it is not known when it is needed."""
        return -inf if reservation.start is None else (reservation.start - self._now).total_seconds()

    def _start(self, request: LeaseRequest, hold: Hold, end: datetime | None) -> None:
        self._capacity.take(hold)
        self._borrows.pop(request.queue, None)
        self._share.pop(request.queue, None)
        if end is not None:
            insort(self._started_ends[hold.account], (end, hold), key=end_time)
        for one in self._reserved:
            if one.start is not None and one.then is not None and (end is None or end > one.start):
                one.then.take(hold)

    def _reserve(self, queue: Queue, one: Waiting, short: frozenset[Limit]) -> datetime | None:
        """Keep what the request is short of, unless somebody of its queue has that before it; when it will start."""
        if not self._kept[queue.name].isdisjoint(short):
            return None
        self._kept[queue.name] |= short
        then = self._capacity.copy()
        scope = self._scope(queue, one.request)
        start = first_fit(then, self._ends_in(scope), queue, one.request)
        kept = Reservation(one, queue, short, is_promised=one.arrival in self._first)
        known = replace(kept, start=start, then=then, scope=scope) if start is not None else kept
        insort(self._reserved, known, key=self._leaves)
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
        queue = self._queues.find(request.queue)
        return terms_of(self._queues, queue, request).wants if queue is not None else frozenset()
