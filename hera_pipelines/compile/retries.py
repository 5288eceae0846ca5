"""Argo's retryStrategy for retry budgets, and the limit on open plugin nodes.

A training attempt is repeated through admission. Argo's strategy repeats what ends
in Error: a try whose conclude asks for another, or that lost its agent. A plain step
is repeated by Argo alone, which counts all causes together: the expression selects
the causes to retry, and the limit is the sum of their budgets.

Argo keeps template and answer of every open plugin node of a workflow in one
WorkflowTaskSet, and etcd takes no object above about 1.5 MB. Beyond that all of
them end as Error together. An open step has one open plugin node, so the entry
DAG's ``parallelism`` limits them.
"""

import json
import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

from hera_pipelines.compile.authored_step import AuthoredStep, list_declared
from tiphys.errors import UsageError
from tiphys.failures.classify import (
    CAUSE_PHRASES,
    CONDITION_PHRASES,
    EXIT_CODES,
    MISSING_OUTPUT_PATTERN,
    REJECTION_PHRASES,
)
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.quantities import format_argo_duration
from tiphys.protocol.step_spec import RetryPolicy
from tiphys.recording.step_key import workflow_parameters_used
from tiphys.records import Cause

UNLIMITED_RETRIES = 1000
"""Argo applies a back-off only together with a limit, so "no limit" is a large number."""

_ARGO_BACK_OFF_SECONDS = 0.3, 30.0
"""First and longest back-off of a training in Argo, which lets it pass after a final failure, too. The admit of the
next try waits according to the cause; Argo's own wait is for tries that end before they come to it."""

_EXIT_CODE = "asInt(lastRetry.exitCode)"
_NO_EXIT_CODES = (-1, 0)
"""Of a failure without an exit code, and of one after a program that ended well."""

CAUSES_HIDDEN_FROM_ARGO = (Cause.OUTPUT_MISSING, Cause.GPU_OUT_OF_MEMORY, Cause.HANG, Cause.IMAGE)
"""Causes that Argo's expression cannot detect: Argo sees a missing output as success, the rest as another cause."""


def attempt_retry_strategy(policy: RetryPolicy) -> Manifest:
    """RetryStrategy of a training: its conclude decides, in the phase Error or Failed, and the next admit waits."""
    backoff = _backoff(policy, *_ARGO_BACK_OFF_SECONDS)
    return {"limit": str(UNLIMITED_RETRIES), "retryPolicy": "OnError", "backoff": backoff}


def step_retry_strategy(policy: RetryPolicy) -> Manifest:
    """RetryStrategy of a step's container.

    A gated step has one even where no cause is retried: without a strategy Argo
    would not replace ``{{retries}}`` in the keys of the outputs.
    """
    retried = [cause for cause in Cause if _is_retried(policy, cause)]
    if not retried:
        return {"limit": "0", "retryPolicy": "Always"}
    return {
        "limit": str(_limit(policy, retried)),
        "retryPolicy": "Always",
        "expression": retry_expression(policy),
        "backoff": _backoff(policy, math.inf, math.inf),
    }


def has_retries(policy: RetryPolicy) -> bool:
    """Whether ``policy`` lets Argo repeat a step for any cause."""
    return any(_is_retried(policy, cause) for cause in Cause)


def retry_expression(policy: RetryPolicy) -> str:
    """Expression in expr-lang: whether ``policy`` retries the cause of the last failure.

    A phrase of a cause in the message decides first, then an exit code that has a meaning, then Argo's status.
    """
    refused = [words for cause, words in CAUSE_PHRASES.items() if not _is_retried(policy, cause)]
    refused.append((MISSING_OUTPUT_PATTERN,))
    needs_no_code = policy.infrastructure != 0 and policy.unknown != 0
    implied = {*CONDITION_PHRASES, *(REJECTION_PHRASES if needs_no_code else ())}
    phrases = [words for cause, words in CAUSE_PHRASES.items() if _is_retried(policy, cause)]
    retried = [tuple(word for word in words if word not in implied) for words in phrases]
    codes = sorted(code for code, (cause, _) in EXIT_CODES.items() if _is_retried(policy, cause))
    codes = [*(_NO_EXIT_CODES if needs_no_code else ()), *codes]
    accepted = [_message_matches(retried)] if retried else []
    if codes:
        accepted.append(f"{_EXIT_CODE} in {codes}")
    if by_status := _retried_by_status(policy):
        refused_codes = sorted(EXIT_CODES.keys() - set(codes))
        other = " || ".join(by_status)
        accepted.append(f"!({_EXIT_CODE} in {refused_codes}) && ({other})" if refused_codes else other)
    expression = " || ".join(accepted)
    return f"!({_message_matches(refused)}) && ({expression})" if refused else expression


