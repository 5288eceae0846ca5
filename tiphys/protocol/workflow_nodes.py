"""The nodes of a live Workflow: how Argo stores and names them, and which of them are those of its steps.

A step without a gate is one node, ``wf.prep``; with a ``retryStrategy`` that is a node
of the type Retry with a node for each try, ``wf.prep(0)``. An item of a fan-out is
``wf.sweep(2:lr:0.1)``, its tries ``wf.sweep(2:lr:0.1)(0)``. Argo takes parentheses out of
the text of an item. The hooks of a task are nodes as well, ``wf.prep.onExit`` and
``wf.prep.hooks.running``, and no attempts of its step. Source: Argo Workflows,
``workflow/controller/operator.go``, ``dag.go``, ``hooks.go`` and ``exit_handler.go``.

Who may change a Workflow may write nodes that Argo never would.
"""

import json
import re
import zlib
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from tiphys.errors import UsageError
from tiphys.protocol.gang import NODE_ANNOTATION

WORKFLOW_LABEL = "workflows.argoproj.io/workflow"
"""Label of the pods that Argo makes: the name of their Workflow."""
NODE_NAME_ANNOTATION = "workflows.argoproj.io/node-name"
"""Annotation of the pods that Argo makes: the unique name of their node."""
_MAX_NODES_BYTES = 32 << 20
"""Most of the nodes once decompressed. Argo compresses them into an object of etcd, which has at most 1.5 MB."""
_MAX_JSON_VALUES = 3_000_000
"""Most values in them: an empty list has 3 bytes as JSON, and 64 in memory."""
_MAX_COMPRESSED_NODES = 50_000
_TRY = re.compile(r"\((\d+)\)$")
_STEP_NODE = re.compile(r"([^(.\[]+)(\(\d+:[^()]*\))?(?:\((\d{1,9})\))?")
_NOT_RUN_PHASES = ("Skipped", "Omitted")
_COMPLETED_PHASES = ("Succeeded", "Failed", "Error")


