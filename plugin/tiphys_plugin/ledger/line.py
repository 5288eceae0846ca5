"""One look along the line of all who wait, in the order in which GPUs are given.

Whoever stays within the quota of its queue goes before whoever borrows; then
higher priority, then the queue that uses the smaller share, then the earlier
arrival. Who is next and fits is taken to start. Who is next and does not fit
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby

from tiphys_plugin.ledger import pools
from tiphys_plugin.ledger.capacity import Capacity, Limit
from tiphys_plugin.ledger.model import Lease, LeaseRequest, Waiting
from tiphys_plugin.ledger.reservation import Reservation
from tiphys_plugin.ledger.shares import Consumed, Shares
from tiphys_plugin.ledger.standing import End, Standing, end_of, end_time, standing
from tiphys_plugin.queues import Queue, Queues

_Rank = tuple[bool, int, float, int]
"""Borrows, priority from the highest, share of the queue, arrival."""
_Alike = tuple[str, str | None, int, int | None]
"""All of a request that decides whether it fits."""


@dataclass(frozen=True)
class Turn:
    """How it stands with one request when its turn has come.

    ``pool`` is what it may start on; None if it has to wait. ``ahead`` are those
    before it that want what it wants; ``reserved`` is for whom what it wants is kept.
    """

    pool: str | None
    ahead: tuple[Waiting, ...]
    reserved: Reservation | None
    start: datetime | None
    """When it is expected to start, where that can be said."""
    held: Capacity
    """What leases hold, without those who only could start."""


def turn(
    queues: Queues,
    leases: Sequence[Lease],
    history: Sequence[Consumed],
    others: Iterable[Waiting],
    mine: Waiting,
    now: datetime,
) -> Turn:
    """What comes of ``mine``, which waits with ``others``; its queue exists and could serve it one day."""
    return _Line(queues, standing(queues, leases, history), now).walk(others, mine)


def admissible(
    queues: Queues, leases: Sequence[Lease], history: Sequence[Consumed], waiting: Iterable[Waiting], now: datetime
) -> list[tuple[Waiting, str]]:
    """Everybody who may start now, in the order of their turns, each with its pool.

    The whole line at once, where `turn` looks as far as one request. Requests
    that their queue could never serve must not be among them.
    """
    return _Line(queues, standing(queues, leases, history), now).starts(waiting)


class _Line:
    def __init__(self, queues: Queues, known: Standing, now: datetime) -> None:
        self._queues = queues
        self._now = now
        self._known = known
        self._capacity = known.held.copy()
        self._shares = Shares(queues, known.means, now)
        self._started_ends: defaultdict[tuple[str, str], list[End]] = defaultdict(list)
        self._placed: dict[tuple[object, ...], tuple[str | None, Reservation | None]] = {}
        self._short: dict[_Alike, frozenset[Limit]] = {}
        self._borrows: dict[_Alike, bool] = {}
        self._share: dict[str, float] = {}
        self._reserved: list[Reservation] = []

    def walk(self, others: Iterable[Waiting], mine: Waiting) -> Turn:
        wanted = self._wants(mine.request)
        ahead: list[Waiting] = []
        for queue, one, short, pool, reserved in self._turns([*others, mine]):
            if one is mine:
                return Turn(pool, tuple(ahead), reserved, self._reserve(queue, one, short), self._known.held)
            if pool is not None:
                uses = self._capacity.draws_on(queue, one.request, pool)
            else:
                uses = short or self._wants(one.request)
            if uses & wanted:
                ahead.append(one)
        raise AssertionError("the line ended before the one that stands in it")

    def starts(self, waiting: Iterable[Waiting]) -> list[tuple[Waiting, str]]:
        return [(one, pool) for _, one, _, pool, _ in self._turns(waiting) if pool is not None]

    def _turns(
        self, waiting: Iterable[Waiting]
    ) -> Iterator[tuple[Queue, Waiting, frozenset[Limit], str | None, Reservation | None]]:
        """Everybody in order, with what it is short of, or its pool, or for whom it waits; then it starts, or is kept
        what it waits for.
        """
        for queue, one in self._in_order(waiting):
            short = self._short_of(queue, one.request)
            pool, reserved = (None, None) if short else self._place(queue, one.request)
            yield queue, one, short, pool, reserved
            if pool is not None:
                self._start(one.request, pool)
            else:
                self._reserve(queue, one, short)

    def _in_order(self, waiting: Iterable[Waiting]) -> Iterator[tuple[Queue, Waiting]]:
        """Everybody whose queue could admit, each when nobody goes before it; starts in between are heeded."""
        lines: dict[str, list[Waiting]] = defaultdict(list)
        for one in waiting:
            lines[one.request.queue].append(one)
        heads: list[tuple[_Rank, str, Queue, Iterator[Waiting], Waiting]] = []

        def push(queue: Queue, rest: Iterator[Waiting]) -> None:
            if (one := next(rest, None)) is not None:
                heapq.heappush(heads, (self._rank(queue, one), queue.name, queue, rest, one))

        for name, line in lines.items():
            queue = self._queues.find(name)
            if queue is not None and not queue.stopped:
                push(queue, iter(sorted(line, key=lambda one: (-one.request.priority, one.arrival))))
        while heads:
            _, _, queue, rest, one = heapq.heappop(heads)
            yield queue, one
            push(queue, rest)

    def _rank(self, queue: Queue, one: Waiting) -> _Rank:
        alike = _alike(one.request)
        if (borrows := self._borrows.get(alike)) is None:
            open_to = pools.of(self._queues, queue, one.request)
            short = all(self._capacity.left(queue, pool) < one.request.gpus for pool in open_to)
            borrows = self._borrows[alike] = queue.cohort is not None and short
        if (share := self._share.get(queue.name)) is None:
            share = self._share[queue.name] = self._shares.of(queue, self._capacity)
        return borrows, -one.request.priority, share, one.arrival

    def _place(self, queue: Queue, request: LeaseRequest) -> tuple[str | None, Reservation | None]:
        """The pool to start on; or for whom it has to wait, if it fits and others are before it."""
        alike = (*_alike(request), request.seconds)
        if alike not in self._placed:
            self._placed[alike] = self._find_place(queue, request)
        return self._placed[alike]

    def _find_place(self, queue: Queue, request: LeaseRequest) -> tuple[str | None, Reservation | None]:
        first: Reservation | None = None
        for pool in self._capacity.fitting(queue, request):
            held_up = self._delays(queue, request, pool)
            if held_up is None:
                return pool, None
            first = first or held_up
        return None, first

    def _delays(self, queue: Queue, request: LeaseRequest, pool: str) -> Reservation | None:
        if not self._reserved:
            return None
        draws = self._capacity.draws_on(queue, request, pool)
        hold, end = self._capacity.hold(request, pool), end_of(request, self._now)
        return next((one for one in self._reserved if one.is_delayed_by(hold, draws, end)), None)

    def _start(self, request: LeaseRequest, pool: str) -> None:
        hold, end = self._capacity.hold(request, pool), end_of(request, self._now)
        self._capacity.take(hold)
        # What was found out about others no longer holds.
        self._placed.clear()
        self._short.clear()
        self._borrows.clear()
        self._share.pop(request.queue, None)
        if end is not None:
            insort(self._started_ends[hold.account], (end, hold), key=end_time)
        for one in self._reserved:
            if one.start is not None and one.then is not None and (end is None or end > one.start):
                one.then.take(hold)

    def _short_of(self, queue: Queue, request: LeaseRequest) -> frozenset[Limit]:
        """As `Capacity.short_of`; in a long line many want the same, and nothing changes until somebody starts."""
        alike = _alike(request)
        if (known := self._short.get(alike)) is None:
            known = self._short[alike] = self._capacity.short_of(queue, request)
        return known

    def _reserve(self, queue: Queue, one: Waiting, short: frozenset[Limit]) -> datetime | None:
        """Keep what the request is short of, unless somebody of its queue has that before it; when it will start."""
        if not short or any(other.queue is queue and other.short & short for other in self._reserved):
            return None
        then = self._capacity.copy()
        for end, over in groupby(self._ends_that_matter(queue, one.request), key=end_time):
            for _, hold in over:
                then.give_back(hold)
            if then.fitting(queue, one.request):
                return self._keep(Reservation(one, queue, short, end, then, self._accounts(queue, one.request)))
        return self._keep(Reservation(one, queue, short))

    def _keep(self, reservation: Reservation) -> datetime | None:
        self._reserved.append(reservation)
        self._placed.clear()
        return reservation.start

    def _ends_that_matter(self, queue: Queue, request: LeaseRequest) -> Iterable[End]:
        """What ends, in order of time, where ``request`` would count: with an inventory that is everywhere."""
        accounts = self._accounts(queue, request) or {*self._known.accounts, *self._started_ends}
        known = [self._known.ends(account, self._now) for account in accounts]
        return heapq.merge(*known, *(self._started_ends[account] for account in accounts), key=end_time)

    def _accounts(self, queue: Queue, request: LeaseRequest) -> frozenset[tuple[str, str]] | None:
        if self._queues.inventory is not None:
            return None
        return frozenset((queue.cohort or queue.name, pool) for pool in pools.of(self._queues, queue, request))

    def _wants(self, request: LeaseRequest) -> frozenset[Limit]:
        queue = self._queues.find(request.queue)
        if queue is None:
            return frozenset()
        open_to = pools.of(self._queues, queue, request)
        limits = {limit for pool in open_to for limit in self._capacity.draws_on(queue, request, pool)}
        # Whether it has to borrow may change while those before it start.
        return frozenset(limits | {Limit("cohort", queue.cohort, pool) for pool in open_to if queue.cohort is not None})


def _alike(request: LeaseRequest) -> _Alike:
    return request.queue, request.gpu_type, request.gpus, request.min_gpu_memory_mb
