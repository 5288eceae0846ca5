"""Retry budgets as Argo's retryStrategy.

A training attempt repeats through admission: settle decides, so Argo only has
to repeat whatever failed. A step repeats inside Argo, which counts all causes
together: its expression says which causes are worth another try, and its limit
is the sum of their budgets.
"""

from tiphys.lineage.classify import EXIT_CODES, WORDS
from tiphys.protocol.pipeline import Manifest
from tiphys.protocol.policy import RetryPolicy
from tiphys.records import Cause

UNLIMITED = 1000
"""Argo waits between attempts only under a limit, so "no limit" is a large one."""

_CODE = "asInt(lastRetry.exitCode)"

UNSEEN = (Cause.OUTPUT_MISSING, Cause.GPU_OUT_OF_MEMORY, Cause.HANG, Cause.IMAGE)
"""Causes that do not show in what Argo knows of a container: a missing output as success, the others as others."""


def attempts_strategy(policy: RetryPolicy) -> Manifest:
    """RetryStrategy of a training step's attempts: again and again, until settle succeeds."""
    return {"limit": str(UNLIMITED), "retryPolicy": "Always", "backoff": _backoff(policy)}


def step_strategy(policy: RetryPolicy) -> Manifest:
    """RetryStrategy of a step's container.

    It is present even where nothing is retried: without one, ``{{retries}}`` in
    the keys of the outputs would stay literal.
    """
    retried = [cause for cause in Cause if _retried(policy, cause)]
    if not retried:
        return {"limit": "0", "retryPolicy": "Always"}
    return {
        "limit": str(_limit(policy, retried)),
        "retryPolicy": "Always",
        "expression": retry_expression(policy),
        "backoff": _backoff(policy),
    }


def retry_expression(policy: RetryPolicy) -> str:
    """expr-lang: whether the last attempt ended by a cause that ``policy`` grants another try."""
    never = [_says(words) for cause, words in WORDS.items() if not _retried(policy, cause)]
    again = [_says(words) for cause, words in WORDS.items() if _retried(policy, cause)]
    if codes := sorted(code for code, (cause, _) in EXIT_CODES.items() if _retried(policy, cause)):
        again.append(f"{_CODE} in {codes}")
    if policy.infrastructure != 0:
        again.append(f"(lastRetry.status == 'Error' && !({_CODE} in {sorted(EXIT_CODES)}))")
    if policy.user_error != 0:
        again.append(f"(lastRetry.status != 'Error' && {_CODE} > 0 && !({_CODE} in {sorted(EXIT_CODES)}))")
    if policy.unknown != 0:
        again.append(f"(lastRetry.status != 'Error' && {_CODE} < 1)")
    accepted = " || ".join(again)
    return " && ".join([*(f"!({words})" for words in never), f"({accepted})"]) if never else accepted


def _retried(policy: RetryPolicy, cause: Cause) -> bool:
    return policy.budget(cause) != 0 and cause not in UNSEEN


def _limit(policy: RetryPolicy, retried: list[Cause]) -> int:
    # A budget that stands for another's is no more of it: Argo counts all causes together.
    budgets = [policy.budget(cause) for cause in retried if not isinstance(getattr(policy, cause.value), str)]
    return min(sum(UNLIMITED if budget is None else budget for budget in budgets), UNLIMITED)


def _says(words: tuple[str, ...]) -> str:
    return f"lastRetry.message matches '{'|'.join(words)}'"


def _backoff(policy: RetryPolicy) -> Manifest:
    return {
        "duration": f"{policy.backoff_seconds:g}s",
        "factor": f"{policy.backoff_factor:g}",
        "cap": f"{policy.backoff_cap_seconds:g}s",
    }
