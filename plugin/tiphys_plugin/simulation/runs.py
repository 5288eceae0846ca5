"""What became of the jobs of a replay."""

from dataclasses import dataclass
from math import fsum

from tiphys_plugin.ledger.model import Reason
from tiphys_plugin.queues import Queues
from tiphys_plugin.simulation.job import Job


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
