"""The state of a run, read from storage: its submissions, attempts, outputs and events.

Plugin, controller and command read runs only through this module, so that all
three see the same state.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from tiphys.errors import ConflictError, IntegrityError, NotFoundError, ObjectMissingError, StoreError
from tiphys.records import (
    AttemptClaim,
    AttemptEnd,
    AttemptEndOutcome,
    Event,
    EventBatch,
    RunRecord,
    StoredRecord,
    SubmissionBinding,
    SubmissionClaim,
    SubmissionEnd,
    SubmissionKind,
    WorkflowRecord,
    json_digest,
)
from tiphys.records.event import PROGRAM_EVENT_PREFIXES, PROGRAM_EVENT_SOURCE, ProgramEventBatch
from tiphys.store.attempt_ends import DamagedRecord, check_record_identity, read_attempt_end, unreadable_end
from tiphys.store.base import Store
from tiphys.store.claims import ClaimResult, claim_record, find_record, read_record
from tiphys.store.format import mark_format
from tiphys.store.layout import RUNS, RunLayout, event_batch_key, parse_attempt, parse_event_batch, parse_submission
from tiphys.store.run_markers import mark, newest_marker
from tiphys.threads import map_parallel

RecordT = TypeVar("RecordT", bound=StoredRecord)
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

# Reads of small records mostly wait for the network, so parallel reads take hardly longer than one.
_PARALLEL_READS = 16
_MAX_SIMILAR_NAMES = 10_000
_EVENT_ATTEMPTS = 100
MAX_PROGRAM_BATCHES = 1000
"""Batches of events that are read of the programs of a run: a program may write as many as it likes."""
_MAX_EVENTS_OF_BATCH = 20
_MAX_MESSAGE_CHARACTERS = 1000
_MAX_DATA_FIELDS, _MAX_DATA_CHARACTERS = 20, 300


class Attempt(NamedTuple):
    """One attempt of a step. ``end`` is None until its end is recorded."""

    claim: AttemptClaim
    end: AttemptEnd | None


@dataclass(frozen=True)
class Submission:
    """One Workflow of a run. ``end`` may stay None, because only its onExit handler leads to an end record."""

    claim: SubmissionClaim
    binding: SubmissionBinding | None
    end: SubmissionEnd | None
    joined_keys: frozenset[str] = frozenset()
    """Digests of idempotency keys under which calls have sent what another call had claimed."""

    @property
    def records(self) -> tuple[SubmissionClaim, SubmissionBinding | None, SubmissionEnd | None]:
        """Claim, binding and end; the last two may not be written yet."""
        return self.claim, self.binding, self.end

    def answers(self, key_digest: str) -> bool:
        """Whether it is the answer to all calls under an idempotency key."""
        return key_digest == self.claim.key or key_digest in self.joined_keys


def list_runs(store: Store) -> Iterator[str]:
    """Names of all runs, in ascending order, without a listing of their objects."""
    for prefix in store.prefixes(RUNS):
        yield prefix.removeprefix(RUNS).rstrip("/")


def read_run(store: Store, run: str) -> RunRecord:
    """The record of a run.

    Raises:
        NotFoundError: the store has no such run; the message names similar ones.
        IntegrityError: the record is damaged, or belongs to another run.
    """
    try:
        return check_record_identity(
            store, RunLayout(run).run_record, read_record(store, RunLayout(run).run_record, RunRecord), run=run
        )
    except ObjectMissingError:
        if is_partly_deleted(store, run):
            raise NotFoundError(deletion_message(store, run)) from None
        similar = difflib.get_close_matches(run, list(islice(list_runs(store), _MAX_SIMILAR_NAMES)))
        hint = f"did you mean {' or '.join(similar)}?" if similar else "check the name and the store"
        raise NotFoundError(f"{store.url} has no run {run!r}; {hint}") from None


def is_partly_deleted(store: Store, run: str) -> bool:
    """Whether the store has objects of a run without its record, as after an interrupted deletion."""
    return any(_iter_leftovers(store, run))


def _iter_leftovers(store: Store, run: str) -> Iterator[str]:
    """Keys of a run without a record; none of a run that has one."""
    layout = RunLayout(run)
    if next(iter(store.list(layout.run_record)), None) is None:
        for prefix in (layout.control, layout.data, layout.lineages):
            yield from (info.key for info in store.list(prefix))


def check_name_free_of_leftovers(store: Store, run: str) -> None:
    """Check that a new run of this name would find nothing of a deleted one, apart from its first submissions.

    Those may be of a Workflow whose run is about to be recorded; a claim tells.

    Raises:
        ConflictError: it would.
    """
    if any(not key.startswith(RunLayout(run).submissions) for key in _iter_leftovers(store, run)):
        raise ConflictError(deletion_message(store, run))


def deletion_message(store: Store, run: str) -> str:
    """Why nothing can be done with a run whose deletion was begun."""
    return f"run {run} of {store.url} was partly deleted; `tiphys runs rm {run} --yes` deletes the rest"


def check_not_deleted(store: Store, run: str) -> None:
    """Check that no deletion of a run was begun.

    Raises:
        NotFoundError: it was, or there is no such run.
    """
    read_run(store, run)
    last = read_last_claim(store, run)
    if last is not None and last.kind is SubmissionKind.DELETION:
        raise NotFoundError(deletion_message(store, run))


def claim_run(store: Store, record: RunRecord) -> ClaimResult[RunRecord]:
    """Write the record of a new run, and before it the markers of the store's format and of the newest runs."""
    mark_format(store)
    marker = newest_marker(record.run, record.written_at)
    mark(store, marker)
    claimed = claim_record(store, RunLayout(record.run).run_record, record)
    if newest_marker(record.run, claimed.record.written_at) != marker:
        store.delete(marker)  # the run that has the name is listed by its own
    return claimed


