"""Where every checkpoint of a run came from, and what became of it: what is drawn and listed for people.

Attempts say what they started from, manifests what was committed, quarantine
what must not be used. None of them says it all, so they are brought together
here, once, for every picture and table.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from tiphys.errors import IntegrityError, NotFoundError, ObjectMissingError
from tiphys.lineage.quarantine import quarantine_records
from tiphys.lineage.select import StartsFrom, chain, commits_of, inferred_starts, restored_by, starts_of
from tiphys.lineage.validity import read_manifest
from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.protocol.fan_out import given_by, in_words, is_fan_out, written_items
from tiphys.records import (
    Cause,
    CheckpointManifest,
    CheckpointRef,
    Event,
    Facts,
    Outcome,
    QuarantineRecord,
    Record,
    RunRecord,
    Skipped,
    Timestamp,
)
from tiphys.store import Attempt, Store, all_attempts, open_store, read_current_run, read_events
from tiphys.store.runs import concurrently


class Status(StrEnum):
    """What became of a checkpoint."""

    COMMITTED = "committed"
    QUARANTINED = "quarantined"
    """Its bytes did not match when they were read, or a person barred it."""
    DAMAGED = "damaged"
    """Its manifest or its sizes are wrong; no attempt may start from it."""
    LATE = "late"
    """Committed after another attempt had gone on from elsewhere; never chosen."""
    REMOVED = "removed"
    """Gone by retention; known because something started from it."""


class CheckpointNode(Record):
    """One checkpoint. What only the manifest knows is empty where there is none."""

    ref: CheckpointRef
    status: Status
    reason: str = ""
    """Why it is quarantined or damaged."""
    parent: CheckpointRef | None = None
    """The checkpoint that the attempt had restored or committed before."""
    restored: CheckpointRef | None = None
    """What the attempt had restored when it began."""
    saved_because: str = ""
    """``due``, ``asked`` or ``sigterm``."""
    size_bytes: int = 0
    metrics: dict[str, float] = {}
    facts: Facts = Facts()
    """What it was made with."""
    committed_at: Timestamp | None = None
    quarantined_at: Timestamp | None = None


class AttemptNode(Record):
    """One attempt and its checkpoints, oldest first. Without an end, ``outcome`` is None."""

    attempt: int
    submission: int
    started_at: Timestamp
    ended_at: Timestamp | None = None
    outcome: Outcome | None = None
    cause: Cause | None = None
    message: str = ""
    starts_from: CheckpointRef | None = None
    skipped: tuple[Skipped, ...] = ()
    checkpoints: tuple[CheckpointNode, ...] = ()
    preemption: Event | None = None
    """The report card of a SIGTERM: what became of the grace period."""


class StepLineage(Record):
    """The checkpoints of one training step, by attempt, first attempt first."""

    step: str
    lineage: str
    item: str = ""
    """What this item of a fan-out was given, such as ``lr=0.1 width=64``; empty where only the run could tell."""
    attempts: tuple[AttemptNode, ...]
    note: str = ""
    """Why checkpoints are missing here, when their store cannot be reached from where one looks."""


class LineageTree(Record):
    """All lineages of a run, by step id."""

    run: str
    steps: tuple[StepLineage, ...]


def tree(store: Store, run: str) -> LineageTree:
    """Read the lineages of ``run``. Costs a read for each attempt, checkpoint and batch of events.

    Raises:
        NotFoundError: the store has no such run.
    """
    return tree_of(store, read_current_run(store, run), all_attempts(store, run), read_events(store, run))


def tree_of(
    store: Store, record: RunRecord, attempts: Mapping[str, Sequence[Attempt]], events: Iterable[Event]
) -> LineageTree:
    """Like `tree`, for whoever has read the run, its attempts and its events already."""
    cards = {(event.step, event.attempt): event for event in events if event.name == "checkpoint.preempted"}
    pipeline = CompiledPipeline.from_manifest(record.workflow)
    training = {step: tries for step, tries in sorted(attempts.items()) if tries[-1].claim.lineage}
    items = _items(pipeline)
    # Each of them reads in turn where there are several, or a sweep would ask storage for hundreds of things at once.
    read = concurrently if len(training) < 2 else _in_turn
    lineages = concurrently(lambda one: _lineage(store, pipeline, *one, cards, read), list(training.items()))
    named = (one.model_copy(update={"item": items.get(one.step, "")}) for one in lineages)
    return LineageTree(run=record.run, steps=tuple(named))


def _items(pipeline: CompiledPipeline) -> dict[str, str]:
    """What items are, by step id, as far as the Workflow says so."""
    written = (written_items(task) for task in pipeline.tasks() if is_fan_out(task))
    return {item.step: in_words(given_by(item.text)) for items in written for item in items or ()}


def _lineage(
    store: Store,
    pipeline: CompiledPipeline,
    step: str,
    attempts: Sequence[Attempt],
    cards: Mapping[tuple[str, int | None], Event],
    read: "_Reader",
) -> StepLineage:
    lineage = attempts[-1].claim.lineage
    volume, note = pipeline.volume(step.partition(".")[0]), ""
    try:
        found = _read(open_store(volume, must_exist=True) if volume else store, lineage, read)
    except NotFoundError as error:
        found, note = _Found([], {}, {}), f"the checkpoints cannot be seen from here: {error}"
    starts = _starts(lineage, attempts, found) if volume else starts_of(attempts)
    nodes: dict[int, list[CheckpointNode]] = {}
    for node in checkpoint_nodes(lineage, attempts, starts, found):
        nodes.setdefault(node.ref.attempt, []).append(node)
    return StepLineage(
        step=step,
        lineage=lineage,
        attempts=tuple(
            _attempt(one, starts[number], nodes.get(number, ()), cards.get((step, number)))
            for one in attempts
            for number in [one.claim.attempt]
        ),
        note=note,
    )


def _starts(lineage: str, attempts: Sequence[Attempt], found: "_Found") -> StartsFrom:
    restored = restored_by(
        manifest for manifest in found.manifests.values() if isinstance(manifest, CheckpointManifest)
    )
    return inferred_starts(found.commits, lineage, [attempt.claim.attempt for attempt in attempts], restored)


_Reader = Callable[
    [Callable[[CheckpointRef], CheckpointManifest | str], Sequence[CheckpointRef]], list[CheckpointManifest | str]
]
"""Reads the manifest of each checkpoint; a string says why there is none that can be read."""


class _Found(NamedTuple):
    commits: list[CheckpointRef]
    barred: dict[CheckpointRef, QuarantineRecord]
    manifests: dict[CheckpointRef, CheckpointManifest | str]
    """A string says why there is none that can be read."""


def _in_turn(
    read: Callable[[CheckpointRef], CheckpointManifest | str], commits: Sequence[CheckpointRef]
) -> list[CheckpointManifest | str]:
    return [read(ref) for ref in commits]


def _read(store: Store, lineage: str, gather: "_Reader") -> _Found:
    commits = commits_of(store, lineage)

    def read(ref: CheckpointRef) -> CheckpointManifest | str:
        try:
            return read_manifest(store, ref)
        except (IntegrityError, ObjectMissingError) as error:
            return str(error)

    manifests = dict(zip(commits, gather(read, commits), strict=True))
    return _Found(commits, quarantine_records(store, lineage), manifests)


def checkpoint_nodes(
    lineage: str, attempts: Iterable[Attempt], starts: StartsFrom, found: _Found
) -> list[CheckpointNode]:
    """Judge every checkpoint that anything mentions, oldest first. Pure."""
    commits, barred, manifests = found
    usable = set(chain(commits, lineage, starts))
    skipped = {skip.checkpoint: skip.reason for attempt in attempts for skip in attempt.claim.skipped}
    mentioned = {*commits, *barred, *skipped, *(ref for ref in starts.values() if ref)}
    own = {ref for ref in mentioned if ref.lineage == lineage}  # a fork starts from one of another run

    def node(ref: CheckpointRef) -> CheckpointNode:
        manifest = manifests.get(ref)
        if (record := barred.get(ref)) is not None:
            status, reason = Status.QUARANTINED, f"{record.reason} (by {record.by})"
        elif isinstance(manifest, str) or ref in skipped:
            status, reason = Status.DAMAGED, manifest if isinstance(manifest, str) else skipped[ref]
        elif manifest is None:
            status, reason = Status.REMOVED, ""
        else:
            status, reason = (Status.COMMITTED if ref in usable else Status.LATE), ""
        seen = CheckpointNode(
            ref=ref, status=status, reason=reason, quarantined_at=record.written_at if record else None
        )
        return _with_manifest(seen, manifest) if isinstance(manifest, CheckpointManifest) else seen

    return [node(ref) for ref in sorted(own, key=lambda ref: (ref.attempt, ref.global_step))]


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


def _attempt(
    attempt: Attempt, starts_from: CheckpointRef | None, own: Iterable[CheckpointNode], card: Event | None
) -> AttemptNode:
    claim, end = attempt
    return AttemptNode(
        attempt=claim.attempt,
        submission=claim.submission,
        started_at=claim.written_at,
        ended_at=end.written_at if end else None,
        outcome=end.outcome if end else None,
        cause=end.cause if end else None,
        message=end.message if end else "",
        starts_from=starts_from,
        skipped=claim.skipped,
        checkpoints=tuple(own),
        preemption=card,
    )
