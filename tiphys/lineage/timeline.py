"""Everything that happened to a run, in one list of sentences.

Most of it is already said by records, which are what decisions are taken from.
Those are put into words here, and merged with the events that no record says,
so that there is no second log which could tell another story.
"""

from collections.abc import Iterator
from typing import Any

from tiphys.lineage.tree import AttemptNode, CheckpointNode, LineageTree, Status, tree_of
from tiphys.records import AttemptClaim, AttemptEnd, Event, Outcome, RunRecord
from tiphys.store import Attempt, Store, Submission, all_attempts, read_events, read_run, submissions


def timeline(store: Store, run: str) -> list[Event]:
    """All events of ``run`` by the time at which they were recorded.

    The times are those of the machines that wrote; where their clocks disagree,
    so does the order.

    Raises:
        NotFoundError: the store has no such run.
    """
    record, steps = read_run(store, run), all_attempts(store, run)
    events = [_submitted(record)]
    for submission in submissions(store, run):
        events += _of_submission(submission)
    for attempt in (attempt for attempts in steps.values() for attempt in attempts):
        events += _of_attempt(attempt)
    told = read_events(store, run)
    events += _of_checkpoints(tree_of(store, record, steps, told))
    events += told
    return sorted(events, key=lambda event: event.at)


def _submitted(record: RunRecord) -> Event:
    return Event(
        name="run.submitted",
        at=record.written_at,
        message=f"run {record.run} of pipeline {record.pipeline} was submitted",
        data={"parameters": record.parameters},
    )


def _of_submission(submission: Submission) -> Iterator[Event]:
    claim, bound, end = submission
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
        told = f": {end.message}" if end.message else ""
        message = f"submission {claim.submission} ended as {end.status}{told}"
        yield Event(name="submission.ended", at=end.written_at, message=message, data=number)


def _of_attempt(attempt: Attempt) -> Iterator[Event]:
    claim, end = attempt
    start = claim.starts_from.within(claim.lineage) if claim.starts_from else ""
    yield Event(
        name="attempt.started",
        at=claim.written_at,
        step=claim.step,
        attempt=claim.attempt,
        message=f"attempt {claim.attempt} of {claim.step} starts{_from(claim)}",
        data={"submission": claim.submission, "starts_from": start},
    )
    if end:
        yield Event(
            name="attempt.ended",
            at=end.written_at,
            step=end.step,
            attempt=end.attempt,
            message=_ended(end),
            data={"outcome": end.outcome.value, "cause": end.cause.value if end.cause else "", **_preempted(end)},
        )
    if end and end.outcome is Outcome.DONE:
        yield Event(
            name="step.done",
            at=end.written_at,
            step=end.step,
            attempt=end.attempt,
            message=f"step {end.step} is done",
            data={"outputs": [output.name for output in end.outputs]},
        )


def _preempted(end: AttemptEnd) -> dict[str, Any]:
    """What it has cost that an attempt was asked to go; nothing for others."""
    if end.preempted is None:
        return {}
    told = end.preempted.model_dump(mode="json", exclude_none=True)
    return {"preempted": {**told, "gpu_seconds_lost": end.preempted.gpu_seconds_lost}}


def _of_checkpoints(lineages: LineageTree) -> Iterator[Event]:
    for lineage in lineages.steps:
        for attempt in lineage.attempts:
            for node in attempt.checkpoints:
                yield from _of_checkpoint(lineage.step, attempt, node)


def _of_checkpoint(step: str, attempt: AttemptNode, node: CheckpointNode) -> Iterator[Event]:
    checkpoint = {"checkpoint": str(node.ref)}
    if node.committed_at:
        late = ", too late: another attempt had gone on" if node.status is Status.LATE else ""
        yield Event(
            name="checkpoint.committed",
            at=node.committed_at,
            step=step,
            attempt=attempt.attempt,
            message=f"{node.ref.words} was committed{late}",
            data={**checkpoint, "size_bytes": node.size_bytes, "metrics": node.metrics, "reason": node.saved_because},
        )
    if node.quarantined_at:
        yield Event(
            name="checkpoint.quarantined",
            at=node.quarantined_at,
            step=step,
            attempt=attempt.attempt,
            message=f"{node.ref.words} was quarantined: {node.reason}",
            data=checkpoint,
        )


def _from(claim: AttemptClaim) -> str:
    if not claim.lineage:
        return ""
    start = claim.starts_from
    if start is None:
        return " from the beginning"
    return f" from {start.words}{'' if start.lineage == claim.lineage else f' of {start.lineage}'}"


def _ended(end: AttemptEnd) -> str:
    cause = f" ({end.cause.value.replace('_', ' ')})" if end.cause else ""
    told = f": {end.message}" if end.message else ""
    return f"attempt {end.attempt} of {end.step} ended as {end.outcome.value}{cause}{told}"
