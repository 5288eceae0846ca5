"""Converts a `LineageTree` to a `LineageGraph`: one lane per attempt, one dot per checkpoint.

Pictures and terminal tree read only the graph, so their tests need no storage.

The facts of a dot are its position and what changed since its parent. A commit,
an image or a version at every dot would hide the dot where it changes, and that
change may explain a bend of the metrics.

`collapse_lineage` shortens long lineages. It keeps the first and the last
checkpoint of every attempt, those that an attempt started from, and those that
are not simply committed. It counts the rest. Of many attempts it keeps the first,
the last and the remarkable ones, and folds the others into groups.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from tiphys.lineage.tree import AttemptNode, CheckpointNode, CheckpointStatus, LineageTree, StepLineage
from tiphys.protocol.quantities import format_bytes
from tiphys.records import CheckpointRef, Provenance


class AttemptEnding(StrEnum):
    DONE = "done"
    FAILED = "failed"
    FENCED = "fenced"
    STOPPED = "stopped"
    """A person stopped its workflow."""
    OPEN = "open"
    """No end is recorded: the attempt is running, or its pod is lost."""


class CheckpointPosition(NamedTuple):
    """Identifies a checkpoint within its lineage."""

    attempt: int
    global_step: int


@dataclass(frozen=True)
class Dot:
    """One checkpoint. ``facts`` are short lines of detail, such as size, metrics and changes."""

    position: CheckpointPosition
    status: CheckpointStatus = CheckpointStatus.COMMITTED
    metrics: str = ""
    facts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lane:
    """One attempt. ``origin`` is the checkpoint of this lineage that it started from; None: none of this lineage."""

    attempt: int
    submission: int
    origin: CheckpointPosition | None
    ending: AttemptEnding
    message: str
    dots: tuple[Dot, ...]
    report: str = ""
    """How the attempt used its grace period, if it was preempted; empty otherwise."""
    fork: str = ""
    """Description of the checkpoint of another run that the attempt started from; empty for none."""
    cause: str = ""
    """Cause of its failure; empty for none."""
    data: str = ""
    """Versions of the data that it read and no step made; empty for none."""

    @property
    def title(self) -> str:
        return f"attempt {self.attempt}"

    @property
    def subtitle(self) -> str:
        return f"submission {self.submission}"

    @property
    def ending_text(self) -> str:
        return self.ending.value

    @property
    def start(self) -> str:
        """Description of the checkpoint that the attempt started from."""
        if self.origin is not None:
            return f"from step {self.origin.global_step} of attempt {self.origin.attempt}"
        return f"from {self.fork}" if self.fork else "from scratch"


@dataclass(frozen=True)
class LaneGroup:
    """Consecutive attempts that are shown as one row."""

    lanes: tuple[Lane, ...]

    @property
    def attempt(self) -> int:
        return self.lanes[0].attempt

    @property
    def origin(self) -> CheckpointPosition | None:
        return self.lanes[0].origin

    @property
    def start(self) -> str:
        return self.lanes[0].start

    @property
    def title(self) -> str:
        return f"attempts {self.attempt}–{self.lanes[-1].attempt}"

    @property
    def subtitle(self) -> str:
        first, last = self.lanes[0].submission, self.lanes[-1].submission
        return f"submission {first}" if first == last else f"submissions {first}–{last}"

    @property
    def ending(self) -> AttemptEnding:
        """The most frequent ending."""
        return Counter(lane.ending for lane in self.lanes).most_common(1)[0][0]

    @property
    def ending_text(self) -> str:
        return ", ".join(f"{count} {ending}" for ending, count in Counter(lane.ending for lane in self.lanes).items())

    @property
    def message(self) -> str:
        """The causes of the failures, the most frequent first."""
        causes = Counter(lane.cause for lane in self.lanes if lane.cause)
        return ", ".join(f"{cause} {count}" for cause, count in causes.most_common())

    @property
    def report(self) -> str:
        return ""

    @cached_property
    def gap(self) -> "Gap | None":
        """All its checkpoints; None if it has none."""
        positions = [dot.position for lane in self.lanes for dot in lane.dots]
        if not positions:
            return None
        steps = [position.global_step for position in positions]
        return Gap(self.attempt, min(steps), max(steps), len(positions))


@dataclass(frozen=True)
class LineageGraph:
    """The checkpoints of one training step of a run."""

    run: str
    step: str
    lanes: tuple[Lane, ...]
    note: str = ""
    """Why checkpoints may be missing."""
    name: str = ""
    """Name of the step or item for people; empty: the step id."""
    item: str = ""
    """Value of the item, for a step that is fanned out."""

    @property
    def title(self) -> str:
        """Name of the step, with the parameters of the item for a fan-out."""
        return f"{self.name or self.step}  {self.item}".rstrip()


def describe_facts(facts: Provenance, parent_facts: Provenance | None) -> tuple[str, ...]:
    """Describe ``facts`` in short lines, with the changes since ``parent_facts``; None: facts of the parent unknown."""
    return (*_position_lines(facts), *(_drift_lines(parent_facts, facts) if parent_facts is not None else ()))


def _position_lines(facts: Provenance) -> Iterator[str]:
    if facts.epoch is not None:
        yield f"epoch {facts.epoch}"
    if facts.world_size > 1:
        yield f"{facts.world_size} ranks"


def _drift_lines(before: Provenance, now: Provenance) -> Iterator[str]:
    if before.world_size != now.world_size:
        yield f"before: {before.world_size} rank{'s' if before.world_size > 1 else ''}"
    if before.parameters and now.parameters and before.parameters != now.parameters:
        yield "other parameters"
    earlier = {version.name: version for version in before.data}
    pairs = [(earlier[version.name], version) for version in now.data if version.name in earlier]
    changed = [(old, new) for old, new in pairs if str(old) != str(new)]
    for old, new in changed:
        yield f"data {new.name} {old.short_version} → {new.short_version}"
    if before.dataset and now.dataset and before.dataset != now.dataset and not changed:
        yield "other data"
    if before.git_commit and now.git_commit and before.git_commit != now.git_commit:
        yield f"code {before.git_commit[:7]} → {now.git_commit[:7]}"
    if before.image and now.image and before.image != now.image:
        yield f"image {before.image} → {now.image}"
    for package, version in now.versions.items():
        if (old_version := before.versions.get(package)) not in (None, version):
            yield f"{package} {old_version} → {version}"


def build_lineage_graphs(tree: LineageTree) -> list[LineageGraph]:
    """Build one `LineageGraph` per training step of the run, or per item of a fan-out."""
    return [_build_lineage_graph(tree.run, step) for step in tree.steps]


def _build_lineage_graph(run: str, step: StepLineage) -> LineageGraph:
    facts = _facts_by_checkpoint(step)
    lanes = tuple(_lane(attempt, facts, step.lineage) for attempt in step.attempts)
    return LineageGraph(run, step.step, lanes, step.note, step.name, step.item)


def _facts_by_checkpoint(step: StepLineage) -> Mapping[CheckpointRef, Provenance]:
    return {node.ref: node.facts for attempt in step.attempts for node in attempt.checkpoints if node.committed_at}


def _lane(attempt: AttemptNode, facts: Mapping[CheckpointRef, Provenance], lineage: str) -> Lane:
    origin = _origin(attempt)
    in_lineage = origin is not None and origin.lineage == lineage
    return Lane(
        attempt=attempt.attempt,
        submission=attempt.submission,
        origin=CheckpointPosition(origin.attempt, origin.global_step) if origin and in_lineage else None,
        fork=f"step {origin.global_step} of attempt {origin.attempt} of {origin.lineage}"
        if origin and not in_lineage
        else "",
        ending=_ending(attempt),
        message=_message(attempt),
        cause=_cause(attempt),
        dots=tuple(_dot(node, facts) for node in attempt.checkpoints),
        report=attempt.preemption.message if attempt.preemption else "",
        data=", ".join(f"{version.name} {version.short_version}" for version in attempt.data),
    )


def _origin(attempt: AttemptNode) -> CheckpointRef | None:
    """Return the checkpoint that the attempt really resumed from.

    Admission proposes a checkpoint by the sizes of its objects. The trainer reads
    the bytes and may have to use an older one. Each commit of the attempt names
    that one, so any commit that retention has left will do.
    """
    restored = (node.restored for node in attempt.checkpoints if node.committed_at)
    return next(restored, attempt.starts_from)


def _ending(attempt: AttemptNode) -> AttemptEnding:
    if attempt.stopped:
        return AttemptEnding.STOPPED
    return AttemptEnding(attempt.outcome.value) if attempt.outcome else AttemptEnding.OPEN


def _message(attempt: AttemptNode) -> str:
    if attempt.stopped:
        return ""
    return ": ".join(part for part in (_cause(attempt), attempt.message) if part)


def _cause(attempt: AttemptNode) -> str:
    return attempt.cause.display_name if attempt.cause else ""


def _dot(node: CheckpointNode, facts_by_ref: Mapping[CheckpointRef, Provenance]) -> Dot:
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in node.metrics.items())
    size = format_bytes(node.size_bytes) if node.size_bytes else ""
    save_reason = f"saved after {node.saved_because}" if node.saved_because in ("asked", "sigterm") else ""
    made_with = describe_facts(node.facts, facts_by_ref.get(node.parent) if node.parent else None)
    facts = tuple(fact for fact in (size, metrics, *made_with, save_reason, node.reason) if fact)
    return Dot(CheckpointPosition(node.ref.attempt, node.ref.global_step), node.status, metrics, facts)


@dataclass(frozen=True)
class Gap:
    """A run of checkpoints of one lane that is shown as a count."""

    attempt: int
    first: int
    last: int
    count: int


LaneItem = Dot | Gap


def collapse_lineage(
    lineage: LineageGraph, max_steps: int, max_lanes: int
) -> list[tuple[Lane | LaneGroup, list[LaneItem]]]:
    """Return the rows to show, and the items of each.

    Up to ``max_steps`` distinct steps all dots are shown, and up to ``max_lanes`` lanes all of them. Of more, at most
    as many rows are returned.
    """
    lanes = _add_missing_origins(lineage.lanes)
    rows = _fold_lanes(lanes, max_lanes)
    shown = [row for row in rows if isinstance(row, Lane)]
    distinct = {dot.position.global_step for lane in shown for dot in lane.dots}
    origins = {lane.origin for lane in shown if lane.origin}
    is_folded = len(rows) < len(lanes)

    def items_of(row: Lane | LaneGroup) -> list[LaneItem]:
        if isinstance(row, LaneGroup):
            return [row.gap] if row.gap else []
        if len(distinct) <= max_steps:
            return list(row.dots)
        return list(_shorten(row.dots, origins, keep_first=not is_folded))

    return [(row, items_of(row)) for row in rows]


_LAST_LANES = 3


def _fold_lanes(lanes: Sequence[Lane], max_lanes: int) -> list[Lane | LaneGroup]:
    """Fold all lanes but the first, the last and the newest remarkable ones into groups of consecutive lanes."""
    if len(lanes) <= max_lanes:
        return list(lanes)
    last = range(len(lanes) - _LAST_LANES, len(lanes))
    remarkable = [index for index in range(1, last.start) if _is_remarkable(lanes[index], lanes[index - 1])]
    kept = {0, *last, *remarkable[len(remarkable) - max(0, max_lanes // 2 - 1 - _LAST_LANES) :]}
    rows: list[Lane | LaneGroup] = []
    for is_kept, members in groupby(range(len(lanes)), kept.__contains__):
        group = [lanes[index] for index in members]
        rows += group if is_kept or len(group) == 1 else [LaneGroup(tuple(group))]
    return rows


def _is_remarkable(lane: Lane, before: Lane) -> bool:
    """Whether a lane has a checkpoint that is not simply committed, or did not go on where the one before stopped."""
    if any(dot.status not in (CheckpointStatus.COMMITTED, CheckpointStatus.REMOVED) for dot in lane.dots):
        return True
    newest = before.dots[-1].position if before.dots else before.origin
    return lane.origin != newest


def _add_missing_origins(lanes: Sequence[Lane]) -> list[Lane]:
    """Add a dot to each lane for each of its removed checkpoints that another attempt started from."""
    origins: dict[int, set[CheckpointPosition]] = {}
    for lane in lanes:
        if lane.origin:
            origins.setdefault(lane.origin.attempt, set()).add(lane.origin)

    def with_origins(lane: Lane) -> Lane:
        missing = origins.get(lane.attempt, set()) - {dot.position for dot in lane.dots}
        removed = [Dot(position, CheckpointStatus.REMOVED) for position in missing]
        return dataclasses.replace(lane, dots=tuple(sorted([*lane.dots, *removed], key=lambda dot: dot.position)))

    return [with_origins(lane) for lane in lanes]


def _shorten(dots: Sequence[Dot], origins: set[CheckpointPosition], *, keep_first: bool) -> Iterator[LaneItem]:
    hidden: list[Dot] = []
    ends = (0, len(dots) - 1) if keep_first else (len(dots) - 1,)
    for index, dot in enumerate(dots):
        if index not in ends and dot.status == CheckpointStatus.COMMITTED and dot.position not in origins:
            hidden.append(dot)
            continue
        yield from _gap(hidden)
        hidden = []
        yield dot


def _gap(hidden: list[Dot]) -> list[LaneItem]:
    """Return the gap for ``hidden``; a single dot is shown, because it takes no more room than a count."""
    if len(hidden) < 2:
        return list(hidden)
    first, last = hidden[0].position, hidden[-1].position
    return [Gap(first.attempt, first.global_step, last.global_step, len(hidden))]
