"""Draws charts as SVG pictures without scripts: series on axes, marks, limits and a legend, for light and dark schemes.

A picture is a list of shapes and texts in pixels from its upper left corner. `Axes`
maps values to these pixels, so a chart is told in values and the rest is here.
Tooltips are titles, which every browser shows.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

from hera_pipelines.draw.templates import load_picture_template, shorten

_DAY = 86400
_TIME_STEPS = (
    (1, "s"), (5, "s"), (15, "s"), (60, "m"), (300, "m"), (900, "m"), (3600, "h"), (3 * 3600, "h"), (6 * 3600, "h"),
    (12 * 3600, "h"),
)  # fmt: skip
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": _DAY}
_LEGEND_STEP = 114
"""Pixels of a legend's entry."""
_LEGEND_COLUMNS = 8
_LEGEND_CHARACTERS = 14


@dataclass(frozen=True)
class Shape:
    """A path; ``style`` is a class of the style sheet, unless it has a colour of its own."""

    path: str
    style: str = ""
    colour: str = ""
    tooltip: str = ""


@dataclass(frozen=True)
class Label:
    """A text at its base line; ``note`` follows it in soft letters."""

    x: float
    y: float
    text: str
    style: str = ""
    note: str = ""
    tooltip: str = ""


@dataclass(frozen=True)
class Axes:
    """Where a plot stands in its picture, and the values at its edges."""

    left: float
    top: float
    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float] = (0.0, 1.0)

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height

    def x(self, value: float) -> float:
        return round(self.left + self.width * _share(value, *self.x_range), 1)

    def y(self, value: float) -> float:
        return round(self.bottom - self.height * _share(value, *self.y_range), 1)

    def line(self, points: Sequence[tuple[float, float]]) -> str:
        """Path through points; a single one becomes a short dash."""
        places = [(self.x(x), self.y(y)) for x, y in points]
        if len(places) == 1:
            places = [(places[0][0] - 2, places[0][1]), (places[0][0] + 2, places[0][1])]
        return "M" + "L".join(f"{x:g} {y:g}" for x, y in places)

    def steps(self, lower: Sequence[float], upper: Sequence[float]) -> str:
        """Path of the area between two series, which have a value for each of equal parts of the x axis."""
        upper_edge = list(self._edge(upper))
        lower_edge = [(end, begin, y) for begin, end, y in reversed(list(self._edge(lower)))]
        x, _, y = upper_edge[0]
        return f"M{x:g} {y:g}" + "".join(f"V{y:g}H{end:g}" for _, end, y in [*upper_edge, *lower_edge]) + "Z"

    def _edge(self, values: Sequence[float]) -> Iterator[tuple[float, float, float]]:
        """The levels of a series: first x, last x, y."""
        width = self.width / len(values)
        for y, level in groupby(enumerate(values), key=lambda entry: self.y(entry[1])):
            columns = [column for column, _ in level]
            yield round(self.left + columns[0] * width, 1), round(self.left + (columns[-1] + 1) * width, 1), y


@dataclass
class Picture:
    """A picture under construction; what is drawn later covers what was drawn before, and texts cover all."""

    title: str
    shapes: list[Shape] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)

    def draw(self, path: str, style: str = "", *, colour: str = "", tooltip: str = "") -> None:
        """Add a shape."""
        self.shapes.append(Shape(path, style, colour, tooltip))

    def write(self, x: float, y: float, text: str, style: str = "", *, note: str = "", tooltip: str = "") -> None:
        self.labels.append(Label(x, y, text, style, note, tooltip))

    def draw_level(self, axes: Axes, value: float, style: str = "grid", tooltip: str = "") -> None:
        """A line across a plot at ``value``."""
        self.draw(f"M{axes.left:g} {axes.y(value):g}H{axes.right:g}", style, tooltip=tooltip)

    def mark_times(self, axes: Axes, marks: Iterable[tuple[float, str]]) -> None:
        """Lines from top to bottom of a plot, with their labels below it."""
        for value, label in marks:
            self.draw(f"M{axes.x(value):g} {axes.top:g}V{axes.bottom + 4:g}", "grid")
            self.write(axes.x(value), axes.bottom + 18, label, "soft middle")

    def add_legend(self, x: float, y: float, entries: Iterable[tuple[str, str]]) -> None:
        """Name and colour of each series."""
        for index, (name, colour) in enumerate(entries):
            left, top = x + index % _LEGEND_COLUMNS * _LEGEND_STEP, y + index // _LEGEND_COLUMNS * 18
            self.draw(box(left, top, 11, 11), colour=colour)
            self.write(left + 17, top + 10, shorten(name, _LEGEND_CHARACTERS), "soft", tooltip=name)

    def render(self, width: float, height: float, *, is_framed: bool = False) -> str:
        """The SVG document; a framed one brings its own paper."""
        template = load_picture_template("chart.svg.jinja")
        return template.render(picture=self, width=round(width), height=round(height), is_framed=is_framed)


def box(x: float, y: float, width: float, height: float) -> str:
    """Path of a rectangle."""
    return f"M{x:g} {y:g}H{round(x + width, 2):g}V{round(y + height, 2):g}H{x:g}Z"


def compute_mean_levels(
    changes: Iterable[tuple[float, float]], begin: float, end: float, intervals: int
) -> list[float]:
    """The mean in each of equal intervals of a value that changes at moments, by an amount each.

    So a short change is neither lost nor drawn as long as an interval, and an area is always an amount. ``changes``
    before ``begin`` count from there, in any order.
    """
    width = (end - begin) / intervals
    # A change counts in its interval for the rest of it, and in all later ones as a whole.
    partial, whole = [0.0] * intervals, [0.0] * (intervals + 1)
    for moment, amount in changes:
        at = min(max((moment - begin) / width, 0.0), float(intervals))
        index = min(int(at), intervals - 1)
        partial[index] += amount * (index + 1 - at)
        whole[index + 1] += amount
    return [round(part + before, 6) for part, before in zip(partial, accumulate(whole), strict=False)]


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


def _share(value: float, low: float, high: float) -> float:
    """Where ``value`` lies between two others, from 0 to 1; the middle if these are equal."""
    # Halved, because the distance of two floats may be too large for a float.
    half = high / 2 - low / 2
    return (value / 2 - low / 2) / half if half else 0.5