def read_submission_workflow(store: Store, record: RunRecord, claimed: SubmissionClaim | None) -> dict[str, Any]:
    """The Workflow of a submission; that of the run if ``claimed`` is None or names no other.

    Raises:
        IntegrityError: the Workflow is missing, or differs from the digest in the claim.
    """
    if claimed is None or not claimed.workflow:
        return record.workflow
    key = RunLayout(record.run).workflow(claimed.workflow)
    try:
        stored = read_record(store, key, WorkflowRecord)
    except ObjectMissingError:
        stored = None
    if stored is None or stored.run != record.run or json_digest(stored.workflow) != claimed.workflow:
        raise IntegrityError(
            f"{store.url}: {key} is missing or is not the Workflow that submission {claimed.submission} of run "
            f"{record.run} was made of; restore the object, or `tiphys fork` the run"
        )
    return stored.workflow


def read_last_claim(store: Store, run: str) -> SubmissionClaim | None:
    """The claim of the last submission of a run; None before the first. Costs a listing and a read."""
    parsed_keys = (parse_submission(info.key) for info in store.list(RunLayout(run).submissions))
    last = max((number for number, kind in filter(None, parsed_keys) if kind == "claim"), default=0)
    return read_record(store, RunLayout(run).submission(last), SubmissionClaim) if last else None


def read_submissions(store: Store, run: str, damaged: list[DamagedRecord] | None = None) -> list[Submission]:
    """All submissions of a run, in order.

    With ``damaged``, for displays only, each damaged record is added to it and left out.
    """
    listed = [info.key for info in store.list(RunLayout(run).submissions)]
    keys = {parsed: key for key in listed if (parsed := parse_submission(key))}
    numbers = sorted({number for number, _ in keys})

    def read(number: int) -> Submission | None:
        claim_key, joined = keys.get((number, "claim")), RunLayout(run).submission_key(number, "")
        with collect_damage(claim_key or RunLayout(run).submission(number), damaged):
            if claim_key is None:
                raise _missing_claim(run, "submission", number)
            claim = read_record(store, claim_key, SubmissionClaim)
            return Submission(
                claim=check_record_identity(store, claim_key, claim, run=run, submission=number),
                binding=_read_listed(store, keys.get((number, "bound")), SubmissionBinding, damaged),
                end=_read_listed(store, keys.get((number, "end")), SubmissionEnd, damaged),
                joined_keys=frozenset(key.removeprefix(joined) for key in listed if key.startswith(joined)),
            )
        return None

    return [submission for submission in read_concurrently(read, numbers) if submission is not None]


class AttemptNumbers(NamedTuple):
    """The attempts of one step by what is listed of them."""

    claimed: set[int]
    ended: set[int]


ALL_ATTEMPTS = slice(None)


def list_attempts(store: Store, run: str, step: str = "") -> dict[str, AttemptNumbers]:
    """Numbers of the attempts of a run by step id, or those of one step alone; costs a listing."""
    layout = RunLayout(run)
    listed: dict[str, AttemptNumbers] = {}
    for info in store.list(layout.step_attempts(step) if step else layout.attempts):
        if (key := parse_attempt(info.key)) is not None:
            if key.step not in listed:
                listed[key.step] = AttemptNumbers(set(), set())
            (listed[key.step].ended if key.is_end else listed[key.step].claimed).add(key.attempt)
    return listed


