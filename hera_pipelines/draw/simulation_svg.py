"""Renders simulations of queues in one self-contained SVG file: GPUs held and waited for over time, by queue.

All simulations have the same scales, so that their areas can be compared. A
picture has fewer columns than a trace has changes, so each column shows the mean
of its time: an area is always an amount of GPU-hours.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from tiphys_plugin.quota.simulation.jobs import ReplayResult
from tiphys_plugin.quota.simulation.results import TimelineSpan, build_timeline

from hera_pipelines.draw.lineage_svg import load_picture_template

COLUMNS = 480
MAX_BANDS = 8
OTHER_QUEUES = "other queues"


@dataclass(frozen=True)
class Band:
    """Mean GPUs of one queue, or of several together, in each column."""

    label: str
    held: tuple[float, ...]
    waiting: tuple[float, ...]


@dataclass(frozen=True)
class SimulationTimeline:
    """GPUs over time in one simulation. ``quota`` sums all queues; ``inventory`` is None where not declared."""

    heading: str
    seconds: float
    bands: tuple[Band, ...]
    quota: int
    inventory: int | None

    @property
    def max_held(self) -> float:
        return max(map(sum, zip(*(band.held for band in self.bands), strict=True)), default=0.0)

    @property
    def max_waiting(self) -> float:
        return max(map(sum, zip(*(band.waiting for band in self.bands), strict=True)), default=0.0)


def build_simulation_timeline(
    heading: str, replay: ReplayResult, begin: float, seconds: float, queue_names: Sequence[str]
) -> SimulationTimeline:
    """Sample a replay in columns.

    Args:
        heading: Heading of the timeline.
        replay: Result of the simulation.
        begin: First second to show.
        seconds: Number of seconds to show.
        queue_names: Queues with a band of their own; the others share one.
    """
    queues = replay.queues
    others = [queue.name for queue in queues.queues if queue.name not in queue_names]
    groups = {**{name: [name] for name in queue_names}, **({OTHER_QUEUES: others} if others else {})}
    timeline = list(build_timeline(replay))
    inventory = None if queues.gpu_inventory is None else sum(stock.count for stock in queues.gpu_inventory.values())
    return SimulationTimeline(
        heading=heading,
        seconds=seconds,
        bands=tuple(_band(label, names, timeline, begin, seconds) for label, names in groups.items()),
        quota=sum(sum(queue.gpus.values()) for queue in queues.queues),
        inventory=inventory,
    )


def largest_queues(replays: Sequence[ReplayResult]) -> list[str]:
    """Return the queues with most GPU-seconds in all ``replays``, at most `MAX_BANDS`, in the order of their files."""
    names = list(dict.fromkeys(queue.name for replay in replays for queue in replay.queues.queues))
    if len(names) <= MAX_BANDS:
        return names
    used = dict.fromkeys(names, 0.0)
    for replay in replays:
        for run in replay.runs:
            used[run.queue] += run.gpu_seconds
    largest = set(sorted(names, key=lambda name: -used[name])[: MAX_BANDS - 1])
    return [name for name in names if name in largest]


def _band(label: str, names: Sequence[str], timeline: Sequence[TimelineSpan], begin: float, seconds: float) -> Band:
    band_queues = set(names)
    held = [sum(gpus for (queue, _), gpus in span.held.items() if queue in band_queues) for span in timeline]
    waiting = [sum(span.pending_gpus[name] for name in names) for span in timeline]
    return Band(label, _column_means(timeline, held, begin, seconds), _column_means(timeline, waiting, begin, seconds))


def _column_means(
    timeline: Sequence[TimelineSpan], values: Sequence[int], origin: float, seconds: float
) -> tuple[float, ...]:
    """Compute the mean of ``values`` in each of `COLUMNS` equal parts of ``seconds`` from ``origin``."""
    width = seconds / COLUMNS
    sums = [0.0] * COLUMNS
    for span, value in zip(timeline, values, strict=True):
        begin, end = (span.begin - origin) / width, (span.end - origin) / width
        for column in range(int(begin), min(COLUMNS, int(end) + 1)) if value else ():
            sums[column] += value * max(0.0, min(end, column + 1) - max(begin, column))
    return tuple(round(total, 6) for total in sums)


_TIME_STEPS = (
    (1, "s"), (5, "s"), (15, "s"), (60, "m"), (300, "m"), (900, "m"), (3600, "h"), (3 * 3600, "h"), (6 * 3600, "h"),
    (12 * 3600, "h"),
)  # fmt: skip
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DAY = 86400


def axis_maximum(most: float) -> float:
    """Round ``most`` up to the end of an axis: 1, 2, 4, 5, 8 or 10 times a power of ten."""
    if most <= 1:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(power * step for step in (1, 2, 4, 5, 8, 10) if power * step >= most)


def time_marks(seconds: float, max_marks: int = 8) -> list[tuple[float, str]]:
    """Return at most ``max_marks`` marks of a time axis after 0, as seconds and label."""
    step, unit = next(
        ((step, unit) for step, unit in _TIME_STEPS if seconds / step <= max_marks),
        (_day_step_seconds(seconds, max_marks), "d"),
    )
    return [(n * step, f"{n * step / _UNITS[unit]:g}{unit}") for n in range(1, int(seconds / step) + 1)]


def _day_step_seconds(seconds: float, max_marks: int) -> int:
    """Distance of marks in seconds: 1, 2, 5 or 10 times a power of ten days."""
    power: int = 10 ** max(0, math.floor(math.log10(max(1.0, seconds / _DAY / max_marks))))
    return next(_DAY * power * step for step in (1, 2, 5, 10) if seconds / (_DAY * power * step) <= max_marks)


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
_BAND_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#3fa7a0", "#d4a72c", "#9c755f")
_OTHERS_COLOUR = "#8c959f"


@dataclass(frozen=True)
class Area:
    """One band in one chart; ``path`` follows its upper edge and returns along its lower edge."""

    label: str
    colour: str
    path: str


@dataclass(frozen=True)
class SimulationChart:
    """One chart. ``top`` is its y within the panel; ``marks`` and ``lines`` hold y and label of marks and limits."""

    label: str
    top: float
    height: float
    areas: tuple[Area, ...]
    marks: tuple[tuple[float, str], ...]
    lines: tuple[tuple[float, str], ...]


def render_simulation_svg(title: str, timelines: Sequence[SimulationTimeline]) -> str:
    """Render an SVG document; all ``timelines`` have the same length, and the same bands in the same order."""
    held = axis_maximum(max(max(timeline.max_held, timeline.quota, timeline.inventory or 0) for timeline in timelines))
    waiting = axis_maximum(max(timeline.max_waiting for timeline in timelines))
    seconds = timelines[0].seconds
    return load_picture_template("rehearsal.svg.jinja").render(
        title=title,
        width=WIDTH,
        height=_TOP + _PANEL_HEIGHT * len(timelines),
        left=LEFT,
        chart_width=CHART_WIDTH,
        panels=[
            (
                _TOP + _PANEL_HEIGHT * number,
                timeline.heading,
                [_held_chart(timeline, held), _waiting_chart(timeline, waiting)],
            )
            for number, timeline in enumerate(timelines)
        ],
        times=[(LEFT + CHART_WIDTH * at / seconds, label) for at, label in time_marks(seconds)],
        legend=list(dict(pair for timeline in timelines for pair in _band_colours(timeline)).items()),
    )


def _held_chart(timeline: SimulationTimeline, top: float) -> SimulationChart:
    quota = (_y_position(timeline.quota, top, HELD_HEIGHT), f"quotas {timeline.quota}")
    inventory = (
        []
        if timeline.inventory is None
        else [(_y_position(timeline.inventory, top, HELD_HEIGHT), f"inventory {timeline.inventory}")]
    )
    # Two labels at the same height would be unreadable.
    lines = (
        (quota, *inventory)
        if timeline.inventory != timeline.quota
        else ((quota[0], f"quotas and inventory {timeline.quota}"),)
    )
    areas = _chart_areas(timeline, [band.held for band in timeline.bands], top, HELD_HEIGHT)
    return SimulationChart("GPUs held", _HEADING, HELD_HEIGHT, areas, _marks(top, HELD_HEIGHT), tuple(lines))


def _waiting_chart(timeline: SimulationTimeline, top: float) -> SimulationChart:
    areas = _chart_areas(timeline, [band.waiting for band in timeline.bands], top, WAITING_HEIGHT)
    marks = _marks(top, WAITING_HEIGHT)
    return SimulationChart("GPUs waited for", _HEADING + HELD_HEIGHT + _BETWEEN, WAITING_HEIGHT, areas, marks, ())


def _chart_areas(
    timeline: SimulationTimeline, values: Sequence[Sequence[float]], top: float, height: float
) -> tuple[Area, ...]:
    lower = [0.0] * len(values[0]) if values else []
    areas = []
    for (label, colour), band_values in zip(_band_colours(timeline), values, strict=True):
        upper = [below + value for below, value in zip(lower, band_values, strict=True)]
        if any(band_values):
            areas.append(Area(label, colour, _path(lower, upper, top, height)))
        lower = upper
    return tuple(areas)


def _path(lower: Sequence[float], upper: Sequence[float], top: float, height: float) -> str:
    upper_edge = list(_edge(upper, top, height))
    lower_edge = [(end, begin, y) for begin, end, y in reversed(list(_edge(lower, top, height)))]
    x, _, y = upper_edge[0]
    return f"M {x:g} {y:g} " + " ".join(f"V {y:g} H {end:g}" for _, end, y in [*upper_edge, *lower_edge]) + " Z"


def _edge(values: Sequence[float], top: float, height: float) -> Iterator[tuple[float, float, float]]:
    """Yield the levels of a step function: first x, last x, y."""
    width = CHART_WIDTH / len(values)
    for y, level in groupby(enumerate(values), key=lambda entry: _y_position(entry[1], top, height)):
        columns = [column for column, _ in level]
        yield round(LEFT + columns[0] * width, 1), round(LEFT + (columns[-1] + 1) * width, 1), y


def _marks(top: float, height: float) -> tuple[tuple[float, str], ...]:
    return tuple((_y_position(value, top, height), f"{value:,g}") for value in (0, top / 2, top))


def _y_position(value: float, top: float, height: float) -> float:
    return round(height * (1 - value / top), 1)


def _band_colours(timeline: SimulationTimeline) -> Iterator[tuple[str, str]]:
    for number, band in enumerate(timeline.bands):
        yield band.label, _OTHERS_COLOUR if band.label == OTHER_QUEUES else _BAND_COLOURS[number]
