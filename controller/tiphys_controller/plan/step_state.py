"""Is this step done? The verdict on one step, from what storage lists and records.

Only an end record says that a step is done. The projection of that record
carries the digest of the listing it was written for, so while both agree, the
listings alone verify the step and its record need not be read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from tiphys.records import AttemptEnd, Outcome
from tiphys.store import RunLayout, listing_digest, output_fault

EndKey = tuple[str, int]
"""(step id, attempt) of an end record."""


@dataclass(frozen=True)
class StepListing:
    """What listings show of one step. Attempts are numbers; sizes are bytes."""

    attempts: frozenset[int] = frozenset()
    ended: frozenset[int] = frozenset()
    projections: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """Listing digests of done projections, by attempt."""
    outputs: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Sizes of the objects of an attempt, by attempt and by key relative to its outputs."""

    @property
    def last(self) -> int:
        """The last attempt; 0 if there is none."""
        return max(self.attempts, default=0)

    @cached_property
    def verified(self) -> bool:
        """Whether a projection vouches for what is listed of the last attempt. Plans are made more than once."""
        projected = self.projections.get(self.last, frozenset())
        return bool(projected) and listing_digest(self.outputs.get(self.last, {}).items()) in projected


@dataclass(frozen=True)
class Adoption:
    """A result that stands for a step because a submission took it over. ``source`` says in words whose it is."""

    source: str
    attempt: int
    """Under which number its end record is kept among those of the step; 0 for one of another run."""
    end: AttemptEnd | None
    """None if somebody removed it since."""
    sizes: Mapping[str, int]
    """Sizes of the objects listed where it lies, by key."""


class Standing(StrEnum):
    DONE = "done"
    MISSING = "missing"
    DAMAGED = "damaged"
    """It was done once; what it made is gone or changed."""
    NEVER = "never"
    UNREAD = "unread"
    """The end record decides, and nobody has read it yet."""


@dataclass(frozen=True)
class Verdict:
    """Where a step stands, and the reason in words. ``attempt`` is the one that decided, if any."""

    standing: Standing
    reason: str
    attempt: int | None = None
    objects: int = 0

    @property
    def done(self) -> bool:
        return self.standing is Standing.DONE


def judge(step: str, listing: StepListing | None, ends: Mapping[EndKey, AttemptEnd], layout: RunLayout) -> Verdict:
    """The verdict on one step. Its last attempt decides.

    Args:
        step: Step id.
        listing: What storage lists of it; None for nothing.
        ends: End records read so far.
        layout: Where its run keeps things.
    """
    if listing is None or not listing.attempts:
        return Verdict(Standing.NEVER, "never started")
    last = listing.last
    if last not in listing.ended:
        return Verdict(Standing.MISSING, f"never finished: attempt {last} has no end record", last)
    rows = listing.outputs.get(last, {})
    if listing.verified:
        return _done(last, len(rows))
    if end := ends.get((step, last)):
        prefix = layout.outputs(step, last)
        return _by_record(end, {prefix + key: size for key, size in rows.items()})
    return Verdict(Standing.UNREAD, f"attempt {last} ended; its record is not read yet", last)


def judge_adopted(adoption: Adoption) -> Verdict:
    """The verdict on a step that stands by what was taken over."""
    if adoption.end is None:
        reason = f"its result was taken over from {adoption.source}, whose record is gone"
        return Verdict(Standing.DAMAGED, reason, adoption.attempt)
    found = _by_record(adoption.end, adoption.sizes)
    reason = f"{found.reason}, taken over from {adoption.source}"
    if found.done:
        reason = f"taken over from {adoption.source}{_verified(found.objects)}"
    return replace(found, reason=reason, attempt=adoption.attempt)


def _by_record(end: AttemptEnd, sizes: Mapping[str, int]) -> Verdict:
    if end.outcome is Outcome.FENCED:
        return Verdict(Standing.MISSING, f"never finished: attempt {end.attempt} was fenced by a resume", end.attempt)
    if end.outcome is Outcome.FAILED:
        return Verdict(Standing.MISSING, _failure(end), end.attempt)
    if fault := output_fault(end, sizes):
        return Verdict(Standing.DAMAGED, f"damaged: {fault}", end.attempt)
    return _done(end.attempt, sum(len(output.objects) for output in end.outputs))


def _done(attempt: int, objects: int) -> Verdict:
    return Verdict(Standing.DONE, f"done in attempt {attempt}{_verified(objects)}", attempt, objects)


def _verified(objects: int) -> str:
    return f", {objects} object{'' if objects == 1 else 's'} verified" if objects else ""


def _failure(end: AttemptEnd) -> str:
    cause = f" by {end.cause.value.replace('_', ' ')}" if end.cause else ""
    message = f": {end.message}" if end.message else ""
    return f"never finished: attempt {end.attempt} ended{cause}{message}"
