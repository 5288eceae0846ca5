"""The nodes of one running workflow, as Argo keeps them in ``status.nodes``."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from hera_pipelines.local.changes import WORKFLOW, NodeChange, NodePhase
from hera_pipelines.local.names import display_name, node_id, pod_name

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
