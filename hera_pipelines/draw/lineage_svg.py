"""Renders the lineage as one self-contained SVG file, for light and dark colour schemes.

Attempts are rows. Global steps are columns in their order, not to scale, so that
dense and sparse saves are both readable. The line of an attempt leaves its start
checkpoint downwards and turns into its own row, so repeated work shows as two
dots in one column.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hera_pipelines.draw.lineage_graph import (
    CheckpointPosition,
    Dot,
    Gap,
    Lane,
    LaneGroup,
    LaneItem,
    LineageGraph,
    collapse_lineage,
)
from hera_pipelines.draw.templates import load_picture_template
from tiphys.lineage.tree import CheckpointStatus

LABELS_WIDTH = 132
COLUMN_WIDTH = 64
ENDING_WIDTH = 310
ROW_HEIGHT = 74
HEADER_HEIGHT = 58
"""Pixels from the top of a section to the middle of its first row."""
BAND_HEIGHT = 66
_TURN_RADIUS = 18
_TAIL_LENGTH = 30


class PlacedItem(NamedTuple):
    """A checkpoint, or the pill that counts hidden ones, with its position in pixels."""

    item: LaneItem
    x: float
    y: float


@dataclass(frozen=True)
class AttemptRow:
    """One attempt or group of attempts: its line, its dots and gaps, and the position of its ending.

    ``caption`` has the metrics of its last checkpoint.
    """

    lane: Lane | LaneGroup
    y: float
    path: str
    from_scratch_x: float | None
    dots: tuple[PlacedItem, ...]
    gaps: tuple[PlacedItem, ...]
    end_x: float
    caption: str


@dataclass(frozen=True)
class PictureLayout:
    """All rows of one lineage; ``width`` and ``height`` enclose them."""

    rows: tuple[AttemptRow, ...]
    width: float
    height: float


ShownRow = tuple[Lane | LaneGroup, Sequence[LaneItem]]
"""A row of `collapse_lineage`."""


def lay_out_lanes(lanes: Sequence[ShownRow]) -> PictureLayout:
    """Compute the position of every row, in pixels from the upper left corner."""
    columns = _columns(lanes)
    row_of, group_x = {}, {}
    for index, (lane, _) in enumerate(lanes):
        for member in lane.lanes if isinstance(lane, LaneGroup) else (lane,):
            row_of[member.attempt] = float(HEADER_HEIGHT + ROW_HEIGHT * index)
            if isinstance(lane, LaneGroup) and lane.gap:
                group_x[member.attempt] = columns[lane.gap.first]
    rows = tuple(_attempt_row(lane, shown, columns, row_of, group_x) for lane, shown in lanes)
    width = max((row.end_x for row in rows), default=LABELS_WIDTH) + ENDING_WIDTH
    below = ROW_HEIGHT * (len(rows) - 1) + BAND_HEIGHT / 2 if rows else 0
    return PictureLayout(rows, width, HEADER_HEIGHT + below)


def _columns(lanes: Sequence[ShownRow]) -> dict[int, float]:
    """Compute the x of each shown global step, with a column for each pill."""
    steps = {dot.position.global_step for _, shown in lanes for dot in shown if isinstance(dot, Dot)}
    pills = {gap.first for _, shown in lanes for gap in shown if isinstance(gap, Gap)}
    ordered = sorted(steps | pills)
    return {step: LABELS_WIDTH + COLUMN_WIDTH * (index + 1) for index, step in enumerate(ordered)}


def _attempt_row(
    lane: Lane | LaneGroup,
    shown: Sequence[LaneItem],
    columns: dict[int, float],
    y_by_attempt: dict[int, float],
    group_x: dict[int, float],
) -> AttemptRow:
    y = y_by_attempt[lane.attempt]
    checkpoints = [item for item in shown if isinstance(item, Dot)]
    dots = tuple(PlacedItem(dot, columns[dot.position.global_step], y) for dot in checkpoints)
    gaps = tuple(PlacedItem(item, columns[item.first], y) for item in shown if isinstance(item, Gap))
    start_x, path = _row_start(lane.origin, y, columns, y_by_attempt, group_x)
    end_x = max([start_x + _TURN_RADIUS, *(dot.x for dot in dots), *(gap.x for gap in gaps)]) + _TAIL_LENGTH
    scratch = start_x if lane.origin is None else None
    caption = checkpoints[-1].metrics if checkpoints else ""
    return AttemptRow(lane, y, f"{path} H {end_x:g}", scratch, dots, gaps, end_x, caption)


def _row_start(
    origin: CheckpointPosition | None,
    y: float,
    columns: dict[int, float],
    y_by_attempt: dict[int, float],
    group_x: dict[int, float],
) -> tuple[float, str]:
    """Compute the x at which a row begins, and the beginning of its line."""
    if origin is None or origin.attempt not in y_by_attempt:
        return LABELS_WIDTH, f"M {LABELS_WIDTH:g} {y:g}"
    x = group_x[origin.attempt] if origin.attempt in group_x else columns[origin.global_step]
    return (
        x,
        f"M {x:g} {y_by_attempt[origin.attempt]:g} V {y - _TURN_RADIUS:g} Q {x:g} {y:g} {x + _TURN_RADIUS:g} {y:g}",
    )


_MIN_WIDTH = 660.0
"""Pixels for the title and the sentence below it."""


MAX_COLUMNS = 14
"""Most distinct global steps in a picture that is not collapsed."""
MAX_ROWS = 16
"""Most rows of a lineage; more attempts are folded."""


def render_lineage_svg(title: str, lineages: Sequence[LineageGraph]) -> str:
    """Render an SVG document that shows all ``lineages`` below each other."""
    shown = [collapse_lineage(lineage, MAX_COLUMNS, MAX_ROWS) for lineage in lineages]
    layouts = [*map(lay_out_lanes, shown)]
    statuses = {item.status for rows in shown for _, items in rows for item in items if isinstance(item, Dot)}
    return load_picture_template("lineage.svg.jinja").render(
        title=title,
        sections=list(zip(lineages, layouts, strict=True)),
        width=max([_MIN_WIDTH, *(layout.width for layout in layouts)]),
        tops=_section_tops(layouts),
        band_height=BAND_HEIGHT,
        legend=[status for status in CheckpointStatus if status in statuses],
    )


def _section_tops(layouts: Sequence[PictureLayout]) -> list[float]:
    """Compute the y at which each section begins, and the y at which the last one ends."""
    tops = [76.0]
    for layout in layouts:
        tops.append(tops[-1] + layout.height + 22)
    return tops
