"""What a replay was like for each queue, in the numbers that people compare schedulers by.

What was held and who waited, from one change to the next: what all sums over time are made of.

Do queues that want more than there is get what their weights promise?
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from tiphys_plugin.quota.lease import Reason
from tiphys_plugin.quota.queues import Queue, Queues
from tiphys_plugin.quota.simulation.jobs import Replay, Run


@dataclass(frozen=True)
class Span:
    """Between two changes, in seconds of the trace. What nobody holds or waits for may be missing."""

    begin: float
    end: float
    held: Counter[tuple[str, str]]
    """GPUs by queue and pool."""
    waiting_gpus: Counter[str]
    waiting_jobs: Counter[str]

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class _Change(NamedTuple):
    seconds: float
    queue: str
    pool: str
    held: int
    waiting: int


def spans(replay: Replay) -> Iterator[Span]:
    """From the first submission to the last end, without gaps; none has no length."""
    held: Counter[tuple[str, str]] = Counter()
    gpus: Counter[str] = Counter()
    jobs: Counter[str] = Counter()
    before: float | None = None
    for seconds, together in groupby(sorted(_changes(replay)), key=lambda one: one.seconds):
        if before is not None:
            yield Span(before, seconds, held.copy(), gpus.copy(), jobs.copy())
        for one in together:
            held[one.queue, one.pool] += one.held
            gpus[one.queue] += one.waiting
            jobs[one.queue] += (one.waiting > 0) - (one.waiting < 0)
        before = seconds


def _changes(replay: Replay) -> Iterator[_Change]:
    for run in replay.runs:
        gpus = run.job.gpus
        for one in run.attempts:
            yield _Change(one.asked_seconds, run.queue, one.pool, 0, gpus)
            yield _Change(one.started_seconds, run.queue, one.pool, gpus, -gpus)
            yield _Change(one.ended_seconds, run.queue, one.pool, -gpus, 0)
    for job in replay.waiting:
        yield _Change(job.submit_seconds, job.queue or "", "", 0, job.gpus)


def fairness(queues: Queues, spans: Sequence[Span]) -> dict[str, float]:
    """Jain's index of each cohort in which two queues ever had to wait at the same time.

    Compared is what each queue held while it waited beside others, to what its
    weight would have given it of all that they held. 1: everybody got that;
    1/n: one of n had it all.
    Source: R. Jain, D. Chiu, W. Hawe, "A Quantitative Measure of Fairness", DEC TR-301, 1984.
    """
    cohorts = sorted({queue.cohort for queue in queues.queues if queue.cohort is not None})
    indexes = {cohort: jain(_ratios(_members(queues, cohort), spans)) for cohort in cohorts}
    return {cohort: index for cohort, index in indexes.items() if index is not None}


def jain(values: Sequence[float]) -> float | None:
    """None for less than two values, or if all are zero."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if len(values) > 1 and squares else None


def _members(queues: Queues, cohort: str) -> list[Queue]:
    return [queue for queue in queues.queues if queue.cohort == cohort and not queue.stopped]


def _ratios(members: Sequence[Queue], spans: Iterable[Span]) -> list[float]:
    """Of each queue that ever had a rival: GPU-seconds that it got to those that were its due."""
    got: dict[str, float] = defaultdict(float)
    due: dict[str, float] = defaultdict(float)
    for span in spans:
        rivals = [queue for queue in members if span.waiting_jobs[queue.name]]
        if len(rivals) < 2:
            continue
        held = {queue.name: sum(span.held[queue.name, pool] for pool in queue.gpus) for queue in rivals}
        weights = sum(queue.weight for queue in rivals)
        for queue in rivals:
            got[queue.name] += span.seconds * held[queue.name]
            due[queue.name] += span.seconds * sum(held.values()) * queue.weight / weights
    return [got[name] / due[name] for name in due if due[name]]


_SLOWDOWN_BOUND_SECONDS = 10.0
"""Shorter jobs count as this long, so that one second of waiting does not make a job of a second twice as slow."""


