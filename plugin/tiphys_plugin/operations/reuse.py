"""Finds a finished result that a step can reuse instead of running.

A result is reusable if its end record says done under the same step key, and a
listing shows every object that the record names with its size, and as it was when
it was hashed. What was written again is hashed again. A damaged result is never
reused: the step runs again, and its message reports the damage.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tiphys.errors import IntegrityError, NotFoundError, ObjectExistsError, ObjectMissingError
from tiphys.faults import failpoint
from tiphys.lineage.fork_history import find_rerun_submission
from tiphys.protocol.execute_api import ExecuteReply, pending_reply
from tiphys.records import AttemptEnd, AttemptEndOutcome, Event, MemoRecord, ReuseRecord, task_name
from tiphys.store import (
    Attempt,
    DamagedRecord,
    RunLayout,
    append_events,
    claim_record,
    find_attempt_end,
    find_output_fault,
    find_record,
    list_outputs,
    memo_key,
    read_step_attempts,
)
from tiphys.store.outputs import confirm_outputs, find_changed_outputs
from tiphys_plugin.runtime.background import HashingProgress
from tiphys_plugin.runtime.context import StepCall


class ReuseLookup(NamedTuple):
    """``end`` is None if the step has to run; ``damage`` says why a finished result was not reused.

    ``waiting`` is a Pending reply while outputs that were written again are being hashed.
    """

    end: AttemptEnd | None
    damage: str = ""
    waiting: ExecuteReply | None = None


def find_reusable_result(call: StepCall, key: str, attempts: Sequence[Attempt]) -> ReuseLookup:
    """The newest intact result of this run or of the runs it was forked from, else the one that another run shares."""
    damage, damaged = "", list[DamagedRecord]()
    for end, name in _candidates(call, key, attempts, damaged):
        fault = find_damage(call, end)
        if isinstance(fault, ExecuteReply):
            return ReuseLookup(None, waiting=fault)
        if fault is None:
            return ReuseLookup(end)
        damage = damage or f"{name} is damaged: {fault}"
    return ReuseLookup(None, damage or "; ".join(one.message for one in damaged[:1]))


def _candidates(
    call: StepCall, key: str, attempts: Sequence[Attempt], damaged: list[DamagedRecord]
) -> Iterator[tuple[AttemptEnd, str]]:
    """Each result that may be reused, with its name in messages."""
    for end in _matching_results(call, key, attempts, damaged):
        source = "" if end.run == call.run else f" of run {end.run}"
        yield end, f"the result of attempt {end.attempt}{source}"
    if call.spec.share and not call.rerun_since and (shared := _find_shared_result(call, key, damaged)) is not None:
        yield shared, f"the shared result of run {shared.run}"


def find_damage(call: StepCall, end: AttemptEnd) -> ExecuteReply | str | None:
    """The first output that is missing or has other bytes. Lists the outputs, and hashes those written again.

    None if all are intact; a Pending reply while objects are being hashed.
    """
    listed, settings = list_outputs(call.store, end), call.context.settings
    if changed := find_changed_outputs(end, listed):
        job = f"reuse {call.layout.outputs(end.step, end.attempt)} {end.run}"
        try:
            hashes = call.context.hasher.hash_objects(job, changed, settings.verify_inline_seconds)
        except ObjectMissingError as error:
            return str(error)
        if isinstance(hashes, HashingProgress):
            message = f"Verifying outputs again: {hashes.done} of {hashes.total} objects"
            return pending_reply(message, settings.requeue_min_seconds)
        listed = confirm_outputs(end, listed, hashes.__getitem__)
    return find_output_fault(end, listed)


def record_reuse(call: StepCall, key: str, end: AttemptEnd) -> ReuseRecord:
    """Record that this submission reuses ``end`` for the step; returns the stored record, also if it is another's."""
    record = ReuseRecord(
        run=call.run,
        submission=call.binding.submission,
        step=call.step,
        step_key=key,
        source_run=end.run,
        source_step=end.step,
        source_attempt=end.attempt,
    )
    failpoint("adopt.before_record")
    stored = claim_record(call.store, call.layout.reused(call.binding.submission, call.step), record)
    failpoint("adopt.after_record")
    if stored.is_ours:
        source = "run" if end.run == call.run else "shared"
        call.context.metrics.reused_steps.labels(source=source).inc()
        message = f"{call.name} was not run: {describe_reuse(call, stored.record)}"
        event = Event(name="step.adopted", at=call.context.clock(), step=call.step, message=message)
        append_events(call.store, call.run, "plugin", [event])
    return stored.record


