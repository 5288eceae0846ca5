"""A trace from its first job to its last, in virtual time.

Time goes from one arrival or end to the next. At each such instant the policy
looks at those who wait, as the service would at whoever asks, and where queues
have it so, trainings are asked to leave. Book, history, capacity, the decision
on GPUs and the choice of who has to go are the service's own.

Who may start now: the service's own rule, and two plain ones to compare it with.

All hold the same quotas; they differ in order and in what is kept for whom.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime

from tiphys_plugin.quota.lease import Lease, LeaseRequest, Reason, Waiting
from tiphys_plugin.quota.queues import Queue, Queues
from tiphys_plugin.quota.scheduler.capacity import Capacity
from tiphys_plugin.quota.scheduler.cycle import Start, admissible
from tiphys_plugin.quota.scheduler.fair_share import Consumed, place_in_queue
from tiphys_plugin.quota.simulation.jobs import Costs, Job, Replay, at, next_tick
from tiphys_plugin.quota.simulation.prepare import never
from tiphys_plugin.quota.simulation.simulated_cluster import Place, Running, Waiters
from tiphys_plugin.quota.simulation.simulated_preemption import Going

Policy = Callable[[Queues, Sequence[Lease], Sequence[Consumed], Iterable[Waiting], datetime], list[Start]]
"""Queues, leases, history, who waits, and the time; everybody who may start, in order."""


def fifo(
    queues: Queues, leases: Sequence[Lease], _history: Sequence[Consumed], waiting: Iterable[Waiting], _now: datetime
) -> list[Start]:
    """Strictly in order of arrival, all queues in one line: whoever does not fit stops everybody behind it."""
    return list(_first_fit(queues, leases, waiting, passes_over=False))


def skip(
    queues: Queues, leases: Sequence[Lease], _history: Sequence[Consumed], waiting: Iterable[Waiting], _now: datetime
) -> list[Start]:
    """In order of arrival, passing over whoever does not fit, and keeping nothing for anybody."""
    return list(_first_fit(queues, leases, waiting, passes_over=True))


POLICIES: Mapping[str, Policy] = {"tiphys": admissible, "fifo": fifo, "skip": skip}


def _first_fit(
    queues: Queues, leases: Sequence[Lease], waiting: Iterable[Waiting], *, passes_over: bool
) -> Iterator[Start]:
    capacity = Capacity(queues, tuple(leases))
    too_large: set[tuple[str, str | None, int | None, int, str]] = set()
    for queue, one in _pending_by_arrival(queues, waiting):
        kind = (queue.name, one.request.gpu_type, one.request.min_gpu_memory_mb, one.request.gpus, one.request.spot)
        pool = next(iter(capacity.fitting(queue, one.request)), None) if kind not in too_large else None
        if pool is not None:
            hold = capacity.placed(one.request, pool)
            capacity.take(hold)
            yield Start(one, pool, hold.placement.nodes if hold.placement is not None else ())
        elif passes_over:
            too_large.add(kind)  # nothing comes back during one look
        else:
            return


def _pending_by_arrival(queues: Queues, waiting: Iterable[Waiting]) -> Iterator[tuple[Queue, Waiting]]:
    """Everybody whose queue admits at all."""
    for one in sorted(waiting, key=lambda one: one.arrival):
        queue = queues.find(one.request.queue)
        if queue is not None and not queue.stopped:
            yield queue, one


def replay(
    queues: Queues,
    jobs: Sequence[Job],
    policy: Policy = admissible,
    advance: Callable[[int], None] = lambda _: None,
    costs: Costs | None = None,
) -> Replay:
    """Replay ``jobs``, all of which name a queue. ``advance`` is told how many more are started or rejected.

    ``costs`` are those of trainings that have to go where their queue has it so; None: nobody ever has to.
    """
    world = _World(queues, policy, advance, costs)
    arrivals = deque(enumerate(sorted(jobs, key=lambda job: job.submit_seconds), 1))
    while (now := world.next_instant(arrivals[0][1] if arrivals else None)) is not None:
        world.end_what_is_over(now)
        while arrivals and at(arrivals[0][1].submit_seconds) <= now:
            world.arrive(*arrivals.popleft(), now)
        world.look(now)
    return world.replayed()


class _World:
    def __init__(self, queues: Queues, policy: Policy, advance: Callable[[int], None], costs: Costs | None) -> None:
        self._queues = queues
        self._policy = policy
        self._advance = advance
        self._costs = costs or Costs()
        self._some_may_go = costs is not None and queues.preempts
        self._gpus = _all_gpus(queues)
        self._running = Running(queues, self._costs)
        self._waiters = Waiters(self._place if policy is admissible else _by_arrival)
        self._going = Going(queues, self._running, self._waiters, self._gpus)
        self._rejected: list[tuple[Job, Reason]] = []
        self._verdicts: dict[tuple[str | None, str | None, int, int, str], Reason | None] = {}
        self._next_look: datetime | None = None
        self._looks = 0

    def next_instant(self, coming: Job | None) -> datetime | None:
        instants = [at(coming.submit_seconds) if coming else None, self._running.next_end, self._next_look]
        if self._some_may_go and self._waiters.heads:
            instants.append(self._running.next_wake)
        return min((one for one in instants if one is not None), default=None)

    def end_what_is_over(self, now: datetime) -> None:
        for again in self._running.end_what_is_over(now):
            self._waiters.add(again)

    def arrive(self, number: int, job: Job, now: datetime) -> None:
        kind = (job.queue, job.gpu_type, job.gpus, job.members, job.spot)
        if kind not in self._verdicts:
            self._verdicts[kind] = never(self._queues, job)
        if (why := self._verdicts[kind]) is not None:
            self._rejected.append((job, why))
            self._advance(1)
        else:
            self._waiters.add(self._running.arrive(number, job, now))

    def look(self, now: datetime) -> None:
        """See who may start and who has to go, or come back when the time for it has come."""
        due = next_tick(now, self._costs.look_every_seconds)
        self._next_look = due if due > now and self._waiters.heads else None
        if due > now:
            return
        self._start_who_may(now)
        while self._some_may_go and self._going.look(now):
            self.end_what_is_over(now)
            self._start_who_may(now)

    def replayed(self) -> Replay:
        waiting = [self._running.job_of(one) for one in sorted(self._waiters, key=_by_arrival)]
        return Replay(self._queues, tuple(self._running.runs), tuple(self._rejected), tuple(waiting), self._looks)

    def _start_who_may(self, now: datetime) -> None:
        if not any(self._fits(one.request) for one in self._waiters.heads):
            return
        self._looks += 1
        book = self._running.book
        free = self._gpus - sum(one.request.gpus for one in book.leases)
        line = {one.arrival: one for one in (*self._waiters.first(free), *self._running.promised.values())}
        started = self._policy(self._queues, book.leases, book.history, [line[n] for n in sorted(line)], now)
        for start in started:
            self._waiters.remove(start.waiting)
        self._advance(sum([self._running.start(start, now) for start in started]))

    def _fits(self, request: LeaseRequest) -> bool:
        """Whether it would start if nobody else waited; mostly none of any kind would."""
        queue = self._queues.find(request.queue)
        return queue is not None and not queue.stopped and self._running.capacity.fits(queue, request)

    def _place(self, one: Waiting) -> Place:
        return place_in_queue(self._queues.find(one.request.queue), one.request, one.arrival)


def _by_arrival(one: Waiting) -> Place:
    return (one.arrival,)


def _all_gpus(queues: Queues) -> int:
    """The most that can be held at once."""
    return sum(sum(queue.gpus.values()) for queue in queues.queues)
