"""Where the time of an attempt went, one phase after the other. Pure.

Useful is only what a later attempt, or the result, rests on: training up to the
checkpoint that was gone on from. The rest is the price of failures.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from tiphys.records import Began, Outcome, Record, Timestamp
from tiphys.store import Attempt


class Phase(StrEnum):
    """What a moment was spent on."""

    STARTING = "starting"
    """From admission until the program opened its session: scheduling, the image, libraries."""
    LOADING = "loading"
    """Restoring a checkpoint."""
    FIRST_STEP = "first_step"
    """From there to the end of the first step, which compiles, warms up and fills caches."""
    USEFUL = "useful"
    """Training that is kept."""
    LOST = "lost"
    """Training that nothing rests on, or that had to be done again."""
    DETECTING = "detecting"
    """From the end of the program until its end was on record; its GPUs are held."""


class Span(Record):
    """A phase of one attempt, and how long it took."""

    phase: Phase
    begin: Timestamp
    end: Timestamp

    @property
    def seconds(self) -> float:
        return (self.end - self.begin).total_seconds()


class Kept(NamedTuple):
    """What is known of an attempt beside its claim and end."""

    until: datetime | None
    """Until when its training is kept; None: nothing of it is."""
    began: Began | None


def spans(attempt: Attempt, kept: Kept, now: datetime) -> tuple[Span, ...]:
    """The phases of an attempt in their order, without those that took no time.

    An attempt that nobody saw begin, because it committed nothing, is lost as a
    whole: starting and training cannot be told apart.

    Args:
        attempt: One that may still run.
        kept: What its checkpoints tell.
        now: The end of what runs.
    """
    opened_at = attempt.claim.written_at
    ended_at = attempt.end.written_at if attempt.end else now
    over_at = (attempt.end.over_at if attempt.end else None) or ended_at
    borders = [opened_at, *_training(attempt, kept, min(over_at, ended_at)), ended_at]
    phases = (*(_BEFORE if kept.began else ()), Phase.USEFUL, Phase.LOST, Phase.DETECTING)
    return tuple(_adjacent(phases, borders))


_BEFORE = (Phase.STARTING, Phase.LOADING, Phase.FIRST_STEP)


def _training(attempt: Attempt, kept: Kept, over_at: datetime) -> Iterator[datetime]:
    """Where each of its phases ends, but for the last."""
    if kept.began is not None:
        yield kept.began.opened_at
        yield (restored := kept.began.restored_at or kept.began.opened_at)
        yield kept.began.first_step_at or restored
    done = attempt.end is not None and attempt.end.outcome is Outcome.DONE
    yield over_at if done else kept.until or attempt.claim.written_at
    yield over_at


def _adjacent(phases: Sequence[Phase], borders: Sequence[datetime]) -> Iterator[Span]:
    """Spans between ``borders``, which clocks that disagree may have put out of order."""
    begin, last = borders[0], max(borders[0], borders[-1])
    for phase, border in zip(phases, borders[1:], strict=True):
        end = min(max(begin, border), last)
        if end - begin > timedelta(0):
            yield Span(phase=phase, begin=begin, end=end)
        begin = end
