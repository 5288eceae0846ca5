"""Measures a replay by queue in the usual metrics of schedulers: waits, slowdown, utilisation, fairness.

Metrics over time are sums over `TimelineSpan`, the spans between two changes of held
GPUs and pending jobs. Fairness compares the GPUs of competing queues with their
weights.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from tiphys_plugin.quota.lease import AdmissionReason
from tiphys_plugin.quota.queue import Queue
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.simulation.jobs import ReplayResult, SimulatedRun


@dataclass(frozen=True)
class TimelineSpan:
    """Time between two changes, in seconds of the trace. Counters may lack entries that are 0."""

    begin: float
    end: float
    held: Counter[tuple[str, str]]
    """GPUs by queue and pool."""
    pending_jobs: Counter[str]

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class TimelineChange(NamedTuple):
    """How many more GPUs of a queue are held, and are waited for, from a moment on; negative for fewer."""

    seconds: float
    queue: str
    pool: str
    held: int
    pending: int


def build_timeline(replay: ReplayResult) -> Iterator[TimelineSpan]:
    """Spans from the first submission to the last end, without gaps and without empty spans."""
    held: Counter[tuple[str, str]] = Counter()
    jobs: Counter[str] = Counter()
    before: float | None = None
    for seconds, together in groupby(sorted(list_changes(replay)), key=lambda change: change.seconds):
        if before is not None:
            yield TimelineSpan(before, seconds, held.copy(), jobs.copy())
        for change in together:
            held[change.queue, change.pool] += change.held
            jobs[change.queue] += (change.pending > 0) - (change.pending < 0)
        before = seconds


def list_changes(replay: ReplayResult) -> Iterator[TimelineChange]:
    """All changes of a replay, in any order."""
    for run in replay.runs:
        gpus = run.job.gpus
        for attempt in run.attempts:
            yield TimelineChange(attempt.requested_seconds, run.queue, attempt.pool, 0, gpus)
            yield TimelineChange(attempt.started_seconds, run.queue, attempt.pool, gpus, -gpus)
            yield TimelineChange(attempt.ended_seconds, run.queue, attempt.pool, -gpus, 0)
    for job in replay.never_started:
        yield TimelineChange(job.submit_seconds, job.queue or "", "", 0, job.gpus)


def compute_fairness(queues: Queues, spans: Sequence[TimelineSpan]) -> dict[str, float]:
    """Jain's index by cohort, for cohorts in which two queues had pending jobs at the same time.

    The index compares the GPU-seconds that each queue held while it competed with the share of all held GPU-seconds
    that its weight gives it. 1: every queue had its share; 1/n: one of n queues had everything.
    Source: R. Jain, D. Chiu, W. Hawe, "A Quantitative Measure of Fairness", DEC TR-301, 1984.
    """
    cohorts = sorted({queue.cohort for queue in queues.queues if queue.cohort is not None})
    indexes = {cohort: compute_jain_index(_fair_share_ratios(_members(queues, cohort), spans)) for cohort in cohorts}
    return {cohort: index for cohort, index in indexes.items() if index is not None}


def compute_jain_index(values: Sequence[float]) -> float | None:
    """Jain's index of ``values``; None for fewer than two values, or if all are 0."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if len(values) > 1 and squares else None


def _members(queues: Queues, cohort: str) -> list[Queue]:
    return [queue for queue in queues.queues if queue.cohort == cohort and not queue.stopped]


def _fair_share_ratios(members: Sequence[Queue], spans: Iterable[TimelineSpan]) -> list[float]:
    """Held GPU-seconds relative to the weighted share, of each queue that ever competed."""
    held_gpu_seconds: dict[str, float] = defaultdict(float)
    fair_gpu_seconds: dict[str, float] = defaultdict(float)
    for span in spans:
        competing = [queue for queue in members if span.pending_jobs[queue.name]]
        if len(competing) < 2:
            continue
        held = {queue.name: sum(span.held[queue.name, pool] for pool in queue.gpus) for queue in competing}
        total_weight = sum(queue.weight for queue in competing)
        for queue in competing:
            held_gpu_seconds[queue.name] += span.seconds * held[queue.name]
            fair_gpu_seconds[queue.name] += span.seconds * sum(held.values()) * queue.weight / total_weight
    return [held_gpu_seconds[name] / fair for name, fair in fair_gpu_seconds.items() if fair]


_SLOWDOWN_BOUND_SECONDS = 10.0
"""Shorter jobs count as this long, so that one second of wait does not double the slowdown of a job of one second."""


