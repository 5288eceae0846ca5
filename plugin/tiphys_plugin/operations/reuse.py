"""Is there a finished result that can stand for this step?

Finished means: an end record says done, under the same step key, and a listing
shows every object it names with its size. A damaged result is never adopted;
the step runs again, and its message says what was wrong.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tiphys.errors import ObjectExistsError
from tiphys.faults import failpoint
from tiphys.records import AdoptedRecord, AttemptEnd, Event, MemoRecord, Outcome
from tiphys.store import (
    Attempt,
    RunLayout,
    Store,
    append_events,
    claim,
    find_record,
    memo_key,
    output_fault,
    step_attempts,
)
from tiphys_plugin.runtime.context import StepCall


class Found(NamedTuple):
    """``end`` is None if the step has to run; ``damage`` says why a finished result was not taken."""

    end: AttemptEnd | None
    damage: str = ""


def find(call: StepCall, key: str, attempts: Sequence[Attempt]) -> Found:
    """The newest intact result of this run, of one that it is a fork of, or else the one that another run shares."""
    damage = ""
    for end in _results(call, key, attempts):
        fault = damage_of(call.store, end)
        if fault is None:
            return Found(end)
        of = "" if end.run == call.run else f" of run {end.run}"
        damage = damage or f"the result of attempt {end.attempt}{of} is damaged: {fault}"
    if call.spec.share and not call.fresh_since and (shared := _shared(call, key)) is not None:
        fault = damage_of(call.store, shared)
        if fault is None:
            return Found(shared)
        damage = damage or f"the shared result of run {shared.run} is damaged: {fault}"
    return Found(None, damage)


def damage_of(store: Store, end: AttemptEnd) -> str | None:
    """What a listing shows to be missing or of another size; None if all is there."""
    listed = {info.key: info.size for info in store.list(RunLayout(end.run).outputs(end.step, end.attempt))}
    return output_fault(end, listed)


def adopt(call: StepCall, key: str, end: AttemptEnd) -> AdoptedRecord:
    """Record that this submission takes ``end`` for the step; the record that stands is answered."""
    wanted = AdoptedRecord(
        run=call.run,
        submission=call.binding.submission,
        step=call.step,
        step_key=key,
        source_run=end.run,
        source_step=end.step,
        source_attempt=end.attempt,
    )
    failpoint("adopt.before_record")
    held = claim(call.store, call.layout.adopted(call.binding.submission, call.step), wanted)
    failpoint("adopt.after_record")
    if held.won:
        source = "run" if end.run == call.run else "shared"
        call.services.metrics.adopted.labels(source=source).inc()
        message = f"{call.step} was not run: {describe(call, held.record)}"
        event = Event(name="step.adopted", at=call.services.clock(), step=call.step, message=message)
        append_events(call.store, call.run, "plugin", [event])
    return held.record


def adopted(call: StepCall) -> AdoptedRecord | None:
    """What this submission adopted for the step before, if anything."""
    return find_record(call.store, call.layout.adopted(call.binding.submission, call.step), AdoptedRecord)


def source(call: StepCall, record: AdoptedRecord) -> AttemptEnd | None:
    """The end record that was adopted; None if somebody removed it since."""
    key = RunLayout(record.source_run).attempt_end(record.source_step, record.source_attempt)
    return find_record(call.store, key, AttemptEnd)


def project(call: StepCall, record: AdoptedRecord) -> None:
    """Say by a key alone which attempt of the step was taken, so that plans need not read the records of thousands."""
    if (record.source_run, record.source_step) == (call.run, call.step):
        key = call.layout.adopted_attempt(record.submission, call.step, record.source_attempt)
        with contextlib.suppress(ObjectExistsError):
            call.store.create(key, b"")
        failpoint("adopt.after_projection")


def describe(call: StepCall, record: AdoptedRecord) -> str:
    """Where an adopted result comes from, for a person."""
    if record.source_run == call.run:
        return f"adopted from attempt {record.source_attempt}"
    return f"adopted from run {record.source_run}, step {record.source_step}, attempt {record.source_attempt}"


def _results(call: StepCall, key: str, attempts: Sequence[Attempt]) -> Iterator[AttemptEnd]:
    """Finished results under this step key, the newest first: of the run itself, then of those that it comes from."""
    # cache=False means: once in every submission.
    since = call.fresh_since if call.spec.cache else call.binding.submission
    yield from _done(attempts, key, since)
    for ancestor in call.family if call.spec.cache else ():
        since = ancestor.fresh_since.get(call.spec.name, 0)
        yield from _done(step_attempts(call.store, ancestor.run, call.step), key, since)
        if since:
            break


def _done(attempts: Sequence[Attempt], key: str, since: int) -> Iterator[AttemptEnd]:
    for _, end in reversed(attempts):
        if end is not None and end.outcome is Outcome.DONE and end.step_key == key and end.submission >= since:
            yield end


def _shared(call: StepCall, key: str) -> AttemptEnd | None:
    memo = find_record(call.store, memo_key(key), MemoRecord)
    if memo is None or memo.run == call.run or not call.spec.cache:
        return None
    end = find_record(call.store, RunLayout(memo.run).attempt_end(memo.step, memo.attempt), AttemptEnd)
    return end if end is not None and end.outcome is Outcome.DONE and end.step_key == key else None
