"""Retry budgets: whether a failed step may be tried again.

One limit for all causes would end a healthy run after its tenth preemption, or
run a broken program ten times. Each cause therefore has its own budget, and an
attempt that committed a later step than it started from refunds the charges before it.

Three ends are not limited by the budget:

- One that made a checkpoint suspect. The program may be correct, and its next
  attempt starts from an older checkpoint.
- A preemption by the queue, on which the author has no influence.
- One with unknown progress, unless its cause is never retried.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tiphys.protocol.step_spec import RetryPolicy
from tiphys.records import AttemptEnd, AttemptEndOutcome, Cause

_CAUSES_FROM_OUTSIDE = (Cause.PREEMPTION, Cause.INFRASTRUCTURE)


class RetryDecision(NamedTuple):
    """Whether to try again.

    ``charged`` counts the ends with the cause of the newest one, which is
    included. ``budget`` is the number of them that may be followed by another
    attempt; None means no limit. ``message`` explains the decision.
    """

    retry: bool
    charged: int
    budget: int | None
    message: str


def evaluate_retry_budget(ends: Sequence[AttemptEnd], policy: RetryPolicy, submission: int) -> RetryDecision:
    """Decide about a retry after the newest of ``ends`` in ``submission``. Pure.

    Failed ends of the same cause in this submission are charged, starting with
    the newest end that made progress: its own failure is the first charge after
    the refund. Ends of other submissions never count. A failure without a cause
    counts as unknown.
    """
    window = ends_since_progress(_ends_of_submission(ends, submission))
    if not window:
        return RetryDecision(True, 0, None, "no attempt has failed yet")
    last = window[-1]
    if last.outcome is not AttemptEndOutcome.FAILED:
        return RetryDecision(False, 0, None, f"attempt {last.attempt} is {last.outcome.value}; nothing to try again")
    cause = last.cause or Cause.UNKNOWN
    charged = sum(1 for end in window if end.outcome is AttemptEndOutcome.FAILED and _charged_cause(end) is cause)
    budget = policy.budget(cause)
    if last.lost_gpus_to_queue:
        return RetryDecision(True, charged, budget, "its queue gave its GPUs to another, which is not charged")
    if last.suspect is not None:
        return RetryDecision(True, charged, budget, f"checkpoint {last.suspect} is suspect, so an older one gets a try")
    if last.progress_unknown:
        message = (
            "its progress is unknown, so it is not charged" if budget != 0 else f"{cause.display_name} is not retried"
        )
        return RetryDecision(budget != 0, charged, budget, message)
    retry = budget is None or charged <= budget
    return RetryDecision(retry, charged, budget, _budget_message(cause, charged, budget, refunded=window[0].progress))


def back_off_seconds(ends: Sequence[AttemptEnd], policy: RetryPolicy, submission: int) -> float:
    """Seconds between the newest of ``ends`` in ``submission`` and the next attempt. Pure.

    It grows with each failure since the last progress. After a failure from outside of the program it begins with
    the second: a lost pod says nothing against a new one.
    """
    window = ends_since_progress(
        [end for end in _ends_of_submission(ends, submission) if end.outcome is AttemptEndOutcome.FAILED]
    )
    failures = len(window) - (bool(window) and window[-1].cause in _CAUSES_FROM_OUTSIDE)
    return policy.wait_after(failures) if failures else 0.0


def _ends_of_submission(ends: Sequence[AttemptEnd], submission: int) -> list[AttemptEnd]:
    return sorted((end for end in ends if end.submission == submission), key=lambda end: end.attempt)


def _charged_cause(end: AttemptEnd) -> Cause | None:
    """The cause whose budget is charged for an end; None if it is not charged."""
    if end.lost_gpus_to_queue or end.progress_unknown:
        return None
    return end.cause or Cause.UNKNOWN


def ends_since_progress(ends: Sequence[AttemptEnd]) -> Sequence[AttemptEnd]:
    """``ends``, in the order of attempts, from the newest one with progress on; all if none made progress."""
    newest = max((index for index, end in enumerate(ends) if end.progress), default=0)
    return ends[newest:]


def _budget_message(cause: Cause, charged: int, budget: int | None, *, refunded: bool) -> str:
    name = cause.display_name
    since = " since the last attempt that saved a checkpoint" if refunded else ""
    if budget is None:
        return f"retries after {name} are not limited"
    if budget == 0:
        return f"{name} is not retried"
    if charged <= budget:
        return f"retry {charged} of {budget} after {name}{since}"
    spent = "the only retry" if budget == 1 else f"all {budget} retries"
    return f"{spent} after {name} {'is' if budget == 1 else 'are'} used up{since}"
