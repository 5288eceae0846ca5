"""Estimates whether a Workflow with all its nodes fits into one object.

Argo keeps the status of every node in the Workflow object, compresses them above
``MAX_WORKFLOW_SIZE`` (1 MiB), and fails the Workflow if that is not enough, unless
node status offloading is configured (``workflow/packer/packer.go``,
``workflow/hydrator/hydrator.go``). That happens in the middle of a run, so compile
warns before it. Items that only the run produces count as one.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from hera_pipelines.compile.gated_step import list_declared
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import PLACEHOLDER_PATTERN, Manifest, read_workflow_parameters
from tiphys.protocol.fan_out import is_fan_out, item_values

MAX_WORKFLOW_BYTES = 1 << 20
"""Argo's default of ``MAX_WORKFLOW_SIZE``."""
_COMPRESSED_NODE_BYTES = 60
"""Bytes of one node after gzip and base64: 57 to 65 in statuses of 270 to 10,800 nodes with 800 bytes of JSON each."""
_LARGE_RUNS = "docs/install.md#large-runs"


class WorkflowSize(NamedTuple):
    """What a run without failures makes of a Workflow."""

    nodes: int
    """Nodes of its status."""
    bytes: int
    """Size of the object with compressed nodes."""


def estimate_size(workflow: Manifest) -> WorkflowSize:
    """Estimate the largest size of a Workflow, or of those of a template or schedule, that runs without failures."""
    spec = workflow["spec"].get("workflowSpec", workflow["spec"])
    counter = _NodeCounter({t["name"]: t for t in spec["templates"]}, read_workflow_parameters({"spec": spec}))
    nodes = counter.count(spec["entrypoint"]) + counter.count(spec.get("onExit", ""))
    return WorkflowSize(nodes, len(json.dumps(workflow).encode()) + nodes * _COMPRESSED_NODE_BYTES)


def size_warning(workflow: Manifest) -> str | None:
    """A sentence that says that the Workflow will be larger than Argo can store, and what to do; None if it fits."""
    size = estimate_size(workflow)
    if size.bytes <= MAX_WORKFLOW_BYTES:
        return None
    return (
        f"the Workflow will have some {size.nodes:,} nodes and {size.bytes:,} bytes, and Argo stores at most "
        f"{MAX_WORKFLOW_BYTES:,} in one object: configure Argo's node status offloading, start fewer items per run, or "
        f"make steps that need no record Plain; see {_LARGE_RUNS}"
    )


class _NodeCounter:
    """Counts the nodes of templates; each template is counted once."""

    def __init__(self, templates: Mapping[str, Manifest], parameters: Mapping[str, str]) -> None:
        self._templates = templates
        self._parameters = parameters
        self._counts: dict[str, int] = {}

    def count(self, name: str) -> int:
        """Nodes of one call of the template; 1 for a template that is not in the Workflow, 0 for no template."""
        if not name:
            return 0
        if name not in self._counts:
            self._counts[name] = 1  # for a template that calls itself
            self._counts[name] = self._count_template(self._templates.get(name, {}))
        return self._counts[name]

    def _count_template(self, template: Manifest) -> int:
        tasks = list_declared(template, "dag", "tasks")
        groups: list[list[Manifest]] = template.get("steps") or []
        children = sum(map(self._count_task, tasks))
        children += sum(1 + sum(map(self._count_task, group)) for group in groups)
        return 1 + bool(template.get("retryStrategy")) + children

    def _count_task(self, task: Manifest) -> int:
        nodes = self.count(task.get("template") or "") or 1
        return 1 + self._count_items(task) * nodes if is_fan_out(task) else nodes

    def _count_items(self, task: Manifest) -> int:
        sequence = {field: self._fill_in(text) for field, text in (task.get("withSequence") or {}).items()}
        filled = {**task, "withParam": self._fill_in(task.get("withParam")), "withSequence": sequence}
        try:
            return len(item_values(filled))
        except UsageError:
            return 1

    def _fill_in(self, text: Any) -> Any:
        """``text`` with the values of workflow parameters."""
        if not isinstance(text, str):
            return text
        values = {f"workflow.parameters.{name}": value for name, value in self._parameters.items()}
        return PLACEHOLDER_PATTERN.sub(lambda tag: values.get(tag[1].strip(), tag[0]), text)
