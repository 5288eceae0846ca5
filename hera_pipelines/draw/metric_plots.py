"""Draws the metrics of checkpoints over their global steps as one SVG picture of small plots.

A strong line follows the checkpoints from which the newest one descends, through all
attempts. Faint lines are the work that other attempts did again, or that was given up.
Only stored checkpoints have metrics, so a plot is as dense as the saves that retention keeps.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hera_pipelines.draw.lineage_svg import load_picture_template
from tiphys.lineage import AttemptNode, CheckpointNode, CheckpointStatus, LineageTree, StepLineage

MAX_PLOTS = 24
"""Most plots in a picture; it says how many it leaves out."""
MAX_POINTS = 300
"""Most points of a line; of more, evenly spread ones are drawn."""
PLOT_WIDTH, PLOT_HEIGHT = 300, 164
_COLUMNS = 3
_INSET = (10, 40, 14, 26)
"""Pixels between the frame of a plot and its lines: left, top, right, bottom."""
_NOT_SHOWN = (CheckpointStatus.DAMAGED, CheckpointStatus.REMOVED)

Point = tuple[float, float]
_Ref = tuple[int, int]
"""Attempt and global step of a checkpoint of one lineage."""


@dataclass(frozen=True)
class MetricLine:
    """Points of one attempt, or of the line of descent; ``path`` in pixels of the plot."""

    path: str
    tooltip: str
    is_kept: bool


@dataclass(frozen=True)
class MetricPlot:
    """One metric of one training step, at ``x`` and ``y`` of the picture."""

    x: int
    y: int
    step: str
    metric: str
    value: str
    """Newest value on the line of descent."""
    lines: tuple[MetricLine, ...]
    last: Point | None
    """Where that value stands; None if it is no number that can be drawn."""
    marks: tuple[str, str, str, str]
    """First and last global step, lowest and highest value."""


@dataclass(frozen=True)
class MetricPicture:
    plots: tuple[MetricPlot, ...]
    hidden: int

    @property
    def width(self) -> int:
        return max(1, min(_COLUMNS, len(self.plots))) * PLOT_WIDTH

    @property
    def height(self) -> int:
        return -(-len(self.plots) // _COLUMNS) * PLOT_HEIGHT + 28


def lay_out_metrics(tree: LineageTree) -> MetricPicture:
    """A plot for each metric of each training step of a run, losses first."""
    series = [(lineage, name) for lineage in tree.steps for name in _list_metrics(lineage)]
    plots = [
        _lay_out_plot(PLOT_WIDTH * (index % _COLUMNS), PLOT_HEIGHT * (index // _COLUMNS), lineage, name)
        for index, (lineage, name) in enumerate(series[:MAX_PLOTS])
    ]
    return MetricPicture(tuple(plots), len(series) - len(plots))


def render_metrics_svg(title: str, picture: MetricPicture) -> str:
    """Render the picture; without plots it says that no checkpoint has metrics."""
    template = load_picture_template("metrics.svg.jinja")
    return template.render(title=title, picture=picture, width=PLOT_WIDTH, height=PLOT_HEIGHT, inset=_INSET)


def _list_metrics(lineage: StepLineage) -> list[str]:
    names = {name for _, node in _shown_nodes(lineage) for name in node.metrics}
    return sorted(names, key=lambda name: ("loss" not in name, name))


def _shown_nodes(lineage: StepLineage) -> Iterator[tuple[AttemptNode, CheckpointNode]]:
    return (
        (attempt, node)
        for attempt in lineage.attempts
        for node in attempt.checkpoints
        if node.status not in _NOT_SHOWN and node.ref.lineage == lineage.lineage
    )


def find_line_of_descent(lineage: StepLineage) -> list[_Ref]:
    """The checkpoints of the lineage from which the newest one descends, the oldest first."""
    nodes = {(node.ref.attempt, node.ref.global_step): node for _, node in _shown_nodes(lineage)}
    line: list[_Ref] = []
    at = _find_newest(lineage)
    while at is not None and at in nodes and at not in line[-1:]:
        line.append(at)
        parent = nodes[at].parent
        is_earlier = parent is not None and parent.lineage == lineage.lineage and parent.global_step < at[1]
        at = (parent.attempt, parent.global_step) if parent is not None and is_earlier else None
    return line[::-1]


def _find_newest(lineage: StepLineage) -> _Ref | None:
    """The newest checkpoint of the last attempt that has one, or that from which it started."""
    for attempt in reversed(lineage.attempts):
        committed = [node.ref for node in attempt.checkpoints if node.status is CheckpointStatus.COMMITTED]
        newest = max(committed, key=lambda ref: ref.global_step, default=attempt.starts_from)
        if newest is not None and newest.lineage == lineage.lineage:
            return newest.attempt, newest.global_step
    return None


def _lay_out_plot(x: int, y: int, lineage: StepLineage, name: str) -> MetricPlot:
    values = {
        (node.ref.attempt, node.ref.global_step): float(node.metrics[name])
        for _, node in _shown_nodes(lineage)
        if name in node.metrics
    }
    descent = [ref for ref in find_line_of_descent(lineage) if ref in values]
    finite = {ref: value for ref, value in values.items() if math.isfinite(value)}
    scale = _Scale(finite)
    lines = list(_given_up_lines(finite, set(descent), scale))
    kept = [(ref[1], finite[ref]) for ref in descent if ref in finite]
    if kept:
        lines.append(
            MetricLine(scale.path(kept), f"{name} of the checkpoints that led to the newest one", is_kept=True)
        )
    newest = values[descent[-1]] if descent else None
    return MetricPlot(
        x,
        y,
        lineage.name or lineage.step,
        name,
        "" if newest is None else format_metric(newest),
        tuple(lines),
        scale.place(kept[-1]) if kept and descent[-1] in finite else None,
        scale.marks,
    )


def _given_up_lines(values: Mapping[_Ref, float], descent: set[_Ref], scale: "_Scale") -> Iterator[MetricLine]:
    """The checkpoints of each attempt that are not on the line of descent, from the last one before them that is."""
    for attempt in sorted({attempt for attempt, _ in values}):
        own = sorted(step for number, step in values if number == attempt)
        others = [step for step in own if (attempt, step) not in descent]
        if not others:
            continue
        before = [step for step in own if step < others[0]][-1:]
        points = [(step, values[attempt, step]) for step in before + others]
        tooltip = f"attempt {attempt}: steps {others[0]:,} to {others[-1]:,} were done again or given up"
        yield MetricLine(scale.path(points), tooltip, is_kept=False)


class _Scale:
    """Maps global steps and values to pixels of a plot."""

    def __init__(self, values: Mapping[_Ref, float]) -> None:
        steps = [step for _, step in values] or [0]
        self._steps = min(steps), max(steps)
        self._values = min(values.values(), default=0.0), max(values.values(), default=0.0)

    @property
    def marks(self) -> tuple[str, str, str, str]:
        first, last = self._steps
        return f"{first:,}", f"{last:,}", format_metric(self._values[0]), format_metric(self._values[1])

    def place(self, point: tuple[int, float]) -> Point:
        left, top, right, bottom = _INSET
        across = _share(point[0], *self._steps)
        up = _share(point[1], *self._values)
        return (
            round(left + across * (PLOT_WIDTH - left - right), 1),
            round(PLOT_HEIGHT - bottom - up * (PLOT_HEIGHT - top - bottom), 1),
        )

    def path(self, points: Sequence[tuple[int, float]]) -> str:
        """SVG path; a single point becomes a short dash."""
        stride = -(-len(points) // MAX_POINTS)
        shown = [*points[:-1:stride], points[-1]]
        places = [self.place(point) for point in shown]
        if len(places) == 1:
            places = [(places[0][0] - 2, places[0][1]), (places[0][0] + 2, places[0][1])]
        return "M" + " L".join(f"{x:g} {y:g}" for x, y in places)


def _share(value: float, low: float, high: float) -> float:
    """Where ``value`` lies between two others, from 0 to 1; the middle if these are equal."""
    # Halved, because the distance of two floats may be too large for a float.
    half = high / 2 - low / 2
    return (value / 2 - low / 2) / half if half else 0.5


def format_metric(value: float) -> str:
    """A value in at most four digits, such as ``0.4123`` or ``1.2e-07``."""
    return f"{value:.4g}"
