"""Who waits, queue by queue, in the order in which the queue serves them.

To sort thousands costs more than to decide on one. Few of them come or go
between two looks, so the lines are kept and brought up to date by these.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from math import inf
from operator import attrgetter
from typing import NamedTuple

from tiphys_plugin.ledger.attained import Place, place_in_queue
from tiphys_plugin.ledger.latest import Latest
from tiphys_plugin.ledger.model import Waiting
from tiphys_plugin.ledger.terms import Terms, terms_of
from tiphys_plugin.queues import Queue, Queues


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
