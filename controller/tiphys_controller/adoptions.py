"""Which steps stand by a result that a submission took over, instead of by an attempt of their own.

A step that was taken over opens no attempt. Looking at attempts alone, a plan
would run a step that another run has made again and again, or answer for it
with its last attempt where an older one was taken.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tiphys.records import AdoptedRecord, AttemptClaim, AttemptEnd
from tiphys.store import RunLayout, Store, find_record, read_record
from tiphys.store.layout import parse_adopted, parse_adopted_attempt
from tiphys.store.runs import concurrently
from tiphys_controller.evidence import Adoption, StepListing

_NOTHING = StepListing()


class AdoptionState(NamedTuple):
    """``adoption`` is None where the last attempt of the step stands. Finding out took so many requests."""

    adoption: Adoption | None
    requests: int


class TakenOver(NamedTuple):
    """What keys below ``adopted/`` say."""

    submissions: dict[str, int]
    """The last submission that took over a result for a step, by step id."""
    attempts: set[tuple[int, str, int]]
    """Submission, step id, and the attempt of that step which it took over; not all have left that."""


def taken_over(keys: Iterable[str]) -> TakenOver:
    """Read what is told by the keys alone."""
    found = TakenOver({}, set())
    for key in keys:
        if place := parse_adopted(key):
            found.submissions[place[1]] = max(place[0], found.submissions.get(place[1], 0))
        elif own := parse_adopted_attempt(key):
            found.attempts.add(own)
    return found


def standing(store: Store, run: str, taken: TakenOver, steps: Mapping[str, StepListing]) -> dict[str, AdoptionState]:
    """What steps stand by that were taken over, but for those whose last attempt stands, as the keys alone tell.

    Each costs one read, and three more requests if it is not its last attempt.

    Raises:
        IntegrityError: a record is damaged.
    """
    places = [
        (step, submission)
        for step, submission in sorted(taken.submissions.items())
        if (submission, step, steps.get(step, _NOTHING).last) not in taken.attempts
    ]
    found = concurrently(lambda place: _standing(store, RunLayout(run), *place, steps.get(place[0], _NOTHING)), places)
    return {step: one for (step, _), one in zip(places, found, strict=True)}


def _standing(store: Store, layout: RunLayout, step: str, submission: int, listing: StepListing) -> AdoptionState:
    record = read_record(store, layout.adopted(submission, step), AdoptedRecord)
    last = listing.last
    own = (record.source_run, record.source_step) == (layout.run, step)
    if own and record.source_attempt == last:
        return AdoptionState(None, 1)
    if not last:
        return AdoptionState(_adoption(store, record, own), 3)
    # Who took a result over opens no attempt afterwards; a later submission may.
    later = read_record(store, layout.attempt(step, last), AttemptClaim).submission > submission
    return AdoptionState(None, 2) if later else AdoptionState(_adoption(store, record, own), 4)


def _adoption(store: Store, record: AdoptedRecord, own: bool) -> Adoption:
    source = RunLayout(record.source_run)
    where = "" if own else f"run {record.source_run}, step {record.source_step}, "
    return Adoption(
        source=f"{where}attempt {record.source_attempt}",
        attempt=record.source_attempt if own else 0,
        end=find_record(store, source.attempt_end(record.source_step, record.source_attempt), AttemptEnd),
        sizes={info.key: info.size for info in store.list(source.outputs(record.source_step, record.source_attempt))},
    )
