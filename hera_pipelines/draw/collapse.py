"""Long lineages, shortened: what a person would ask about stays, the rest is counted.

Kept are the first and the last checkpoint of every attempt, those an attempt
started from with the one before them, and those that are not simply committed.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hera_pipelines.draw.model import Dot, Lane, Lineage, Place
from tiphys.lineage import Status


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
