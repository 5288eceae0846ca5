"""From the lineage tree that storage gives to what is drawn of it.

What there is to draw: one lane per attempt, one dot per checkpoint.

Drawing reads this and nothing of storage, so that pictures are tested without
records; `hera_pipelines.draw.lineage_graph` makes it from them.

What a checkpoint was made with, in a few words: where it stands, and what is new since the one before it.

A commit, an image or a version on every line would hide the one line on which it
changes, and that is the one that explains a curve which bends there.

Long lineages, shortened: what a person would ask about stays, the rest is counted.

Kept are the first and the last checkpoint of every attempt, those an attempt
started from with the one before them, and those that are not simply committed.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from tiphys.lineage import AttemptNode, CheckpointNode, LineageTree, Status, StepLineage
from tiphys.records import CheckpointRef, Facts


class Ending(StrEnum):
    """How an attempt ended."""

    DONE = "done"
    FAILED = "failed"
    FENCED = "fenced"
    OPEN = "open"
    """No end is recorded: it runs, or whoever ran it is gone."""


class Place(NamedTuple):
    """Names a checkpoint within its lineage."""

    attempt: int
    global_step: int


@dataclass(frozen=True)
class Dot:
    """One checkpoint. ``facts`` are short lines for whoever looks closer."""

    place: Place
    status: Status = Status.COMMITTED
    metrics: str = ""
    facts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lane:
    """One attempt. ``origin`` is the checkpoint of this lineage that it started from; None means from none."""

    attempt: int
    submission: int
    origin: Place | None
    ending: Ending
    message: str
    dots: tuple[Dot, ...]
    report: str = ""
    """What became of its grace period, if it was told to stop."""
    fork: str = ""
    """The checkpoint of another run that it started from, in words; empty for none."""

    @property
    def start(self) -> str:
        """What it started from, in words."""
        if self.origin is not None:
            return f"from step {self.origin.global_step} of attempt {self.origin.attempt}"
        return f"from {self.fork}" if self.fork else "from scratch"


@dataclass(frozen=True)
class Lineage:
    """The checkpoints of one training step of a run."""

    run: str
    step: str
    lanes: tuple[Lane, ...]
    note: str = ""
    """Why checkpoints may be missing."""
    item: str = ""
    """What this item of a fan-out was given."""

    @property
    def title(self) -> str:
        """The step, and for an item what people know it by."""
        return f"{self.step}  {self.item}" if self.item else self.step


def in_short(facts: Facts, before: Facts | None) -> tuple[str, ...]:
    """Short lines about ``facts``; ``before`` are those of the parent, None if nobody knows them. Pure."""
    return (*_standing(facts), *(_drift(before, facts) if before is not None else ()))


def _standing(facts: Facts) -> Iterator[str]:
    if facts.epoch is not None:
        yield f"epoch {facts.epoch}"
    if facts.world_size > 1:
        yield f"{facts.world_size} ranks"


def _drift(before: Facts, now: Facts) -> Iterator[str]:
    if before.world_size != now.world_size:
        yield f"before: {before.world_size} rank{'s' if before.world_size > 1 else ''}"
    for what, old, new in (
        ("parameters", before.parameters, now.parameters),
        ("data", before.dataset, now.dataset),
    ):
        if old and new and old != new:
            yield f"other {what}"
    if before.git_commit and now.git_commit and before.git_commit != now.git_commit:
        yield f"code {before.git_commit[:7]} → {now.git_commit[:7]}"
    if before.image and now.image and before.image != now.image:
        yield f"image {before.image} → {now.image}"
    for package, version in now.versions.items():
        if (known := before.versions.get(package)) not in (None, version):
            yield f"{package} {known} → {version}"


def lineages_of(tree: LineageTree) -> list[Lineage]:
    """One `Lineage` per training step of the run."""
    return [
        Lineage(
            tree.run,
            step.step,
            tuple(_lane(attempt, _facts(step), step.lineage) for attempt in step.attempts),
            step.note,
            step.item,
        )
        for step in tree.steps
    ]


def _facts(step: StepLineage) -> Mapping[CheckpointRef, Facts]:
    return {node.ref: node.facts for attempt in step.attempts for node in attempt.checkpoints if node.committed_at}


def _lane(attempt: AttemptNode, facts: Mapping[CheckpointRef, Facts], lineage: str) -> Lane:
    origin = _origin(attempt)
    own = origin is not None and origin.lineage == lineage
    return Lane(
        attempt=attempt.attempt,
        submission=attempt.submission,
        origin=Place(origin.attempt, origin.global_step) if origin and own else None,
        fork=f"step {origin.global_step} of attempt {origin.attempt} of {origin.lineage}" if origin and not own else "",
        ending=Ending(attempt.outcome.value) if attempt.outcome else Ending.OPEN,
        message=_message(attempt),
        dots=tuple(_dot(node, facts) for node in attempt.checkpoints),
        report=attempt.preemption.message if attempt.preemption else "",
    )


def _origin(attempt: AttemptNode) -> CheckpointRef | None:
    """What the attempt really went on from.

    Admission proposes a checkpoint by its sizes; the trainer reads the bytes
    and may have to take an older one. Each of its commits names that one; the
    first may be gone by retention.
    """
    restored = (node.restored for node in attempt.checkpoints if node.committed_at)
    return next(restored, attempt.starts_from)


def _message(attempt: AttemptNode) -> str:
    cause = attempt.cause.value.replace("_", " ") if attempt.cause else ""
    return ": ".join(part for part in (cause, attempt.message) if part)


def _dot(node: CheckpointNode, known: Mapping[CheckpointRef, Facts]) -> Dot:
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in node.metrics.items())
    size = size_text(node.size_bytes) if node.size_bytes else ""
    why = f"saved after {node.saved_because}" if node.saved_because in ("asked", "sigterm") else ""
    made_with = in_short(node.facts, known.get(node.parent) if node.parent else None)
    facts = tuple(fact for fact in (size, metrics, *made_with, why, node.reason) if fact)
    return Dot(Place(node.ref.attempt, node.ref.global_step), node.status, metrics, facts)


def size_text(size_bytes: int) -> str:
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"


@dataclass(frozen=True)
class Gap:
    """Checkpoints of one lane that are not shown one by one."""

    attempt: int
    first: int
    last: int
    count: int


Shown = Dot | Gap


def collapse(lineage: Lineage, limit: int) -> list[tuple[Lane, list[Shown]]]:
    """Each lane with what is shown of it; nothing is left out while at most ``limit`` steps are distinct."""
    lanes = [_with_missing_origins(lane, lineage.lanes) for lane in lineage.lanes]
    distinct = {dot.place.global_step for lane in lanes for dot in lane.dots}
    if len(distinct) <= limit:
        return [(lane, list(lane.dots)) for lane in lanes]
    origins = {lane.origin for lane in lanes if lane.origin}
    return [(lane, list(_shorten(lane.dots, origins))) for lane in lanes]


def _with_missing_origins(lane: Lane, lanes: Sequence[Lane]) -> Lane:
    """``lane`` with a dot for each of its checkpoints that others started from but that is kept no longer."""
    present = {dot.place for dot in lane.dots}
    wanted = {other.origin for other in lanes if other.origin and other.origin.attempt == lane.attempt}
    gone = [Dot(place, Status.REMOVED) for place in wanted - present]
    dots = sorted([*lane.dots, *gone], key=lambda dot: dot.place)
    return dataclasses.replace(lane, dots=tuple(dots))


def _shorten(dots: Sequence[Dot], origins: set[Place]) -> Iterator[Shown]:
    hidden: list[Dot] = []
    for index, dot in enumerate(dots):
        if index not in (0, len(dots) - 1) and dot.status == Status.COMMITTED and dot.place not in origins:
            hidden.append(dot)
            continue
        yield from _gap(hidden)
        hidden = []
        yield dot


def _gap(hidden: list[Dot]) -> list[Shown]:
    """One hidden checkpoint takes as little room shown as counted."""
    if len(hidden) < 2:
        return list(hidden)
    first, last = hidden[0].place, hidden[-1].place
    return [Gap(first.attempt, first.global_step, last.global_step, len(hidden))]
