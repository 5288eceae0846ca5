"""What follows from leases and the past alone: the same for everybody who asks until one of them changes.

Thousands wait and ask again every few seconds, while leases come and go far
more rarely, and only few of them at once. So this is worked out once, remembered
for as long as the leases are the same, and brought up to date by the few that
are not.

What was worked out lately, for those who ask the same again.

Thousands wait and ask every few seconds, and between two changes of the book all
of them ask about the same one. Its entries are mostly the very same objects then,
which makes two books quick to compare, however long they are.

Who waits, queue by queue, in the order in which the queue serves them.

To sort thousands costs more than to decide on one. Few of them come or go
between two looks, so the lines are kept and brought up to date by these.
"""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from math import inf
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

from tiphys_plugin.quota.lease import Lease, LeaseRequest, Waiting
from tiphys_plugin.quota.queues import Queue, Queues
from tiphys_plugin.quota.scheduler.capacity import Capacity, Hold
from tiphys_plugin.quota.scheduler.fair_share import Consumed, Means, Place, place_in_queue
from tiphys_plugin.quota.scheduler.pools import Terms, terms_of

_Known = TypeVar("_Known")


class Latest(Generic[_Known]):
    """The last ``keep`` answers. Any thread may ask and remember at any time; the worst is that one is forgotten."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._known: tuple[_Known, ...] = ()

    @property
    def newest(self) -> _Known | None:
        return next(iter(self._known), None)

    def find(self, suits: Callable[[_Known], bool]) -> _Known | None:
        return next(filter(suits, self._known), None)

    def remember(self, found: _Known) -> _Known:
        self._known = (found, *self._known[: self._keep - 1])
        return found

    def clear(self) -> None:
        self._known = ()


class Entry(NamedTuple):
    """One who waits; ``place`` is its place in the line of its queue, and no two have the same."""

    place: Place
    waiting: Waiting
    terms: Terms
    seconds: float
    """The longest that it holds its GPUs; infinite if nobody said."""


class Lines:
    """Everybody of ``waiting`` whose queue exists and is open. Read it, and take `after` for a change."""

    def __init__(self, queues: Queues, waiting: Sequence[Waiting] = ()) -> None:
        self.queues = queues
        self._asked = _asked(waiting)
        self.has_promises = any(one.promised_at for one in waiting)
        """Whether something is kept for anybody for whom others have left."""
        self._waiting: dict[int, Waiting] = {one.arrival: one for one in waiting}
        self._lines: dict[str, list[Entry]] = {}
        for one in waiting:
            if (entry := self._entry(one)) is not None:
                self._lines.setdefault(one.request.queue, []).append(entry)
        for line in self._lines.values():
            line.sort(key=_by_place)

    def __iter__(self) -> Iterator[tuple[Queue, Sequence[Entry]]]:
        """Each queue in which somebody waits, with its line."""
        return ((queue, line) for name, line in self._lines.items() if (queue := self.queues.find(name)) and line)

    def is_of(self, queues: Queues, waiting: Sequence[Waiting]) -> bool:
        """Whether these are the lines of ``waiting``. Signs of life do not matter."""
        return self.queues is queues and self._asked == _asked(waiting)

    def after(self, waiting: Sequence[Waiting]) -> "Lines | None":
        """The same, once these wait; None if too much is different for that to be worth while."""
        now, before = {one.arrival: one for one in waiting}, self._waiting
        gone = [one for arrival, one in before.items() if arrival not in now or not _is_same(now[arrival], one)]
        come = [one for arrival, one in now.items() if arrival not in before or not _is_same(one, before[arrival])]
        if 4 * (len(come) + len(gone)) > len(before):
            return None
        twin = Lines(self.queues)
        twin._asked, twin._waiting = _asked(waiting), now
        twin.has_promises = any(one.promised_at for one in waiting)
        twin._lines = {name: line.copy() for name, line in self._lines.items()}
        for one in gone:
            twin._drop(one)
        for one in come:
            twin._add(one)
        return twin

    def _entry(self, one: Waiting) -> Entry | None:
        request, queue = one.request, self.queues.find(one.request.queue)
        if queue is None or queue.stopped:
            return None
        seconds = inf if request.seconds is None else request.seconds
        return Entry(place_in_queue(queue, request, one.arrival), one, terms_of(self.queues, queue, request), seconds)

    def _add(self, one: Waiting) -> None:
        if (entry := self._entry(one)) is not None:
            insort(self._lines.setdefault(one.request.queue, []), entry, key=_by_place)

    def _drop(self, one: Waiting) -> None:
        if (entry := self._entry(one)) is not None:
            line = self._lines[one.request.queue]
            del line[bisect_left(line, entry.place, key=_by_place)]


def lines_of(queues: Queues, waiting: Sequence[Waiting]) -> Lines:
    """The lines of all who wait; remembered for the last few. Whoever stands in them was last seen at any time."""
    known = _latest_queues.find(lambda one: one.is_of(queues, waiting))
    if known is None:
        last = _latest_queues.newest
        known = last.after(waiting) if last is not None and last.queues is queues else None
        known = _latest_queues.remember(known or Lines(queues, waiting))
    return known


_latest_queues: Latest[Lines] = Latest(4)
_arrival = attrgetter("arrival")
_request = attrgetter("request")
_by_place = attrgetter("place")


_promised_at = attrgetter("promised_at")


def _asked(waiting: Sequence[Waiting]) -> tuple[list[object], ...]:
    """What they are told by: numbers may be given again, and requests come back unchanged."""
    return tuple(list(map(field, waiting)) for field in (_arrival, _request, _promised_at))


def _is_same(one: Waiting, before: Waiting) -> bool:
    return one.request is before.request and one.promised_at == before.promised_at


End = tuple[datetime, Hold]


class Standing:
    """``held`` is what leases hold, ``means`` what queues have used lately. Read it, and copy before a change."""

    def __init__(self, queues: Queues, leases: Sequence[Lease] = (), history: Sequence[Consumed] = ()) -> None:
        self.queues = queues
        self.leases = tuple(leases)
        self.history = tuple(history)
        self.held = Capacity(queues, leases)
        self.means = Means(queues, leases, history)
        self._ends: defaultdict[tuple[str, str], list[End]] = defaultdict(list)
        self._promised = _promised(leases)
        for lease in leases:
            if (end := lease_end(lease)) is not None:
                hold = self.held.hold_of(lease)
                self._ends[hold.account].append((end, hold))
        for ends in self._ends.values():
            ends.sort(key=end_time)

    def is_of(self, queues: Queues, leases: Sequence[Lease], history: Sequence[Consumed]) -> bool:
        """Whether it follows from these."""
        return self.queues is queues and self.leases == tuple(leases) and self.history == tuple(history)

    def after(self, leases: Sequence[Lease], history: Sequence[Consumed]) -> "Standing | None":
        """The same, once these are the leases; None if too much is different for that to be worth while."""
        now, before = set(map(id, leases)), set(map(id, self.leases))
        come = [one for one in leases if id(one) not in before]
        gone = [one for one in self.leases if id(one) not in now]
        if 4 * (len(come) + len(gone)) > len(self.leases):
            return None
        twin = Standing.__new__(Standing)
        twin.queues, twin.leases, twin.history = self.queues, tuple(leases), tuple(history)
        anybody_leaves = self._promised or any(one.leaving for one in come)
        twin._promised = _promised(leases) if anybody_leaves else self._promised
        twin.held, twin.means = self.held.copy(), self.means.after(come, gone, history)
        twin._ends = defaultdict(list, {account: ends.copy() for account, ends in self._ends.items()})
        for lease in gone:
            twin._forget(lease)
        for lease in come:
            twin._add(lease)
        return twin

    @property
    def accounts(self) -> list[tuple[str, str]]:
        """Accounts (see `Hold`) in which ends are known."""
        return list(self._ends)

    def ends(self, account: tuple[str, str], now: datetime) -> Sequence[End]:
        """Known ends of an account, in order. One that should be over and is not may end at any time: not known."""
        known = self._ends.get(account, [])
        return known[bisect_right(known, now, key=end_time) :]

    @property
    def promises(self) -> bool:
        """Whether somebody was asked to leave for anybody."""
        return bool(self._promised)

    def is_promised(self, request: LeaseRequest) -> bool:
        """Whether somebody was asked to leave for it."""
        return bool(self._promised) and (request.uid, request.step) in self._promised

    def _add(self, lease: Lease) -> None:
        hold = self.held.hold_of(lease)
        self.held.take(hold)
        if (end := lease_end(lease)) is not None:
            insort(self._ends[hold.account], (end, hold), key=end_time)

    def _forget(self, lease: Lease) -> None:
        hold = self.held.hold_of(lease)
        self.held.give_back(hold)
        if (end := lease_end(lease)) is not None:
            ends = self._ends[hold.account]
            first = bisect_left(ends, end, key=end_time)
            del ends[ends.index((end, hold), first)]


def standing(queues: Queues, leases: Sequence[Lease], history: Sequence[Consumed]) -> Standing:
    """Where these leases stand; remembered for the last few."""
    known = _latest_states.find(lambda one: one.is_of(queues, leases, history))
    if known is None:
        last = _latest_states.newest
        known = last.after(leases, history) if last is not None and last.queues is queues else None
        known = _latest_states.remember(known or Standing(queues, leases, history))
    return known


def end_of(request: LeaseRequest, since: datetime) -> datetime | None:
    """When a lease that began at ``since`` ends at the latest; None if nobody said."""
    return since + timedelta(seconds=request.seconds) if request.seconds is not None else None


def lease_end(lease: Lease) -> datetime | None:
    """When a lease ends at the latest, by what was declared or because it was asked to leave; None: not known."""
    declared = end_of(lease.request, lease.granted_at)
    if lease.leaving is None or lease.leaving.keeps is not None:
        return declared
    return lease.leaving.deadline if declared is None else min(declared, lease.leaving.deadline)


def end_time(end: End) -> datetime:
    return end[0]


_latest_states: Latest[Standing] = Latest(8)


def _promised(leases: Sequence[Lease]) -> frozenset[tuple[str, str]]:
    return frozenset((one.leaving.uid, one.leaving.step) for one in leases if one.leaving is not None)
