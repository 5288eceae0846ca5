"""Rehearsals below each other in one self-contained SVG file, all on the same scales, so that areas compare.

What a replay looked like over time: GPUs that were held and waited for, by queue.

A picture has fewer columns than a trace has changes, so each column shows the
mean of its time: areas are GPU-hours, whatever the width.

Where the marks of an axis stand, at numbers that a person would choose.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from tiphys_plugin.quota.simulation.jobs import Replay
from tiphys_plugin.quota.simulation.results import Span, spans

from hera_pipelines.draw.lineage_svg import template

COLUMNS = 480
MOST_BANDS = 8
OTHERS = "other queues"


@dataclass(frozen=True)
class Band:
    """One queue, or several: mean GPUs in each column."""

    label: str
    held: tuple[float, ...]
    waiting: tuple[float, ...]


@dataclass(frozen=True)
class Rehearsal:
    """``quota`` is that of all queues together; ``inventory`` None: not declared."""

    heading: str
    seconds: float
    bands: tuple[Band, ...]
    quota: int
    inventory: int | None

    @property
    def most_held(self) -> float:
        return max(map(sum, zip(*(band.held for band in self.bands), strict=True)), default=0.0)

    @property
    def most_waiting(self) -> float:
        return max(map(sum, zip(*(band.waiting for band in self.bands), strict=True)), default=0.0)


def rehearsal_of(heading: str, replay: Replay, begin: float, seconds: float, shown: Sequence[str]) -> Rehearsal:
    """The ``seconds`` of a replay from ``begin``, a band for each queue in ``shown``, and one for all others."""
    queues = replay.queues
    others = [queue.name for queue in queues.queues if queue.name not in shown]
    groups = {**{name: [name] for name in shown}, **({OTHERS: others} if others else {})}
    timeline = list(spans(replay))
    inventory = None if queues.stock is None else sum(stock.count for stock in queues.stock.values())
    return Rehearsal(
        heading=heading,
        seconds=seconds,
        bands=tuple(_band(label, names, timeline, begin, seconds) for label, names in groups.items()),
        quota=sum(sum(queue.gpus.values()) for queue in queues.queues),
        inventory=inventory,
    )


def largest(replays: Sequence[Replay]) -> list[str]:
    """The queues that deserve a band of their own in all of ``replays``, in the order of their files."""
    names = list(dict.fromkeys(queue.name for replay in replays for queue in replay.queues.queues))
    if len(names) <= MOST_BANDS:
        return names
    used = dict.fromkeys(names, 0.0)
    for replay in replays:
        for run in replay.runs:
            used[run.queue] += run.gpu_seconds
    first = set(sorted(names, key=lambda name: -used[name])[: MOST_BANDS - 1])
    return [name for name in names if name in first]


def _band(label: str, names: Sequence[str], timeline: Sequence[Span], begin: float, seconds: float) -> Band:
    mine = set(names)
    held = [sum(gpus for (queue, _), gpus in span.held.items() if queue in mine) for span in timeline]
    waiting = [sum(span.waiting_gpus[name] for name in names) for span in timeline]
    return Band(label, _means(timeline, held, begin, seconds), _means(timeline, waiting, begin, seconds))


def _means(timeline: Sequence[Span], values: Sequence[int], origin: float, seconds: float) -> tuple[float, ...]:
    """The mean of a value in each of `COLUMNS` equal parts of ``seconds`` from ``origin``."""
    width = seconds / COLUMNS
    sums = [0.0] * COLUMNS
    for span, value in zip(timeline, values, strict=True):
        begin, end = (span.begin - origin) / width, (span.end - origin) / width
        for column in range(int(begin), min(COLUMNS, int(end) + 1)) if value else ():
            sums[column] += value * max(0.0, min(end, column + 1) - max(begin, column))
    return tuple(round(total, 6) for total in sums)


_TIMES = (
    (1, "s"), (5, "s"), (15, "s"), (60, "m"), (300, "m"), (900, "m"), (3600, "h"), (3 * 3600, "h"), (6 * 3600, "h"),
    (12 * 3600, "h"),
)  # fmt: skip
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DAY = 86400


def top_of(most: float) -> float:
    """The end of an axis from 0 that holds ``most``: 1, 2, 4, 5 or 8 times a power of ten."""
    if most <= 1:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(power * step for step in (1, 2, 4, 5, 8, 10) if power * step >= most)


def time_marks(seconds: float, most: int = 8) -> list[tuple[float, str]]:
    """At most ``most`` marks after 0, as seconds and label."""
    step, unit = next(((step, unit) for step, unit in _TIMES if seconds / step <= most), (_days(seconds, most), "d"))
    return [(n * step, f"{n * step / _UNITS[unit]:g}{unit}") for n in range(1, int(seconds / step) + 1)]


def _days(seconds: float, most: int) -> int:
    """The step in seconds: a number of days that is 1, 2 or 5 times a power of ten."""
    power: int = 10 ** max(0, math.floor(math.log10(max(1.0, seconds / _DAY / most))))
    return next(_DAY * power * step for step in (1, 2, 5, 10) if seconds / (_DAY * power * step) <= most)


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
