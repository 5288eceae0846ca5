"""The nodes of one running workflow, as Argo keeps them in ``status.nodes``.

`NodeTable` holds the nodes and reports each change to the engine's observer as a
`NodeChange`. Node, pod and attempt names are the ones that Argo would make,
because plugins, labels and people rely on them.

Source: Argo Workflows ``workflow_types.go`` (NodeID), ``util/pod_name.go``,
``controller/operator.go`` (generateNodeName).
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

from tiphys.protocol.compiled_workflow import Manifest

WORKFLOW_KIND = "Workflow"
"""Kind of a change of the whole workflow, not of one node."""


class NodePhase(StrEnum):
    """Phase of a node, in Argo's words."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    SKIPPED = "Skipped"
    OMITTED = "Omitted"
    FAILED = "Failed"
    ERROR = "Error"

    @property
    def finished(self) -> bool:
        return self not in (NodePhase.PENDING, NodePhase.RUNNING)


class NodeChange(NamedTuple):
    """A node was added, or its phase or message changed."""

    changed_at: datetime
    node: str
    """Unique name, such as ``digits.fit(1).admit``."""
    task: str
    """Task of the entry DAG that the node belongs to; empty above the tasks."""
    kind: str
    """Argo's node type: DAG, Steps, StepGroup, Retry, Pod, Plugin, Suspend, Skipped or TaskGroup.

    `WORKFLOW_KIND` for a change of the whole workflow.
    """
    template: str
    phase: NodePhase
    message: str
    log_tail: tuple[str, ...] = ()
    """Last log lines of a failed container."""


def ignore_change(_change: NodeChange) -> None:
    """Default observer of the engine: does nothing."""


# Kubernetes names have at most 253 characters; Argo leaves room for a hyphen and the hash.
_MAX_POD_PREFIX = 242


def node_id(workflow: str, node: str) -> str:
    """Id of a node: the workflow's name for the root, otherwise that name and the FNV-1a hash of the node's name."""
    return workflow if node == workflow else f"{workflow}-{_fnv1a(node)}"


def pod_name(workflow: str, node: str, template: str) -> str:
    if node == workflow:
        return workflow
    prefix = f"{workflow}-{template}" if template else workflow
    return f"{prefix[:_MAX_POD_PREFIX]}-{_fnv1a(node)}"


def group_name(node: str, index: int) -> str:
    """Name of the group ``index`` (from 0) of a steps node."""
    return f"{node}[{index}]"


def attempt_name(node: str, attempt: int) -> str:
    """Name of the attempt ``attempt`` (from 0) of a node with a retryStrategy."""
    return f"{node}({attempt})"


def item_name(name: str, index: int, label: str) -> str:
    """Name of one item of a fan-out: ``sweep(1:code:1,lr:0.2)``. Parentheses in the label are dropped."""
    return f"{name}({index}:{label.replace('(', '').replace(')', '')})"


def display_name(node: str) -> str:
    """The last part of a node's name, as the Argo UI shows it."""
    depth = 0
    for position in range(len(node) - 1, -1, -1):
        character = node[position]
        depth += (character == ")") - (character == "(")
        if depth == 0 and character == ".":
            return node[position + 1 :]
        if depth == 0 and character == "[" and node.endswith("]"):
            return node[position:]
    return node


def _fnv1a(text: str) -> int:
    value = 0x811C9DC5
    for byte in text.encode():
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return value


Artifact = dict[str, Any]
"""An Argo artifact; ``s3`` or ``raw`` locates its bytes."""


@dataclass(frozen=True)
class WorkflowNodeOutputs:
    parameters: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    result: str | None = None
    exit_code: str | None = None


@dataclass
class WorkflowNode:
    """State of one node. Only `NodeTable` changes it."""

    name: str
    id: str
    kind: str
    template: str
    task: str
    phase: NodePhase
    message: str
    started: datetime
    finished: datetime | None = None
    inputs: Manifest = field(default_factory=dict)
    outputs: WorkflowNodeOutputs | None = None
    termination_message: str = ""
    """End of the log of a program that failed."""
    attempts: list["WorkflowNode"] = field(default_factory=list)
    """Attempts of a Retry node."""
    items: list["WorkflowNode"] = field(default_factory=list)
    """Children of a fan-out."""

    @property
    def failed(self) -> bool:
        return self.phase in (NodePhase.FAILED, NodePhase.ERROR)

    @property
    def completed(self) -> bool:
        """Whether the node ran to its end: it was neither skipped nor omitted."""
        return self.failed or self.phase is NodePhase.SUCCEEDED

    @property
    def last_attempt(self) -> "WorkflowNode":
        """The last attempt of a Retry node; any other node itself."""
        return self.attempts[-1] if self.attempts else self