def read_nodes(workflow: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Nodes of a Workflow by start time, also compressed ones; none where a database has them.

    Raises:
        UsageError: the nodes cannot be read.
    """
    status = workflow.get("status") or {}
    nodes: Any = status.get("nodes") or {}
    if compressed := status.get("compressedNodes"):
        nodes = _decompress(compressed)
        if isinstance(nodes, dict) and len(nodes) > _MAX_COMPRESSED_NODES:
            raise UsageError(f"the Workflow has more than {_MAX_COMPRESSED_NODES:,} nodes")
    if not isinstance(nodes, dict) or not all(isinstance(node, dict) and "name" in node for node in nodes.values()):
        raise UsageError("the nodes of the Workflow are not those that Argo writes")
    return sorted(nodes.values(), key=lambda node: str(node.get("startedAt") or ""))


def _decompress(text: object) -> Any:
    try:
        reader = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        data = reader.decompress(b64decode(str(text)), _MAX_NODES_BYTES)
        if reader.unconsumed_tail:
            raise UsageError(f"the nodes of the Workflow have more than {_MAX_NODES_BYTES:,} bytes")
        if sum(map(data.count, (b",", b"[", b"{"))) > _MAX_JSON_VALUES:
            raise UsageError(f"the nodes of the Workflow have more than {_MAX_JSON_VALUES:,} values")
        nodes = json.loads(data)
    except (ValueError, zlib.error, RecursionError) as error:
        raise UsageError(f"the compressed nodes of the Workflow cannot be read: {error}") from error
    return nodes


def are_nodes_offloaded(workflow: Mapping[str, Any]) -> bool:
    """Whether a database of Argo has the nodes, so that the object does not show them."""
    return bool((workflow.get("status") or {}).get("offloadNodeStatusVersion"))


def node_of_pod(pod: Mapping[str, Any]) -> str:
    """Unique name of the node of a pod, of one of a gang too; empty for a pod of no Workflow."""
    annotations = pod["metadata"].get("annotations") or {}
    return str(annotations.get(NODE_NAME_ANNOTATION) or annotations.get(NODE_ANNOTATION) or "")


def without_try(node: str) -> str:
    """The name of a node without the number of its try: ``wf.prep(1)`` → ``wf.prep``."""
    return _TRY.sub("", node)


class StepNode(NamedTuple):
    """A task of the entry DAG, or an item of a fan-out, that runs without a gate."""

    instance: str
    """Name of its node, without tries."""
    task: str
    node: Mapping[str, Any]
    """The node of the step, or of all its tries."""
    tries: tuple[Mapping[str, Any], ...] = ()
    """The node of each try, in their order; empty without a ``retryStrategy``."""

    @property
    def last_try(self) -> Mapping[str, Any]:
        """The node of the last pod."""
        return self.tries[-1] if self.tries else self.node

    @property
    def phase(self) -> str:
        return str(self.node.get("phase") or "Pending")

    @property
    def has_started(self) -> bool:
        """Whether Argo has made a pod for it, or tried to."""
        pods = (node for node in self.tries or (self.node,) if node.get("type") == "Pod")
        return self.phase not in _NOT_RUN_PHASES and any(pod.get("startedAt") for pod in pods)

    @property
    def has_ended(self) -> bool:
        """Whether its phase is final. Before Argo has all outputs of a pod, it may still change (``Fulfilled``)."""
        is_synced = self.node.get("taskResultSynced") is not False
        return self.phase in _NOT_RUN_PHASES or (self.phase in _COMPLETED_PHASES and is_synced)

    @property
    def outputs(self) -> Mapping[str, Any]:
        """Outputs of the last pod.

        Raises:
            UsageError: Argo did not write them.
        """
        return self._side("outputs")

    def output_values(self) -> dict[str, str]:
        """Values of its output parameters by name; raises as `outputs`."""
        return self._values("outputs")

    def output_artifacts(self) -> list[dict[str, Any]]:
        """Its output artifacts, with their locations; raises as `outputs`."""
        return self._entries("outputs", "artifacts")

    def input_values(self) -> dict[str, str]:
        """Values of its input parameters by name; raises as `outputs`."""
        return self._values("inputs")

    def input_artifacts(self) -> list[dict[str, Any]]:
        """Its input artifacts, with their locations; raises as `outputs`."""
        return self._entries("inputs", "artifacts")

    def _side(self, side: str) -> dict[str, Any]:
        found = self.last_try.get(side) or self.node.get(side) or {}
        if not isinstance(found, dict):
            raise UsageError(f"node {self.instance} has {side} that Argo did not write")
        return found

    def _entries(self, side: str, kind: str) -> list[dict[str, Any]]:
        entries = self._side(side).get(kind) or []
        is_list = isinstance(entries, list)
        if not is_list or not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in entries):
            raise UsageError(f"node {self.instance} has {kind} among its {side} that Argo did not write")
        return list(entries)

    def _values(self, side: str) -> dict[str, str]:
        entries = self._entries(side, "parameters")
        return {entry["name"]: str(entry["value"]) for entry in entries if entry.get("value") is not None}


def find_step_nodes(workflow: str, nodes: Iterable[Mapping[str, Any]], tasks: Mapping[str, bool]) -> Iterator[StepNode]:
    """The nodes of ``tasks`` and of their items.

    ``tasks`` names those of the entry DAG that have no gate, each with whether it is fanned out.
    """
    prefix = f"{workflow}."
    found: dict[str, tuple[str, Mapping[str, Any]]] = {}
    tries: dict[str, list[tuple[int, Mapping[str, Any]]]] = {}
    for node in nodes:
        name = str(node["name"])
        match = _STEP_NODE.fullmatch(name[len(prefix) :]) if name.startswith(prefix) else None
        if match is None or tasks.get(match[1]) is not bool(match[2]):
            continue
        instance = f"{prefix}{match[1]}{match[2] or ''}"
        if match[3]:
            tries.setdefault(instance, []).append((int(match[3]), node))
        else:
            found[instance] = match[1], node
    for instance, (task, node) in found.items():
        of_node = tuple(node for _, node in sorted(tries.get(instance, []), key=lambda pair: pair[0]))
        yield StepNode(instance, task, node, of_node)


def parse_node_time(text: object) -> datetime | None:
    """A time of a node; None for any text that is no time with a zone, as Argo writes it."""
    try:
        moment = datetime.fromisoformat(str(text or ""))
        return moment.astimezone(UTC) if moment.tzinfo is not None else None
    except (ValueError, OverflowError):  # the latter at the ends of the calendar
        return None
