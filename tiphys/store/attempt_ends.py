"""Ends of attempts, and the way on when the end record of an attempt is damaged.

Only the end record says how an attempt ended, so a damaged one stops everything that
rests on it. A resume with ``--force`` or ``--from`` passes it over: it stores a fenced end
under a second key, which counts for as long as the first cannot be read. The result of
such an attempt never counts, and its step runs again.
"""

from typing import NamedTuple

from tiphys.errors import IntegrityError, ObjectMissingError
from tiphys.records import AttemptClaim, AttemptEnd, AttemptEndOutcome, Cause
from tiphys.store.base import Store
from tiphys.store.claims import RecordT, claim_record, find_record, read_record
from tiphys.store.layout import RunLayout


class DamagedRecord(NamedTuple):
    """A record that cannot be read. ``message`` names its key, what is damaged, and what to do."""

    key: str
    message: str


def check_record_identity(store: Store, key: str, record: RecordT, **expected: object) -> RecordT:
    """Return ``record`` if its fields match its key.

    ``expected`` has the values of its fields that follow from the key.

    Raises:
        IntegrityError: a field differs, so the record was copied from another key.
    """
    for field, value in expected.items():
        if (actual := getattr(record, field)) != value:
            raise IntegrityError(
                f"{store.url}: {key} holds a record of {field} {actual}, so it was copied from another key; "
                f"records are never copied: {record.damage_remedy}"
            )
    return record


def read_attempt_end(store: Store, run: str, step: str, attempt: int) -> AttemptEnd:
    """The end of an attempt; a fenced one if its record is damaged and was passed over.

    Raises:
        ObjectMissingError: the attempt has no end.
        IntegrityError: the record is damaged, and was not passed over.
    """
    layout = RunLayout(run)
    key = layout.attempt_end(step, attempt)
    try:
        return check_record_identity(
            store, key, read_record(store, key, AttemptEnd), run=run, step=step, attempt=attempt
        )
    except IntegrityError:
        if (passed_over := find_record(store, layout.passed_over_end(step, attempt), AttemptEnd)) is not None:
            return passed_over
        raise


def find_attempt_end(store: Store, run: str, step: str, attempt: int) -> AttemptEnd | None:
    """Like `read_attempt_end`, but None for an attempt without an end."""
    try:
        return read_attempt_end(store, run, step, attempt)
    except ObjectMissingError:
        return None


def pass_over_end(store: Store, run: str, step: str, attempt: int, command: str) -> AttemptEnd:
    """Record that ``command`` passed over the damaged end record of an attempt; returns the end that counts now.

    Raises:
        IntegrityError: the claim of the attempt is damaged, too.
    """
    try:
        return read_attempt_end(store, run, step, attempt)
    except IntegrityError as error:
        layout = RunLayout(run)
        claim = read_record(store, layout.attempt(step, attempt), AttemptClaim)
        end = AttemptEnd(
            run=run,
            step=step,
            attempt=attempt,
            submission=claim.submission,
            outcome=AttemptEndOutcome.FENCED,
            message=f"its end record is damaged, and {command} passed it over ({error})",
            step_key=claim.step_key,
        )
        return claim_record(store, layout.passed_over_end(step, attempt), end).record


def unreadable_end(claim: AttemptClaim, error: IntegrityError) -> AttemptEnd:
    """What to show, and never to store, for an attempt whose end record is damaged."""
    return AttemptEnd(
        run=claim.run,
        step=claim.step,
        attempt=claim.attempt,
        submission=claim.submission,
        outcome=AttemptEndOutcome.FAILED,
        cause=Cause.UNKNOWN,
        message=f"how it ended is not known: {error}",
        written_at=claim.written_at,
    )
