"""May a step be tried again? Preemptions are free, broken programs are not, and progress pays back.

One limit for every cause gives up on a healthy run after its tenth preemption,
or grinds a broken program ten times. So each cause has a budget of its own, and
an attempt that committed a checkpoint pays back what was charged before it. An
end that made a checkpoint suspect is followed by one more, whatever was charged:
the program may be sound, and it shall show that with an older checkpoint. An
attempt that went because its queue gave its GPUs to another is charged nothing,
whatever the budget of preemptions is: its author has no say in that. Nor is one
of which nobody can say whether it got ahead, unless its cause is never retried.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tiphys.protocol.step_spec import RetryPolicy
from tiphys.records import AttemptEnd, Cause, Outcome


class Decision(NamedTuple):
    """Whether to try again.

    ``charged`` counts the ends of the judged cause, the judged one included;
    ``budget`` is how many of them may be followed by another attempt, None
    meaning any number. ``message`` says both for a person.
    """

    again: bool
    charged: int
    budget: int | None
    message: str


def decide(ends: Sequence[AttemptEnd], policy: RetryPolicy, submission: int) -> Decision:
    """Judge the newest of ``ends`` that belongs to ``submission``.

    Charged are the failed ends of the same cause in this submission, from the
    newest end with ``progress`` on, that one included: its own failure is the
    first charge after the refund. Ends of other submissions never count, in
    whatever order they come. A failure without a cause counts as unknown.
    """
    window = _since_progress(sorted((e for e in ends if e.submission == submission), key=lambda e: e.attempt))
    if not window:
        return Decision(True, 0, None, "no attempt has failed yet")
    last = window[-1]
    if last.outcome is not Outcome.FAILED:
        return Decision(False, 0, None, f"attempt {last.attempt} is {last.outcome.value}; nothing to try again")
    cause = last.cause or Cause.UNKNOWN
    charged = sum(1 for end in window if end.outcome is Outcome.FAILED and _charges(end) is cause)
    budget = policy.budget(cause)
    if last.preempted is not None and cause is Cause.PREEMPTION:
        return Decision(True, charged, budget, "its queue gave its GPUs to another, which is not charged")
    if last.suspect is not None:
        return Decision(True, charged, budget, f"checkpoint {last.suspect} is suspect, so an older one gets a try")
    if last.progress_unknown:
        told = "nobody can say how far it got, which is not charged" if budget != 0 else f"{cause.words} is not retried"
        return Decision(budget != 0, charged, budget, told)
    again = budget is None or charged <= budget
    return Decision(again, charged, budget, _sentence(cause, charged, budget, refunded=window[0].progress))


def _charges(end: AttemptEnd) -> Cause | None:
    """The cause whose budget an end is charged to; None for none."""
    if end.preempted is not None and end.cause is Cause.PREEMPTION:
        return None
    if end.progress_unknown:
        return None
    return end.cause or Cause.UNKNOWN


def _since_progress(ends: list[AttemptEnd]) -> list[AttemptEnd]:
    newest = max((index for index, end in enumerate(ends) if end.progress), default=0)
    return ends[newest:]


def _sentence(cause: Cause, charged: int, budget: int | None, *, refunded: bool) -> str:
    words = cause.words
    since = " since the last attempt that saved a checkpoint" if refunded else ""
    if budget is None:
        return f"retries after {words} are not limited"
    if budget == 0:
        return f"{words} is not retried"
    if charged <= budget:
        return f"retry {charged} of {budget} after {words}{since}"
    spent = "the only retry" if budget == 1 else f"all {budget} retries"
    return f"{spent} after {words} {'is' if budget == 1 else 'are'} used up{since}"
