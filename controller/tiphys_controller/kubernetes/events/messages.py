"""Builds the Events of a Workflow's run.

Pure functions of what was read from storage. Events leave out what Argo shows
itself, such as the start and success of a step.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import NamedTuple

from tiphys.records import AlertResultRecord, AttemptEndOutcome, Event, json_digest
from tiphys_controller.kubernetes.events.run_log import (
    REPORTED_EVENTS,
    AttemptKey,
    AttemptOutcome,
    AttemptStart,
    RunLog,
)
from tiphys_controller.kubernetes.workflow_view import SubmissionRef, WorkflowView


class EventMessage(NamedTuple):
    """One Event to record. ``key`` identifies it, so that it is recorded once."""

    key: str
    reason: str
    """Reason code in PascalCase, as Kubernetes requires."""
    message: str
    is_warning: bool = False
    recorded_at: datetime | None = None
    """Time of the record it reports; None if it is read from the Workflow object."""


def build_event_messages(
    workflow: WorkflowView, submission_ref: SubmissionRef | None, log: RunLog | None, resume_command: str
) -> list[EventMessage]:
    """All Events of a Workflow, recorded before or not. ``resume_command`` is the command that resumes the run."""
    run_messages = (
        [*_attempt_messages(submission_ref, log), *_run_event_messages(submission_ref, log)]
        if submission_ref and log
        else []
    )
    return [*sorted(run_messages, key=_sort_time), *_workflow_messages(workflow, resume_command)]


def workflow_deleted_message(resume_command: str) -> EventMessage:
    """Event for a Workflow that was deleted before it finished."""
    return EventMessage(
        "deleted",
        "WorkflowDeleted",
        f"the Workflow was deleted; finished steps are kept: go on with {resume_command}",
        True,
    )


def steps_unrecorded_message(why: str) -> EventMessage:
    """Event for steps without a gate that cannot be recorded, so that a resume runs them again."""
    key = f"unrecorded/{json_digest(why)[:12]}"
    return EventMessage(key, "StepsNotRecorded", f"{why}; a resume runs again what is not recorded", True)


def agent_pod_deleted_message(pod: str, uid: str, why: str) -> EventMessage:
    """Event for a deleted agent pod."""
    message = f"agent pod {pod} did not work ({why}) and was deleted, so that Argo makes another"
    return EventMessage(f"agent/{uid}", "AgentPodDeleted", message, is_warning=True)


def auto_resumed_message(submission: int, why: str) -> EventMessage:
    """Event for an automatic resume."""
    return EventMessage(
        f"automatic/{submission}", "AutoResumed", f"resumed automatically as submission {submission}: {why}"
    )


def dry_run_message(submission: int, why: str) -> EventMessage:
    """Event for an automatic resume that a dry run did not make."""
    message = f"dry run: would resume automatically as submission {submission}: {why}"
    return EventMessage(f"automatic/{submission}/dry-run", "WouldResume", message)


def resume_declined_message(submission: int, reason: str, why: str, resume_command: str) -> EventMessage:
    """Event for a run that is not resumed automatically, or not yet."""
    message = f"not resumed automatically: {why}; {resume_command} resumes it now"
    return EventMessage(f"not-resumed/{submission}/{reason}", f"AutoResume{reason}", message, is_warning=True)


def alert_handled_message(alert: str, name: str, done: AlertResultRecord) -> EventMessage:
    """Event for the outcome of an alert about this run."""
    return EventMessage(f"alert/{alert}", "AlertHandled", f"alert {name or alert}: {done.outcome}: {done.message}")


def _sort_time(message: EventMessage) -> datetime:
    return message.recorded_at or datetime.max.replace(tzinfo=UTC)


def _attempt_messages(submission_ref: SubmissionRef, log: RunLog) -> Iterator[EventMessage]:
    for attempt, opened in sorted(log.attempt_starts.items()):
        if opened.submission == submission_ref.submission:
            name = log.step_name(attempt[0])
            yield from _attempt_started_messages(attempt, name, opened)
            if (ended := log.attempt_outcomes.get(attempt)) is not None:
                yield from _attempt_ended_messages(attempt, name, ended)


def _attempt_started_messages(attempt: AttemptKey, name: str, opened: AttemptStart) -> Iterator[EventMessage]:
    step, number = attempt
    if number > 1 or opened.starts_from:
        start = f"from {opened.starts_from}" if opened.starts_from else "from the beginning"
        yield EventMessage(
            f"opened/{step}/{number}",
            "AttemptStarted",
            f"{name}: attempt {number} starts {start}",
            recorded_at=opened.opened_at,
        )
    for index, sentence in enumerate(opened.skipped_checkpoints):
        key = f"skipped/{step}/{number}/{index}"
        yield EventMessage(
            key, "CheckpointSkipped", f"{name}: {sentence}", is_warning=True, recorded_at=opened.opened_at
        )


def _attempt_ended_messages(attempt: AttemptKey, name: str, ended: AttemptOutcome) -> Iterator[EventMessage]:
    step, number = attempt
    if ended.outcome is AttemptEndOutcome.DONE:
        return
    cause = f" by {ended.cause.display_name}" if ended.cause else ""
    details = f": {ended.message}" if ended.message else ""
    how = "was fenced" if ended.outcome is AttemptEndOutcome.FENCED else "ended"
    reason = "AttemptFenced" if ended.outcome is AttemptEndOutcome.FENCED else "AttemptFailed"
    message = f"{name}: attempt {number} {how}{cause}{details}"
    yield EventMessage(f"ended/{step}/{number}", reason, message, is_warning=True, recorded_at=ended.ended_at)


def _run_event_messages(submission_ref: SubmissionRef, log: RunLog) -> Iterator[EventMessage]:
    for key, events in sorted(log.events.items()):
        for index, event in enumerate(events):
            if _find_event_submission(event, log) == submission_ref.submission:
                reason, warning = REPORTED_EVENTS[event.name]
                about = f"{log.step_name(event.step)}: " if event.step else ""
                yield EventMessage(f"event/{key}/{index}", reason, f"{about}{event.message}", warning, event.at)


def _find_event_submission(event: Event, log: RunLog) -> int | None:
    """Submission of an event; None if unknown."""
    if "submission" in event.data:
        return int(event.data["submission"])
    opened = log.attempt_starts.get((event.step, event.attempt or 0))
    return opened.submission if opened else None


def _workflow_messages(workflow: WorkflowView, resume_command: str) -> Iterator[EventMessage]:
    for wait, message in sorted(workflow.waits.items()):
        # The key omits the message, whose numbers change with each retry.
        yield EventMessage(f"waits/{wait.node}/{wait.reason}", wait.reason, f"{wait.step} waits for GPUs: {message}")
    if workflow.shutdown:
        how = "terminated" if workflow.shutdown == "Terminate" else "stopped"
        message = f"the Workflow is being {how}; finished steps are kept: go on with {resume_command} once it has ended"
        yield EventMessage(f"shutdown/{workflow.shutdown}", "WorkflowStopped", message)
    if workflow.finished and workflow.phase != "Succeeded":
        why = f": {workflow.message}" if workflow.message else ""
        yield EventMessage(
            "failed",
            "RunFailed",
            f"the Workflow ended as {workflow.phase}{why}; run the missing steps with {resume_command}",
            is_warning=True,
        )
