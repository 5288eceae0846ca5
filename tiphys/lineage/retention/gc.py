"""Retention outside of training programs: for runs that have ended, or with another policy.

It applies the same rule as a training program. The policy comes from the record
of the run, and the references of a program that may still run come from claims
and manifests.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from tiphys.errors import NotFoundError
from tiphys.lineage.retention.delete import Retention, RetentionPlan
from tiphys.lineage.retention.policy import age_key
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.select import (
    StartCheckpoints,
    infer_starts_from_volume,
    iter_commits,
    restored_by_attempt,
    starts_from_claims,
)
from tiphys.lineage.validity import read_valid_manifest
from tiphys.protocol.step_spec import RetentionPolicy
from tiphys.records import CheckpointRef, task_name
from tiphys.store import Attempt, LineageLayout, Store, open_store, read_step_attempts
from tiphys.store.runs import ALL_ATTEMPTS


class RetentionAction(StrEnum):
    """Action of one pass for a checkpoint."""

    KEEP = "keep"
    MARK = "mark"
    WAIT = "wait"
    """It is marked, and its delay is not over."""
    DELETE = "delete"


class RetentionDecision(NamedTuple):
    """One checkpoint, the action for it, and the reasons."""

    checkpoint: CheckpointRef
    action: RetentionAction
    reasons: tuple[str, ...]
    """Why it is kept; empty if it is not."""
    marked_at: datetime | None
    size_bytes: int


class CollectionReport(NamedTuple):
    """The decisions of a pass for one lineage, the newest checkpoint first."""

    lineage: "RunLineage"
    decisions: tuple[RetentionDecision, ...]
    orphan_bytes: int
    """Bytes of shards that no manifest names."""

    @property
    def freed_bytes(self) -> int:
        return self.orphan_bytes + sum(
            decision.size_bytes for decision in self.decisions if decision.action is RetentionAction.DELETE
        )

    def find_due_time(self, decision: RetentionDecision, now: datetime) -> datetime | None:
        """When a checkpoint may be deleted, at the soonest; None if it is kept, or is deleted now."""
        if decision.action in (RetentionAction.KEEP, RetentionAction.DELETE) or self.lineage.keep is None:
            return None
        return (decision.marked_at or now) + timedelta(seconds=self.lineage.keep.delay_seconds)


@dataclass(frozen=True)
class RunLineage:
    """The lineage of one training step of a run, with its stores and policy."""

    run_store: Store
    store: Store
    run: str
    step: str
    lineage: str
    keep: RetentionPolicy | None
    on_volume: bool
    label: str = ""
    """Name and value of the step or item for people."""

    def preview(self) -> CollectionReport:
        """The report that `collect` would return; writes nothing."""
        sizes, retention = self._sizes(), self._retention()
        plan = retention.plan(*self._references())
        orphan_bytes = sum(info.size for info in retention.list_orphans(plan))
        decisions = _retention_decisions(plan, retention.select_due(plan.verdict), sizes)
        return CollectionReport(self, decisions, orphan_bytes)

    def collect(self) -> CollectionReport:
        """Mark expired checkpoints, and delete those whose delay is over."""
        sizes = self._sizes()
        plan, marked, deleted, orphan_bytes = self._retention().collect(*self._references())
        return CollectionReport(self, _retention_decisions(plan, deleted, sizes, marked), orphan_bytes)

    def _sizes(self) -> dict[CheckpointRef, int]:
        """Bytes of each checkpoint; costs one listing of all shards."""
        layout = LineageLayout(self.lineage)
        sizes: dict[CheckpointRef, int] = {}
        for info in self.store.list(layout.all_shards):
            if (ref := layout.parse_shard(info.key)) is not None:
                sizes[ref] = sizes.get(ref, 0) + info.size
        return sizes

    def _retention(self) -> Retention:
        return Retention(self.store, self.lineage, self.keep, recheck=lambda: self._references()[1])

    def _references(self) -> tuple[StartCheckpoints, set[CheckpointRef]]:
        """Start checkpoints of all attempts, and the references of the newest attempt, which may be running."""
        attempts = read_step_attempts(self.run_store, self.run, self.step)
        starts = self._starts(attempts)
        newest = max(starts, default=0)
        newest_commit = next((ref for ref in iter_commits(self.store, self.lineage) if ref.attempt == newest), None)
        manifest = read_valid_manifest(self.store, newest_commit) if newest_commit else None
        restored = restored_by_attempt([manifest] if manifest else ())
        return starts, {ref for ref in (starts.get(newest), restored.get(newest)) if ref is not None}

    def _starts(self, attempts: list[Attempt]) -> StartCheckpoints:
        if self.on_volume:
            return infer_starts_from_volume(self.store, self.lineage, [attempt.claim.attempt for attempt in attempts])
        return starts_from_claims(attempts)


@dataclass(frozen=True)
class UnreachableLineage:
    """A lineage whose store cannot be reached from this machine, and why."""

    run: str
    step: str
    lineage: str
    reason: str
    label: str = ""


def iter_run_lineages(
    history: RunHistory,
    alter_policy: Callable[[RetentionPolicy | None], RetentionPolicy | None],
    window: slice = ALL_ATTEMPTS,
) -> Iterator[RunLineage | UnreachableLineage]:
    """All lineages of a run. ``alter_policy`` maps the policy of each step to the policy to apply,
    and ``window`` selects attempts as in `select_attempts`: those of others have no step here.

    Raises:
        NotFoundError: the store has no such run.
    """
    store, run, pipeline, names = history.store, history.run, history.pipeline, history.names
    all_attempts = history.read_attempts(window)
    for step in names.sort(all_attempts):
        lineage, name = all_attempts[step][-1].claim.lineage, task_name(step)
        if not lineage:
            continue
        volume, spec = pipeline.checkpoint_volume_url(name), pipeline.steps.get(name)
        keep = alter_policy(spec.checkpoints.retention if spec and spec.checkpoints else None)
        try:
            checkpoint_store = open_store(volume, must_exist=True) if volume else store
        except NotFoundError as error:
            yield UnreachableLineage(run, step, lineage, str(error), names.label(step))
        else:
            yield RunLineage(store, checkpoint_store, run, step, lineage, keep, bool(volume), names.label(step))


def _retention_decisions(
    plan: RetentionPlan,
    deleted: Collection[CheckpointRef],
    sizes: Mapping[CheckpointRef, int],
    marked: Mapping[CheckpointRef, datetime] = MappingProxyType({}),
) -> tuple[RetentionDecision, ...]:
    def decide(ref: CheckpointRef) -> RetentionDecision:
        reasons, since = plan.verdict.kept.get(ref, ()), plan.marked.get(ref)
        if reasons:
            action = RetentionAction.KEEP
        elif ref in deleted:
            action = RetentionAction.DELETE
        else:
            action = RetentionAction.WAIT if since else RetentionAction.MARK
        return RetentionDecision(ref, action, reasons, since or marked.get(ref), sizes.get(ref, 0))

    return tuple(decide(ref) for ref in sorted(plan.snapshot.commits, key=age_key, reverse=True))
