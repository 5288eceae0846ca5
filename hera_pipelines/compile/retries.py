"""How many plugin nodes may be open at once.

Argo keeps every open plugin node of a workflow, template and answer, in one
WorkflowTaskSet, and etcd takes no object beyond about 1.5 MB: past that, all of
them end as Error together. An open step has one open plugin node, so the entry
DAG's ``parallelism`` bounds them.

Retry budgets as Argo's retryStrategy.

A training attempt repeats through admission: settle decides, so Argo only has
to repeat whatever failed. A step repeats inside Argo, which counts all causes
together: its expression says which causes are worth another try, and its limit
is the sum of their budgets.
"""

import json
from collections.abc import Mapping
from typing import Any

from hera_pipelines.compile.gated_step import GatedStep, listed
from hera_pipelines.compile.references import workflow_parameters
from tiphys.errors import UsageError
from tiphys.failures.classify import EXIT_CODES, WORDS
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import RetryPolicy
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


TASK_SET_BYTES = 1_000_000
"""Of 1.5 MB, what we dare to fill; the rest is Argo's own and other people's plugins."""

_REPLY_BYTES = 2_048
_VALUE_BYTES = 1_024
"""Assumed for a value that is known only at run time, and the least for any other."""


def limit_open_nodes(
    entry: Manifest, steps: list[GatedStep], templates: list[Manifest], parameters: Mapping[str, str]
) -> None:
    """Set ``parallelism`` on the entry DAG where its fan-outs could overfill the task set.

    ``parameters`` are the workflow's, as far as they have values.

    Raises:
        UsageError: the author asks for more at once, or one node alone is too much.
    """
    capacity = TASK_SET_BYTES // _node_bytes(steps, templates, parameters)
    if capacity < 1:
        raise UsageError(
            f"the inputs of one step are larger than a WorkflowTaskSet can hold ({TASK_SET_BYTES} bytes); "
            "pass large values as artifacts"
        )
    width = _width(steps)
    if width is not None and width <= capacity:
        return
    wanted = entry.setdefault("parallelism", capacity)
    if wanted > capacity:
        raise UsageError(
            f"template {entry['name']!r}: parallelism {wanted} would open more plugin nodes at once than a "
            f"WorkflowTaskSet holds; set it to {capacity} or less"
        )


def _width(steps: list[GatedStep]) -> int | None:
    """Steps that may be open at once; None when only the run will tell."""
    widths = [_items(step) for step in steps]
    return None if None in widths else sum(width for width in widths if width is not None)


def _items(step: GatedStep) -> int | None:
    if (items := step.task.get("withItems")) is not None:
        return len(items)
    return None if step.fan_out else 1


def _node_bytes(steps: list[GatedStep], templates: list[Manifest], parameters: Mapping[str, str]) -> int:
    plugins = [template for template in templates if "plugin" in template]
    largest = max(_size(template) for template in plugins)
    return largest + max(_inputs(step, parameters) + _largest_item(step) for step in steps) + _REPLY_BYTES


def _inputs(step: GatedStep, parameters: Mapping[str, str]) -> int:
    given = {p["name"]: p.get("value") for p in listed(step.task, "arguments", "parameters")}
    values = [given.get(p["name"], p.get("value", p.get("default", ""))) for p in step.input_parameters]
    # A value is there twice: as input and in the body.
    known = [2 * (_size(value) + _referred(value, parameters)) for value in values]
    return sum(max(_VALUE_BYTES, size) for size in known) + _referred(step.program, parameters)


def _referred(part: Any, parameters: Mapping[str, str]) -> int:
    return sum(_size(parameters.get(name, "")) for name in workflow_parameters(part))


def _largest_item(step: GatedStep) -> int:
    # An item is there twice: as input and in the body.
    return 2 * max((_size(item) for item in step.task.get("withItems") or []), default=0)


def _size(value: Any) -> int:
    return len(json.dumps(value).encode())
