"""The account of one step: its attempts in turn, and what was between two of them. Pure.

Which training is kept is told backwards: what the newest attempt has saved or
finished, what that attempt had started from, and so on to the beginning.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import pairwise

from tiphys.records import Cause, CheckpointRef, Outcome, Record, Saved, Timestamp
from tiphys.store import Attempt, Submission
from tiphys_controller.economics.spans import Kept, Phase, Span, spans


class Entry(Record):
    """One attempt."""

    attempt: int
    submission: int
    outcome: Outcome | None
    """None while it runs."""
    failed_by: str
    """Its `Cause`; ``fenced`` if another submission took its place; empty if it did not fail."""
    spans: tuple[Span, ...]

    def seconds(self, phase: Phase) -> float:
        """How long it was in ``phase``."""
        return sum(span.seconds for span in self.spans if span.phase is phase)

    @property
    def held(self) -> float:
        """Seconds that it held its GPUs."""
        return sum(span.seconds for span in self.spans)


class Recovery(Record):
    """From the end of a program to the first step of the next attempt, in seconds."""

    after: int
    """The attempt that failed."""
    failed_by: str
    detect: float
    """Until its end was on record."""
    decide: float
    """Until another submission was claimed; 0 where Argo tried again by itself."""
    submit: float
    """Until its Workflow was bound."""
    wait: float
    """Until the next attempt was admitted: back-off, and a turn for GPUs."""
    start: float
    load: float
    first_step: float

    @property
    def seconds(self) -> float:
        return float(sum(getattr(self, part) for part in PARTS))


PARTS = ("detect", "decide", "submit", "wait", "start", "load", "first_step")
"""Parts of a recovery, in their order."""


class StepLedger(Record):
    """All attempts of one step, or of one item of it."""

    step: str
    queue: str = ""
    """Empty for a step without GPUs."""
    gpus: int
    """GPUs of one attempt."""
    began_at: Timestamp
    ended_at: Timestamp
    """The end of its last attempt; for one that runs, the moment of the report."""
    entries: tuple[Entry, ...]
    recoveries: tuple[Recovery, ...]

    def seconds(self, phase: Phase) -> float:
        """How long it was in ``phase``, all attempts together."""
        return sum(entry.seconds(phase) for entry in self.entries)

    @property
    def span(self) -> float:
        """Seconds from its first admission to its end."""
        return max(0.0, (self.ended_at - self.began_at).total_seconds())

    @property
    def held(self) -> float:
        return sum(entry.held for entry in self.entries)

    @property
    def weight(self) -> int:
        """What a second of it counts: its GPUs, or 1 for a step without any."""
        return max(1, self.gpus)


class Known(Record):
    """What storage tells of the checkpoints of one step."""

    starts: Mapping[int, CheckpointRef | None]
    """What each attempt went on from."""
    saved: Mapping[int, Saved]
    """The newest checkpoint of each attempt that has one."""
    at: Mapping[CheckpointRef, datetime]
    """The moment that a checkpoint is of; without those that were removed, unless an end remembers them."""

    @cached_property
    def known_at(self) -> Mapping[CheckpointRef, datetime]:
        return {**self.at, **{one.checkpoint: one.at for one in self.saved.values()}}


def kept_until(attempts: Sequence[Attempt], known: Known) -> dict[int, datetime]:
    """Until when the training of each attempt is kept; attempts of which nothing is kept are absent.

    Where a checkpoint was removed that something started from, so that nobody
    knows its moment, the training of that attempt counts as kept up to its own
    newest one.
    """
    newest = attempts[-1].claim.attempt
    kept = {newest: known.saved[newest].at} if newest in known.saved else {}
    number = newest
    while (start := known.starts.get(number)) is not None and start.attempt < number:
        if start.lineage != attempts[-1].claim.lineage:
            break  # of another run, whose own account it is
        moment = known.known_at.get(start)
        if moment is None and start.attempt in known.saved:
            moment = known.saved[start.attempt].at
        if moment is not None:
            kept[start.attempt] = moment
        number = start.attempt
    return kept


def failed_by(attempt: Attempt) -> str:
    """What ended an attempt that failed; see `Entry`."""
    if attempt.end is None or attempt.end.outcome is Outcome.DONE:
        return ""
    if attempt.end.outcome is Outcome.FENCED:
        return "fenced"
    return (attempt.end.cause or Cause.UNKNOWN).value


def entries(attempts: Sequence[Attempt], known: Known, now: datetime) -> tuple[Entry, ...]:
    """What became of the time of each attempt."""
    kept = kept_until(attempts, known)

    def entry(one: Attempt) -> Entry:
        number = one.claim.attempt
        saved = known.saved.get(number)
        return Entry(
            attempt=number,
            submission=one.claim.submission,
            outcome=one.end.outcome if one.end else None,
            failed_by=failed_by(one),
            spans=spans(one, Kept(kept.get(number), saved.began if saved else None), now),
        )

    return tuple(map(entry, attempts))


def recoveries(
    attempts: Sequence[Attempt], told: Sequence[Entry], submissions: Mapping[int, Submission]
) -> tuple[Recovery, ...]:
    """What was between a failed attempt and the one that followed it."""
    found = []
    for before, after, old, new in zip(attempts, attempts[1:], told, told[1:], strict=False):
        if before.end is None or before.end.outcome is Outcome.DONE:
            continue
        decide, submit, wait = _between(before.end.written_at, after, submissions)
        found.append(
            Recovery(
                after=before.claim.attempt,
                failed_by=failed_by(before),
                detect=old.seconds(Phase.DETECTING),
                decide=decide,
                submit=submit,
                wait=wait,
                start=new.seconds(Phase.STARTING),
                load=new.seconds(Phase.LOADING),
                first_step=new.seconds(Phase.FIRST_STEP),
            )
        )
    return tuple(found)


def _between(ended_at: datetime, after: Attempt, submissions: Mapping[int, Submission]) -> tuple[float, float, float]:
    """Seconds from an end to the claim of the next submission, to its binding, and to the next admission."""
    moments = [ended_at]
    by = submissions.get(after.claim.submission)
    if by is not None and by.claim.written_at > ended_at:
        moments += [by.claim.written_at, by.bound.written_at if by.bound else by.claim.written_at]
    else:
        moments += [ended_at, ended_at]
    moments.append(after.claim.written_at)
    decide, submit, wait = (max(0.0, (end - begin).total_seconds()) for begin, end in pairwise(moments))
    return decide, submit, wait
