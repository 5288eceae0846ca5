"""Records of a simulation: jobs of a trace, their attempts and runs, and the costs of preemption.

A trace counts time in seconds and the ledger in datetimes; `to_datetime` and
`to_trace_seconds` convert them. A preemption costs the training since the last
commit, the save, and the restart (`PreemptionCosts`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import fsum

from tiphys.protocol.step_spec import SpotUse, sort_by_speed
from tiphys_plugin.quota.lease import AdmissionReason, LeaseRequest
from tiphys_plugin.quota.queues import Queues


@dataclass(frozen=True)
class TraceJob:
    """A job of a trace. ``limit_seconds`` is its declared time limit, after which it is ended; None: not declared."""

    name: str
    submit_seconds: float
    duration_seconds: float
    gpus: int
    queue: str | None = None
    gpu_type: str | None = None
    """Several types of which any may serve the job are separated by ``|``; None: any type."""
    priority: int = 0
    limit_seconds: int | None = None
    members: int = 1
    """Pods that share the GPUs evenly, each on one node."""
    spot: SpotUse = "no"
    """Whether the job may use flavors of spot nodes."""
    namespace: str | None = None
    """Namespace of the job; None: one that may use the queue of the job."""
    speed: tuple[float, ...] = ()
    """How fast the job runs on each type of ``gpu_type``; ``duration_seconds`` is that at speed 1. Empty: 1 on all."""

    @property
    def shape(self) -> tuple[object, ...]:
        """The fields that decide whether a queue file rejects the job for good."""
        return self.queue, self.gpu_type, self.gpus, self.members, self.spot, self.namespace, self.priority

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """The types that may serve the job, in order of preference; empty for any."""
        return tuple(dict.fromkeys(self.gpu_type.split("|"))) if self.gpu_type else ()

    @property
    def speed_by_type(self) -> Mapping[str, float]:
        """Speeds by GPU type; a type that is missing has 1."""
        return dict(zip((self.gpu_type or "").split("|"), self.speed, strict=True)) if self.speed else {}

    @property
    def longest_seconds(self) -> float:
        """Duration on the slowest of its types."""
        return self.duration_seconds / min(self.speed, default=1.0)

    @property
    def is_cut_short(self) -> bool:
        """Whether the job is ended at its limit even on the fastest of its types."""
        return self.limit_seconds is not None and self.limit_seconds < self.duration_seconds / max(
            self.speed, default=1.0
        )


@dataclass(frozen=True)
class Trace:
    """Jobs in order of submission. ``skipped`` counts by reason the rows that cannot be replayed."""

    format_name: str
    jobs: tuple[TraceJob, ...]
    skipped: Mapping[str, int]
    ignored: tuple[str, ...] = ()
    """Columns of the file that the format does not know."""


def build_lease_request(job: TraceJob, number: int) -> LeaseRequest:
    """The lease request of the first attempt of the job; ``number`` is unique in the trace."""
    types = sort_by_speed(job.gpu_types, job.speed_by_type)
    return LeaseRequest(
        uid=str(number),
        step=job.name,
        node_hash=str(number),
        namespace=job.namespace or "trace",
        workflow=job.name,
        instance_hash=job.name,
        run=job.name,
        attempt=1,
        queue=job.queue or "",
        gpus=job.gpus,
        resource="",
        gpu_type=types[0] if len(types) == 1 else None,
        gpu_types=types if len(types) > 1 else (),
        priority=job.priority,
        seconds=job.limit_seconds,
        members=job.members,
        spot=job.spot,
    )


TRACE_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
"""The datetime of second 0 of a trace."""


def to_datetime(seconds: float) -> datetime:
    return TRACE_EPOCH + timedelta(seconds=seconds)


def to_trace_seconds(moment: datetime) -> float:
    return (moment - TRACE_EPOCH).total_seconds()


def next_tick(now: datetime, every_seconds: float) -> datetime:
    """The first multiple of ``every_seconds`` at or after ``now``; ``now`` itself if ``every_seconds`` is 0."""
    if not every_seconds:
        return now
    tick = timedelta(seconds=every_seconds)
    return TRACE_EPOCH + -(-(now - TRACE_EPOCH) // tick) * tick


def add_seconds_rounded_up(moment: datetime, seconds: float) -> datetime:
    """The first microsecond after ``moment`` plus ``seconds``, so that rounding cannot make it too early."""
    return moment + timedelta(microseconds=math.floor(seconds * 1e6) + 1)


@dataclass(frozen=True)
class SimulatedAttempt:
    """An attempt that was pending from ``requested_seconds``, and held GPUs of ``pool`` from its start to its end.

    The held time consists of ``kept_seconds`` of committed training, ``lost_seconds`` of training that the next
    attempt repeats, ``restart_seconds`` before the training, and the save of a preemption.
    """

    pool: str
    requested_seconds: float
    started_seconds: float
    ended_seconds: float
    kept_seconds: float
    lost_seconds: float = 0.0
    restart_seconds: float = 0.0

    @property
    def held_seconds(self) -> float:
        return self.ended_seconds - self.started_seconds


@dataclass(frozen=True)
class SimulatedRun:
    """A finished job; each of its ``attempts`` but the last was preempted. Times are seconds of the trace."""

    job: TraceJob
    queue: str
    attempts: tuple[SimulatedAttempt, ...]

    @property
    def submitted_seconds(self) -> float:
        return self.attempts[0].requested_seconds

    @property
    def started_seconds(self) -> float:
        return self.attempts[0].started_seconds

    @property
    def ended_seconds(self) -> float:
        return self.attempts[-1].ended_seconds

    @property
    def preemptions(self) -> int:
        return len(self.attempts) - 1

    @property
    def trained_seconds(self) -> float:
        """Seconds of training, without what was lost or repeated."""
        return fsum(attempt.kept_seconds for attempt in self.attempts)

    @property
    def gpu_seconds(self) -> float:
        """GPU-seconds that the job held."""
        return self.job.gpus * fsum(attempt.held_seconds for attempt in self.attempts)

    @property
    def lost_gpu_seconds(self) -> float:
        """GPU-seconds that preemptions cost: repeated training, saves and restarts."""
        return self.job.gpus * fsum(attempt.held_seconds - attempt.kept_seconds for attempt in self.attempts)


@dataclass(frozen=True)
class ReplayResult:
    """Result for every job. Jobs that ``never_started`` belong to a stopped queue."""

    queues: Queues
    runs: tuple[SimulatedRun, ...]
    rejected: tuple[tuple[TraceJob, AdmissionReason], ...]
    never_started: tuple[TraceJob, ...]
    cycles: int


@dataclass(frozen=True)
class PreemptionCosts:
    """Costs of preempted trainings, in seconds."""

    checkpoint_every_seconds: float = 600.0
    """Training between two periodic commits."""
    save_seconds: float = 30.0
    """From the preemption to the end of the pods; the save commits all training until the preemption."""
    restart_seconds: float = 60.0
    """From the grant of the GPUs to the first new training step: images, processes, and reading the checkpoint."""
    waits_for_save: bool = True
    """False: a victim is killed at once and restarts from its last periodic commit, as under a scheduler without
    checkpoints on preemption."""
    look_every_seconds: float = 0.0
    """Interval of the preemption loop and of repeated requests; 0: immediate."""


@dataclass(frozen=True)
class RunningAttempt:
    """An attempt that holds its GPUs: first the restart, then the remaining training."""

    started_seconds: float
    restart_seconds: float
    remaining_seconds: float
    """Seconds of training that remained at the start of the attempt, on its GPUs."""
    speed: float = 1.0
    """Of its GPUs, as in `TraceJob.speed`."""

    @property
    def ends_seconds(self) -> float:
        """End of the attempt without a preemption."""
        return self.started_seconds + self.restart_seconds + self.remaining_seconds

    def trained_seconds(self, now: float) -> float:
        """Seconds of training until ``now``."""
        return min(max(0.0, now - self.started_seconds - self.restart_seconds), self.remaining_seconds)

    def committed_seconds(self, now: float, costs: PreemptionCosts) -> float:
        """Seconds of training until ``now`` that periodic commits hold."""
        every = costs.checkpoint_every_seconds
        return min(self.trained_seconds(now), every * math.floor(self.trained_seconds(now) / every))

    def last_commit_seconds(self, now: float, costs: PreemptionCosts) -> float:
        """Time of the newest periodic commit; the start of the attempt if there is none yet."""
        committed = self.committed_seconds(now, costs)
        return self.started_seconds + self.restart_seconds + committed if committed else self.started_seconds

    def preempt(self, now: float, costs: PreemptionCosts) -> "SimulatedPreemption":
        """The effect of a preemption at ``now``."""
        trained = self.trained_seconds(now)
        kept = trained if costs.waits_for_save else self.committed_seconds(now, costs)
        restarting = min(self.restart_seconds, now - self.started_seconds)
        return SimulatedPreemption(
            now + (costs.save_seconds if costs.waits_for_save else 0.0), kept, trained - kept, restarting
        )


@dataclass(frozen=True)
class SimulatedPreemption:
    """End of a preempted attempt, and its time until then: committed training, lost training, and restart."""

    ended_seconds: float
    kept_seconds: float
    lost_seconds: float
    restart_seconds: float