def find_reuse_record(call: StepCall) -> ReuseRecord | None:
    """The reuse that this submission has recorded for the step, if any."""
    return find_record(call.store, call.layout.reused(call.binding.submission, call.step), ReuseRecord)


def read_reused_end(call: StepCall, record: ReuseRecord) -> AttemptEnd:
    """The end record that was reused.

    Raises:
        NotFoundError: it was removed since, or no longer counts as done.
    """
    end = find_attempt_end(call.store, record.source_run, record.source_step, record.source_attempt)
    source = describe_reuse(call, record)
    if end is None:
        raise NotFoundError(
            f"{call.name} was {source}, whose record has been removed since; "
            f"`tiphys resume {call.run}` runs the step again"
        )
    if end.outcome is not AttemptEndOutcome.DONE:
        raise NotFoundError(f"{call.name} was {source}, which counts no longer: {end.message}")
    return end


def write_reuse_projection(call: StepCall, record: ReuseRecord) -> None:
    """Name the reused attempt by a key alone, so that a plan of thousands of steps lists keys and reads no records."""
    if (record.source_run, record.source_step) == (call.run, call.step):
        key = call.layout.reused_attempt(record.submission, call.step, record.source_attempt)
        with contextlib.suppress(ObjectExistsError):
            call.store.create(key, b"")
        failpoint("adopt.after_projection")


def describe_reuse(call: StepCall, record: ReuseRecord) -> str:
    """Describe the source of a reused result."""
    if record.source_run == call.run:
        return f"adopted from attempt {record.source_attempt}"
    step = task_name(record.source_step)
    return f"adopted from run {record.source_run}, step {step}, attempt {record.source_attempt}"


def _matching_results(
    call: StepCall, key: str, attempts: Sequence[Attempt], damaged: list[DamagedRecord]
) -> Iterator[AttemptEnd]:
    """Finished results under this step key, the newest first: of the run, then of the runs it was forked from.

    A damaged record of another run is added to ``damaged``, and its result is not reused.
    """
    # cache=False means: run once in every submission.
    since = call.rerun_since if call.spec.cache else call.binding.submission
    yield from _done_attempts(attempts, key, since)
    for ancestor in call.fork_ancestors if call.spec.cache else ():
        since = find_rerun_submission(ancestor.rerun_since, call.step)
        yield from _done_attempts(read_step_attempts(call.store, ancestor.run, call.step, damaged), key, since)
        if since:
            break


def _done_attempts(attempts: Sequence[Attempt], key: str, since: int) -> Iterator[AttemptEnd]:
    for _, end in reversed(attempts):
        if (
            end is not None
            and end.outcome is AttemptEndOutcome.DONE
            and end.step_key == key
            and end.submission >= since
        ):
            yield end


def _find_shared_result(call: StepCall, key: str, damaged: list[DamagedRecord]) -> AttemptEnd | None:
    memo = find_record(call.store, memo_key(key), MemoRecord)
    if memo is None or memo.run == call.run or not call.spec.cache:
        return None
    try:
        end = find_attempt_end(call.store, memo.run, memo.step, memo.attempt)
    except IntegrityError as error:
        damaged.append(DamagedRecord(RunLayout(memo.run).attempt_end(memo.step, memo.attempt), str(error)))
        return None
    return end if end is not None and end.outcome is AttemptEndOutcome.DONE and end.step_key == key else None