def select_attempts(listed: Mapping[str, AttemptNumbers], window: slice = ALL_ATTEMPTS) -> list[tuple[str, int]]:
    """Step and number of the attempts that ``window`` selects, in order.

    It is a slice of all attempts in the order of their distance from the newest of their step: ``slice(100)`` are the
    newest hundred, with the newest of each step first.
    """
    by_step = ((step, sorted(attempts.claimed | attempts.ended, reverse=True)) for step, attempts in listed.items())
    if window == ALL_ATTEMPTS:
        return sorted((step, number) for step, numbers in by_step for number in numbers)
    ranked = sorted((rank, step, number) for step, numbers in by_step for rank, number in enumerate(numbers))
    return sorted((step, number) for _, step, number in ranked[window])


def read_step_attempts(store: Store, run: str, step: str, damaged: list[DamagedRecord] | None = None) -> list[Attempt]:
    """All attempts of one step, in order.

    With ``damaged``, each damaged end record is added to it, and its attempt has failed for an unknown cause.
    """
    listed = list_attempts(store, run, step)

    def read(place: tuple[str, int]) -> Attempt:
        return read_attempt(store, run, *place, listed[step], partial(read_attempt_end, store, run), damaged)

    return read_concurrently(read, select_attempts(listed))


def read_attempt(
    store: Store,
    run: str,
    step: str,
    number: int,
    listed: AttemptNumbers,
    read_end: Callable[[str, int], AttemptEnd],
    damaged: list[DamagedRecord] | None = None,
) -> Attempt:
    """Read a listed attempt; ``read_end`` reads its end, and ``damaged`` is as in `read_step_attempts`.

    Raises:
        IntegrityError: its claim is damaged or was removed, or its end is damaged and there is no ``damaged``.
    """
    layout = RunLayout(run)
    if number not in listed.claimed:
        raise _missing_claim(run, f"attempt of {step}", number)
    claim = read_record(store, layout.attempt(step, number), AttemptClaim)
    if number not in listed.ended:
        return Attempt(claim, None)
    try:
        return Attempt(claim, read_end(step, number))
    except IntegrityError as error:
        if damaged is None:
            raise
        damaged.append(DamagedRecord(layout.attempt_end(step, number), str(error)))
        return Attempt(claim, unreadable_end(claim, error))


def read_open_attempts(store: Store, run: str, damaged: list[DamagedRecord]) -> list[AttemptClaim]:
    """Claims of the attempts without an end, the last one of each step; costs a listing and one read for each.

    Each claim that cannot be read is added to ``damaged`` and left out.
    """
    listed = list_attempts(store, run)
    last = {step: max(attempts.claimed | attempts.ended) for step, attempts in listed.items()}

    def read(step: str) -> AttemptClaim | None:
        claim_key = RunLayout(run).attempt(step, last[step])
        with collect_damage(claim_key, damaged):
            return read_record(store, claim_key, AttemptClaim)
        return None

    open_steps = [step for step, number in last.items() if number not in listed[step].ended]
    return [claim for claim in read_concurrently(read, open_steps) if claim is not None]


def fence_attempt(
    store: Store,
    run: str,
    step: str,
    attempt: int,
    message: str,
    *,
    stopped: bool = False,
    last_alive_at: datetime | None = None,
) -> AttemptEnd | None:
    """End an attempt as fenced, unless it has an end: nothing that it commits later counts.

    An end is create-only, so a fence and a late finish cannot both count.

    ``stopped`` says whether a person stopped its workflow; ``last_alive_at`` is its last sign of life, None: now.

    Returns:
        The end that the attempt has now, possibly by another writer; None for an attempt that was never claimed.

    Raises:
        IntegrityError: the claim or the end is damaged.
        StoreError: storage did not answer.
    """
    layout = RunLayout(run)
    claim = find_record(store, layout.attempt(step, attempt), AttemptClaim)
    if claim is None:
        return None
    fence = AttemptEnd(
        run=run,
        step=step,
        attempt=attempt,
        submission=claim.submission,
        outcome=AttemptEndOutcome.FENCED,
        message=message,
        stopped=stopped,
        last_alive_at=last_alive_at,
        step_key=claim.step_key,
    )
    return claim_record(store, layout.attempt_end(step, attempt), fence).record


