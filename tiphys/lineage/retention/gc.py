"""Retention from outside of the training programs: of runs that have ended, or with another policy than theirs.

It goes by the same rule as a training program, reads the policy from the run's
own record, and finds out from claims and manifests what a program that may
still be running refers to.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from tiphys.errors import NotFoundError
from tiphys.lineage.retention.delete import Outlook, Retention
from tiphys.lineage.retention.policy import age
from tiphys.lineage.select import StartsFrom, commits_of, restored_by, starts_of, starts_on_volume
from tiphys.lineage.validity import readable
from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.protocol.step_spec import Keep
from tiphys.records import CheckpointRef
from tiphys.store import Attempt, LineageLayout, Store, all_attempts, current_workflow, open_store, step_attempts


class Action(StrEnum):
    """What becomes of a checkpoint in one pass."""

    KEEP = "keep"
    MARK = "mark"
    WAIT = "wait"
    """It was marked before, and its delay is not over."""
    DELETE = "delete"


class Fate(NamedTuple):
    """One checkpoint, what becomes of it and why."""

    checkpoint: CheckpointRef
    action: Action
    reasons: tuple[str, ...]
    """Why it is kept; empty if it is not."""
    marked_at: datetime | None
    size_bytes: int


class Account(NamedTuple):
    """What a pass does with one lineage, the newest checkpoint first."""

    lineage: "RunLineage"
    fates: tuple[Fate, ...]
    swept_bytes: int
    """Bytes of shards that no manifest names."""

    @property
    def freed_bytes(self) -> int:
        return self.swept_bytes + sum(fate.size_bytes for fate in self.fates if fate.action is Action.DELETE)


@dataclass(frozen=True)
class RunLineage:
    """The checkpoints of one training step of a run, and where they lie."""

    run_store: Store
    store: Store
    run: str
    step: str
    lineage: str
    keep: Keep | None
    on_volume: bool

    def foresee(self) -> Account:
        """What `collect` would do; writes nothing."""
        sizes, retention = self._sizes(), self._retention()
        outlook = retention.look(*self._references())
        swept = sum(info.size for info in retention.orphans(outlook))
        return Account(self, _fates(outlook, retention.due(outlook.verdict), sizes), swept)

    def collect(self) -> Account:
        """Mark what has expired, and delete what was marked long enough ago."""
        sizes = self._sizes()
        outlook, marked, deleted, swept = self._retention().collect(*self._references())
        return Account(self, _fates(outlook, deleted, sizes, marked), swept)

    def _sizes(self) -> dict[CheckpointRef, int]:
        """Bytes of each checkpoint; costs one listing of all shards."""
        layout = LineageLayout(self.lineage)
        found: dict[CheckpointRef, int] = {}
        for info in self.store.list(layout.all_shards):
            if (ref := layout.parse_shard(info.key)) is not None:
                found[ref] = found.get(ref, 0) + info.size
        return found

    def _retention(self) -> Retention:
        return Retention(self.store, self.lineage, self.keep, recheck=lambda: self._references()[1])

    def _references(self) -> tuple[StartsFrom, set[CheckpointRef]]:
        """What each attempt started from; and what the newest one refers to, which may be running."""
        attempts = step_attempts(self.run_store, self.run, self.step)
        starts = self._starts(attempts)
        live = max(starts, default=0)
        newest = next((ref for ref in commits_of(self.store, self.lineage) if ref.attempt == live), None)
        manifest = readable(self.store, newest) if newest else None
        restored = restored_by([manifest] if manifest else ())
        return starts, {ref for ref in (starts.get(live), restored.get(live)) if ref is not None}

    def _starts(self, attempts: list[Attempt]) -> StartsFrom:
        if self.on_volume:
            return starts_on_volume(self.store, self.lineage, [attempt.claim.attempt for attempt in attempts])
        return starts_of(attempts)


@dataclass(frozen=True)
class OutOfSight:
    """A lineage whose store cannot be reached from here, and why."""

    run: str
    step: str
    lineage: str
    reason: str


def run_lineages(
    store: Store, run: str, change: Callable[[Keep | None], Keep | None]
) -> Iterator[RunLineage | OutOfSight]:
    """Every lineage of ``run``, with the policy of its step as ``change`` alters it.

    Raises:
        NotFoundError: the store has no such run.
    """
    pipeline = CompiledPipeline.from_manifest(current_workflow(store, run))
    for step, attempts in sorted(all_attempts(store, run).items()):
        lineage, name = attempts[-1].claim.lineage, step.partition(".")[0]
        if not lineage:
            continue
        volume, spec = pipeline.volume(name), pipeline.steps.get(name)
        keep = change(spec.checkpoints.keep if spec and spec.checkpoints else None)
        try:
            place = open_store(volume, must_exist=True) if volume else store
        except NotFoundError as error:
            yield OutOfSight(run, step, lineage, str(error))
        else:
            yield RunLineage(store, place, run, step, lineage, keep, on_volume=bool(volume))


def _fates(
    outlook: Outlook,
    deleted: Collection[CheckpointRef],
    sizes: Mapping[CheckpointRef, int],
    marked: Mapping[CheckpointRef, datetime] = MappingProxyType({}),
) -> tuple[Fate, ...]:
    def fate(ref: CheckpointRef) -> Fate:
        reasons, since = outlook.verdict.kept.get(ref, ()), outlook.marked.get(ref)
        if reasons:
            action = Action.KEEP
        elif ref in deleted:
            action = Action.DELETE
        else:
            action = Action.WAIT if since else Action.MARK
        return Fate(ref, action, reasons, since or marked.get(ref), sizes.get(ref, 0))

    return tuple(fate(ref) for ref in sorted(outlook.seen.commits, key=age, reverse=True))
