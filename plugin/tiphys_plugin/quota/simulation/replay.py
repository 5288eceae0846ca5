"""Replays a trace in virtual time under a scheduling policy.

The simulation is event-driven: time advances to the next arrival or end of a job.
At each event the policy decides which pending requests start, and queues with
preemption rules preempt trainings. Ledger state, usage history, capacity,
scheduling cycle and victim selection are those of the service itself.

`POLICIES` has the policy of the service, and two baselines: strict first come
first served, and first come first served that skips blocked requests. All keep
the same quotas; they differ in order and in reservations.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial

from tiphys_plugin.quota.lease import AdmissionReason, LeaseRequest, LedgerState, PendingRequest
from tiphys_plugin.quota.queue import Queue
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.cache import SchedulerCache
from tiphys_plugin.quota.scheduler.capacity import Capacity
from tiphys_plugin.quota.scheduler.cycle_result import PoolAssignment
from tiphys_plugin.quota.scheduler.decide import select_admissible
from tiphys_plugin.quota.scheduler.queue_order import queue_position
from tiphys_plugin.quota.simulation.jobs import PreemptionCosts, ReplayResult, TraceJob, next_tick, to_datetime
from tiphys_plugin.quota.simulation.prepare import find_permanent_rejection
from tiphys_plugin.quota.simulation.simulated_cluster import PendingJobs, PositionKey, SimulatedCluster
from tiphys_plugin.quota.simulation.simulated_preemption import SimulatedPreemptionLoop

SchedulingPolicy = Callable[[LedgerState, datetime, SchedulerCache], list[PoolAssignment]]
"""Maps a ledger state and a time to the requests that may start, in order."""


def _select_by_arrival(
    state: LedgerState, _now: datetime, _cache: SchedulerCache, *, skips_blocked: bool
) -> list[PoolAssignment]:
    """Baseline policies: order of arrival over all queues, without reservations.

    A request that does not fit blocks all later ones, unless the policy skips it.
    """
    queues = state.queues
    assert isinstance(queues, Queues)
    capacity = Capacity(queues, state.leases)
    assignments: list[PoolAssignment] = []
    blocked_shapes: set[tuple[str, str | None, int | None, int, str]] = set()
    for queue, pending in _pending_by_arrival(queues, state.pending):
        request = pending.request
        shape = (queue.name, request.type_text, request.min_gpu_memory_mb, request.gpus, request.spot)
        fitting = capacity.find_fitting_pools(queue, request) if shape not in blocked_shapes else []
        if fitting:
            held_gpus = capacity.held_gpus_if_placed(request, fitting[0])
            capacity.add(held_gpus)
            nodes = held_gpus.placement.nodes if held_gpus.placement is not None else ()
            assignments.append(PoolAssignment(pending, fitting[0], nodes))
        elif skips_blocked:
            blocked_shapes.add(shape)  # no GPUs come free during one cycle
        else:
            break
    return assignments


POLICIES: Mapping[str, SchedulingPolicy] = {
    "tiphys": select_admissible,
    "fifo": partial(_select_by_arrival, skips_blocked=False),
    "skip": partial(_select_by_arrival, skips_blocked=True),
}


def _pending_by_arrival(queues: Queues, waiting: Iterable[PendingRequest]) -> Iterator[tuple[Queue, PendingRequest]]:
    """Pending requests of queues that exist and are not stopped, by arrival."""
    for pending in sorted(waiting, key=lambda pending: pending.arrival):
        queue = queues.find(pending.request.queue)
        if queue is not None and not queue.stopped:
            yield queue, pending


def replay_jobs(
    queues: Queues,
    jobs: Sequence[TraceJob],
    policy: SchedulingPolicy = select_admissible,
    advance: Callable[[int], None] = lambda _: None,
    costs: PreemptionCosts | None = None,
) -> ReplayResult:
    """Replay a trace.

    Each job names a queue. ``advance`` is called with the number of jobs that were started or rejected since the last
    call. ``costs`` None: no preemption, whatever the queues say.
    """
    simulation = _Simulation(queues, policy, advance, costs)
    arrivals = deque(enumerate(sorted(jobs, key=lambda job: job.submit_seconds), 1))
    while (now := simulation.next_instant(arrivals[0][1] if arrivals else None)) is not None:
        simulation.end_due_attempts(now)
        while arrivals and to_datetime(arrivals[0][1].submit_seconds) <= now:
            simulation.submit_job(*arrivals.popleft(), now)
        simulation.run_cycle(now)
    return simulation.build_result()


class _Simulation:
    def __init__(
        self, queues: Queues, policy: SchedulingPolicy, advance: Callable[[int], None], costs: PreemptionCosts | None
    ) -> None:
        self._queues = queues
        self._policy = policy
        self._advance = advance
        self._costs = costs or PreemptionCosts()
        self._is_preempting = costs is not None and queues.preempts
        self._total_gpus = sum(sum(queue.gpus.values()) for queue in queues.queues)
        self._cluster = SimulatedCluster(queues, self._costs)
        if policy is select_admissible:
            self._pending = PendingJobs(self._queue_position, _queues_to_see_whole(queues))
        else:
            self._pending = PendingJobs(_arrival_position)
        self._preemption = SimulatedPreemptionLoop(queues, self._cluster, self._pending, self._total_gpus)
        self._rejected: list[tuple[TraceJob, AdmissionReason]] = []
        self._rejections: dict[tuple[object, ...], AdmissionReason | None] = {}
        self._next_cycle: datetime | None = None
        self._cycles = 0

    def next_instant(self, next_job: TraceJob | None) -> datetime | None:
        submission = to_datetime(next_job.submit_seconds) if next_job else None
        instants = [submission, self._cluster.next_end, self._next_cycle]
        if self._is_preempting and self._pending.first_of_each_shape:
            instants.append(self._cluster.next_wakeup)
        return min((instant for instant in instants if instant is not None), default=None)

    def end_due_attempts(self, now: datetime) -> None:
        for next_attempt in self._cluster.end_due_attempts(now):
            self._pending.add(next_attempt)

    def submit_job(self, number: int, job: TraceJob, now: datetime) -> None:
        if job.shape not in self._rejections:
            self._rejections[job.shape] = find_permanent_rejection(self._queues, job)
        if (reason := self._rejections[job.shape]) is not None:
            self._rejected.append((job, reason))
            self._advance(1)
        else:
            self._pending.add(self._cluster.submit_job(number, job, now))

    def run_cycle(self, now: datetime) -> None:
        """Start and preempt attempts; between two ticks of ``look_every_seconds`` only schedule the next cycle."""
        due = next_tick(now, self._costs.look_every_seconds)
        self._next_cycle = due if due > now and self._pending.first_of_each_shape else None
        if due > now:
            return
        self._start_admissible(now)
        while self._is_preempting and self._preemption.run_round(now):
            self.end_due_attempts(now)
            self._start_admissible(now)

    def build_result(self) -> ReplayResult:
        never_started = [
            self._cluster.job_of(waiting_request) for waiting_request in sorted(self._pending, key=_arrival_position)
        ]
        return ReplayResult(
            self._queues, tuple(self._cluster.runs), tuple(self._rejected), tuple(never_started), self._cycles
        )

    def _start_admissible(self, now: datetime) -> None:
        if not any(self._fits(pending.request) for pending in self._pending.first_of_each_shape):
            return
        self._cycles += 1
        state = self._cluster.ledger_state
        free_gpus = self._total_gpus - sum(lease.request.gpus for lease in state.leases)
        promised = tuple(self._cluster.promised.values())
        relevant = (*self._pending.select_relevant(free_gpus, promised), *promised)
        by_arrival = {pending.arrival: pending for pending in relevant}
        pending = tuple(by_arrival[arrival] for arrival in sorted(by_arrival))
        assignments = self._policy(replace(state, pending=pending), now, self._cluster.cache)
        for assignment in assignments:
            self._pending.remove(assignment.pending)
        self._advance(sum([self._cluster.start(assignment, now) for assignment in assignments]))

    def _fits(self, request: LeaseRequest) -> bool:
        """Whether the request would start if no other were pending. Cheap, and mostly false for every shape."""
        queue = self._queues.find(request.queue)
        return queue is not None and not queue.stopped and self._cluster.capacity.fits(queue, request)

    def _queue_position(self, pending: PendingRequest) -> PositionKey:
        return queue_position(self._queues.find(pending.request.queue), pending)


def _arrival_position(pending: PendingRequest) -> PositionKey:
    return (pending.arrival,)


def _queues_to_see_whole(queues: Queues) -> frozenset[str]:
    """The queues of which each request matters: it goes after all before it in its own queue, and others in between.

    Without preemptible backfill the first blocked request of a shape already keeps those behind it from starting.
    """
    return frozenset(queue.name for queue in queues.queues if len(queues.queues) > 1 and queue.is_backfill_preemptible)
