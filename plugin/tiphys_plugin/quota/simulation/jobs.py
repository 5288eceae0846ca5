"""What it costs a training to go for another: what it has done since its last commit, the save, and the way back.

What is replayed: who asks for how many GPUs, when, and for how long.

Seconds of a trace as times of the ledger, and back.

What became of the jobs of a replay.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from math import fsum

from tiphys.protocol.step_spec import SpotUse
from tiphys_plugin.quota.lease import LeaseRequest, Reason
from tiphys_plugin.quota.queues import Queues


@dataclass(frozen=True)
class Job:
    """``limit_seconds`` is the longest that it said it would take, and it is ended then; None: it said nothing."""

    name: str
    submit_seconds: float
    duration_seconds: float
    gpus: int
    queue: str | None = None
    gpu_type: str | None = None
    priority: int = 0
    limit_seconds: int | None = None
    members: int = 1
    """Pods that share its GPUs evenly, each on one node."""
    spot: SpotUse = "no"
    """Whether flavors of spot nodes are for it."""

    @property
    def held_seconds(self) -> float:
        """How long it holds its GPUs once it has them."""
        return self.duration_seconds if self.limit_seconds is None else min(self.duration_seconds, self.limit_seconds)


@dataclass(frozen=True)
class Trace:
    """``jobs`` in order of submission. ``skipped`` counts rows that are no such jobs, by why."""

    form: str
    jobs: tuple[Job, ...]
    skipped: Mapping[str, int]
    ignored: tuple[str, ...] = ()
    """Columns that nobody reads, in a form of which somebody might think so."""


def request_of(job: Job, number: int) -> LeaseRequest:
    """What an attempt of the job would ask of the ledger; ``number`` tells it from all others."""
    return LeaseRequest(
        uid=str(number),
        step=job.name,
        node=str(number),
        namespace="trace",
        workflow=job.name,
        instance=job.name,
        run=job.name,
        attempt=1,
        queue=job.queue or "",
        gpus=job.gpus,
        gpu_type=job.gpu_type,
        priority=job.priority,
        seconds=job.limit_seconds,
        members=job.members,
        spot=job.spot,
    )


EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
"""Second zero of a trace."""


def at(seconds: float) -> datetime:
    return EPOCH + timedelta(seconds=seconds)


def seconds_of(moment: datetime) -> float:
    return (moment - EPOCH).total_seconds()


def next_tick(now: datetime, every_seconds: float) -> datetime:
    """``now``, or the next multiple of ``every_seconds``; with 0 any time is one."""
    if not every_seconds:
        return now
    tick = timedelta(seconds=every_seconds)
    return EPOCH + -(-(now - EPOCH) // tick) * tick


def after(moment: datetime, seconds: float) -> datetime:
    """The first time at which so many seconds are over, however they are rounded."""
    return moment + timedelta(microseconds=math.floor(seconds * 1e6) + 1)


@dataclass(frozen=True)
class Attempt:
    """It waited from ``asked_seconds`` on, and held GPUs of ``pool`` from its start to its end.

    Of that time ``kept_seconds`` were training that counts, ``lost_seconds`` training that the next attempt does
    again, ``restart_seconds`` the way back; the rest went by while it saved because it had to go.
    """

    pool: str
    asked_seconds: float
    started_seconds: float
    ended_seconds: float
    kept_seconds: float
    lost_seconds: float = 0.0
    restart_seconds: float = 0.0

    @property
    def held_seconds(self) -> float:
        return self.ended_seconds - self.started_seconds


@dataclass(frozen=True)
class Run:
    """A job that was given its GPUs, and had to go before each of its ``attempts`` but the last had done all.

    Seconds are those of the trace.
    """

    job: Job
    queue: str
    attempts: tuple[Attempt, ...]

    @property
    def submitted_seconds(self) -> float:
        return self.attempts[0].asked_seconds

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
    def gpu_seconds(self) -> float:
        """All that it held."""
        return self.job.gpus * fsum(one.held_seconds for one in self.attempts)

    @property
    def lost_gpu_seconds(self) -> float:
        """What it held and did not train for good: training done again, saves because it had to go, ways back."""
        return self.job.gpus * fsum(one.held_seconds - one.kept_seconds for one in self.attempts)


@dataclass(frozen=True)
class Replay:
    """What became of every job. ``waiting`` are those that never started: their queue is stopped."""

    queues: Queues
    runs: tuple[Run, ...]
    rejected: tuple[tuple[Job, Reason], ...]
    waiting: tuple[Job, ...]
    looks: int
    """How often the policy was asked."""


@dataclass(frozen=True)
class Costs:
    """Of trainings that are asked to leave, in seconds.

    ``waits_for_save`` False: none is asked, each is ended at once and goes back to its last commit, as where
    nobody knows of checkpoints.
    """

    checkpoint_every_seconds: float = 600.0
    """Training between two commits that nobody asked for."""
    save_seconds: float = 30.0
    """From being asked to being gone, with all that was done until then committed."""
    restart_seconds: float = 60.0
    """From having GPUs again to training again: images, processes, and reading the checkpoint."""
    waits_for_save: bool = True
    look_every_seconds: float = 0.0
    """How often a service looks who has to go, and who waits asks; 0: at once."""


@dataclass(frozen=True)
class Try:
    """An attempt from the moment it has its GPUs: first the way back, then training until nothing of it is left."""

    started_seconds: float
    restart_seconds: float
    left_seconds: float
    """Training that was still to be done when it started."""

    @property
    def ends_seconds(self) -> float:
        """If nobody asks it to leave."""
        return self.started_seconds + self.restart_seconds + self.left_seconds

    def trained(self, now: float) -> float:
        """Seconds of training until ``now``."""
        return min(max(0.0, now - self.started_seconds - self.restart_seconds), self.left_seconds)

    def committed(self, now: float, costs: Costs) -> float:
        """Of these, what a checkpoint holds that nobody asked for."""
        every = costs.checkpoint_every_seconds
        return min(self.trained(now), every * math.floor(self.trained(now) / every))

    def saved_at(self, now: float, costs: Costs) -> float:
        """When the newest checkpoint was committed; its start, if there is none yet."""
        committed = self.committed(now, costs)
        return self.started_seconds + self.restart_seconds + committed if committed else self.started_seconds

    def asked(self, now: float, costs: Costs) -> "Departure":
        """What becomes of it if it is asked to leave at ``now``."""
        trained = self.trained(now)
        kept = trained if costs.waits_for_save else self.committed(now, costs)
        restarting = min(self.restart_seconds, now - self.started_seconds)
        return Departure(now + (costs.save_seconds if costs.waits_for_save else 0.0), kept, trained - kept, restarting)


@dataclass(frozen=True)
class Departure:
    """When it is gone, and of its time until then: training that is kept, that is lost, and the way back before."""

    gone_seconds: float
    kept_seconds: float
    lost_seconds: float
    restart_seconds: float