@dataclass(frozen=True)
class WaitStatistics:
    """Statistics of waits, in seconds; percentiles by nearest rank."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: float


@dataclass(frozen=True)
class QueueOutcome:
    """Metrics of one queue; ``queue`` None: of all queues. A metric without data is None.

    ``wait``, ``completion_seconds`` (mean time from submission to end) and ``slowdown`` cover the jobs that started.
    ``slowdown`` is the mean of completion time by duration, bounded (D. Feitelson et al., "Theory and Practice in
    Parallel Job Scheduling", JSSPP 1997).
    """

    queue: str | None
    jobs: int
    started: int
    rejected: dict[AdmissionReason, int]
    waiting: int
    """Jobs that never started."""
    wait: WaitStatistics | None
    completion_seconds: float | None
    slowdown: float | None
    gpu_hours: float
    borrowed_gpu_hours: float
    quota_utilisation: float | None
    """Utilisation of the quota, from the first submission to the last end; above 1 with borrowed GPUs."""
    preemptions: int
    lost_gpu_hours: float
    """GPU-hours that preemptions cost: saves, repeated training, and restarts."""
    longest_line: int
    """Most jobs that were pending at the same time."""


@dataclass(frozen=True)
class SimulationOutcome:
    """Metrics of a replay. ``fairness`` is Jain's index by cohort, see `compute_fairness`."""

    queues: tuple[QueueOutcome, ...]
    total: QueueOutcome
    span_seconds: float
    inventory_utilisation: float | None
    fairness: dict[str, float]


def measure_replay(replay: ReplayResult) -> SimulationOutcome:
    """Measure a replay. Queues are in the order of the queue file; undeclared queues of jobs come last."""
    timeline = list(build_timeline(replay))
    total_seconds = sum(span.seconds for span in timeline)
    declared = {queue.name: queue for queue in replay.queues.queues}
    unknown = sorted({job.queue or "" for job, _ in replay.rejected} - declared.keys())
    by_queue = [_measure_queues(replay, [name], name, timeline, total_seconds) for name in [*declared, *unknown]]
    total = _measure_queues(replay, [*declared, *unknown], None, timeline, total_seconds)
    inventory = replay.queues.gpu_inventory
    existing_gpus = sum(entry.count for entry in inventory.values()) if inventory is not None else 0
    utilisation = _utilisation(total.gpu_hours, existing_gpus, total_seconds)
    fairness = compute_fairness(replay.queues, timeline)
    return SimulationOutcome(tuple(by_queue), total, total_seconds, utilisation, fairness)


def _measure_queues(
    replay: ReplayResult,
    names: Sequence[str],
    label: str | None,
    timeline: Sequence[TimelineSpan],
    total_seconds: float,
) -> QueueOutcome:
    runs = [run for run in replay.runs if run.queue in names]
    rejected = Counter(why for job, why in replay.rejected if (job.queue or "") in names)
    waiting = sum(job.queue in names for job in replay.never_started)
    declared = [queue for name in names if (queue := replay.queues.find(name)) is not None]
    gpu_hours = sum(run.gpu_seconds for run in runs) / 3600
    return QueueOutcome(
        queue=label,
        jobs=len(runs) + rejected.total() + waiting,
        started=len(runs),
        rejected=dict(sorted(rejected.items())),
        waiting=waiting,
        wait=_wait_statistics([run.started_seconds - run.submitted_seconds for run in runs]),
        completion_seconds=_mean([run.ended_seconds - run.submitted_seconds for run in runs]),
        slowdown=_mean([_slowdown(run) for run in runs]),
        gpu_hours=gpu_hours,
        borrowed_gpu_hours=sum(_borrowed_gpu_seconds(queue, timeline) for queue in declared) / 3600,
        quota_utilisation=_utilisation(gpu_hours, sum(sum(queue.gpus.values()) for queue in declared), total_seconds),
        preemptions=sum(run.preemptions for run in runs),
        lost_gpu_hours=sum(run.lost_gpu_seconds for run in runs) / 3600,
        longest_line=max((sum(span.pending_jobs[name] for name in names) for span in timeline), default=0),
    )


def _slowdown(run: SimulatedRun) -> float:
    duration = max(run.trained_seconds, _SLOWDOWN_BOUND_SECONDS)
    return max(1.0, (run.ended_seconds - run.submitted_seconds) / duration)


def _borrowed_gpu_seconds(queue: Queue, timeline: Iterable[TimelineSpan]) -> float:
    """GPU-seconds that the queue held beyond its quota."""
    return sum(
        span.seconds * max(0, span.held[queue.name, pool] - quota)
        for span in timeline
        for pool, quota in queue.gpus.items()
    )


def _utilisation(gpu_hours: float, gpus: int, seconds: float) -> float | None:
    return gpu_hours * 3600 / (gpus * seconds) if gpus and seconds else None


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _wait_statistics(values: Sequence[float]) -> WaitStatistics | None:
    if not values:
        return None
    ordered = sorted(values)

    def percentile(percent: int) -> float:
        return ordered[math.ceil(percent * len(ordered) / 100) - 1]

    mean = math.fsum(ordered) / len(ordered)
    return WaitStatistics(mean, percentile(50), percentile(90), percentile(99), ordered[-1])
