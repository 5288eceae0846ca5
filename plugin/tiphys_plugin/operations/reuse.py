"""Finds a finished result that a step can reuse instead of running.

A result is reusable if its end record says done under the same step key, and a
listing shows every object that the record names with its size, and as it was when
it was hashed. What was written again is hashed again. A damaged result is never
reused: the step runs again, and its message reports the damage.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tiphys.errors import NotFoundError, ObjectMissingError
from tiphys.protocol.execute_api import ExecuteReply, pending_reply
from tiphys.recording.reusable_results import ResultSource, describe_reuse, iter_reusable_results, record_reuse
from tiphys.records import AttemptEnd, AttemptEndOutcome, Event, ReuseRecord
from tiphys.store import (
    Attempt,
    DamagedRecord,
    append_events,
    find_attempt_end,
    find_output_fault,
    find_record,
    list_outputs,
)
from tiphys.store.outputs import confirm_outputs, find_changed_outputs, outputs_prefix
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
    source = ResultSource(call.run, call.binding.submission, call.rerun_since, call.fork_ancestors)
    for end, name in iter_reusable_results(call.store, call.spec, call.step, key, attempts, source, damaged):
        fault = find_damage(call, end)
        if isinstance(fault, ExecuteReply):
            return ReuseLookup(None, waiting=fault)
        if fault is None:
            return ReuseLookup(end)
        damage = damage or f"{name} is damaged: {fault}"
    return ReuseLookup(None, damage or "; ".join(result.message for result in damaged[:1]))


def find_damage(call: StepCall, end: AttemptEnd) -> ExecuteReply | str | None:
    """The first output that is missing or has other bytes. Lists the outputs, and hashes those written again.

    None if all are intact; a Pending reply while objects are being hashed.
    """
    listed, settings = list_outputs(call.store, end), call.context.settings
    if changed := find_changed_outputs(end, listed):
        job = f"reuse {outputs_prefix(end)} {end.run}"
        try:
            hashes = call.context.hasher.hash_objects(job, changed, settings.verify_inline_seconds)
        except ObjectMissingError as error:
            return str(error)
        if isinstance(hashes, HashingProgress):
            message = f"Verifying outputs again: {hashes.done} of {hashes.total} objects"
            return pending_reply(message, settings.requeue_min_seconds)
        listed = confirm_outputs(end, listed, hashes.__getitem__)
    return find_output_fault(end, listed)


def take_over(call: StepCall, end: AttemptEnd) -> ReuseRecord:
    """Record that this submission reuses ``end`` for the step; returns the stored record, also if it is another's."""
    stored = record_reuse(call.store, call.run, call.binding.submission, call.step, end)
    if stored.is_ours:
        source = "run" if end.run == call.run else "shared"
        call.context.metrics.reused_steps.labels(source=source).inc()
        message = f"{call.name} was not run: {describe_reuse(stored.record)}"
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
    source = describe_reuse(record)
    if end is None:
        raise NotFoundError(
            f"{call.name} was {source}, whose record has been removed since; "
            f"`tiphys resume {call.run}` runs the step again"
        )
    if end.outcome is not AttemptEndOutcome.DONE:
        raise NotFoundError(f"{call.name} was {source}, which counts no longer: {end.message}")
    return end
