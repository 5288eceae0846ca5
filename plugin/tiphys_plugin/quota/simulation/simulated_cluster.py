"""Jobs that hold GPUs, in the book of the ledger, and what becomes of them.

Those who wait, kept so that a look need not go through all of them.

Thousands may wait, and no more of those that are alike can start at once than
there are GPUs for. So of each kind only the first few are looked at: what comes
of them is the same, and a trace of years takes seconds.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import count

from tiphys_plugin.quota.lease import Lease, LeaseRequest, Leaving, Waiting
from tiphys_plugin.quota.ledger.state import Book
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.capacity import Capacity
from tiphys_plugin.quota.scheduler.cycle import Start
from tiphys_plugin.quota.scheduler.fair_share import attained
from tiphys_plugin.quota.simulation.jobs import (
    Attempt,
    Costs,
    Departure,
    Job,
    Run,
    Try,
    after,
    at,
    request_of,
    seconds_of,
)


@dataclass(frozen=True)
class Held:
    """A lease and the attempt that has it; ``departure`` once it was asked to leave."""

    lease: Lease
    asked_seconds: float
    attempt: Try
    departure: Departure | None = None

    @property
    def number(self) -> int:
        return int(self.lease.request.uid)

    @property
    def ends_seconds(self) -> float:
        return self.attempt.ends_seconds if self.departure is None else self.departure.gone_seconds


class Running:
    """``book`` and ``capacity`` are what is held now."""

    def __init__(self, queues: Queues, costs: Costs) -> None:
        self._queues = queues
        self._costs = costs
        self.book = Book()
        self.capacity = Capacity(queues)
        self.runs: list[Run] = []
        self.promised: dict[str, Waiting] = {}
        """Those for whom somebody is leaving, by uid."""
        self._arrivals = count(1)
        self._jobs: dict[int, Job] = {}
        self._left: dict[int, float] = {}
        self._attempts: dict[int, list[Attempt]] = {}
        self._held: dict[str, Held] = {}
        self._ends: list[tuple[datetime, int, str]] = []
        self._wakes: list[tuple[datetime, int, str]] = []
        self._serials = count()

    @property
    def next_end(self) -> datetime | None:
        return self._ends[0][0] if self._ends else None

    @property
    def next_wake(self) -> datetime | None:
        """When somebody reaches the next level of GPU time, or may be asked to leave from then on."""
        return self._wakes[0][0] if self._wakes else None

    def job_of(self, one: Waiting) -> Job:
        return self._jobs[int(one.request.uid)]

    def arrive(self, number: int, job: Job, now: datetime) -> Waiting:
        self._jobs[number], self._left[number], self._attempts[number] = job, job.held_seconds, []
        return Waiting(request_of(job, number), next(self._arrivals), since=now, seen_at=now)

    def start(self, start: Start, now: datetime) -> bool:
        """Give a job its GPUs; whether it is the first time."""
        request = start.waiting.request
        number = int(request.uid)
        lease = Lease(f"{number}.{request.attempt}", request, start.pool, now, now, start.nodes)
        is_first = not self._attempts[number]
        restart = 0.0 if is_first else self._costs.restart_seconds
        began = Try(seconds_of(now), restart, self._left[number])
        self.book = replace(self.book, leases=(*self.book.leases, lease))
        self.capacity.take(self.capacity.hold_of(lease))
        self.promised.pop(request.uid, None)
        self._put(Held(lease, seconds_of(start.waiting.since), began))
        for wake in self._wakes_of(lease):
            heapq.heappush(self._wakes, (wake, next(self._serials), lease.id))
        return is_first

    def end_what_is_over(self, now: datetime) -> Iterator[Waiting]:
        """Take back what is over; next attempts of those who had to go."""
        while self._ends and self._ends[0][0] <= now:
            held = self._take_off(heapq.heappop(self._ends), now)
            if held is not None and (again := self._over(held, now)) is not None:
                yield again
        while self._wakes and (self._wakes[0][0] <= now or self._wakes[0][2] not in self._held):
            heapq.heappop(self._wakes)

    def ask_to_leave(self, leases: Sequence[Lease], mine: Waiting, now: datetime) -> None:
        """Have these go for one that waits."""
        marked: dict[str, Lease] = {}
        for lease in leases:
            held = self._held[lease.id]
            departure = held.attempt.asked(seconds_of(now), self._costs)
            leaving = Leaving(mine.request.uid, mine.request.step, now, at(departure.gone_seconds))
            marked[lease.id] = replace(lease, leaving=leaving)
            self._put(replace(held, lease=marked[lease.id], departure=departure))
        self.book = replace(self.book, leases=tuple(marked.get(one.id, one) for one in self.book.leases))
        self.promised[mine.request.uid] = mine

    def lost(self, leases: Sequence[Lease], now: datetime) -> Mapping[str, float]:
        """As a service would say it: GPU-seconds since the last commit."""
        seconds = seconds_of(now)
        saved = {one.id: self._held[one.id].attempt.saved_at(seconds, self._costs) for one in leases}
        return {one.id: one.request.gpus * (seconds - saved[one.id]) for one in leases}

    def _put(self, held: Held) -> None:
        self._held[held.lease.id] = held
        heapq.heappush(self._ends, (at(held.ends_seconds), next(self._serials), held.lease.id))

    def _take_off(self, end: tuple[datetime, int, str], now: datetime) -> Held | None:
        """Whose end it is; None if it was the one that it would have had without being asked to leave."""
        held = self._held.get(end[2])
        if held is None or at(held.ends_seconds) > now:
            return None
        del self._held[held.lease.id]
        self.book = self.book.release(held.lease.id, self._queues, now)
        self.capacity.give_back(self.capacity.hold_of(held.lease))
        return held

    def _over(self, held: Held, now: datetime) -> Waiting | None:
        """Note an attempt that is over; the next one, if it had to go."""
        job = self._jobs[held.number]
        self._attempts[held.number].append(_attempt_of(held, seconds_of(now)))
        if held.departure is None or held.lease.leaving is None:
            self.runs.append(Run(job, held.lease.request.queue, tuple(self._attempts.pop(held.number))))
            return None
        self._left[held.number] -= held.departure.kept_seconds
        for_whom = held.lease.leaving.uid
        if all(one.leaving is None or one.leaving.uid != for_whom for one in self.book.leases):
            self.promised.pop(for_whom, None)
        return Waiting(self._again(held, job, now), next(self._arrivals), since=now, seen_at=now)

    def _again(self, held: Held, job: Job, now: datetime) -> LeaseRequest:
        """What the next attempt asks for. Whoever declares a limit has reckoned with the way back."""
        attempt = held.lease.request.attempt + 1
        longer = math.ceil(self._costs.restart_seconds)
        return replace(
            held.lease.request,
            node=f"{held.number}.{attempt}",
            attempt=attempt,
            attained=attained(held.lease, now),
            first_start=at(self._attempts[held.number][0].started_seconds).timestamp(),
            seconds=None if job.limit_seconds is None else job.limit_seconds + longer,
        )

    def _wakes_of(self, lease: Lease) -> Iterator[datetime]:
        queue, request = self._queues.find(lease.request.queue), lease.request
        if queue is None:
            return
        if queue.min_runtime_seconds:
            yield lease.granted_at + timedelta(seconds=queue.min_runtime_seconds)
        if queue.preempts_longer:
            thresholds = (3600 * hours - request.attained for hours in queue.attained_gpu_hours)
            yield from (after(lease.granted_at, seconds / request.gpus) for seconds in thresholds if seconds > 0)


def _attempt_of(held: Held, ended_seconds: float) -> Attempt:
    went, began = held.departure, held.attempt
    return Attempt(
        pool=held.lease.pool,
        asked_seconds=held.asked_seconds,
        started_seconds=began.started_seconds,
        ended_seconds=ended_seconds,
        kept_seconds=began.left_seconds if went is None else went.kept_seconds,
        lost_seconds=0.0 if went is None else went.lost_seconds,
        restart_seconds=began.restart_seconds if went is None else went.restart_seconds,
    )


Place = tuple[float, ...]
"""Where one stands among those of its queue; the smallest is next. No two have the same."""
Kind = tuple[str, str | None, int, int, int | None, str]
"""Queue, GPU type, GPUs, members, and the longest that it takes: of two that agree in these, the one with the better
place starts first."""
_Placed = tuple[Place, Waiting]


class Waiters:
    """``place`` gives the order within a queue; it is asked once for each."""

    def __init__(self, place: Callable[[Waiting], Place]) -> None:
        self._place = place
        self._kinds: dict[Kind, list[_Placed]] = {}

    def __iter__(self) -> Iterator[Waiting]:
        return (one for line in self._kinds.values() for _, one in line)

    @property
    def heads(self) -> list[Waiting]:
        """Who is next of each kind."""
        return [line[0][1] for line in self._kinds.values()]

    def add(self, one: Waiting) -> None:
        insort(self._kinds.setdefault(_kind(one.request), []), (self._place(one), one), key=_by_place)

    def remove(self, one: Waiting) -> None:
        kind = _kind(one.request)
        line = self._kinds[kind]
        del line[bisect_left(line, self._place(one), key=_by_place)]
        if not line:
            del self._kinds[kind]

    def first(self, gpus: int) -> list[Waiting]:
        """All who can matter to what becomes of so many GPUs, in the order of arrival."""
        found = [one for kind, line in self._kinds.items() for _, one in line[: _most(kind, gpus)]]
        return sorted(found, key=lambda one: one.arrival)

    def of_queue(self, name: str, gpus: int) -> list[Waiting]:
        """The same of one queue, the best place first."""
        lines = [line[: _most(kind, gpus)] for kind, line in self._kinds.items() if kind[0] == name]
        return [one for _, one in sorted((placed for line in lines for placed in line), key=_by_place)]


def _most(kind: Kind, gpus: int) -> int:
    """One more than can start on so many GPUs: it is the one for whom the rest is kept."""
    return gpus // kind[2] + 1


def _kind(request: LeaseRequest) -> Kind:
    return (request.queue, request.gpu_type, request.gpus, request.members, request.seconds, request.spot)


def _by_place(placed: _Placed) -> Place:
    return placed[0]
