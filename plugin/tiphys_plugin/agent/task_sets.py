"""The agent's view of one WorkflowTaskSet, and what it wants to write into it. No clock, no I/O.

A workflow has one task set of its name (Argo Workflows
``workflow/controller/taskset.go``). ``spec.tasks`` holds the template of every
open HTTP and plugin node by node id, ``status.nodes`` the answers. Argo removes a
finished node first from the status, then from the tasks.

| the task set shows | the agent |
|---|---|
| a new task of Tiphys | calls the core |
| the same task again, in another rendering | does nothing: the core was called |
| a removed task again | calls again: ``argo retry`` issues the exit handler under its old node id |
| a final entry, of any writer | treats the node as answered, and never overwrites the entry |
| its own answer removed, but not the task | waits: Argo removes the answer first; see `TaskSetState.is_answer_lost` |
| the task removed | drops the node, and ignores the result of a call in progress |
| an entry without a task | removes it: one unknown node id blocks the whole workflow in Argo's controller |
| an open finalize task | the exit handler runs, so Argo has decided every other node: removes their Pending entries |

Argo's controller copies a Pending entry to the node at every reconcile, whatever
else happened to the node, and thereby hides deadlines and ``argo stop``. The
agent therefore writes it once for each reason, and removes it after Argo had time
to copy it (`TaskSetState.withdraw_pending`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from tiphys.errors import UsageError
from tiphys_plugin.runtime.requests import identify_call, is_tiphys_template

Template = dict[str, Any]
NodeEntry = dict[str, Any]
"""Entry of one node in ``status.nodes``: phase, message, outputs."""

_OPEN_PHASES = ("", "Pending", "Running")


@dataclass(frozen=True)
class TaskSet:
    """One version of a task set."""

    namespace: str
    name: str
    uid: str
    version: int
    workflow_uid: str
    """Uid of the workflow that owns the task set; empty if it has no such owner."""
    tasks: dict[str, Template]
    entries: dict[str, NodeEntry]

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name

    @cached_property
    def is_exiting(self) -> bool:
        """Whether the workflow's exit handler runs; Argo has decided every other node then, even with an open task."""
        return any(
            is_tiphys_template(template) and identify_call(template).op == "finalize"
            for template in self.tasks.values()
        )


def parse_task_set(document: dict[str, Any]) -> TaskSet:
    """Parse a WorkflowTaskSet object of the API server.

    Raises:
        UsageError: its tasks or its answers are no objects: the kind in the API server has no types for them.
    """
    metadata = document["metadata"]
    owners = metadata.get("ownerReferences") or []
    spec, status = document.get("spec") or {}, document.get("status") or {}
    return TaskSet(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        version=int(metadata["resourceVersion"]),
        workflow_uid=next((owner.get("uid", "") for owner in owners if owner.get("kind") == "Workflow"), ""),
        tasks=_objects_by_name(spec, "spec.tasks"),
        entries=_objects_by_name(status, "status.nodes"),
    )


def _objects_by_name(part: Any, path: str) -> dict[str, dict[str, Any]]:
    found = part.get(path.rpartition(".")[2]) or {} if isinstance(part, dict) else None
    if not isinstance(found, dict) or not all(isinstance(value, dict) for value in found.values()):
        raise UsageError(f"its {path} does not hold an object for each node; correct or delete the task set")
    return found


def is_final(entry: NodeEntry | None) -> bool:
    """Whether an entry decides its node."""
    return entry is not None and entry.get("phase", "") not in _OPEN_PHASES


def is_same_entry(entry: NodeEntry | None, other: NodeEntry | None) -> bool:
    """Whether two entries have the same phase and message, which is what people and Argo's controller read."""
    if entry is None or other is None:
        return entry is other
    return all((entry.get(field) or "") == (other.get(field) or "") for field in ("phase", "message"))


class NodeStage(StrEnum):
    """Stage of a node in the agent."""

    OPEN = "open"
    """The core is being called about the node, or will be."""
    ANSWERED = "answered"
    OVER = "over"
    """The workflow is exiting, so an entry for this node can only do harm."""


@dataclass(eq=False)
class TaskNode:
    """One open task. Compared by identity, because a later task may have the same id."""

    id: str
    template: Template
    """The first rendering of the template; Argo renders it again in each reconcile."""
    first_seen_at: float
    stage: NodeStage = NodeStage.OPEN
    desired_entry: NodeEntry | None = None
    """Entry that the task set should have for the node; None if the core has not replied yet."""
    is_stored: bool = False
    """Whether the task set has had the desired entry."""
    is_withdrawn: bool = False
    """Whether a Pending entry has to be removed, because Argo has copied it."""
    lost_at: float | None = None
    """When the stored answer disappeared while the task remained; None if it has not."""
    failures: int = 0
    """Consecutive calls in which the core raised an error."""
    call_in_progress: bool = False
    """Whether a call about the node is in progress, or waits for a worker."""
    call_count: int = 0
    """Number of calls about the node; a repetition that was planned before the last call is void."""

    @property
    def template_workflow_uid(self) -> str:
        """Uid of the workflow that the body was rendered for."""
        body = self.template["plugin"]["tiphys"]
        uid = body.get("uid") if isinstance(body, dict) else None
        return uid if isinstance(uid, str) else ""


