"""How many plugin nodes may be open at once.

Argo keeps every open plugin node of a workflow, template and answer, in one
WorkflowTaskSet, and etcd takes no object beyond about 1.5 MB: past that, all of
them end as Error together. An open step has one open plugin node, so the entry
DAG's ``parallelism`` bounds them.
"""

import json
from collections.abc import Mapping
from typing import Any

from hera_pipelines.compile.gated import GatedStep, listed
from hera_pipelines.compile.references import workflow_parameters
from tiphys.errors import UsageError
from tiphys.protocol.pipeline import Manifest

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
