"""Reads which checkpoints of a run stay and why, and which retention takes next.

It is the answer of ``tiphys gc --dry-run``, by the same functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, islice
from typing import NamedTuple

from tiphys.lineage.retention.gc import (
    CollectionReport,
    RetentionAction,
    RetentionDecision,
    RunLineage,
    UnreachableLineage,
    iter_run_lineages,
)
from tiphys.lineage.run_history import RunHistory
from tiphys.store import LineageLayout, RunLayout, Store

MAX_CHECKPOINTS = 200
"""Most checkpoints of a step on the page."""
MAX_STEPS = 50
"""Most steps on a page."""
MAX_RECORDS = 1000
"""Most records of attempts and objects of checkpoints that are read for a page."""
_FIRST = (RetentionAction.DELETE, RetentionAction.WAIT, RetentionAction.MARK)


class CheckpointRow(NamedTuple):
    """What retention does with a checkpoint."""

    decision: RetentionDecision
    due_at: datetime | None
    """When it may be deleted; None if it stays."""

    @property
    def stays(self) -> bool:
        return self.decision.action is RetentionAction.KEEP


@dataclass(frozen=True)
class StepCheckpoints:
    """The checkpoints of one training step or item."""

    name: str
    rows: tuple[CheckpointRow, ...]
    """Those that go next, the oldest first; then those that stay, the newest first."""
    total: int
    going: int
    going_bytes: int
    problem: str = ""
    """Why they cannot be read from here; empty if they can."""


@dataclass(frozen=True)
class CheckpointsView:
    run: str
    steps: tuple[StepCheckpoints, ...]

    @property
    def is_cut(self) -> bool:
        """Whether there may be more steps."""
        return len(self.steps) >= MAX_STEPS


def read_checkpoints_view(store: Store, run: str, now: datetime) -> CheckpointsView:
    """Read the checkpoints of a run.

    Raises:
        NotFoundError: there is no such run.
        IntegrityError: a record is damaged.
        StoreError: the store does not answer.
    """
    history = RunHistory(store, run)
    names, left, steps = history.names, MAX_RECORDS, list[StepCheckpoints]()
    for lineage in iter_run_lineages(history, lambda policy: policy, slice(MAX_STEPS)):
        name, problem = names.name(lineage.step), lineage.reason if isinstance(lineage, UnreachableLineage) else ""
        if isinstance(lineage, RunLineage):
            left -= _count_records(lineage, left + 1)
            problem = f"the run has too many records for a page; `tiphys gc {run} --dry-run` reads all"
            if left >= 0:
                steps.append(_describe_lineage(name, lineage.preview(), now))
                continue
        steps.append(StepCheckpoints(name, (), 0, 0, 0, problem))
    return CheckpointsView(run, tuple(steps))


def _count_records(lineage: RunLineage, most: int) -> int:
    """Objects that a preview of a lineage reads or lists, up to ``most``."""
    attempts = lineage.run_store.list(RunLayout(lineage.run).step_attempts(lineage.step))
    objects = lineage.store.list(LineageLayout(lineage.lineage).prefix)
    return sum(1 for _ in islice(chain(attempts, objects), max(0, most)))


def _describe_lineage(name: str, report: CollectionReport, now: datetime) -> StepCheckpoints:
    rows = [
        CheckpointRow(decision, report.find_due_time(decision, now)) for decision in _order_decisions(report.decisions)
    ]
    going = [row for row in rows if not row.stays]
    return StepCheckpoints(
        name, tuple(rows[:MAX_CHECKPOINTS]), len(rows), len(going), sum(row.decision.size_bytes for row in going)
    )


def _order_decisions(decisions: Sequence[RetentionDecision]) -> list[RetentionDecision]:
    going = [decision for action in _FIRST for decision in reversed(decisions) if decision.action is action]
    return [*going, *(decision for decision in decisions if decision.action is RetentionAction.KEEP)]
