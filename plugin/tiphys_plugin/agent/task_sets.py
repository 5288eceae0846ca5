"""What the agent remembers of one task set, and what it wants written into it. No clock, no I/O.

| the task set shows | the agent |
|---|---|
| a new task of ours | asks the core |
| the same task again, in another rendering | nothing: it was asked |
| a task that was gone and is back | asks again: ``argo retry`` issues the exit handler under its old node id |
| a final entry, whoever wrote it | takes the node as answered; nothing is ever written over it |
| its own answer is gone, the task is not | waits: Argo removes the answer first; see `Memory.lost` |
| the task is gone | forgets the node, and whatever is still being asked about it |
| an entry without a task | removes it: one unknown node id blocks the whole workflow in Argo's controller |
| an open finalize task | the exit handler runs, so Argo has decided every other node: their Pendings are removed |

A Pending entry is put over the node in every reconcile of Argo's controller,
whatever else happened to the node, so it also keeps deadlines and ``argo stop``
from being seen. It is therefore written once for each reason, and taken back
when it has been there long enough to be copied (`Memory.fade`).

A WorkflowTaskSet as the agent reads it.

Source: Argo Workflows ``workflow/controller/taskset.go``. One object for each
workflow, of the same name; ``spec.tasks`` holds the template of every open
HTTP and plugin node by node id, ``status.nodes`` the answers. Argo takes a
finished node first out of the status, then out of the tasks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from tiphys_plugin.runtime.requests import identify, is_ours

Template = dict[str, Any]
Entry = dict[str, Any]
"""What ``status.nodes`` says of one node: phase, message, outputs."""

_WAITING = ("", "Pending", "Running")


@dataclass(frozen=True)
class TaskSet:
    """One version of a task set."""

    namespace: str
    name: str
    uid: str
    version: int
    workflow_uid: str
    """The workflow that owns it; empty if it names none."""
    tasks: dict[str, Template]
    entries: dict[str, Entry]

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name

    @cached_property
    def exiting(self) -> bool:
        """Whether the workflow's exit handler runs: every other node is decided then, whatever its task says."""
        return any(is_ours(template) and identify(template).op == "finalize" for template in self.tasks.values())


def read_task_set(found: dict[str, Any]) -> TaskSet:
    """Read what the API server holds."""
    metadata = found["metadata"]
    owners = metadata.get("ownerReferences") or []
    return TaskSet(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        version=int(metadata["resourceVersion"]),
        workflow_uid=next((owner.get("uid", "") for owner in owners if owner.get("kind") == "Workflow"), ""),
        tasks=(found.get("spec") or {}).get("tasks") or {},
        entries=(found.get("status") or {}).get("nodes") or {},
    )


def is_final(entry: Entry | None) -> bool:
    """Whether an entry decides its node."""
    return entry is not None and entry.get("phase", "") not in _WAITING


def same(one: Entry | None, other: Entry | None) -> bool:
    """Whether two entries say the same of a node, as far as people and Argo's controller see it."""
    if one is None or other is None:
        return one is other
    return all((one.get(field) or "") == (other.get(field) or "") for field in ("phase", "message"))


class Stage(StrEnum):
    """Where a node stands."""

    OPEN = "open"
    """It is being asked, or will be."""
    ANSWERED = "answered"
    OVER = "over"
    """The workflow is exiting; what is said of this node now can only do harm."""


@dataclass(eq=False)
class Node:
    """One open task. It is told from its successor under the same id by identity."""

    id: str
    template: Template
    """As it was rendered first; Argo renders it again in each reconcile."""
    seen_at: float
    stage: Stage = Stage.OPEN
    wanted: Entry | None = None
    """What the task set shall say of it; None: nothing yet."""
    shown: bool = False
    """The task set has said so."""
    faded: bool = False
    lost_at: float | None = None
    failures: int = 0
    """Calls in a row that found nobody who could answer."""
    asking: bool = False
    """A call about it is under way, or waits for a worker."""
    asked: int = 0
    """How often it was asked; what was planned before the last time is void."""

    @property
    def body_uid(self) -> str:
        """Uid of the workflow that the body was rendered for."""
        body = self.template["plugin"]["tiphys"]
        uid = body.get("uid") if isinstance(body, dict) else None
        return uid if isinstance(uid, str) else ""