def _retried_by_status(policy: RetryPolicy) -> list[str]:
    """When else a failure is retried: its message and exit code have no meaning."""
    conditions = []
    if policy.infrastructure != 0:
        conditions.append("lastRetry.status == 'Error'")
    if policy.user_error != 0:
        conditions.append(f"lastRetry.status != 'Error' && {_EXIT_CODE} > 0")
    if policy.unknown != 0 and policy.infrastructure == 0:
        conditions.append(f"lastRetry.status != 'Error' && {_EXIT_CODE} < 1")
    return conditions


def _is_retried(policy: RetryPolicy, cause: Cause) -> bool:
    return policy.budget(cause) != 0 and cause not in CAUSES_HIDDEN_FROM_ARGO


def _limit(policy: RetryPolicy, retried: list[Cause]) -> int:
    # A budget that only names another cause adds nothing: Argo counts all causes together.
    budgets = [policy.budget(cause) for cause in retried if not isinstance(getattr(policy, cause.value), str)]
    return min(sum(UNLIMITED_RETRIES if budget is None else budget for budget in budgets), UNLIMITED_RETRIES)


def _message_matches(phrases: list[tuple[str, ...]]) -> str:
    return f"lastRetry.message matches '{'|'.join(chain.from_iterable(phrases))}'"


def _backoff(policy: RetryPolicy, first_seconds: float, cap_seconds: float) -> Manifest:
    return {
        "duration": format_argo_duration(min(policy.backoff_seconds, first_seconds)),
        "factor": f"{policy.backoff_factor:g}",
        "cap": format_argo_duration(min(policy.backoff_cap_seconds, cap_seconds)),
    }


TASK_SET_BYTES = 1_000_000
"""Share of the 1.5 MB for open nodes; the rest is for Argo's own fields and other plugins."""

_REPLY_BYTES = 2_048
_VALUE_BYTES = 1_024
"""Assumed size of a value that only the run produces, and least size of any other."""


def limit_open_nodes(
    entry: Manifest, steps: list[AuthoredStep], templates: list[Manifest], parameters: Mapping[str, str]
) -> None:
    """Set ``parallelism`` on the entry DAG where the fan-outs of gated steps could overfill the task set.

    ``templates`` are those compiled of these steps, and ``parameters`` the workflow parameters that have a value.

    Raises:
        UsageError: the author's parallelism is too high, or one node alone is too large.
    """
    if not steps:
        return
    capacity = TASK_SET_BYTES // _node_bytes(steps, templates, parameters)
    if capacity < 1:
        raise UsageError(
            f"the inputs of one step are larger than a WorkflowTaskSet can hold ({TASK_SET_BYTES} bytes); "
            "pass large values as artifacts"
        )
    width = _max_open_steps(steps)
    if width is not None and width <= capacity:
        return
    parallelism = entry.setdefault("parallelism", capacity)
    if parallelism > capacity:
        raise UsageError(
            f"template {entry['name']!r}: parallelism {parallelism} would open more plugin nodes at once than a "
            f"WorkflowTaskSet holds; set it to {capacity} or less"
        )


def _max_open_steps(steps: list[AuthoredStep]) -> int | None:
    """Largest number of steps open at once; None where it depends on the run."""
    widths = [_item_count(step) for step in steps]
    return None if None in widths else sum(width for width in widths if width is not None)


def _item_count(step: AuthoredStep) -> int | None:
    if (items := step.task.get("withItems")) is not None:
        return len(items)
    return None if step.fan_out else 1


def _node_bytes(steps: list[AuthoredStep], templates: list[Manifest], parameters: Mapping[str, str]) -> int:
    plugins = [template for template in templates if "plugin" in template]
    largest = max(_json_bytes(template) for template in plugins)
    return largest + max(_input_bytes(step, parameters) + _largest_item_bytes(step) for step in steps) + _REPLY_BYTES


def _input_bytes(step: AuthoredStep, parameters: Mapping[str, str]) -> int:
    arguments = {p["name"]: p.get("value") for p in list_declared(step.task, "arguments", "parameters")}
    values = [arguments.get(p["name"], p.get("value", p.get("default", ""))) for p in step.input_parameters]
    # The node holds a value twice: as input and in the body.
    sizes = [2 * (_json_bytes(value) + _referenced_bytes(value, parameters)) for value in values]
    return sum(max(_VALUE_BYTES, size) for size in sizes) + _referenced_bytes(step.program, parameters)


def _referenced_bytes(part: Any, parameters: Mapping[str, str]) -> int:
    return sum(_json_bytes(parameters.get(name, "")) for name in workflow_parameters_used(part))


def _largest_item_bytes(step: AuthoredStep) -> int:
    # The node holds an item twice: as input and in the body.
    return 2 * max((_json_bytes(item) for item in step.task.get("withItems") or []), default=0)


def _json_bytes(value: Any) -> int:
    return len(json.dumps(value).encode())
