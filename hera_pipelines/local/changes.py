"""What the local engine tells whoever watches it."""

from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

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
