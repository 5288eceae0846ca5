"""What a run looks like to whoever watches it: one row per task of the pipeline.

The engine reports every node; a person thinks in tasks. This folds the one into
the other, and is the same for the live view and for plain lines.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from hera_pipelines.local.changes import WORKFLOW, NodeChange, NodePhase
from tiphys.protocol.operations import retry_of


@dataclass
class TaskRow:
    """The present state of one task. ``attempt`` counts within this submission, from 1."""

    task: str
    phase: NodePhase | None = None
    """None before the engine has come to it."""
    attempt: int = 1
    message: str = ""
    saved_step: int | None = None
    """Global step of the newest committed checkpoint."""
    items: dict[str, NodePhase] = field(default_factory=dict)
    """Phase of each item of a fan-out, by its display name such as ``sweep(0:lr:0.1)``."""
    told: dict[str, str] = field(default_factory=dict)
    """The last message of the task and of each item."""
    log_tail: tuple[str, ...] = ()
    """What the container that failed last had written."""
    started_at: datetime | None = None
    ended_at: datetime | None = None

    def seconds(self, now: datetime) -> float:
        """How long the task has run, or did run."""
        return ((self.ended_at or now) - self.started_at).total_seconds() if self.started_at else 0.0

    @property
    def running(self) -> bool:
        return self.phase is not None and not self.phase.finished

    @property
    def failed(self) -> bool:
        return self.phase in (NodePhase.FAILED, NodePhase.ERROR)

    @property
    def items_finished(self) -> int:
        return sum(phase.finished for phase in self.items.values())


class Board:
    """All rows, in the order of the pipeline."""

    def __init__(self, tasks: Iterable[str]) -> None:
        self.rows = {task: TaskRow(task) for task in tasks}
        self.notice = ""
        """What the engine says about the whole run, such as that it is stopping."""

    def apply(self, change: NodeChange) -> list[str]:
        """Take one change in; the lines that tell it, none if it says nothing new to a person."""
        if not change.task:
            return self._hear(change)
        row = self.rows.setdefault(change.task, TaskRow(change.task))
        row.log_tail = change.log_tail or row.log_tail
        if retry_of(change.node) + 1 > row.attempt:
            row.attempt, row.message = retry_of(change.node) + 1, ""
            row.told.clear()
        lines = []
        speaker, message = _speaker(change), _message(change)
        if message and message != row.told.get(speaker):
            row.message = row.told[speaker] = message
            lines.append(f"{speaker}: {message}")
        place = _within_workflow(change)
        if place == change.task and change.phase != row.phase:
            _enter(row, change)
            lines.append(f"{row.task}: {change.phase}")
        elif place == speaker:
            row.items[place] = change.phase
        return lines

    def _hear(self, change: NodeChange) -> list[str]:
        if change.kind != WORKFLOW:
            return []
        self.notice = change.message
        return [change.message]

    def saved(self, task: str, global_step: int) -> list[str]:
        """Take in that ``task`` has committed a checkpoint; the line that tells it, if it is news."""
        row = self.rows[task]
        if row.saved_step == global_step:
            return []
        row.saved_step = global_step
        return [f"{task}: step {global_step} is saved"]

    def failures(self) -> list[str]:
        """One sentence per task that failed."""
        return [f"{row.task}: {row.message or row.phase}" for row in self.rows.values() if row.failed]


def _message(change: NodeChange) -> str:
    """What the plugin answers, how a pod ended, and how long a retry waits.

    Composite nodes, and a retry that is over, only repeat that a child failed.
    """
    waits = change.kind == "Retry" and not change.phase.finished
    return " ".join(change.message.split()) if waits or change.kind in ("Plugin", "Pod") else ""


def _within_workflow(change: NodeChange) -> str:
    """The node's name from its task on: ``sweep(0:lr:0.1)[0].admit``."""
    return change.node[change.node.find(f".{change.task}") + 1 :]


def _speaker(change: NodeChange) -> str:
    """The task, or the item of its fan-out, that the node belongs to."""
    item = re.match(rf"{re.escape(change.task)}\(.*?\)(?=\[|$)", _within_workflow(change))
    return item[0] if item else change.task


def _enter(row: TaskRow, change: NodeChange) -> None:
    row.phase = change.phase
    row.started_at = row.started_at or change.at
    row.ended_at = change.at if change.phase.finished else None
