"""Estimates whether a Workflow with all its nodes fits into one object.

Argo keeps the status of every node in the Workflow object, compresses them above
``MAX_WORKFLOW_SIZE`` (1 MiB), and fails the Workflow if that is not enough, unless
node status offloading is configured (``workflow/packer/packer.go``,
``workflow/hydrator/hydrator.go``). That happens in the middle of a run, so compile
warns before it. Items that only the run produces count as one.

Sizes were measured with Argo's own ``file.CompressEncodeString`` (gzip by default)
on the nodes of real runs, copied as 300 to 2,000 items with their own ids, times and
keys. A node has 1,000 to 1,200 bytes of JSON, of which 85 (plain), 99 (`Step`) or 113
(`Train`) are left. The ids in it are random, and nodes are sorted by them, so what
the nodes of an item share is too far apart for gzip: each holds the item again.
"""

import json
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import NamedTuple

from hera_pipelines.compile.authored_step import list_declared
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest, is_fan_out, read_workflow_parameters, substitute_tags
from tiphys.protocol.fan_out import item_documents, sequence_numbers

MAX_WORKFLOW_BYTES = 1 << 20
"""Argo's default of ``MAX_WORKFLOW_SIZE``."""
_COMPRESSED_NODE_BYTES = 100
"""Size of a node after gzip and base64, apart from the item in its name and inputs."""
_COMPRESSED_ITEM_SHARE = 0.7
"""What a byte of an item takes in each node: 0.6 for three numbers, 0.8 for 200 bytes of words."""
_LARGE_RUNS = "docs/install.md#large-runs"
_MAX_LIST_ITEMS = 200
"""``maxItems`` of ``spec.templates`` and of ``dag.tasks`` in Argo's full CRDs (4.1, ``manifests/base/crds/full``)."""


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
    counts = [counter.count(spec[name]) for name in ("entrypoint", "onExit") if spec.get(name)]
    nodes, item_bytes = sum(count.nodes for count in counts), sum(count.item_bytes for count in counts)
    compressed = nodes * _COMPRESSED_NODE_BYTES + round(item_bytes * _COMPRESSED_ITEM_SHARE)
    return WorkflowSize(nodes, len(json.dumps(workflow).encode()) + compressed)


def size_warning(workflow: Manifest) -> str | None:
    """A sentence that says why a cluster may not be able to store the Workflow, and what to do; None if it can."""
    if sentence := _list_warning(workflow["spec"].get("workflowSpec", workflow["spec"])):
        return sentence
    size = estimate_size(workflow)
    if size.bytes <= MAX_WORKFLOW_BYTES:
        return None
    return (
        f"the Workflow will have some {size.nodes:,} nodes and {size.bytes:,} bytes, and Argo stores at most "
        f"{MAX_WORKFLOW_BYTES:,} in one object: configure Argo's node status offloading, start fewer items per run, or "
        f"give small steps retries that repeat nothing; see {_LARGE_RUNS}"
    )


def _list_warning(spec: Manifest) -> str | None:
    """A sentence about the first list that the API server refuses where Argo's full CRDs are installed."""
    templates: list[Manifest] = spec["templates"]
    lists = {"spec.templates": templates}
    lists |= {
        f"the tasks of template {template['name']!r}": list_declared(template, "dag", "tasks") for template in templates
    }
    for name, entries in lists.items():
        if len(entries) > _MAX_LIST_ITEMS:
            return (
                f"{name} has {len(entries):,} entries, and a cluster with Argo's full CRDs refuses more than "
                f"{_MAX_LIST_ITEMS}: have one step work on many items (a fan-out), start several runs, or install "
                f"Argo's minimal CRDs; see {_LARGE_RUNS}"
            )
    return None


class _Count(NamedTuple):
    nodes: int
    item_bytes: int = 0
    """Bytes of the item of each node, all together."""


def _total(counts: Iterable[_Count]) -> _Count:
    return _Count(*map(sum, zip(_Count(0), *counts, strict=True)))


class _NodeCounter:
    """Counts the nodes of templates; each template is counted once."""

    def __init__(self, templates: Mapping[str, Manifest], parameters: Mapping[str, str]) -> None:
        self._templates = templates
        self._values = {f"workflow.parameters.{name}": value for name, value in parameters.items()}
        self._counts: dict[str, _Count] = {}

    def count(self, name: str) -> _Count:
        """Nodes of one call of the template; 1 for a template that is not in the Workflow."""
        if name not in self._counts:
            self._counts[name] = _Count(1)  # for a template that calls itself
            self._counts[name] = self._count_template(self._templates.get(name, {}))
        return self._counts[name]

    def _count_template(self, template: Manifest) -> _Count:
        groups: list[list[Manifest]] = template.get("steps") or []
        tasks = [*list_declared(template, "dag", "tasks"), *chain.from_iterable(groups)]
        own = _Count(1 + (template.get("retryStrategy") is not None) + len(groups))
        return _total([own, *map(self._count_task, tasks)])

    def _count_task(self, task: Manifest) -> _Count:
        call = self.count(task.get("template") or "")
        if not is_fan_out(task):
            return call
        items, text_bytes = self._measure_items(task)
        return _Count(1 + items * call.nodes, items * call.item_bytes + call.nodes * text_bytes)

    def _measure_items(self, task: Manifest) -> tuple[int, int]:
        """Number of items, and bytes of their texts; numbers of a sequence are too short to count."""
        tagged = {name: task[name] for name in ("withParam", "withSequence") if name in task}
        filled = {**task, **substitute_tags(tagged, self._values.get)}
        try:
            if sequence := filled.get("withSequence"):
                return len(sequence_numbers(task["name"], sequence)), 0
            items = item_documents(filled)
            return len(items), sum(len(item.encode()) for item in items)
        except (UsageError, OverflowError):  # Argo reports the invalid items when it runs the task
            return 1, 0
