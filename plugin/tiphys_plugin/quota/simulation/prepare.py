"""What a trace does not say and a rehearsal needs: whose jobs they are, and how long they would say they take.

Which jobs the service would turn away, and why: whatever is held, and whoever waits.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from tiphys.errors import UsageError
from tiphys_plugin.quota.lease import Reason, Rejected
from tiphys_plugin.quota.queues import Queue, Queues
from tiphys_plugin.quota.scheduler import pools
from tiphys_plugin.quota.scheduler.decide import State, decide
from tiphys_plugin.quota.simulation.jobs import EPOCH, Job, request_of


def never(queues: Queues, job: Job) -> Reason | None:
    """Why the job is rejected even by a cluster that nobody uses; None if it is not."""
    answer = decide(State(queues), request_of(job, 0), 1, EPOCH)
    return answer.reason if isinstance(answer, Rejected) else None


def declared(jobs: Sequence[Job]) -> tuple[Job, ...]:
    """Each job with its duration as the longest that it says it takes, rounded up to a second."""
    return tuple(replace(job, limit_seconds=max(1, math.ceil(job.duration_seconds))) for job in jobs)


def spread(jobs: Sequence[Job], queues: Queues) -> tuple[Job, ...]:
    """Each job that is larger than the largest node of ``queues`` over the fewest nodes that can share it evenly."""
    largest = max((node.gpus for node in queues.nodes or ()), default=0)

    def over_nodes(job: Job) -> Job:
        if not largest or job.members > 1 or job.gpus <= largest:
            return job
        fewest = -(-job.gpus // largest)
        return replace(job, members=next(n for n in range(fewest, job.gpus + 1) if job.gpus % n == 0))

    return tuple(map(over_nodes, jobs))


def given_to(jobs: Sequence[Job], queues: Queues, name: str) -> tuple[Job, ...]:
    """Each job that names no queue in the queue ``name``.

    Raises:
        UsageError: there is no such queue.
    """
    if queues.find(name) is None:
        known = ", ".join(queues.names) or "none"
        raise UsageError(f"there is no queue {name!r} for the jobs of the trace; the queues are: {known}")
    return tuple(job if job.queue else replace(job, queue=name) for job in jobs)


def shared_out(jobs: Sequence[Job], queues: Queues, seed: int) -> tuple[Job, ...]:
    """Each job that names no queue in one that could serve it, drawn in proportion to the quotas.

    A job that none could ever serve goes to one of all of them, where it is rejected.

    Raises:
        UsageError: there is no queue.
    """
    if not queues.queues:
        raise UsageError("the jobs of the trace need a queue, and the queue file has none; add `queues: [{name: …}]`")
    draw = random.Random(seed)  # noqa: S311  no secret: whoever repeats the seed gets the same queues
    odds: dict[tuple[int, str | None, str], list[int]] = {}

    def drawn(job: Job) -> Job:
        if job.queue:
            return job
        kind = (job.gpus, job.gpu_type, job.spot)
        if kind not in odds:
            odds[kind] = _odds(job, queues)
        return replace(job, queue=draw.choices(queues.names, odds[kind])[0])

    return tuple(map(drawn, jobs))


def _odds(job: Job, queues: Queues) -> list[int]:
    weights = [_quota(replace(job, queue=queue.name), queues, queue) for queue in queues.queues]
    return weights if any(weights) else [1] * len(weights)


def _quota(job: Job, queues: Queues, queue: Queue) -> int:
    """GPUs of its own that the queue has for the job; at least one if it can serve it by borrowing alone."""
    if never(queues, job) is not None:
        return 0
    return max(1, sum(queue.gpus[pool] for pool in pools.of(queues, queue, request_of(job, 0))))
