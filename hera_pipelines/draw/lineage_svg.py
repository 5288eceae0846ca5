"""Where everything goes in the picture, in pixels.

Attempts are rows, global steps are columns in their order (not to scale, so
that dense and sparse saving both read well). An attempt's line leaves the
checkpoint it started from downwards and turns into its own row: work that was
done again shows as two dots in one column.

The templates of the pictures, in an environment that no text can break out of.

The lineage as one self-contained SVG file that reads in light and in dark.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from hera_pipelines.draw.lineage_graph import Dot, Gap, Lane, Lineage, Place, Shown, collapse
from tiphys.lineage import Status

if TYPE_CHECKING:
    from jinja2 import Template


LABELS_WIDTH = 132
COLUMN_WIDTH = 64
ENDING_WIDTH = 310
ROW_HEIGHT = 74
HEADER_HEIGHT = 58
"""From the top of a section to the middle of its first row."""
BAND_HEIGHT = 66
_TURN = 18
_TAIL = 30


@dataclass(frozen=True)
class PlacedDot:
    """A checkpoint at its pixel."""

    dot: Dot
    x: float
    y: float


@dataclass(frozen=True)
class PlacedGap:
    """The pill that counts what is not shown."""

    gap: Gap
    x: float
    y: float


@dataclass(frozen=True)
class Row:
    """One attempt: its line, what lies on it, and where its ending is written.

    ``caption`` tells the metrics of its last checkpoint.
    """

    lane: Lane
    y: float
    path: str
    from_scratch_x: float | None
    dots: tuple[PlacedDot, ...]
    gaps: tuple[PlacedGap, ...]
    end_x: float
    caption: str


@dataclass(frozen=True)
class Layout:
    """All rows of one lineage; ``width`` and ``height`` enclose them."""

    rows: tuple[Row, ...]
    width: float
    height: float


def lay_out(lanes: Sequence[tuple[Lane, Sequence[Shown]]]) -> Layout:
    """Place every lane; the upper left corner is (0, 0)."""
    columns = _columns(lanes)
    row_of = {lane.attempt: float(HEADER_HEIGHT + ROW_HEIGHT * index) for index, (lane, _) in enumerate(lanes)}
    rows = tuple(_row(lane, shown, columns, row_of) for lane, shown in lanes)
    width = max((row.end_x for row in rows), default=LABELS_WIDTH) + ENDING_WIDTH
    below = ROW_HEIGHT * (len(rows) - 1) + BAND_HEIGHT / 2 if rows else 0
    return Layout(rows, width, HEADER_HEIGHT + below)


def _columns(lanes: Sequence[tuple[Lane, Sequence[Shown]]]) -> dict[int, float]:
    """Where each shown global step lies, its x; a column is left free where a pill must fit."""
    steps = {dot.place.global_step for _, shown in lanes for dot in shown if isinstance(dot, Dot)}
    pills = {gap.first for _, shown in lanes for gap in shown if isinstance(gap, Gap)}
    ordered = sorted(steps | pills)
    return {step: LABELS_WIDTH + COLUMN_WIDTH * (index + 1) for index, step in enumerate(ordered)}


def _row(lane: Lane, shown: Sequence[Shown], columns: dict[int, float], row_of: dict[int, float]) -> Row:
    y = row_of[lane.attempt]
    dots = tuple(PlacedDot(item, columns[item.place.global_step], y) for item in shown if isinstance(item, Dot))
    gaps = tuple(PlacedGap(item, columns[item.first], y) for item in shown if isinstance(item, Gap))
    start_x, path = _start(lane.origin, y, columns, row_of)
    end_x = max([start_x + _TURN, *(dot.x for dot in dots)]) + _TAIL
    scratch = start_x if lane.origin is None else None
    caption = dots[-1].dot.metrics if dots else ""
    return Row(lane, y, f"{path} H {end_x:g}", scratch, dots, gaps, end_x, caption)


def _start(origin: Place | None, y: float, columns: dict[int, float], row_of: dict[int, float]) -> tuple[float, str]:
    """Where a row begins, its x, and the beginning of its line."""
    if origin is None or origin.attempt not in row_of:
        return LABELS_WIDTH, f"M {LABELS_WIDTH:g} {y:g}"
    x = columns[origin.global_step]
    return x, f"M {x:g} {row_of[origin.attempt]:g} V {y - _TURN:g} Q {x:g} {y:g} {x + _TURN:g} {y:g}"


_NOT_XML = re.compile(r"[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LONGEST_MESSAGE = 46


@cache
def template(name: str) -> "Template":
    """The template ``name`` of this package."""
    # Imported where a picture is drawn: every command that tells a size comes by here.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("hera_pipelines.draw", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_printable,
    )
    environment.filters["shorten"] = _shorten
    return environment.get_template(name)


def _printable(value: object) -> object:
    """Text without the characters that XML cannot hold even escaped."""
    return _NOT_XML.sub("\ufffd", value) if type(value) is str else value


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - 1].rstrip() + "…"


MOST_COLUMNS = 14
"""Distinct global steps that are shown one by one before the picture collapses them."""


def lineage_svg(title: str, lineages: Sequence[Lineage]) -> str:
    """An SVG document that shows all ``lineages`` below each other."""
    layouts = [lay_out(collapse(lineage, MOST_COLUMNS)) for lineage in lineages]
    statuses = {dot.dot.status for layout in layouts for row in layout.rows for dot in row.dots}
    return template("lineage.svg.jinja").render(
        title=title,
        sections=list(zip(lineages, layouts, strict=True)),
        width=max([560.0, *(layout.width for layout in layouts)]),
        tops=_tops(layouts),
        band_height=BAND_HEIGHT,
        legend=[status for status in Status if status in statuses],
    )


def _tops(layouts: Sequence[Layout]) -> list[float]:
    """Where each section begins, its y, and where the last one ends."""
    tops = [76.0]
    for layout in layouts:
        tops.append(tops[-1] + layout.height + 22)
    return tops