def append_events(store: Store, run: str, source: str, events: Sequence[Event]) -> None:
    """Store ``events`` under the next free number; no events, no object.

    Those of a training program (`PROGRAM_EVENT_SOURCE`) go below ``data/``, all others below ``control/``.

    Raises:
        StoreError: other writers claimed every number that was tried.
    """
    if not events:
        return
    layout = RunLayout(run)
    prefix = layout.program_events if source == PROGRAM_EVENT_SOURCE else layout.events
    kind = ProgramEventBatch if source == PROGRAM_EVENT_SOURCE else EventBatch
    batch = kind(run=run, source=source, events=tuple(events))
    first = max((number for number, _ in _event_keys(store, prefix)), default=0) + 1
    for number in range(first, first + _EVENT_ATTEMPTS):
        if claim_record(store, event_batch_key(prefix, number), batch).is_ours:
            return
    raise StoreError(
        f"{store.url}: other writers claimed {_EVENT_ATTEMPTS} event numbers of run {run} in a row; try again"
    )


def read_events(
    store: Store, run: str, damaged: list[DamagedRecord] | None = None, max_batches: int | None = None
) -> list[Event]:
    """All events of a run: those of the services, then those of its programs, each in the order of their storage.

    Of the programs' objects the first `MAX_PROGRAM_BATCHES` count; one that cannot be read is skipped. So is a
    damaged one of the services with ``damaged``, to which it is added. ``max_batches`` keeps the last of
    each kind.
    """
    newest = slice(0 if max_batches is None else -max_batches, None)

    def read(key: str) -> tuple[Event, ...]:
        batch = _read_listed(store, key, EventBatch, damaged)
        return batch.events if batch else ()

    services = read_concurrently(read, [key for _, key in _event_keys(store, RunLayout(run).events)][newest])
    programs = read_concurrently(partial(read_program_events, store), list_program_batches(store, run)[newest])
    return [event for batch in (*services, *programs) for event in batch]


def list_program_batches(store: Store, run: str) -> list[str]:
    """Keys of the first `MAX_PROGRAM_BATCHES` batches of events that programs of the run stored."""
    return [key for _, key in islice(_event_keys(store, RunLayout(run).program_events), MAX_PROGRAM_BATCHES)]


def read_program_events(store: Store, key: str) -> tuple[Event, ...]:
    """The events of one batch of a program; none if it cannot be read, so that it does not hide other events.

    A program can report on its checkpoints and processes only. Long texts are cut, as services keep events in memory.
    """
    try:
        events = read_record(store, key, ProgramEventBatch).events
    except (IntegrityError, ObjectMissingError):
        return ()
    return tuple(_bounded(event) for event in events[:_MAX_EVENTS_OF_BATCH] if _is_about_program(event))


def _is_about_program(event: Event) -> bool:
    return event.name.startswith(PROGRAM_EVENT_PREFIXES) and len(event.name) < _MAX_DATA_CHARACTERS


def _bounded(event: Event) -> Event:
    """``event`` with plain values only, each of a limited length."""
    data = {
        name[:_MAX_DATA_CHARACTERS]: value[:_MAX_DATA_CHARACTERS] if isinstance(value, str) else value
        for name, value in islice(event.data.items(), _MAX_DATA_FIELDS)
        if value is None or isinstance(value, str | float | bool) or (isinstance(value, int) and abs(value) < 1 << 63)
    }
    step, message = event.step[:_MAX_DATA_CHARACTERS], event.message[:_MAX_MESSAGE_CHARACTERS]
    return event.model_copy(update={"data": data, "message": message, "step": step})


def _event_keys(store: Store, prefix: str) -> Iterator[tuple[int, str]]:
    for info in store.list(prefix):
        if (number := parse_event_batch(info.key)) is not None:
            yield number, info.key


@contextmanager
def collect_damage(key: str, damaged: list[DamagedRecord] | None) -> Iterator[None]:
    """Add an `IntegrityError` about ``key`` to ``damaged``; without a list, it is raised."""
    try:
        yield
    except IntegrityError as error:
        if damaged is None:
            raise
        damaged.append(DamagedRecord(key, str(error)))


def _missing_claim(run: str, kind: str, number: int) -> IntegrityError:
    return IntegrityError(
        f"run {run}: {kind} {number} has records but no claim, which is always written first; "
        "the claim was removed: restore the object or remove the run"
    )


def _read_listed(
    store: Store, key: str | None, kind: type[RecordT], damaged: list[DamagedRecord] | None
) -> RecordT | None:
    if key is not None:
        with collect_damage(key, damaged):
            return read_record(store, key, kind)
    return None


def read_concurrently(read: Callable[[ItemT], ResultT], items: Sequence[ItemT]) -> list[ResultT]:
    """Call ``read`` for each item in parallel; the results are in the order of the items. Meant for small reads."""
    return map_parallel(lambda _, item: read(item), items, _PARALLEL_READS)
