"""What is replayed: who asks for how many GPUs, when, and for how long."""

from collections.abc import Mapping
from dataclasses import dataclass

from tiphys.protocol.policy import SpotUse
from tiphys_plugin.ledger.model import LeaseRequest


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
