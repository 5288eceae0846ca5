"""Rehearsals below each other in one self-contained SVG file, all on the same scales, so that areas compare."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from hera_pipelines.draw.axis import time_marks, top_of
from hera_pipelines.draw.rehearsal import OTHERS, Rehearsal
from hera_pipelines.draw.templates import template

WIDTH = 960
LEFT = 72
CHART_WIDTH = 860
HELD_HEIGHT = 190
WAITING_HEIGHT = 90
_HEADING = 30
_BETWEEN = 26
_BELOW = 44
_PANEL_HEIGHT = _HEADING + HELD_HEIGHT + _BETWEEN + WAITING_HEIGHT + _BELOW
_TOP = 92
_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#3fa7a0", "#d4a72c", "#9c755f")
_OTHERS_COLOUR = "#8c959f"


@dataclass(frozen=True)
class Area:
    """One queue in one chart; ``path`` goes along its upper edge and back along its lower one."""

    label: str
    colour: str
    path: str


@dataclass(frozen=True)
class Chart:
    """``top`` is its y within the panel, ``marks`` the y and label of its axis, ``lines`` those across it."""

    label: str
    top: float
    height: float
    areas: tuple[Area, ...]
    marks: tuple[tuple[float, str], ...]
    lines: tuple[tuple[float, str], ...]


def rehearsal_svg(title: str, rehearsals: Sequence[Rehearsal]) -> str:
    """An SVG document; all ``rehearsals`` last equally long and have the same bands in the same order."""
    held = top_of(max(max(one.most_held, one.quota, one.inventory or 0) for one in rehearsals))
    waiting = top_of(max(one.most_waiting for one in rehearsals))
    seconds = rehearsals[0].seconds
    return template("rehearsal.svg.jinja").render(
        title=title,
        width=WIDTH,
        height=_TOP + _PANEL_HEIGHT * len(rehearsals),
        left=LEFT,
        chart_width=CHART_WIDTH,
        panels=[
            (_TOP + _PANEL_HEIGHT * number, one.heading, [_held(one, held), _waiting(one, waiting)])
            for number, one in enumerate(rehearsals)
        ],
        times=[(LEFT + CHART_WIDTH * at / seconds, label) for at, label in time_marks(seconds)],
        legend=list(dict(pair for one in rehearsals for pair in _coloured(one)).items()),
    )


def _held(one: Rehearsal, top: float) -> Chart:
    quota = (_y(one.quota, top, HELD_HEIGHT), f"quotas {one.quota}")
    inventory = [] if one.inventory is None else [(_y(one.inventory, top, HELD_HEIGHT), f"inventory {one.inventory}")]
    # Two labels at one height would be unreadable.
    lines = (quota, *inventory) if one.inventory != one.quota else ((quota[0], f"quotas and inventory {one.quota}"),)
    areas = _areas(one, [band.held for band in one.bands], top, HELD_HEIGHT)
    return Chart("GPUs held", _HEADING, HELD_HEIGHT, areas, _marks(top, HELD_HEIGHT), tuple(lines))


def _waiting(one: Rehearsal, top: float) -> Chart:
    areas = _areas(one, [band.waiting for band in one.bands], top, WAITING_HEIGHT)
    marks = _marks(top, WAITING_HEIGHT)
    return Chart("GPUs waited for", _HEADING + HELD_HEIGHT + _BETWEEN, WAITING_HEIGHT, areas, marks, ())


def _areas(one: Rehearsal, values: Sequence[Sequence[float]], top: float, height: float) -> tuple[Area, ...]:
    lower = [0.0] * len(values[0]) if values else []
    areas = []
    for (label, colour), mine in zip(_coloured(one), values, strict=True):
        upper = [below + value for below, value in zip(lower, mine, strict=True)]
        if any(mine):
            areas.append(Area(label, colour, _path(lower, upper, top, height)))
        lower = upper
    return tuple(areas)


def _path(lower: Sequence[float], upper: Sequence[float], top: float, height: float) -> str:
    there = list(_edge(upper, top, height))
    back = [(end, begin, y) for begin, end, y in reversed(list(_edge(lower, top, height)))]
    x, _, y = there[0]
    return f"M {x:g} {y:g} " + " ".join(f"V {y:g} H {to:g}" for _, to, y in [*there, *back]) + " Z"


def _edge(values: Sequence[float], top: float, height: float) -> Iterator[tuple[float, float, float]]:
    """Levels of a step function: from x to x, and y."""
    width = CHART_WIDTH / len(values)
    for y, same in groupby(enumerate(values), key=lambda one: _y(one[1], top, height)):
        columns = [column for column, _ in same]
        yield round(LEFT + columns[0] * width, 1), round(LEFT + (columns[-1] + 1) * width, 1), y


def _marks(top: float, height: float) -> tuple[tuple[float, str], ...]:
    return tuple((_y(value, top, height), f"{value:,g}") for value in (0, top / 2, top))


def _y(value: float, top: float, height: float) -> float:
    return round(height * (1 - value / top), 1)


def _coloured(one: Rehearsal) -> Iterator[tuple[str, str]]:
    for number, band in enumerate(one.bands):
        yield band.label, _OTHERS_COLOUR if band.label == OTHERS else _COLOURS[number]