class Seen(NamedTuple):
    """What a version of the task set brought."""

    ask: list[Node]
    delivered: list[Node]
    """Nodes whose final answer, given by this agent, is stored."""
    lost: list[Node]
    """Nodes whose stored answer has just gone, while their task is still there."""


@dataclass
class Memory:
    """The nodes of one task set."""

    task_set: TaskSet
    nodes: dict[str, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._version = -1

    @property
    def open(self) -> Iterator[Node]:
        return (node for node in self.nodes.values() if node.stage is Stage.OPEN)

    @property
    def foreign(self) -> list[Template]:
        """Templates of other plugins, and HTTP templates."""
        return [template for template in self.task_set.tasks.values() if not is_ours(template)]

    def observe(self, task_set: TaskSet, now: float) -> Seen:
        """Take in a version of the task set; one that is not newer than the last changes nothing."""
        seen = Seen([], [], [])
        if task_set.version <= self._version:
            return seen
        self.task_set, self._version = task_set, task_set.version
        for gone in self.nodes.keys() - task_set.tasks.keys():
            del self.nodes[gone]
        for node_id, template in task_set.tasks.items():
            if is_ours(template):
                self._observe_node(node_id, template, now, seen)
        return seen

    def answer(self, node: Node, entry: Entry) -> bool:
        """Note the core's answer; False if nobody waits for it any more."""
        if not self.expects(node):
            return False
        if is_final(entry):
            node.stage = Stage.ANSWERED
        elif same(entry, node.wanted):
            return True
        node.wanted, node.faded = entry, False
        node.shown = same(entry, self.task_set.entries.get(node.id))
        return True

    def expects(self, node: Node) -> bool:
        """Whether an answer about this node would still be heard."""
        return self.nodes.get(node.id) is node and node.stage is Stage.OPEN

    def fade(self, node: Node, entry: Entry) -> bool:
        """Take a Pending back, if it is still what the node says; False if it was not stored yet: come again."""
        if self.expects(node) and node.wanted is entry:
            node.faded = node.shown
            return node.shown
        return True

    def lost(self, node: Node) -> bool:
        """Whether an answer that was stored is still gone while its task is there.

        Argo removes the answer, then the task, then stores the workflow. If it
        dies in between, it waits for the answer again, and writes nothing that
        would tell.
        """
        return self.nodes.get(node.id) is node and node.lost_at is not None

    def reopen(self, node: Node) -> bool:
        """Ask about a node again whose answer was lost; False if it is gone or no longer lost."""
        if not self.lost(node):
            return False
        node.stage, node.wanted, node.shown, node.lost_at = Stage.OPEN, None, False, None
        return True

    def changes(self) -> dict[str, Entry | None]:
        """What has to be written into ``status.nodes`` of the version seen last; None removes an entry."""
        entries = self.task_set.entries
        wanted: dict[str, Entry | None] = dict.fromkeys(entries.keys() - self.task_set.tasks.keys())
        for node in self.nodes.values():
            entry = entries.get(node.id)
            if node.stage is Stage.OVER or node.faded:
                if entry is not None and not is_final(entry):
                    wanted[node.id] = None
            elif node.wanted is not None and not node.shown:
                wanted[node.id] = {**dict.fromkeys(entry or (), None), **node.wanted}
        return wanted

    def _observe_node(self, node_id: str, template: Template, now: float, seen: Seen) -> None:
        node = self.nodes.get(node_id)
        entry = self.task_set.entries.get(node_id)
        is_new = node is None
        if node is None:
            node = self.nodes[node_id] = Node(node_id, template, now)
        if is_final(entry):
            if node.stage is Stage.ANSWERED and not node.shown:
                seen.delivered.append(node)
            node.stage, node.wanted, node.shown, node.lost_at = Stage.ANSWERED, entry, True, None
        elif node.stage is Stage.ANSWERED and node.shown:
            self._observe_absence(node, now, seen)
        elif self.task_set.exiting and identify(template).op != "finalize":
            node.stage = Stage.OVER
        elif node.stage is Stage.ANSWERED:
            pass  # on its way
        else:
            if is_new or node.stage is Stage.OVER:
                seen.ask.append(node)
            node.stage = Stage.OPEN
            node.shown = node.shown or (node.wanted is not None and same(entry, node.wanted))

    @staticmethod
    def _observe_absence(node: Node, now: float, seen: Seen) -> None:
        if node.lost_at is None:
            node.lost_at = now
            seen.lost.append(node)