@dataclass(frozen=True)
class Spread:
    """Of the seconds that jobs waited. A percentile is the smallest value that so many reach (nearest rank)."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: float


@dataclass(frozen=True)
class QueueOutcome:
    """``queue`` None: all together. None for a number: nothing to measure it by.

    ``wait``, ``completion_seconds`` (submission to end) and ``slowdown`` (that
    over the duration, bounded: D. Feitelson et al., "Theory and Practice in
    Parallel Job Scheduling", JSSPP 1997) are of the jobs that started.
    """

    queue: str | None
    jobs: int
    started: int
    rejected: dict[Reason, int]
    waiting: int
    """Jobs that never started."""
    wait: Spread | None
    completion_seconds: float | None
    slowdown: float | None
    gpu_hours: float
    borrowed_gpu_hours: float
    quota_utilisation: float | None
    """Of the quota, from the first submission to the last end; above 1 with GPUs of others."""
    preemptions: int
    """How often a job of the queue had to go for another."""
    lost_gpu_hours: float
    """Of the GPU-hours, those in which it came to that: saves, training done again, and the ways back."""
    longest_line: int
    """Most jobs that waited at the same time."""


@dataclass(frozen=True)
class Outcome:
    """``fairness`` is Jain's index by cohort, see `tiphys_plugin.quota.simulation.results`."""

    queues: tuple[QueueOutcome, ...]
    total: QueueOutcome
    span_seconds: float
    inventory_utilisation: float | None
    fairness: dict[str, float]


def outcome(replay: Replay) -> Outcome:
    """Measure ``replay``. Queues are in the order of their file; those that it does not know come last."""
    timeline = list(spans(replay))
    total_seconds = sum(span.seconds for span in timeline)
    declared = {queue.name: queue for queue in replay.queues.queues}
    unknown = sorted({job.queue or "" for job, _ in replay.rejected} - declared.keys())
    each = [_measured(replay, [name], name, timeline, total_seconds) for name in [*declared, *unknown]]
    total = _measured(replay, [*declared, *unknown], None, timeline, total_seconds)
    inventory = replay.queues.stock
    exist = sum(stock.count for stock in inventory.values()) if inventory is not None else 0
    used = _share(total.gpu_hours, exist, total_seconds)
    return Outcome(tuple(each), total, total_seconds, used, fairness(replay.queues, timeline))


def _measured(
    replay: Replay, names: Sequence[str], told: str | None, timeline: Sequence[Span], total_seconds: float
) -> QueueOutcome:
    runs = [run for run in replay.runs if run.queue in names]
    rejected = Counter(why for job, why in replay.rejected if (job.queue or "") in names)
    waiting = sum(job.queue in names for job in replay.waiting)
    declared = [queue for name in names if (queue := replay.queues.find(name)) is not None]
    gpu_hours = sum(run.gpu_seconds for run in runs) / 3600
    return QueueOutcome(
        queue=told,
        jobs=len(runs) + rejected.total() + waiting,
        started=len(runs),
        rejected=dict(sorted(rejected.items())),
        waiting=waiting,
        wait=_spread([run.started_seconds - run.submitted_seconds for run in runs]),
        completion_seconds=_mean([run.ended_seconds - run.submitted_seconds for run in runs]),
        slowdown=_mean([_slowdown(run) for run in runs]),
        gpu_hours=gpu_hours,
        borrowed_gpu_hours=sum(_borrowed(queue, timeline) for queue in declared) / 3600,
        quota_utilisation=_share(gpu_hours, sum(sum(queue.gpus.values()) for queue in declared), total_seconds),
        preemptions=sum(run.preemptions for run in runs),
        lost_gpu_hours=sum(run.lost_gpu_seconds for run in runs) / 3600,
        longest_line=max((sum(span.waiting_jobs[name] for name in names) for span in timeline), default=0),
    )


def _slowdown(run: Run) -> float:
    duration = max(run.job.held_seconds, _SLOWDOWN_BOUND_SECONDS)
    return max(1.0, (run.ended_seconds - run.submitted_seconds) / duration)


def _borrowed(queue: Queue, timeline: Iterable[Span]) -> float:
    """GPU-seconds beyond the quota."""
    return sum(
        span.seconds * max(0, span.held[queue.name, pool] - quota)
        for span in timeline
        for pool, quota in queue.gpus.items()
    )


def _share(gpu_hours: float, gpus: int, seconds: float) -> float | None:
    return gpu_hours * 3600 / (gpus * seconds) if gpus and seconds else None


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    ordered = sorted(values)

    def percentile(percent: int) -> float:
        return ordered[math.ceil(percent * len(ordered) / 100) - 1]

    mean = math.fsum(ordered) / len(ordered)
    return Spread(mean, percentile(50), percentile(90), percentile(99), ordered[-1])
