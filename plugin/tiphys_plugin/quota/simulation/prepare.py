"""Adds to the jobs of a trace what a simulation needs: a queue, a declared time limit, and gang members.

`find_permanent_rejection` finds the jobs that the service would reject in any state
of the cluster.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from tiphys.errors import UsageError
from tiphys_plugin.quota.lease import AdmissionReason, LedgerState, Rejected
from tiphys_plugin.quota.queue import Queue
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler import pools
from tiphys_plugin.quota.scheduler.decide import decide_admission
from tiphys_plugin.quota.simulation.jobs import TRACE_EPOCH, TraceJob, build_lease_request


def find_permanent_rejection(queues: Queues, job: TraceJob) -> AdmissionReason | None:
    """Why an empty cluster rejects the job; None if it admits the job."""
    queue = queues.find(job.queue or "")
    if job.namespace is None and queue is not None and queue.namespaces is not None:
        job = replace(job, namespace=queue.namespaces[0])
    answer = decide_admission(LedgerState(queues=queues), build_lease_request(job, 0), 1, TRACE_EPOCH)
    return answer.reason if isinstance(answer, Rejected) else None


def check_queue_names(jobs: Iterable[TraceJob], queues: Queues, source: str) -> None:
    """Check that ``queues``, those of the file ``source``, have the queue of each job.

    Raises:
        UsageError: a queue is unknown; the message names it and the known ones.
    """
    unknown = Counter(job.queue for job in jobs if queues.find(job.queue or "") is None)
    for name, count in unknown.most_common(1):
        jobs_ask = "1 job of the trace asks" if count == 1 else f"{count} jobs of the trace ask"
        raise UsageError(
            f"{source} has no queue {name!r}, for which {jobs_ask}; it has: {', '.join(queues.names) or 'none'}. "
            "Declare the queue there, or change the name in the trace"
        )


def select_common_jobs(jobs: Sequence[TraceJob], queue_files: Sequence[Queues]) -> tuple[TraceJob, ...]:
    """The jobs that all the queue files admit, or none of them."""

    def are_admitted(queues: Queues) -> Iterator[bool]:
        by_shape: dict[tuple[object, ...], bool] = {}
        for job in spread_over_nodes(jobs, queues):
            if job.shape not in by_shape:
                by_shape[job.shape] = find_permanent_rejection(queues, job) is None
            yield by_shape[job.shape]

    verdicts = zip(*map(are_admitted, queue_files), strict=True)
    return tuple(job for job, admitted in zip(jobs, verdicts, strict=True) if len(set(admitted)) == 1)


def declare_job_durations(jobs: Sequence[TraceJob]) -> tuple[TraceJob, ...]:
    """The jobs with their durations, rounded up to a second, as declared time limits."""
    return tuple(replace(job, limit_seconds=max(1, math.ceil(job.longest_seconds))) for job in jobs)


def spread_over_nodes(jobs: Sequence[TraceJob], queues: Queues) -> tuple[TraceJob, ...]:
    """The jobs, with those larger than the largest node as gangs of the fewest members that share the GPUs evenly."""
    largest_node_gpus = max((node.gpus for node in queues.nodes or ()), default=0)

    def spread(job: TraceJob) -> TraceJob:
        if not largest_node_gpus or job.members > 1 or job.gpus <= largest_node_gpus:
            return job
        min_members = -(-job.gpus // largest_node_gpus)
        return replace(job, members=next(n for n in range(min_members, job.gpus + 1) if job.gpus % n == 0))

    return tuple(map(spread, jobs))


def assign_to_queue(jobs: Sequence[TraceJob], queues: Queues, queue_name: str) -> tuple[TraceJob, ...]:
    """The jobs, with those without a queue assigned to ``queue_name``.

    Raises:
        UsageError: there is no such queue.
    """
    if queues.find(queue_name) is None:
        queue_names = ", ".join(queues.names) or "none"
        raise UsageError(f"there is no queue {queue_name!r} for the jobs of the trace; the queues are: {queue_names}")
    return tuple(job if job.queue else replace(job, queue=queue_name) for job in jobs)


def assign_by_quota(jobs: Sequence[TraceJob], queues: Queues, seed: int) -> tuple[TraceJob, ...]:
    """The jobs, with those without a queue assigned at random in proportion to the quotas that could serve them.

    A job that no queue could ever serve is assigned to any queue, which rejects it.

    Raises:
        UsageError: there is no queue.
    """
    if not queues.queues:
        raise UsageError("the jobs of the trace need a queue, and the queue file has none; add `queues: [{name: …}]`")
    generator = random.Random(seed)  # noqa: S311  not a secret; the same seed gives the same queues
    weights_by_shape: dict[tuple[object, ...], list[int]] = {}

    def assign(job: TraceJob) -> TraceJob:
        if job.queue:
            return job
        shape = (job.gpus, job.gpu_type, job.spot, job.namespace, job.priority)
        if shape not in weights_by_shape:
            weights_by_shape[shape] = _queue_weights(job, queues)
        return replace(job, queue=generator.choices(queues.names, weights_by_shape[shape])[0])

    return tuple(map(assign, jobs))


def _queue_weights(job: TraceJob, queues: Queues) -> list[int]:
    weights = [_servable_quota(replace(job, queue=queue.name), queues, queue) for queue in queues.queues]
    return weights if any(weights) else [1] * len(weights)


def _servable_quota(job: TraceJob, queues: Queues, queue: Queue) -> int:
    """Quota of the queue that could serve the job; at least 1 if the queue can serve it by borrowing alone."""
    if find_permanent_rejection(queues, job) is not None:
        return 0
    return max(
        1, sum(queue.gpus[pool] for pool in pools.find_eligible_pools(queues, queue, build_lease_request(job, 0)))
    )
