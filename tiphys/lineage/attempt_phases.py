"""Splits the time of an attempt into phases: where its GPUs trained, started, or did what was discarded.

The times come from two clocks: records of the service have that of its machine, checkpoints that of the pod.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from tiphys.records import AttemptEndOutcome, LastCheckpoint, Record, RestartLoss, Timestamp
from tiphys.store import Attempt


class TimePhase(StrEnum):
    STARTING = "starting"
    """From admission until the program opened its session: scheduling, the image, libraries."""
    LOADING = "loading"
    """Restoring a checkpoint."""
    FIRST_STEP = "first_step"
    """The first training step after loading, which compiles, warms up and fills caches."""
    USEFUL = "useful"
    """Training that the result or a later attempt builds on."""
    DISCARDED = "discarded"
    """Training that is repeated, or was given up."""
    UNSAVED = "unsaved"
    """Training of a running attempt since its newest checkpoint."""
    DETECTING = "detecting"
    """From the end of the program, or of a save because it had to stop, to its end record; the GPUs are held."""


class PhaseSpan(Record):
    phase: TimePhase
    begin: Timestamp
    end: Timestamp

    @property
    def seconds(self) -> float:
        return (self.end - self.begin).total_seconds()


class KeptTraining(NamedTuple):
    """What the checkpoints of an attempt show, beside its claim and end."""

    until: datetime | None
    """End of the kept training; None if none is kept."""
    newest: LastCheckpoint | None


def split_phases(
    attempt: Attempt, kept: KeptTraining, now: datetime, is_running: bool = False
) -> tuple[PhaseSpan, ...]:
    """Split an attempt into its phases, in order, without empty ones.

    An attempt that committed nothing recorded no start times. It counts as discarded as a whole, because starting and
    training cannot be separated.
    """
    ended_at = attempt.end.ended_at if attempt.end else now
    terminating_at = (attempt.end.terminating_at if attempt.end else None) or ended_at
    kept = _align_clock(kept, attempt.claim.written_at, ended_at)
    borders = [attempt.claim.written_at, *_phase_borders(attempt, kept, min(terminating_at, ended_at)), ended_at]
    unkept = TimePhase.UNSAVED if is_running else TimePhase.DISCARDED
    phases = (*(_STARTUP_PHASES if kept.newest else ()), TimePhase.USEFUL, unkept, TimePhase.DETECTING)
    restarts = kept.newest.began.restarts if kept.newest else ()
    return tuple(piece for span in _spans_between(phases, borders) for piece in _take_out_restarts(span, restarts))


def _take_out_restarts(span: PhaseSpan, restarts: Sequence[RestartLoss]) -> Iterator[PhaseSpan]:
    """``span`` in its order, with what restarts in the pod cost as discarded where it is useful."""
    if span.phase is not TimePhase.USEFUL:
        restarts = ()
    begin = span.begin
    for restart in restarts:
        lost_from, lost_until = max(begin, restart.committed_at), min(span.end, restart.restored_at)
        if lost_from < lost_until:
            if begin < lost_from:
                yield PhaseSpan(phase=span.phase, begin=begin, end=lost_from)
            yield PhaseSpan(phase=TimePhase.DISCARDED, begin=lost_from, end=lost_until)
            begin = lost_until
    if begin < span.end:
        yield PhaseSpan(phase=span.phase, begin=begin, end=span.end)


def _align_clock(kept: KeptTraining, opened_at: datetime, ended_at: datetime) -> KeptTraining:
    """Shift the times of a pod by the least that puts them into its attempt, whose times another clock gave."""
    times = [
        *(kept.newest.began.moments() if kept.newest else []),
        *([kept.newest.at] if kept.newest else []),
        *([kept.until] if kept.until else []),
    ]
    if not times or (min(times) >= opened_at and max(times) <= ended_at):
        return kept
    shift = ended_at - max(times) if max(times) > ended_at else min(opened_at - min(times), ended_at - max(times))
    newest = kept.newest and kept.newest.model_copy(
        update={"at": kept.newest.at + shift, "began": kept.newest.began.shift(shift)}
    )
    return KeptTraining(kept.until and kept.until + shift, newest)


_STARTUP_PHASES = (TimePhase.STARTING, TimePhase.LOADING, TimePhase.FIRST_STEP)


def _phase_borders(attempt: Attempt, kept: KeptTraining, terminating_at: datetime) -> Iterator[datetime]:
    """End of each phase except the last."""
    if kept.newest:
        yield (began := kept.newest.began).opened_at
        yield (restored := began.restored_at or began.opened_at)
        yield began.first_step_at or restored
    done = attempt.end is not None and attempt.end.outcome is AttemptEndOutcome.DONE
    yield terminating_at if done else kept.until or attempt.claim.written_at
    trained_until = kept.newest.at if kept.newest and kept.newest.at_stop and not done else terminating_at
    yield min(trained_until, terminating_at)


def _spans_between(phases: Sequence[TimePhase], borders: Sequence[datetime]) -> Iterator[PhaseSpan]:
    """Spans between ``borders``, which may be out of order because the writers' clocks differ."""
    begin, last = borders[0], max(borders[0], borders[-1])
    for phase, border in zip(phases, borders[1:], strict=True):
        end = min(max(begin, border), last)
        if end - begin > timedelta(0):
            yield PhaseSpan(phase=phase, begin=begin, end=end)
        begin = end
