"""Running and pending jobs of a simulation, over a GPU ledger state.

`PendingJobs` groups thousands of pending jobs by shape. No more jobs of one shape can
start at once than the GPUs suffice for, so a scheduling cycle considers only the
first few jobs of each shape. The result is the same, and a trace of years takes
seconds.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import chain, count, islice, takewhile

from tiphys_plugin.quota.lease import Lease, LeaseRequest, LedgerState, PendingRequest, PreemptionNotice
from tiphys_plugin.quota.ledger.transitions import release
from tiphys_plugin.quota.preemption.victims import VictimSelection
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler import pools
from tiphys_plugin.quota.scheduler.cache import SchedulerCache
from tiphys_plugin.quota.scheduler.capacity import Capacity
from tiphys_plugin.quota.scheduler.cycle import PROMISE_DURATION
from tiphys_plugin.quota.scheduler.cycle_result import PoolAssignment
from tiphys_plugin.quota.scheduler.fair_share import attained_gpu_seconds, level_ends
from tiphys_plugin.quota.scheduler.queue_order import drop_unused_attained, patience_ends_at, request_of_lease
from tiphys_plugin.quota.simulation.jobs import (
    PreemptionCosts,
    RunningAttempt,
    SimulatedAttempt,
    SimulatedPreemption,
    SimulatedRun,
    TraceJob,
    add_seconds_rounded_up,
    build_lease_request,
    to_datetime,
    to_trace_seconds,
)


@dataclass(frozen=True)
class _RemainingTraining:
    """What a job still has to train: seconds at speed 1, and seconds until its limit, at any speed."""

    seconds_at_speed_1: float
    limit_seconds: float

    def seconds_at(self, speed: float) -> float:
        """Seconds of training on GPUs of this speed."""
        return min(self.seconds_at_speed_1 / speed, self.limit_seconds)

    def after(self, kept_seconds: float, speed: float) -> "_RemainingTraining":
        """What remains after ``kept_seconds`` on GPUs of this speed."""
        return _RemainingTraining(self.seconds_at_speed_1 - kept_seconds * speed, self.limit_seconds - kept_seconds)


@dataclass(frozen=True)
class RunningJob:
    """A lease and its attempt; ``preemption`` is set for a victim."""

    lease: Lease
    requested_seconds: float
    attempt: RunningAttempt
    preemption: SimulatedPreemption | None = None

    @property
    def number(self) -> int:
        return int(self.lease.request.uid)

    @property
    def ends_seconds(self) -> float:
        return self.attempt.ends_seconds if self.preemption is None else self.preemption.ended_seconds


class SimulatedCluster:
    """Running jobs. ``ledger_state`` and ``capacity`` describe the GPUs that they hold."""

    def __init__(self, queues: Queues, costs: PreemptionCosts) -> None:
        self._queues = queues
        self._costs = costs
        self.ledger_state = LedgerState(queues=queues)
        self.cache = SchedulerCache()
        self.capacity = Capacity(queues)
        self.runs: list[SimulatedRun] = []
        self.promised: dict[str, PendingRequest] = {}
        """Preemptors, and jobs that move, that have not started since, by uid."""
        self._arrivals = count(1)
        self._jobs: dict[int, TraceJob] = {}
        self._remaining: dict[int, _RemainingTraining] = {}
        self._attempts: dict[int, list[SimulatedAttempt]] = {}
        self._running: dict[str, RunningJob] = {}
        self._ends: list[tuple[datetime, int, str]] = []
        self._wakeups: list[tuple[datetime, int, str]] = []
        self._serials = count()

    @property
    def next_end(self) -> datetime | None:
        return self._ends[0][0] if self._ends else None

    @property
    def next_wakeup(self) -> datetime | None:
        """When a job next reaches a level of attained service, the end of its protection, or that of its patience."""
        return self._wakeups[0][0] if self._wakeups else None

    def job_of(self, pending: PendingRequest) -> TraceJob:
        return self._jobs[int(pending.request.uid)]

    def submit_job(self, number: int, job: TraceJob, now: datetime) -> PendingRequest:
        limit_seconds = math.inf if job.limit_seconds is None else job.limit_seconds
        self._jobs[number], self._attempts[number] = job, []
        self._remaining[number] = _RemainingTraining(job.duration_seconds, limit_seconds)
        return self._wait(build_lease_request(job, number), now)

    def start(self, assignment: PoolAssignment, now: datetime) -> bool:
        """Start an attempt; returns whether it is the first attempt of its job."""
        request = request_of_lease(self._queues, assignment.pending, assignment.pending.request)
        number = int(request.uid)
        lease = Lease(f"{number}.{request.attempt}", request, assignment.pool, now, now, assignment.nodes)
        is_first = not self._attempts[number]
        restart_seconds = 0.0 if is_first else self._costs.restart_seconds
        speed = self._jobs[number].speed_by_type.get(self._gpu_type_of(lease) or "", 1.0)
        remaining_seconds = self._remaining[number].seconds_at(speed)
        attempt = RunningAttempt(to_trace_seconds(now), restart_seconds, remaining_seconds, speed)
        self.ledger_state = replace(self.ledger_state, leases=(*self.ledger_state.leases, lease))
        self.capacity.add(self.capacity.held_gpus_of_lease(lease))
        self.promised.pop(request.uid, None)
        self._track(RunningJob(lease, to_trace_seconds(assignment.pending.since), attempt))
        for wakeup in self._find_wakeups(lease, remaining_seconds):
            heapq.heappush(self._wakeups, (wakeup, next(self._serials), lease.id))
        return is_first

    def end_due_attempts(self, now: datetime) -> Iterator[PendingRequest]:
        """Release ended attempts, and yield the next requests of preempted jobs."""
        while self._ends and self._ends[0][0] <= now:
            ended = self._pop_ended(heapq.heappop(self._ends), now)
            if ended is not None and (next_request := self._finish_attempt(ended, now)) is not None:
                yield next_request
        while self._wakeups and (self._wakeups[0][0] <= now or self._is_stale(self._wakeups[0][2])):
            heapq.heappop(self._wakeups)

    def preempt(self, selection: VictimSelection, preemptor: PendingRequest, now: datetime) -> None:
        """Preempt the selected leases for ``preemptor``."""
        marked: dict[str, Lease] = {}
        for lease in selection.leases:
            running = self._running[lease.id]
            preemption = running.attempt.preempt(to_trace_seconds(now), self._costs)
            notice = PreemptionNotice(
                *(preemptor.request.uid, preemptor.request.step, now, to_datetime(preemption.ended_seconds)),
                moves=lease.id in selection.moved_leases,
            )
            marked[lease.id] = replace(lease, preemption=notice)
            self._track(replace(running, lease=marked[lease.id], preemption=preemption))
        self.ledger_state = replace(
            self.ledger_state, leases=tuple(marked.get(lease.id, lease) for lease in self.ledger_state.leases)
        )
        self.promised[preemptor.request.uid] = preemptor

    def lost_gpu_seconds(self, leases: Sequence[Lease], now: datetime) -> Mapping[str, float]:
        """A `LossEstimator`: GPU-seconds since the last commit, by lease id."""
        seconds = to_trace_seconds(now)
        saved_at = {
            lease.id: self._running[lease.id].attempt.last_commit_seconds(seconds, self._costs) for lease in leases
        }
        return {lease.id: lease.request.gpus * (seconds - saved_at[lease.id]) for lease in leases}

    def _track(self, running: RunningJob) -> None:
        self._running[running.lease.id] = running
        heapq.heappush(self._ends, (to_datetime(running.ends_seconds), next(self._serials), running.lease.id))

    def _pop_ended(self, end: tuple[datetime, int, str], now: datetime) -> RunningJob | None:
        """The job that ends; None for an end that a preemption has replaced."""
        ended = self._running.get(end[2])
        if ended is None or to_datetime(ended.ends_seconds) > now:
            return None
        del self._running[ended.lease.id]
        # What waits is kept by `PendingJobs`.
        self.ledger_state = replace(release(self.ledger_state, ended.lease.id, now, self.cache), pending=())
        self.capacity.remove(self.capacity.held_gpus_of_lease(ended.lease))
        return ended

    def _finish_attempt(self, ended: RunningJob, now: datetime) -> PendingRequest | None:
        """Record an ended attempt; returns the request of the next attempt if it was preempted."""
        job = self._jobs[ended.number]
        self._attempts[ended.number].append(_build_attempt_record(ended, to_trace_seconds(now)))
        if ended.preemption is None or ended.lease.preemption is None:
            self.runs.append(SimulatedRun(job, ended.lease.request.queue, tuple(self._attempts.pop(ended.number))))
            return None
        kept_seconds, speed = ended.preemption.kept_seconds, ended.attempt.speed
        self._remaining[ended.number] = self._remaining[ended.number].after(kept_seconds, speed)
        preemptor_uid = ended.lease.preemption.uid
        if all(lease.preemption is None or lease.preemption.uid != preemptor_uid for lease in self.ledger_state.leases):
            self._keep_for_preemptor(preemptor_uid, now)
        next_request = self._wait(self._build_next_request(ended, job, now), now)
        if ended.lease.preemption.moves:
            next_request = self.promised[next_request.request.uid] = replace(next_request, promised_at=now)
        return next_request

    def _wait(self, request: LeaseRequest, now: datetime) -> PendingRequest:
        """A request that begins to wait, and the wakeup at which it may preempt."""
        pending = PendingRequest(request, next(self._arrivals), since=now, seen_at=now)
        queue = self._queues.find(request.queue)
        if queue is not None and queue.preempts and (at := patience_ends_at(queue, pending)) > now:
            heapq.heappush(self._wakeups, (at, next(self._serials), ""))
        return pending

    def _keep_for_preemptor(self, uid: str, now: datetime) -> None:
        """As the ledger keeps the freed GPUs for a preemptor that is still pending."""
        if (preemptor := self.promised.get(uid)) is not None:
            self.promised[uid] = replace(preemptor, promised_at=now)

    def has_promise(self, uid: str, now: datetime) -> bool:
        """Whether GPUs of victims are or will be kept for this job."""
        preemptor = self.promised.get(uid)
        if preemptor is None:
            return False
        return preemptor.promised_at is None or now - preemptor.promised_at <= PROMISE_DURATION

    def _build_next_request(self, ended: RunningJob, job: TraceJob, now: datetime) -> LeaseRequest:
        """The request of the next attempt. A declared time limit is extended by the restart."""
        attempt = ended.lease.request.attempt + 1
        restart_seconds = math.ceil(self._costs.restart_seconds)
        return drop_unused_attained(
            self._queues,
            replace(
                ended.lease.request,
                node_hash=f"{ended.number}.{attempt}",
                attempt=attempt,
                attained=attained_gpu_seconds(ended.lease, now),
                first_start=to_datetime(self._attempts[ended.number][0].started_seconds).timestamp(),
                seconds=None if job.limit_seconds is None else job.limit_seconds + restart_seconds,
            ),
        )

    def _is_stale(self, lease_id: str) -> bool:
        """Whether a wakeup was for a lease that has ended; those for requests have no lease."""
        return bool(lease_id) and lease_id not in self._running

    def _gpu_type_of(self, lease: Lease) -> str | None:
        """The type of the GPUs of a lease; None if neither its pool nor its nodes tell it."""
        kind, inventory = pools.gpu_kind_in_pool(lease.request, lease.pool), self._queues.node_inventory
        if kind is None and lease.nodes and inventory is not None:
            kind = inventory.nodes[inventory.node_numbers[lease.nodes[0]]].gpu_type
        return None if kind is None else self._queues.flavor_set.gpu_type_of(kind)

    def _find_wakeups(self, lease: Lease, remaining_seconds: float) -> Iterator[datetime]:
        queue, request = self._queues.find(lease.request.queue), lease.request
        if queue is None:
            return
        if queue.protected_seconds:
            yield lease.granted_at + timedelta(seconds=queue.protected_seconds)
        if queue.moves_trainings:
            yield lease.granted_at + timedelta(seconds=queue.settled_seconds)
        if queue.preempts_longer:
            most = request.attained + request.gpus * remaining_seconds
            thresholds = takewhile(lambda reached: reached < most, level_ends(queue, request.most_gpus))
            yield from (
                add_seconds_rounded_up(lease.granted_at, (reached - request.attained) / request.gpus)
                for reached in thresholds
                if reached > request.attained
            )


def _build_attempt_record(ended: RunningJob, ended_seconds: float) -> SimulatedAttempt:
    preemption, attempt = ended.preemption, ended.attempt
    return SimulatedAttempt(
        pool=ended.lease.pool,
        requested_seconds=ended.requested_seconds,
        started_seconds=attempt.started_seconds,
        ended_seconds=ended_seconds,
        kept_seconds=attempt.remaining_seconds if preemption is None else preemption.kept_seconds,
        lost_seconds=0.0 if preemption is None else preemption.lost_seconds,
        restart_seconds=attempt.restart_seconds if preemption is None else preemption.restart_seconds,
    )


PositionKey = tuple[float, ...]
"""Position within a queue, unique there; the smallest is next."""
JobShape = tuple[str, str | None, int, int, int | None, str]
"""Queue, GPU type, GPUs, members, time limit and use of spot nodes. Of two jobs of one shape, the one with the smaller
position starts first."""
_PositionedRequest = tuple[PositionKey, PendingRequest]


class PendingJobs:
    """Pending requests by shape. ``position_of`` gives the order within a queue.

    Requests of ``whole_queues`` are never left out.
    """

    def __init__(self, position_of: Callable[[PendingRequest], PositionKey], whole_queues: Container[str] = ()) -> None:
        self.position_of = position_of
        self._whole_queues = whole_queues
        self._by_shape: dict[JobShape, list[_PositionedRequest]] = {}

    def __iter__(self) -> Iterator[PendingRequest]:
        return (pending for entries in self._by_shape.values() for _, pending in entries)

    @property
    def first_of_each_shape(self) -> list[PendingRequest]:
        """The first request of each shape."""
        return [entries[0][1] for entries in self._by_shape.values()]

    def add(self, pending: PendingRequest) -> None:
        same_shape = self._by_shape.setdefault(_job_shape(pending.request), [])
        insort(same_shape, (self.position_of(pending), pending), key=_by_position)

    def remove(self, pending: PendingRequest) -> None:
        shape = _job_shape(pending.request)
        entries = self._by_shape[shape]
        del entries[bisect_left(entries, self.position_of(pending), key=_by_position)]
        if not entries:
            del self._by_shape[shape]

    def select_relevant(self, gpus: int, promised: Sequence[PendingRequest]) -> list[PendingRequest]:
        """The requests that can affect the use of ``gpus`` free GPUs, by arrival.

        ``promised`` are the requests that have victims: those before them in position and arrival also go first.
        """
        entries = chain.from_iterable(self._relevant_of_shape(shape, gpus, promised) for shape in self._by_shape)
        relevant = [pending for _, pending in entries]
        return sorted(relevant, key=lambda pending: pending.arrival)

    def select_relevant_in_queue(
        self, name: str, gpus: int, promised: Sequence[PendingRequest]
    ) -> list[PendingRequest]:
        """The requests of one queue that can affect the use of ``gpus`` free GPUs, by position."""
        shapes = [shape for shape in self._by_shape if shape[0] == name]
        relevant = (entry for shape in shapes for entry in self._relevant_of_shape(shape, gpus, promised))
        return [pending for _, pending in sorted(relevant, key=_by_position)]

    def goes_first(self, pending: PendingRequest, promised: Sequence[PendingRequest]) -> bool:
        """Whether the request is one of ``promised``, or was before one of them when its victims were chosen."""
        return any(
            pending.request.queue == other.request.queue
            and pending.arrival <= other.arrival
            and self.position_of(pending) <= self.position_of(other)
            for other in promised
        )

    def _relevant_of_shape(
        self, shape: JobShape, gpus: int, promised: Sequence[PendingRequest]
    ) -> Iterable[_PositionedRequest]:
        entries, most = self._by_shape[shape], _max_relevant(shape, gpus)
        own = [pending for pending in promised if pending.request.queue == shape[0]]
        if shape[0] in self._whole_queues:
            return entries
        if not own:
            return entries[:most]
        going_first = (entry for entry in entries[most:] if self.goes_first(entry[1], own))
        return chain(entries[:most], islice(going_first, most))


def _max_relevant(shape: JobShape, gpus: int) -> int:
    """One request more than can start on ``gpus`` GPUs: the last one may get a reservation."""
    return gpus // shape[2] + 1


def _job_shape(request: LeaseRequest) -> JobShape:
    return (request.queue, request.type_text, request.gpus, request.members, request.seconds, request.spot)


def _by_position(placed: _PositionedRequest) -> PositionKey:
    return placed[0]
