"""A trace from its first job to its last, in virtual time.

Time goes from one arrival or end to the next. At each such instant the policy
looks once at all who wait, as the service would at whoever asks; book, history
and capacity are the service's own.
"""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from tiphys_plugin.ledger.book import Book
from tiphys_plugin.ledger.capacity import Capacity
from tiphys_plugin.ledger.line import admissible
from tiphys_plugin.ledger.model import Lease, LeaseRequest, Reason, Waiting
from tiphys_plugin.ledger.verdict import Start
from tiphys_plugin.queues import Queues
from tiphys_plugin.simulation.job import Job, request_of
from tiphys_plugin.simulation.policies import Policy
from tiphys_plugin.simulation.rejections import EPOCH, never

_Kind = tuple[str, str | None]
"""Queue and GPU type: of two requests that agree in these, the smaller one fits wherever the larger one does."""


@dataclass(frozen=True)
class Run:
    """A job that was given its GPUs, from ``pool`` of its queue. Seconds are those of the trace."""

    job: Job
    queue: str
    pool: str
    submitted_seconds: float
    started_seconds: float
    ended_seconds: float


@dataclass(frozen=True)
class Replay:
    """What became of every job. ``waiting`` are those that never started: their queue is stopped."""

    queues: Queues
    runs: tuple[Run, ...]
    rejected: tuple[tuple[Job, Reason], ...]
    waiting: tuple[Job, ...]
    looks: int
    """How often the policy was asked."""


def replay(
    queues: Queues, jobs: Sequence[Job], policy: Policy = admissible, advance: Callable[[int], None] = lambda _: None
) -> Replay:
    """Replay ``jobs``, all of which name a queue. ``advance`` is told how many more are started or rejected."""
    world = _World(queues, policy, advance)
    arrivals = deque(enumerate(sorted(jobs, key=lambda job: job.submit_seconds), 1))
    while (now := world.next_instant(arrivals[0][1] if arrivals else None)) is not None:
        world.end_what_is_over(now)
        while arrivals and _at(arrivals[0][1].submit_seconds) <= now:
            world.arrive(*arrivals.popleft(), now)
        world.start_who_may(now)
    return world.replayed()


class _World:
    def __init__(self, queues: Queues, policy: Policy, advance: Callable[[int], None]) -> None:
        self._queues = queues
        self._policy = policy
        self._advance = advance
        self._book = Book()
        self._capacity = Capacity(queues)
        self._line: dict[int, Waiting] = {}
        self._jobs: dict[int, Job] = {}
        self._sizes: dict[_Kind, Counter[int]] = {}
        self._ends: list[tuple[datetime, int, Lease]] = []
        self._runs: list[Run] = []
        self._rejected: list[tuple[Job, Reason]] = []
        self._verdicts: dict[tuple[str | None, str | None, int], Reason | None] = {}
        self._looks = 0

    def next_instant(self, coming: Job | None) -> datetime | None:
        instants = [_at(coming.submit_seconds)] if coming else []
        return min(instants + [end for end, _, _ in self._ends[:1]], default=None)

    def end_what_is_over(self, now: datetime) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, _, lease = heapq.heappop(self._ends)
            self._book = self._book.release(lease.id, self._queues, now)
            self._capacity.give_back(self._capacity.hold_of(lease))

    def arrive(self, number: int, job: Job, now: datetime) -> None:
        kind = (job.queue, job.gpu_type, job.gpus)
        if kind not in self._verdicts:
            self._verdicts[kind] = never(self._queues, job)
        if (why := self._verdicts[kind]) is not None:
            self._rejected.append((job, why))
            self._advance(1)
            return
        self._jobs[number] = job
        self._line[number] = Waiting(request_of(job, number), number, since=now, seen_at=now)
        self._sizes.setdefault(_kind(self._line[number].request), Counter())[job.gpus] += 1

    def start_who_may(self, now: datetime) -> None:
        if not self._somebody_fits():
            return
        self._looks += 1
        book = self._book
        started = self._policy(self._queues, book.leases, book.history, tuple(self._line.values()), now)
        for start in started:
            self._line.pop(start.waiting.arrival)
            self._start(start, now)
        self._advance(len(started))

    def replayed(self) -> Replay:
        waiting = tuple(self._jobs[number] for number in self._line)
        return Replay(self._queues, tuple(self._runs), tuple(self._rejected), waiting, self._looks)

    def _somebody_fits(self) -> bool:
        """Whether a look can start anybody: not if the smallest of each kind finds no room."""
        return any(self._fits(kind, min(sizes)) for kind, sizes in self._sizes.items())

    def _fits(self, kind: _Kind, gpus: int) -> bool:
        queue = self._queues.find(kind[0])
        if queue is None or queue.stopped:
            return False
        smallest = request_of(Job("", 0, 0, gpus, queue=kind[0], gpu_type=kind[1]), 0)
        return bool(self._capacity.fitting(queue, smallest))

    def _start(self, start: Start, now: datetime) -> None:
        waiting, pool, nodes = start
        job, request = self._jobs[waiting.arrival], waiting.request
        self._leave(request)
        lease = Lease(request.uid, request, pool, granted_at=now, check_at=now, nodes=nodes)
        self._book = replace(self._book, leases=(*self._book.leases, lease))
        self._capacity.take(self._capacity.hold_of(lease))
        end = now + timedelta(seconds=job.held_seconds)
        heapq.heappush(self._ends, (end, waiting.arrival, lease))
        self._runs.append(Run(job, request.queue, pool, *map(_seconds, (waiting.since, now, end))))

    def _leave(self, request: LeaseRequest) -> None:
        sizes = self._sizes[_kind(request)]
        sizes[request.gpus] -= 1
        if not sizes[request.gpus]:
            del sizes[request.gpus]
        if not sizes:
            del self._sizes[_kind(request)]


def _kind(request: LeaseRequest) -> _Kind:
    return (request.queue, request.gpu_type)


def _at(seconds: float) -> datetime:
    return EPOCH + timedelta(seconds=seconds)


def _seconds(moment: datetime) -> float:
    return (moment - EPOCH).total_seconds()
