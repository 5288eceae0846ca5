"""The timeline of a run: all its events, in one sorted list.

Most events are derived from the records on which decisions are based, so that
no second log can contradict the records. Events that no record holds are stored
separately and merged in.
"""

from collections.abc import Iterator
from typing import Any

from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.tree import AttemptNode, CheckpointNode, CheckpointStatus, LineageTree, read_lineage_tree
from tiphys.protocol.compiled_workflow import STOPPED_STATUS, shown_status
from tiphys.records import AttemptClaim, AttemptEnd, AttemptEndOutcome, Event, RunRecord
from tiphys.store import Attempt, Submission


def read_timeline(history: RunHistory) -> list[Event]:
    """All events of a run, by the time of their records.

    The times come from the clocks of different machines, so the order is only as
    accurate as these clocks. A damaged record is an event, too.

    Raises:
        NotFoundError: the store has no such run.
    """
    events = [_run_submitted_event(history.record)]
    for submission in history.submissions:
        events += _submission_events(submission)
    for attempt in (attempt for attempts in history.attempts.values() for attempt in attempts):
        events += _attempt_events(attempt)
    events += _lineage_events(read_lineage_tree(history))
    events += history.events
    last = max(event.at for event in events)
    events += [Event(name="record.damaged", at=last, message=message) for message in history.damaged]
    return sorted(events, key=lambda event: event.at)


def _run_submitted_event(record: RunRecord) -> Event:
    return Event(
        name="run.submitted",
        at=record.written_at,
        message=f"run {record.run} of pipeline {record.pipeline} was submitted",
        data={"parameters": record.parameters},
    )


def _submission_events(submission: Submission) -> Iterator[Event]:
    claim, bound, end = submission.records
    number = {"submission": claim.submission}
    if bound:
        message = f"submission {claim.submission} ({claim.kind}) runs as workflow {bound.workflow_name}"
        yield Event(
            name="submission.bound",
            at=bound.written_at,
            message=f"{message} on {bound.cluster}",
            data={**number, "uid": bound.uid, "cluster": bound.cluster},
        )
    if end:
        status = shown_status(end.status, end.message)
        detail = f": {end.message}" if end.message and status != STOPPED_STATUS else ""
        message = f"submission {claim.submission} ended as {status}{detail}"
        yield Event(name="submission.ended", at=end.written_at, message=message, data=number)


def _attempt_events(attempt: Attempt) -> Iterator[Event]:
    claim, end = attempt
    start = claim.starts_from.relative_to(claim.lineage) if claim.starts_from else ""
    yield Event(
        name="attempt.started",
        at=claim.written_at,
        step=claim.step,
        attempt=claim.attempt,
        message=f"attempt {claim.attempt} of {claim.step} starts{_start_phrase(claim)}",
        data={"submission": claim.submission, "starts_from": start},
    )
    if end:
        # Others may record the end of a step without a gate after the next has begun; a fence ends an attempt itself.
        ended_at = end.written_at if end.outcome is AttemptEndOutcome.FENCED else end.ended_at
        yield Event(
            name="attempt.ended",
            at=ended_at,
            step=end.step,
            attempt=end.attempt,
            message=_end_message(end),
            data={"outcome": end.outcome_name, "cause": end.cause.value if end.cause else "", **_preemption_data(end)},
        )
    if end and end.outcome is AttemptEndOutcome.DONE:
        yield Event(
            name="step.done",
            at=ended_at,
            step=end.step,
            attempt=end.attempt,
            message=f"step {end.step} is done",
            data={"outputs": [output.name for output in end.outputs]},
        )


def _preemption_data(end: AttemptEnd) -> dict[str, Any]:
    """The cost of a preemption by the queue; empty without one."""
    if end.preempted is None:
        return {}
    preemption = end.preempted.model_dump(mode="json", exclude_none=True)
    return {"preempted": {**preemption, "gpu_seconds_lost": end.preempted.gpu_seconds_lost}}


def _lineage_events(lineages: LineageTree) -> Iterator[Event]:
    for lineage in lineages.steps:
        for attempt in lineage.attempts:
            for node in attempt.checkpoints:
                yield from _checkpoint_events(lineage.step, attempt, node)


def _checkpoint_events(step: str, attempt: AttemptNode, node: CheckpointNode) -> Iterator[Event]:
    checkpoint = {"checkpoint": str(node.ref)}
    if node.committed_at:
        late = ", too late: a newer attempt had started" if node.status is CheckpointStatus.LATE else ""
        yield Event(
            name="checkpoint.committed",
            at=node.committed_at,
            step=step,
            attempt=attempt.attempt,
            message=f"{node.ref.display_name} was committed{late}",
            data={**checkpoint, "size_bytes": node.size_bytes, "metrics": node.metrics, "reason": node.saved_because},
        )
    if node.quarantined_at:
        yield Event(
            name="checkpoint.quarantined",
            at=node.quarantined_at,
            step=step,
            attempt=attempt.attempt,
            message=f"{node.ref.display_name} was quarantined: {node.reason}",
            data=checkpoint,
        )


def _start_phrase(claim: AttemptClaim) -> str:
    if not claim.lineage:
        return ""
    start = claim.starts_from
    if start is None:
        return " from the beginning"
    return f" from {start.display_name}{'' if start.lineage == claim.lineage else f' of {start.lineage}'}"


def _end_message(end: AttemptEnd) -> str:
    cause = f" ({end.cause.display_name})" if end.cause else ""
    detail = f": {end.message}" if end.message and not end.stopped else ""
    return f"attempt {end.attempt} of {end.step} ended as {end.outcome_name}{cause}{detail}"
