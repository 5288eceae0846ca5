"""How long a run has to wait before it is resumed by itself: nothing while it gets ahead, then longer and longer. Pure.

The state of the brakes is the records of earlier resumes, so whoever leads next
goes on counting. A resume that a person made has no such record: it closes the
breaker.
"""

import math
from collections.abc import Sequence

from tiphys.protocol.auto_resume import AutoResumePolicy
from tiphys.records import Advance, AutomaticResume

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
