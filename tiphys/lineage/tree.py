"""The lineage tree of a run: origin and status of every checkpoint, for all pictures and tables.

Claims name start checkpoints, manifests name commits, and quarantine records
name checkpoints that must not be used. This module combines them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from pydantic import Field

from tiphys.errors import IntegrityError, NotFoundError, ObjectMissingError
from tiphys.lineage.quarantine import read_quarantine_records
from tiphys.lineage.restored_starts import find_restored_starts
from tiphys.lineage.retention.policy import age_key
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.select import (
    StartCheckpoints,
    infer_starts,
    list_commits,
    order_candidates,
    restored_by_attempt,
    starts_from_claims,
)
from tiphys.lineage.validity import read_manifest
from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.records import (
    AttemptEndOutcome,
    Cause,
    CheckpointManifest,
    CheckpointRef,
    DataVersion,
    Event,
    Provenance,
    QuarantineRecord,
    Record,
    SkippedCheckpoint,
    Timestamp,
    task_name,
)
from tiphys.records.checkpoint import Metric
from tiphys.store import Attempt, Store, open_store
from tiphys.store.runs import read_concurrently


class CheckpointStatus(StrEnum):
    COMMITTED = "committed"
    QUARANTINED = "quarantined"
    """Its bytes did not match, it crashed several attempts, or a person quarantined it."""
    DAMAGED = "damaged"
    """Its manifest or its sizes are wrong; no attempt may start from it."""
    LATE = "late"
    """Committed after a newer attempt had started from another checkpoint; never chosen."""
    REMOVED = "removed"
    """Deleted by retention; known because an attempt started from it."""


class CheckpointNode(Record):
    """One checkpoint. Fields from the manifest are empty without a manifest."""

    ref: CheckpointRef
    status: CheckpointStatus
    reason: str = ""
    """Why it is quarantined or damaged."""
    parent: CheckpointRef | None = None
    """The checkpoint that the attempt had restored or committed immediately before."""
    restored: CheckpointRef | None = None
    """The checkpoint that the attempt restored at its start."""
    saved_because: str = ""
    """``due``, ``asked`` or ``sigterm``."""
    size_bytes: int = 0
    metrics: dict[str, Metric] = {}
    facts: Provenance = Provenance()
    """Its provenance."""
    committed_at: Timestamp | None = None
    quarantined_at: Timestamp | None = None


class AttemptNode(Record):
    """One attempt and its checkpoints, oldest first. Without an end, ``outcome`` is None."""

    attempt: int
    submission: int
    started_at: Timestamp
    ended_at: Timestamp | None = None
    outcome: AttemptEndOutcome | None = None
    stopped: bool = Field(default=False, exclude_if=lambda stopped: not stopped)
    """Whether a person stopped its workflow; its outcome is then fenced, and it did not fail."""
    cause: Cause | None = None
    message: str = ""
    starts_from: CheckpointRef | None = None
    skipped: tuple[SkippedCheckpoint, ...] = ()
    checkpoints: tuple[CheckpointNode, ...] = ()
    preemption: Event | None = None
    """The event about its SIGTERM: what was saved in the grace period."""
    data: tuple[DataVersion, ...] = Field(default=(), exclude_if=lambda data: not data)
    """The data that it reads and no step made."""


class StepLineage(Record):
    """The checkpoints of one training step, by attempt, first attempt first."""

    step: str
    name: str = ""
    """Name of the step or item for people, such as ``fit[2]``."""
    lineage: str
    item: str = ""
    """Value of this fan-out item for people, such as ``lr=0.1 width=64``; empty if no record holds it."""
    attempts: tuple[AttemptNode, ...]
    note: str = ""
    """Why checkpoints are missing, if their store cannot be reached from this machine."""


class LineageTree(Record):
    """All lineages of a run, by step id."""

    run: str
    steps: tuple[StepLineage, ...]
    damaged: tuple[str, ...] = Field(default=(), exclude_if=lambda damaged: not damaged)
    """Records that cannot be read, each with its key, what is damaged, and what to do."""


def read_lineage_tree(history: RunHistory, most: int | None = None) -> LineageTree:
    """Read the lineages of a run. Costs a read for each attempt, checkpoint and batch of events.

    With ``most``, no more than that many attempts and checkpoints are read: the newest of each step.

    Raises:
        NotFoundError: the store has no such run.
    """
    tree = build_lineage_tree(history, history.read_attempts(slice(most)), history.events, most)
    return tree.model_copy(update={"damaged": history.damaged})


def build_lineage_tree(
    history: RunHistory,
    attempts: Mapping[str, Sequence[Attempt]],
    events: Sequence[Event] = (),
    most: int | None = None,
) -> LineageTree:
    """Build the lineages of the steps of ``attempts``.

    Without ``events`` nothing is known of preemptions and of what attempts really restored. ``most`` limits the number
    of checkpoints.
    """
    preemptions = {(event.step, event.attempt): event for event in events if event.name == "checkpoint.preempted"}
    store, pipeline, names = history.store, history.pipeline, history.names
    training = {step: attempts[step] for step in names.sort(attempts) if attempts[step][-1].claim.lineage}
    # With several lineages each reads sequentially, otherwise a sweep would send hundreds of requests at once.
    read = read_concurrently if len(training) < 2 else _read_in_turn
    share = None if most is None else max(1, most // max(1, len(training)))
    lineages = read_concurrently(
        lambda step_attempts: _build_step_lineage(store, pipeline, *step_attempts, preemptions, events, read, share),
        list(training.items()),
    )
    named = (
        lineage.model_copy(update={"name": names.name(lineage.step), "item": names.value(lineage.step)})
        for lineage in lineages
    )
    return LineageTree(run=history.run, steps=tuple(named))


def _build_step_lineage(
    store: Store,
    pipeline: CompiledPipeline,
    step: str,
    attempts: Sequence[Attempt],
    preemption_events: Mapping[tuple[str, int | None], Event],
    events: Sequence[Event],
    read_manifests: "_ManifestReader",
    most: int | None,
) -> StepLineage:
    lineage = attempts[-1].claim.lineage
    volume, note = pipeline.checkpoint_volume_url(task_name(step)), ""
    try:
        checkpoint_store = open_store(volume, must_exist=True) if volume else store
        records = _read_lineage_records(checkpoint_store, lineage, read_manifests, most)
    except NotFoundError as error:
        records, note = _LineageRecords([], {}, {}), f"the checkpoints cannot be read from this machine: {error}"
    if is_cut := most is not None and len(records.commits) >= most:
        note = f"checkpoints older than the newest {most:,} are not shown"
    starts = _infer_starts(lineage, attempts, records) if volume else starts_from_claims(attempts)
    restored = starts if volume else find_restored_starts(attempts, events)
    nodes: dict[int, list[CheckpointNode]] = {}
    for node in build_checkpoint_nodes(lineage, attempts, starts, records):
        if is_cut and age_key(node.ref) < age_key(records.commits[-1]):
            continue  # its records were not read
        nodes.setdefault(node.ref.attempt, []).append(node)
    return StepLineage(
        step=step,
        lineage=lineage,
        attempts=tuple(
            _build_attempt_node(attempt, restored[number], nodes.get(number, ()), preemption_events.get((step, number)))
            for attempt in attempts
            for number in [attempt.claim.attempt]
        ),
        note=note,
    )


def _infer_starts(lineage: str, attempts: Sequence[Attempt], records: "_LineageRecords") -> StartCheckpoints:
    restored = restored_by_attempt(
        manifest for manifest in records.manifests.values() if isinstance(manifest, CheckpointManifest)
    )
    return infer_starts(records.commits, lineage, [attempt.claim.attempt for attempt in attempts], restored)


_ManifestReader = Callable[
    [Callable[[CheckpointRef], CheckpointManifest | str], Sequence[CheckpointRef]], list[CheckpointManifest | str]
]
"""Reads the manifest of each checkpoint; a string is the reason why a manifest cannot be read."""


class _LineageRecords(NamedTuple):
    commits: list[CheckpointRef]
    quarantined: dict[CheckpointRef, QuarantineRecord | str]
    manifests: dict[CheckpointRef, CheckpointManifest | str]
    """In both, a string is the reason why a record cannot be read."""


def _read_in_turn(
    read: Callable[[CheckpointRef], CheckpointManifest | str], commits: Sequence[CheckpointRef]
) -> list[CheckpointManifest | str]:
    return [read(ref) for ref in commits]


def _read_lineage_records(
    store: Store, lineage: str, read_manifests: "_ManifestReader", most: int | None
) -> _LineageRecords:
    commits = list_commits(store, lineage, most)

    def read(ref: CheckpointRef) -> CheckpointManifest | str:
        try:
            return read_manifest(store, ref)
        except (IntegrityError, ObjectMissingError) as error:
            return str(error)

    manifests = dict(zip(commits, read_manifests(read, commits), strict=True))
    return _LineageRecords(commits, read_quarantine_records(store, lineage, most), manifests)


def build_checkpoint_nodes(
    lineage: str, attempts: Iterable[Attempt], starts: StartCheckpoints, records: _LineageRecords
) -> list[CheckpointNode]:
    """Status of every checkpoint that any record mentions, oldest first. Pure."""
    commits, quarantined, manifests = records
    usable = set(order_candidates(commits, lineage, starts))
    skipped = {skip.checkpoint: skip.reason for attempt in attempts for skip in attempt.claim.skipped}
    mentioned = {*commits, *quarantined, *skipped, *(ref for ref in starts.values() if ref)}
    own = {ref for ref in mentioned if ref.lineage == lineage}  # a fork starts from a checkpoint of another lineage

    def build_node(ref: CheckpointRef) -> CheckpointNode:
        manifest = manifests.get(ref)
        if (record := quarantined.get(ref)) is not None:
            reason = record if isinstance(record, str) else f"{record.reason} (by {record.by})"
            status = CheckpointStatus.QUARANTINED
        elif isinstance(manifest, str) or ref in skipped:
            status, reason = CheckpointStatus.DAMAGED, manifest if isinstance(manifest, str) else skipped[ref]
        elif manifest is None:
            status, reason = CheckpointStatus.REMOVED, ""
        else:
            status, reason = (CheckpointStatus.COMMITTED if ref in usable else CheckpointStatus.LATE), ""
        written_at = record.written_at if isinstance(record, QuarantineRecord) else None
        node = CheckpointNode(ref=ref, status=status, reason=reason, quarantined_at=written_at)
        return _with_manifest(node, manifest) if isinstance(manifest, CheckpointManifest) else node

    return [build_node(ref) for ref in sorted(own, key=lambda ref: (ref.attempt, ref.global_step))]


def _with_manifest(node: CheckpointNode, manifest: CheckpointManifest) -> CheckpointNode:
    return node.model_copy(
        update={
            "parent": manifest.parent,
            "restored": manifest.restored,
            "saved_because": manifest.reason,
            "size_bytes": manifest.size_bytes,
            "metrics": manifest.metrics,
            "facts": manifest.facts,
            "committed_at": manifest.written_at,
        }
    )


def _build_attempt_node(
    attempt: Attempt,
    starts_from: CheckpointRef | None,
    checkpoints: Iterable[CheckpointNode],
    preemption_event: Event | None,
) -> AttemptNode:
    claim, end = attempt
    return AttemptNode(
        attempt=claim.attempt,
        submission=claim.submission,
        started_at=claim.written_at,
        ended_at=end.ended_at if end else None,
        outcome=end.outcome if end else None,
        stopped=end is not None and end.stopped,
        cause=end.cause if end else None,
        message=end.message if end else "",
        starts_from=starts_from,
        skipped=claim.skipped,
        checkpoints=tuple(checkpoints),
        preemption=preemption_event,
        data=claim.data,
    )
