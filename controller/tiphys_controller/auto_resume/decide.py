"""Resume a run now, wait, or leave it alone? Observation in, decision out.

How long a run has to wait before it is resumed by itself: nothing while it gets ahead, then longer and longer. Pure.

The state of the brakes is the records of earlier resumes, so whoever leads next
goes on counting. A resume that a person made has no such record: it closes the
breaker.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from tiphys.protocol.auto_resume_policy import AutoResumePolicy
from tiphys.records import Advance, AutomaticResume
from tiphys_controller.auto_resume.state import Limits, Observed, Standing

_LONGEST_RETRY_SECONDS = 24 * 3600.0
_MOST_RETRIES = 3
"""A run that nobody looks at must not be tried for ever."""


def count_fruitless(now: Advance, resumes: Sequence[AutomaticResume]) -> int:
    """Automatic resumes in a row that got a run no further.

    Args:
        now: How far the run has come.
        resumes: Records of its last submissions, the newest first, up to one that somebody else made.
    """
    count, later = 0, now
    for resume in resumes:
        if later.is_beyond(resume.advance):
            break
        count, later = count + 1, resume.advance
    return count


def is_open(policy: AutoResumePolicy, fruitless: int) -> bool:
    """Whether the circuit breaker of the run is open."""
    return fruitless >= policy.max_without_progress


def pause_seconds(policy: AutoResumePolicy, fruitless: int) -> float:
    """How long to wait after the end of the last submission; infinite where only a person goes on."""
    if fruitless == 0:
        return 0.0
    if not is_open(policy, fruitless):
        return _doubled(policy.cooldown_seconds, fruitless - 1, policy.cooldown_cap_seconds)
    if policy.retry_after_seconds is None or fruitless >= policy.max_without_progress + _MOST_RETRIES:
        return math.inf
    longest = max(_LONGEST_RETRY_SECONDS, policy.retry_after_seconds)
    return _doubled(policy.retry_after_seconds, fruitless - policy.max_without_progress, longest)


def _doubled(seconds: float, times: int, longest: float) -> float:
    # From 2**64 on a float of any use is beyond every limit.
    return min(seconds * 2.0 ** min(times, 64), longest)


class Action(StrEnum):
    RESUME = "resume"
    WAIT = "wait"
    LEAVE = "leave"


class Decision(NamedTuple):
    """What to do about a run. ``reason`` is a word for Events and metrics, ``message`` a sentence."""

    action: Action
    reason: str
    message: str
    seconds: float = 0.0
    """How long to wait, at most; 0 for other actions."""


def decide(seen: Observed, waited_seconds: float, limits: Limits, *, demanded: bool = False) -> Decision:
    """Decide about one run.

    Args:
        seen: The run.
        waited_seconds: For how long it has been seen like this, with the same last submission.
        limits: Those of the cluster.
        demanded: An alert asks for it, so the author need not have; all brakes hold.
    """
    if (settled := _settled(seen)) is not None:
        return settled
    if seen.intended:
        # Whoever decided it has paid for it in the count of the brakes, and may have died since.
        return Decision(Action.RESUME, "Intended", f"submission {seen.next_submission} was decided on before")
    policy = seen.policy or (AutoResumePolicy() if demanded else None)
    if policy is None:
        return Decision(Action.LEAVE, "NotAsked", "its pipeline does not ask to be resumed by itself")
    if seen.ended_by:
        return Decision(Action.LEAVE, "EndedByPerson", seen.ended_by)
    for failure in seen.failures:
        if not policy.covers(failure.cause):
            cause = failure.cause.value.replace("_", " ")
            told = f"step {failure.step} failed by {cause}, which another try alone does not help: {failure.message}"
            return Decision(Action.LEAVE, "NeedsPerson", told)
    return _braked(seen, policy, waited_seconds, limits)


def _settled(seen: Observed) -> Decision | None:
    match seen.standing:
        case Standing.RUNS:
            return Decision(Action.LEAVE, "Runs", "it runs")
        case Standing.SUCCEEDED:
            return Decision(Action.LEAVE, "Succeeded", "it succeeded")
        case Standing.ELSEWHERE:
            return Decision(Action.LEAVE, "Elsewhere", "it went to another cluster, whose controller looks after it")
    return None


def _braked(seen: Observed, policy: AutoResumePolicy, waited_seconds: float, limits: Limits) -> Decision:
    pause = pause_seconds(policy, seen.fruitless)
    count = f"{seen.fruitless} resume{'s' if seen.fruitless != 1 else ''} in a row got it no further"
    if math.isinf(pause):
        return Decision(Action.LEAVE, "BreakerOpen", f"{count}; look for the cause, then resume it")
    if waited_seconds < pause:
        reason = "BreakerOpen" if is_open(policy, seen.fruitless) else "CoolingDown"
        return Decision(Action.WAIT, reason, f"{count}; the next one is in {_in_words(pause)}", pause - waited_seconds)
    if waited_seconds < (least := _least_seconds(seen.standing, limits)):
        told = f"it is looked at again in {_in_words(least - waited_seconds)} before it counts as ended"
        return Decision(Action.WAIT, "NotSureYet", told, least - waited_seconds)
    return Decision(Action.RESUME, "Resume", _why(seen))


def _least_seconds(standing: Standing, limits: Limits) -> float:
    """What is concluded from something that is not there has to be so for a while."""
    if standing is Standing.GONE:
        return limits.absent_seconds
    return limits.unsent_seconds if standing is Standing.UNSENT else 0.0


def _why(seen: Observed) -> str:
    if seen.standing is Standing.GONE:
        return f"the Workflow of submission {seen.submission} is gone, and nobody has recorded that it ended"
    if seen.standing is Standing.UNSENT:
        return f"submission {seen.next_submission} was claimed and never sent"
    if seen.failures:
        first = seen.failures[0]
        more = f" and {len(seen.failures) - 1} more" if seen.failures[1:] else ""
        return f"step {first.step}{more} was given up by {first.cause.value.replace('_', ' ')}"
    return f"submission {seen.submission} failed{f': {seen.told}' if seen.told else ''}"


def _in_words(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"
