"""A WorkflowTaskSet as the agent reads it.

Source: Argo Workflows ``workflow/controller/taskset.go``. One object for each
workflow, of the same name; ``spec.tasks`` holds the template of every open
HTTP and plugin node by node id, ``status.nodes`` the answers. Argo takes a
finished node first out of the status, then out of the tasks.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tiphys_plugin.requests import identify, is_ours

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
