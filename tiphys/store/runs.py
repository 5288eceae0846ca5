"""The state of a run, read from listings.

Plugin, controller and command all ask the same questions of storage: which
runs, which submissions, which attempts and how they ended. They are answered
here, once.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from tiphys.errors import IntegrityError, NotFoundError, ObjectMissingError, StoreError
from tiphys.records import (
    AttemptClaim,
    AttemptEnd,
    Event,
    EventBatch,
    RunRecord,
    RunSealed,
    StoredRecord,
    SubmissionBound,
    SubmissionClaim,
    WorkflowRecord,
    digest,
)
from tiphys.store.base import Store
from tiphys.store.claims import claim, read_record
from tiphys.store.layout import RUNS, RunLayout, parse_attempt, parse_event_batch, parse_submission
from tiphys.threads import in_parallel

RecordT = TypeVar("RecordT", bound=StoredRecord)
PlaceT = TypeVar("PlaceT")
ResultT = TypeVar("ResultT")

# Reads of small records wait for the network, so that a few at once cost no more than one.
_READERS = 16
_EVENT_ATTEMPTS = 100


class Attempt(NamedTuple):
    """One try of a step. ``end`` is None while nobody has recorded how it ended."""

    claim: AttemptClaim
    end: AttemptEnd | None


class Submission(NamedTuple):
    """One Workflow of a run. ``end`` may stay None for ever: only onExit writes it."""

    claim: SubmissionClaim
    bound: SubmissionBound | None
    end: RunSealed | None


def list_runs(store: Store) -> Iterator[str]:
    """Names of all runs, in ascending order, without listing what they hold."""
    for prefix in store.prefixes(RUNS):
        yield prefix.removeprefix(RUNS).rstrip("/")


def read_run(store: Store, run: str) -> RunRecord:
    """The record of a run.

    Raises:
        NotFoundError: the store has no such run; the message names similar ones.
        IntegrityError: it is damaged, or that of another run.
    """
    try:
        return of_place(store, RunLayout(run).record, read_record(store, RunLayout(run).record, RunRecord), run=run)
    except ObjectMissingError:
        near = difflib.get_close_matches(run, list(list_runs(store)))
        hint = f"did you mean {' or '.join(near)}?" if near else "check the name and the store"
        raise NotFoundError(f"{store.url} has no run {run!r}; {hint}") from None


def of_place(store: Store, key: str, record: RecordT, **place: Any) -> RecordT:
    """``record``, if it says of itself what its key says.

    Raises:
        IntegrityError: it is that of another place; somebody has copied it.
    """
    for field, value in place.items():
        if (found := getattr(record, field)) != value:
            raise IntegrityError(
                f"{store.url}: {key} says that it is of {field} {found}, so it was written for another place; "
                "records are never copied: restore the object or remove the run"
            )
    return record


def workflow_of(store: Store, record: RunRecord, claimed: SubmissionClaim | None) -> dict[str, Any]:
    """The Workflow that a submission was made of; without one, that of the run.

    Raises:
        IntegrityError: it is not recorded, or not the one that the claim names.
    """
    if claimed is None or not claimed.workflow:
        return record.workflow
    key = RunLayout(record.run).workflow(claimed.workflow)
    try:
        found = read_record(store, key, WorkflowRecord)
    except ObjectMissingError:
        found = None
    if found is None or found.run != record.run or digest(found.workflow) != claimed.workflow:
        raise IntegrityError(
            f"{store.url}: {key} is not the Workflow that submission {claimed.submission} of run {record.run} was "
            "made of, though it was written before it; restore the object, or `tiphys fork` the run"
        )
    return found.workflow


def last_claim(store: Store, run: str) -> SubmissionClaim | None:
    """The claim of the last submission of a run; None before the first. Costs a listing and a read."""
    places = (parse_submission(info.key) for info in store.list(RunLayout(run).submissions))
    last = max((number for number, what in filter(None, places) if what == "claim"), default=0)
    return read_record(store, RunLayout(run).submission(last), SubmissionClaim) if last else None


def current_workflow(store: Store, run: str) -> dict[str, Any]:
    """The Workflow that the last submission of a run was made of.

    Raises:
        NotFoundError: there is no such run.
        IntegrityError: a record is damaged.
    """
    return read_current_run(store, run).workflow


def read_current_run(store: Store, run: str) -> RunRecord:
    """Like `read_run`, with the Workflow that its last submission was made of."""
    record, last = read_run(store, run), last_claim(store, run)
    if last is None or not last.workflow:
        return record
    return record.model_copy(update={"workflow": workflow_of(store, record, last)})


def submissions(store: Store, run: str) -> list[Submission]:
    """All submissions of a run, the first one first."""
    listed = [info.key for info in store.list(RunLayout(run).submissions)]
    keys = {place: key for key in listed if (place := parse_submission(key))}
    numbers = sorted({number for number, _ in keys})

    def read(number: int) -> Submission:
        held = _claim_key(keys.get((number, "claim")), run, "submission", number)
        claimed = read_record(store, held, SubmissionClaim)
        return Submission(
            claim=of_place(store, held, claimed, run=run, submission=number),
            bound=_read_listed(store, keys.get((number, "bound")), SubmissionBound),
            end=_read_listed(store, keys.get((number, "end")), RunSealed),
        )

    return concurrently(read, numbers)


def step_attempts(store: Store, run: str, step: str) -> list[Attempt]:
    """All attempts of one step, the first one first."""
    return _read_attempts(store, run, RunLayout(run).step_attempts(step)).get(step, [])


def all_attempts(store: Store, run: str) -> dict[str, list[Attempt]]:
    """Attempts of every step that has any, by step id, the first one first."""
    return _read_attempts(store, run, RunLayout(run).attempts)


def listing_digest(rows: Iterable[tuple[str, int]]) -> str:
    """SHA-256 of the outputs of an attempt as a listing shows them, in any order.

    Each row is the key relative to `RunLayout.outputs`, and the size in bytes.
    """
    return digest(sorted([key, size] for key, size in rows))


def output_fault(end: AttemptEnd, sizes: Mapping[str, int]) -> str | None:
    """What is wrong with a finished result whose objects are listed with ``sizes`` by key; None if all is there."""
    own = RunLayout(end.run).outputs(end.step, end.attempt)
    for output in end.outputs:
        if not output.key.startswith(own):
            return f"its record names {output.key}, which this attempt did not write"
    for wanted in (thing for output in end.outputs for thing in output.objects):
        size = sizes.get(wanted.key)
        if size is None:
            return f"{wanted.key} is missing"
        if size != wanted.size:
            return f"{wanted.key} has {size} bytes, its record says {wanted.size}"
    return None


def append_events(store: Store, run: str, source: str, events: Sequence[Event]) -> None:
    """Store events under the next free number; nothing if there are none.

    Raises:
        StoreError: other writers took every number tried.
    """
    if not events:
        return
    layout = RunLayout(run)
    batch = EventBatch(run=run, source=source, events=tuple(events))
    first = max((number for number, _ in _event_keys(store, run)), default=0) + 1
    for number in range(first, first + _EVENT_ATTEMPTS):
        if claim(store, layout.event_batch(number), batch).won:
            return
    raise StoreError(f"{store.url}: {_EVENT_ATTEMPTS} numbers for events of run {run} were taken in turn; try again")


def read_events(store: Store, run: str) -> list[Event]:
    """All events of a run, in the order in which they were stored."""
    keys = [key for _, key in _event_keys(store, run)]
    batches = concurrently(lambda key: read_record(store, key, EventBatch), keys)
    return [event for batch in batches for event in batch.events]


def _event_keys(store: Store, run: str) -> Iterator[tuple[int, str]]:
    for info in store.list(RunLayout(run).events):
        if (number := parse_event_batch(info.key)) is not None:
            yield number, info.key


def _read_attempts(store: Store, run: str, prefix: str) -> dict[str, list[Attempt]]:
    listed = [info.key for info in store.list(prefix)]
    keys = {place: key for key in listed if (place := parse_attempt(key))}
    places = sorted({(step, number) for step, number, _ in keys})

    def read(place: tuple[str, int]) -> Attempt:
        step, number = place
        held = _claim_key(keys.get((step, number, False)), run, f"attempt of {step}", number)
        return Attempt(
            claim=read_record(store, held, AttemptClaim),
            end=_read_listed(store, keys.get((step, number, True)), AttemptEnd),
        )

    found: dict[str, list[Attempt]] = {}
    for (step, _), attempt in zip(places, concurrently(read, places), strict=True):
        found.setdefault(step, []).append(attempt)
    return found


def _claim_key(key: str | None, run: str, what: str, number: int) -> str:
    if key is None:
        raise IntegrityError(
            f"run {run}: {what} {number} has records but no claim, which is always written first; "
            "somebody removed it: restore the object or remove the run"
        )
    return key


def _read_listed(store: Store, key: str | None, kind: type[RecordT]) -> RecordT | None:
    return read_record(store, key, kind) if key else None


def concurrently(read: Callable[[PlaceT], ResultT], places: Sequence[PlaceT]) -> list[ResultT]:
    """``read`` of each place, in their order; for many small reads that would wait for the network in turn."""
    return in_parallel(lambda _, place: read(place), places, _READERS)