class NodeTable:
    """All nodes of a workflow; reports every change to the observer."""

    def __init__(self, workflow: str, clock: Callable[[], datetime], observer: Callable[[NodeChange], None]) -> None:
        self._workflow = workflow
        self._clock = clock
        self._observer = observer
        self._nodes: dict[str, WorkflowNode] = {}

    def __iter__(self) -> Iterator[WorkflowNode]:
        return iter(self._nodes.values())

    def add(
        self, name: str, kind: str, template: str, task: str, phase: NodePhase = NodePhase.RUNNING, message: str = ""
    ) -> WorkflowNode:
        """Add a node; its first phase may be a final one."""
        now = self._clock()
        node = WorkflowNode(name, node_id(self._workflow, name), kind, template, task, phase, message, started=now)
        node.finished = now if phase.finished else None
        self._nodes[name] = node
        self._notify(node)
        return node

    def set_phase(
        self, node: WorkflowNode, phase: NodePhase, message: str = "", log_tail: tuple[str, ...] = ()
    ) -> None:
        """Set phase and message of ``node``; the observer is called only if one of them changes."""
        if (node.phase, node.message) == (phase, message):
            return
        node.phase, node.message = phase, message
        node.finished = self._clock() if phase.finished else None
        self._notify(node, log_tail)

    def announce(self, message: str) -> None:
        """Send the observer a message about the whole workflow; no node changes."""
        self._observer(NodeChange(self._clock(), self._workflow, "", WORKFLOW_KIND, "", NodePhase.RUNNING, message))

    def failures_json(self) -> str:
        """Value of ``workflow.failures``: JSON encoded twice, as in Argo; ``"null"`` if no node failed."""
        failed = [
            {
                "displayName": display_name(node.name),
                "message": node.message,
                "templateName": node.template,
                "phase": str(node.phase),
                "podName": pod_name(self._workflow, node.name, node.template),
                "finishedAt": _optional_rfc3339(node.finished),
            }
            for node in self
            if node.failed
        ]
        return json.dumps(json.dumps(failed or None))

    def status_nodes(self) -> dict[str, Any]:
        """The Workflow's ``status.nodes``."""
        return {node.id: _node_document(node) for node in self}

    def _notify(self, node: WorkflowNode, log_tail: tuple[str, ...] = ()) -> None:
        self._observer(
            NodeChange(
                self._clock(), node.name, node.task, node.kind, node.template, node.phase, node.message, log_tail
            )
        )


def _node_document(node: WorkflowNode) -> dict[str, Any]:
    document = {
        "id": node.id,
        "name": node.name,
        "displayName": display_name(node.name),
        "type": node.kind,
        "templateName": node.template,
        "phase": str(node.phase),
        "message": node.message,
        "startedAt": _optional_rfc3339(node.started),
        "finishedAt": _optional_rfc3339(node.finished),
        "inputs": node.inputs,
        "outputs": _outputs_document(node.outputs),
        # In Argo this is a part of the message.
        "terminationMessage": node.termination_message,
    }
    return {name: value for name, value in document.items() if value or name == "message"}


def _outputs_document(outputs: WorkflowNodeOutputs | None) -> dict[str, Any]:
    if outputs is None:
        return {}
    document: dict[str, Any] = {
        "parameters": [{"name": name, "value": value} for name, value in outputs.parameters.items()],
        "artifacts": [{**artifact, "name": name} for name, artifact in outputs.artifacts.items()],
        "result": outputs.result,
        "exitCode": outputs.exit_code,
    }
    return {name: value for name, value in document.items() if value not in (None, [])}


def _optional_rfc3339(moment: datetime | None) -> str | None:
    return format_rfc3339(moment) if moment else None


def format_rfc3339(moment: datetime) -> str:
    """Format a UTC time as Kubernetes does, to the second."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


class NodeEnd(NamedTuple):
    """Final phase of a node, with its message, outputs and last log lines."""

    phase: NodePhase
    message: str = ""
    outputs: WorkflowNodeOutputs | None = None
    log_tail: tuple[str, ...] = ()
