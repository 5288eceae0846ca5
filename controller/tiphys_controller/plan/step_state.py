"""Decides whether one step is done, from what storage lists and records.

Only an end record makes a step done. Its projection carries the digest of the
listing it was written for, so while both agree, the listings alone verify the
step and its end record need not be read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

from tiphys.records import AttemptEnd, AttemptEndOutcome
from tiphys.store import ObjectInfo, find_output_fault, outputs_digest
from tiphys.store.outputs import is_checked_by_size

AttemptId = tuple[str, int]
"""(step id, attempt) of an end record."""


@dataclass(frozen=True)
class StepListing:
    """Listings of one step. Attempts are numbers."""

    attempts: frozenset[int] = frozenset()
    ended_attempts: frozenset[int] = frozenset()
    projections: Mapping[int, frozenset[str]] = field(default_factory=dict)
    """Listing digests of done projections, by attempt."""
    outputs: Mapping[int, Mapping[str, ObjectInfo]] | None = field(default_factory=dict)
    """Objects of an attempt, by attempt and by key relative to its outputs. None if they were not listed: then what the
    records say of a result counts, for people."""

    @property
    def last_attempt(self) -> int:
        """The last attempt; 0 if there is none."""
        return max(self.attempts, default=0)

    @cached_property
    def is_verified(self) -> bool:
        """Whether a projection has the digest of the outputs listed for the last attempt, if they were."""
        projected = self.projections.get(self.last_attempt, frozenset())
        if self.outputs is None or not projected:
            return bool(projected)
        rows = ((name, info.size, info.version) for name, info in self.outputs.get(self.last_attempt, {}).items())
        return outputs_digest(rows) in projected


@dataclass(frozen=True)
class ReusedResult:
    """A result that a submission reused for a step. ``source`` describes its origin."""

    source: str
    attempt: int
    """Attempt of the same step that produced it; 0 for a result of another run."""
    end: AttemptEnd | None
    """None if the end record was removed since, or is damaged."""
    listed: Mapping[str, ObjectInfo] | None
    """Objects listed for it, by key; None if they were not listed."""
    damage: str = ""
    """Why the end record, or the one that names it, cannot be read."""


class StepStatus(StrEnum):
    DONE = "done"
    MISSING = "missing"
    DAMAGED = "damaged"
    """It was done; outputs are gone or changed."""
    NEVER_STARTED = "never"
    UNREAD = "unread"
    """Its end record decides, and is not read yet."""


@dataclass(frozen=True)
class StepState:
    """State of a step, and the reason as a phrase. ``attempt`` is the one that decided, if any."""

    status: StepStatus
    reason: str
    attempt: int | None = None
    object_count: int = 0
    checked_by_size: bool = False
    """Whether the store keeps nothing about the bytes, so that no more than sizes was compared."""

    @property
    def is_done(self) -> bool:
        return self.status is StepStatus.DONE

    @property
    def has_result(self) -> bool:
        """Whether the step is done, or may turn out to be."""
        return self.status in (StepStatus.DONE, StepStatus.UNREAD)


def determine_step_state(step: str, listing: StepListing | None, ends: Mapping[AttemptId, AttemptEnd]) -> StepState:
    """Determine the state of a step from its last attempt.

    ``listing`` is None if nothing of the step is listed; ``ends`` are the end records read so far.
    """
    if listing is None or not listing.attempts:
        return StepState(StepStatus.NEVER_STARTED, "never started")
    last = listing.last_attempt
    if last not in listing.ended_attempts:
        return StepState(StepStatus.MISSING, f"never finished: attempt {last} runs, or was lost", last)
    objects = None if listing.outputs is None else listing.outputs.get(last, {}).values()
    if listing.is_verified:
        return _done_state(last, len(objects or ()), checked_by_size=is_checked_by_size(objects or ()))
    if end := ends.get((step, last)):
        return _state_from_end(end, None if objects is None else {info.key: info for info in objects})
    return StepState(StepStatus.UNREAD, f"attempt {last} ended; its record is not read yet", last)


def determine_reused_state(reused: ReusedResult) -> StepState:
    """Determine the state of a step whose result was reused."""
    if reused.end is None:
        what = f"is damaged: {reused.damage}" if reused.damage else "is gone"
        reason = f"its result was taken over from {reused.source}, whose record {what}"
        return StepState(StepStatus.DAMAGED, reason, reused.attempt)
    state = _state_from_end(reused.end, reused.listed)
    reason = f"{state.reason}, taken over from {reused.source}"
    if state.is_done:
        reason = f"taken over from {reused.source}{describe_check(state.object_count, state.checked_by_size)}"
    return replace(state, reason=reason, attempt=reused.attempt)


def _state_from_end(end: AttemptEnd, listed: Mapping[str, ObjectInfo] | None) -> StepState:
    if end.outcome is AttemptEndOutcome.FENCED:
        how = "stopped" if end.stopped else "lost and fenced by a resume"
        return StepState(StepStatus.MISSING, f"never finished: attempt {end.attempt} was {how}", end.attempt)
    if end.outcome is AttemptEndOutcome.FAILED:
        return StepState(StepStatus.MISSING, _failure_text(end), end.attempt)
    if listed is None:
        return _done_state(end.attempt)
    if fault := find_output_fault(end, listed):
        return StepState(StepStatus.DAMAGED, f"damaged: {fault}", end.attempt)
    objects = [obj for output in end.outputs for obj in output.objects]
    by_size = is_checked_by_size([*objects, *(listed[obj.key] for obj in objects)])
    return _done_state(end.attempt, len(objects), checked_by_size=by_size)


def _done_state(attempt: int, objects: int = 0, *, checked_by_size: bool = False) -> StepState:
    reason = f"done in attempt {attempt}{describe_check(objects, checked_by_size)}"
    return StepState(StepStatus.DONE, reason, attempt, objects, checked_by_size)


def describe_check(objects: int, checked_by_size: bool) -> str:
    """How many objects were found intact, as the end of a phrase, and by what; empty without objects."""
    check = "of the recorded size" if checked_by_size else "verified"
    return f", {objects} object{'' if objects == 1 else 's'} {check}" if objects else ""


def _failure_text(end: AttemptEnd) -> str:
    cause = f" by {end.cause.display_name}" if end.cause else ""
    message = f": {end.message}" if end.message else ""
    return f"never finished: attempt {end.attempt} ended{cause}{message}"
