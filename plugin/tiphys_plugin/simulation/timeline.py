"""What was held and who waited, from one change to the next: what all sums over time are made of."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from tiphys_plugin.simulation.runs import Replay


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
