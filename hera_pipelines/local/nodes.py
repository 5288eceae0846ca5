"""The nodes of one running workflow, as Argo keeps them in ``status.nodes``.

What the local engine tells whoever watches it.

Names as Argo makes them, because plugins, labels and people key on them.

Source: Argo Workflows ``workflow_types.go`` (NodeID), ``util/pod_name.go``,
``controller/operator.go`` (generateNodeName).

How a node ended.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple

WORKFLOW = "Workflow"
"""Kind of a change that concerns the workflow as a whole and no node of it."""


class NodePhase(StrEnum):
    """Argo's words for the state of a node."""

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
    """A node came to be, changed its phase, or says something new."""

    at: datetime
    node: str
    """Unique name, such as ``digits.fit[0].attempts(1)[0].admit``."""
    task: str
    """Task of the entry DAG that the node belongs to; empty above the tasks."""
    kind: str
    """Argo's node type: DAG, Steps, StepGroup, Retry, Pod, Plugin, Skipped or TaskGroup; or `WORKFLOW`."""
    template: str
    phase: NodePhase
    message: str
    log_tail: tuple[str, ...] = ()
    """Last lines of the log of a container that failed."""


_MAX_POD_PREFIX = 242


def node_id(workflow: str, node: str) -> str:
    """Id of a node: the workflow's name for its root, else name and FNV-1a hash of the node's name."""
    return workflow if node == workflow else f"{workflow}-{_fnv1a(node)}"


def pod_name(workflow: str, node: str, template: str) -> str:
    """Name of the pod that runs ``node``."""
    if node == workflow:
        return workflow
    prefix = f"{workflow}-{template}" if template else workflow
    return f"{prefix[:_MAX_POD_PREFIX]}-{_fnv1a(node)}"


def group_name(node: str, index: int) -> str:
    """Name of the index-th group of a steps node."""
    return f"{node}[{index}]"


def attempt_name(node: str, attempt: int) -> str:
    """Name of the attempt-th try (from 0) of a node with a retryStrategy."""
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
"""An Argo artifact; where its bytes are is under ``s3`` or ``raw``."""


@dataclass(frozen=True)
class Outputs:
    """What a finished node offers to later ones."""

    parameters: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    result: str | None = None
    exit_code: str | None = None


@dataclass
class Node:
    """One node. Only `NodeTable` changes it."""

    name: str
    id: str
    kind: str
    template: str
    task: str
    phase: NodePhase
    message: str
    started: datetime
    finished: datetime | None = None
    outputs: Outputs | None = None
    attempts: list["Node"] = field(default_factory=list)
    """Tries of a Retry node."""
    items: list["Node"] = field(default_factory=list)
    """Children of a fan-out."""

    @property
    def failed(self) -> bool:
        return self.phase in (NodePhase.FAILED, NodePhase.ERROR)

    @property
    def completed(self) -> bool:
        """Finished, and not by being passed over."""
        return self.failed or self.phase is NodePhase.SUCCEEDED

    @property
    def latest(self) -> "Node":
        """The node whose facts others see: of a Retry node the last attempt."""
        return self.attempts[-1] if self.attempts else self


class NodeTable:
    """All nodes of a workflow; tells the observer about every change."""

    def __init__(self, workflow: str, clock: Callable[[], datetime], observer: Callable[[NodeChange], None]) -> None:
        self._workflow = workflow
        self._clock = clock
        self._observer = observer
        self._nodes: dict[str, Node] = {}

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def add(
        self, name: str, kind: str, template: str, task: str, phase: NodePhase = NodePhase.RUNNING, message: str = ""
    ) -> Node:
        """Make a node; it may be finished from the start."""
        now = self._clock()
        node = Node(name, node_id(self._workflow, name), kind, template, task, phase, message, started=now)
        node.finished = now if phase.finished else None
        self._nodes[name] = node
        self._tell(node)
        return node

    def mark(self, node: Node, phase: NodePhase, message: str = "", log_tail: tuple[str, ...] = ()) -> None:
        """Give ``node`` a phase and message; nothing is told where neither changes."""
        if (node.phase, node.message) == (phase, message):
            return
        node.phase, node.message = phase, message
        node.finished = self._clock() if phase.finished else None
        self._tell(node, log_tail)

    def announce(self, message: str) -> None:
        """Let the observer know something about the workflow as a whole; no node changes by it."""
        self._observer(NodeChange(self._clock(), self._workflow, "", WORKFLOW, "", NodePhase.RUNNING, message))

    def failures(self) -> str:
        """The value of ``workflow.failures``: JSON encoded twice, as Argo makes it; ``"null"`` if nothing failed."""
        failed = [
            {
                "displayName": display_name(node.name),
                "message": node.message,
                "templateName": node.template,
                "phase": str(node.phase),
                "podName": pod_name(self._workflow, node.name, node.template),
                "finishedAt": _stamp(node.finished),
            }
            for node in self
            if node.failed
        ]
        return json.dumps(json.dumps(failed or None))

    def document(self) -> dict[str, Any]:
        """``status.nodes``."""
        return {node.id: _document(node) for node in self}

    def _tell(self, node: Node, log_tail: tuple[str, ...] = ()) -> None:
        self._observer(
            NodeChange(
                self._clock(), node.name, node.task, node.kind, node.template, node.phase, node.message, log_tail
            )
        )


def _document(node: Node) -> dict[str, Any]:
    return {
        "id": node.id,
        "name": node.name,
        "displayName": display_name(node.name),
        "type": node.kind,
        "templateName": node.template,
        "phase": str(node.phase),
        "message": node.message,
        "startedAt": _stamp(node.started),
        "finishedAt": _stamp(node.finished),
    }


def _stamp(moment: datetime | None) -> str | None:
    return rfc3339(moment) if moment else None


def rfc3339(moment: datetime) -> str:
    """A moment as Kubernetes writes it, to the second."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


class Verdict(NamedTuple):
    """The final phase of a node, and why."""

    phase: NodePhase
    message: str = ""
    outputs: Outputs | None = None
    log_tail: tuple[str, ...] = ()
