"""Decides whether to resume a run now, to wait, or to leave it alone.

A run that makes progress is resumed at once. Automatic resumes without progress
back off exponentially, then open a circuit breaker. The brakes are computed
from the records of earlier resumes, so they survive a change of leader; a
manual resume leaves no such record and closes the breaker.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from tiphys.protocol.auto_resume_policy import AutoResumePolicy
from tiphys.protocol.quantities import format_duration
from tiphys.records import AutoResumeRecord, RunProgress
from tiphys_controller.auto_resume.state import AutoResumeLimits, RunObservation, SubmissionStatus

_LONGEST_RETRY_SECONDS = 24 * 3600.0
_MAX_RETRIES_AFTER_BREAKER = 3
"""Bounds the retries of a run that no person repairs."""


def count_fruitless_resumes(current_advance: RunProgress, resumes: Sequence[AutoResumeRecord]) -> int:
    """Count automatic resumes in a row that made no progress.

    ``resumes`` are the records of its automatic resumes, the newest first, back to the last manual submission.
    """
    count, later = 0, current_advance
    for resume in resumes:
        if later.is_ahead_of(resume.advance):
            break
        count, later = count + 1, resume.advance
    return count


def is_breaker_open(policy: AutoResumePolicy, fruitless_resumes: int) -> bool:
    """Whether the circuit breaker of the run is open."""
    return fruitless_resumes >= policy.max_without_progress


def backoff_seconds(policy: AutoResumePolicy, fruitless_resumes: int) -> float:
    """Seconds to wait after the end of the last submission; infinite if only a person may resume the run."""
    if fruitless_resumes == 0:
        return 0.0
    if not is_breaker_open(policy, fruitless_resumes):
        return _exponential_seconds(policy.cooldown_seconds, fruitless_resumes - 1, policy.cooldown_cap_seconds)
    if (
        policy.retry_after_seconds is None
        or fruitless_resumes >= policy.max_without_progress + _MAX_RETRIES_AFTER_BREAKER
    ):
        return math.inf
    longest = max(_LONGEST_RETRY_SECONDS, policy.retry_after_seconds)
    return _exponential_seconds(policy.retry_after_seconds, fruitless_resumes - policy.max_without_progress, longest)


def _exponential_seconds(seconds: float, times: int, longest: float) -> float:
    # The cap on the exponent keeps the float finite.
    return min(seconds * 2.0 ** min(times, 64), longest)


class AutoResumeAction(StrEnum):
    RESUME = "resume"
    WAIT = "wait"
    LEAVE_ALONE = "leave"


class AutoResumeDecision(NamedTuple):
    """What to do about a run. ``reason`` is a code for Events and metrics, ``message`` a sentence."""

    action: AutoResumeAction
    reason: str
    message: str
    wait_seconds: float = 0.0
    """Longest time to wait; 0 for other actions."""


def decide_auto_resume(
    observation: RunObservation, waited_seconds: float, limits: AutoResumeLimits, *, requested_by_alert: bool = False
) -> AutoResumeDecision:
    """Decide about one run.

    The run has been observed in this status, with the same last submission, for ``waited_seconds``. With
    ``requested_by_alert`` the pipeline need not have a policy; all brakes hold.
    """
    if (settled := _decide_settled(observation)) is not None:
        return settled
    if observation.is_intended:
        # The intent already counts for the brakes; the controller that recorded it may have crashed since.
        return AutoResumeDecision(
            AutoResumeAction.RESUME,
            "Intended",
            f"a controller had already decided to make submission {observation.next_submission}",
        )
    policy = observation.policy or (AutoResumePolicy() if requested_by_alert else None)
    if policy is None:
        return AutoResumeDecision(
            AutoResumeAction.LEAVE_ALONE, "NotAsked", "its pipeline does not enable automatic resumes"
        )
    if observation.person_reason:
        return AutoResumeDecision(AutoResumeAction.LEAVE_ALONE, "EndedByPerson", observation.person_reason)
    for failure in observation.failures:
        if failure.cause not in policy.causes:
            cause = failure.cause.display_name
            message = f"step {failure.step} failed by {cause}, which a retry does not repair: {failure.message}"
            return AutoResumeDecision(AutoResumeAction.LEAVE_ALONE, "NeedsPerson", message)
    return _decide_backoff(observation, policy, waited_seconds, limits)


def _decide_settled(observation: RunObservation) -> AutoResumeDecision | None:
    match observation.status:
        case SubmissionStatus.RUNNING:
            return AutoResumeDecision(AutoResumeAction.LEAVE_ALONE, "Runs", "it runs")
        case SubmissionStatus.SUCCEEDED:
            return AutoResumeDecision(AutoResumeAction.LEAVE_ALONE, "Succeeded", "it succeeded")
        case SubmissionStatus.OTHER_CLUSTER:
            return AutoResumeDecision(
                AutoResumeAction.LEAVE_ALONE,
                "Elsewhere",
                "it was submitted to another cluster, whose controller resumes it",
            )
    return None


def _decide_backoff(
    observation: RunObservation, policy: AutoResumePolicy, waited_seconds: float, limits: AutoResumeLimits
) -> AutoResumeDecision:
    pause = backoff_seconds(policy, observation.fruitless_resumes)
    count = (
        f"{observation.fruitless_resumes} resume{'s' if observation.fruitless_resumes != 1 else ''} in a "
        "row made no progress"
    )
    if math.isinf(pause):
        return AutoResumeDecision(
            AutoResumeAction.LEAVE_ALONE, "BreakerOpen", f"{count}; find the cause, then resume the run"
        )
    if waited_seconds < pause:
        reason = "BreakerOpen" if is_breaker_open(policy, observation.fruitless_resumes) else "CoolingDown"
        return AutoResumeDecision(
            AutoResumeAction.WAIT,
            reason,
            f"{count}; the next resume is in {format_duration(pause)}",
            pause - waited_seconds,
        )
    if waited_seconds < (least := _settle_seconds(observation.status, limits)):
        message = f"its end is confirmed in {format_duration(least - waited_seconds)}"
        return AutoResumeDecision(AutoResumeAction.WAIT, "NotSureYet", message, least - waited_seconds)
    return AutoResumeDecision(AutoResumeAction.RESUME, "Resume", _describe_resume_reason(observation))


def _settle_seconds(status: SubmissionStatus, limits: AutoResumeLimits) -> float:
    """How long a missing Workflow must stay missing before the run counts as ended."""
    if status is SubmissionStatus.WORKFLOW_GONE:
        return limits.absent_seconds
    return limits.unsent_seconds if status is SubmissionStatus.UNSENT else 0.0


def _describe_resume_reason(observation: RunObservation) -> str:
    if observation.status is SubmissionStatus.WORKFLOW_GONE:
        return f"the Workflow of submission {observation.submission} is gone, and no end is recorded"
    if observation.status is SubmissionStatus.UNSENT:
        return f"submission {observation.next_submission} was claimed and its Workflow never created"
    if observation.failures:
        first = observation.failures[0]
        more = f" and {len(observation.failures) - 1} more" if observation.failures[1:] else ""
        return f"step {first.step}{more} failed by {first.cause.display_name}"
    return (
        f"submission {observation.submission} failed{f': {observation.end_message}' if observation.end_message else ''}"
    )