class TaskSetChanges(NamedTuple):
    """The relevant changes in a new version of the task set."""

    new_nodes: list[TaskNode]
    """Nodes about which the core must be called."""
    delivered: list[TaskNode]
    """Nodes whose final answer of this agent is stored now."""
    lost_answers: list[TaskNode]
    """Nodes whose stored answer has just disappeared, while their task remains."""


@dataclass
class TaskSetState:
    """The nodes of one task set, and the entries that the agent wants to write."""

    task_set: TaskSet
    nodes: dict[str, TaskNode] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._version = -1

    @property
    def open_nodes(self) -> Iterator[TaskNode]:
        return (node for node in self.nodes.values() if node.stage is NodeStage.OPEN)

    @property
    def foreign_templates(self) -> list[Template]:
        """Templates of other plugins, and HTTP templates."""
        return [template for template in self.task_set.tasks.values() if not is_tiphys_template(template)]

    def observe(self, task_set: TaskSet, now: float) -> TaskSetChanges:
        """Apply a version of the task set; a version that is not newer than the last one is ignored."""
        changes = TaskSetChanges([], [], [])
        if task_set.version <= self._version:
            return changes
        self.task_set, self._version = task_set, task_set.version
        for removed_id in self.nodes.keys() - task_set.tasks.keys():
            del self.nodes[removed_id]
        for node_id, template in task_set.tasks.items():
            if is_tiphys_template(template):
                self._observe_node(node_id, template, now, changes)
        return changes

    def record_answer(self, node: TaskNode, entry: NodeEntry) -> bool:
        """Note the core's answer; False if the node no longer waits for one."""
        if not self.awaits_answer(node):
            return False
        if is_final(entry):
            node.stage = NodeStage.ANSWERED
        elif is_same_entry(entry, node.desired_entry):
            return True
        node.desired_entry, node.is_withdrawn = entry, False
        node.is_stored = is_same_entry(entry, self.task_set.entries.get(node.id))
        return True

    def awaits_answer(self, node: TaskNode) -> bool:
        """Whether the node is open and still part of the task set."""
        return self.nodes.get(node.id) is node and node.stage is NodeStage.OPEN

    def withdraw_pending(self, node: TaskNode, entry: NodeEntry) -> bool:
        """Have a Pending entry removed if it is still the desired one; False if it is not stored yet: retry later."""
        if self.awaits_answer(node) and node.desired_entry is entry:
            node.is_withdrawn = node.is_stored
            return node.is_stored
        return True

    def is_answer_lost(self, node: TaskNode) -> bool:
        """Whether a stored answer is still missing although its task remains.

        Argo removes the answer, then the task, then stores the workflow. If it
        crashes in between, it waits for the answer again, without any change that
        a watch would show.
        """
        return self.nodes.get(node.id) is node and node.lost_at is not None

    def reopen(self, node: TaskNode) -> bool:
        """Open a node again whose answer was lost; False if the node is gone, or its answer is not lost any more."""
        if not self.is_answer_lost(node):
            return False
        node.stage, node.desired_entry, node.is_stored, node.lost_at = NodeStage.OPEN, None, False, None
        return True

    def status_changes(self) -> dict[str, NodeEntry | None]:
        """The changes to write into ``status.nodes`` of the latest version; None as a value removes an entry."""
        entries = self.task_set.entries
        changes: dict[str, NodeEntry | None] = dict.fromkeys(entries.keys() - self.task_set.tasks.keys())
        for node in self.nodes.values():
            entry = entries.get(node.id)
            if node.stage is NodeStage.OVER or node.is_withdrawn:
                if entry is not None and not is_final(entry):
                    changes[node.id] = None
            elif node.desired_entry is not None and not node.is_stored:
                changes[node.id] = {**dict.fromkeys(entry or (), None), **node.desired_entry}
        return changes

    def _observe_node(self, node_id: str, template: Template, now: float, changes: TaskSetChanges) -> None:
        node = self.nodes.get(node_id)
        entry = self.task_set.entries.get(node_id)
        is_new = node is None
        if node is None:
            node = self.nodes[node_id] = TaskNode(node_id, template, now)
        if is_final(entry):
            if node.stage is NodeStage.ANSWERED and not node.is_stored:
                changes.delivered.append(node)
            node.stage, node.desired_entry, node.is_stored, node.lost_at = NodeStage.ANSWERED, entry, True, None
        elif node.stage is NodeStage.ANSWERED and node.is_stored:
            self._observe_missing_answer(node, now, changes)
        elif self.task_set.is_exiting and identify_call(template).op != "finalize":
            node.stage = NodeStage.OVER
        elif node.stage is NodeStage.ANSWERED:
            pass  # the answer is not stored yet
        else:
            if is_new or node.stage is NodeStage.OVER:
                changes.new_nodes.append(node)
            node.stage = NodeStage.OPEN
            node.is_stored = node.is_stored or (
                node.desired_entry is not None and is_same_entry(entry, node.desired_entry)
            )

    @staticmethod
    def _observe_missing_answer(node: TaskNode, now: float, changes: TaskSetChanges) -> None:
        if node.lost_at is None:
            node.lost_at = now
            changes.lost_answers.append(node)
