"""Draws the metrics of checkpoints over their global steps as one SVG picture of small plots.

A strong line follows the checkpoints from which the newest one descends, through all
attempts. Faint lines are the work that other attempts did again, or that was given up.
Only stored checkpoints have metrics, so a plot is as dense as the saves that retention keeps.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hera_pipelines.draw.charts import Axes, Picture
from hera_pipelines.draw.templates import shorten
from tiphys.lineage.tree import AttemptNode, CheckpointNode, CheckpointStatus, LineageTree, StepLineage

MAX_PLOTS = 24
"""Most plots in a picture; it says how many it leaves out."""
MAX_POINTS = 300
"""Most points of a line; of more, evenly spread ones are drawn."""
PLOT_WIDTH, PLOT_HEIGHT = 300, 164
_COLUMNS = 3
_NOT_SHOWN = (CheckpointStatus.DAMAGED, CheckpointStatus.REMOVED)

_Ref = tuple[int, int]
"""Attempt and global step of a checkpoint of one lineage."""


@dataclass(frozen=True)
class MetricLine:
    """Global steps and values of one attempt, or of the line of descent."""

    points: tuple[tuple[int, float], ...]
    tooltip: str
    is_kept: bool


@dataclass(frozen=True)
class MetricPlot:
    """One metric of one training step; ``newest`` is its newest value on the line of descent, if there is one."""

    step: str
    metric: str
    newest: float | None
    lines: tuple[MetricLine, ...]


def list_metric_plots(tree: LineageTree) -> list[MetricPlot]:
    """A plot for each metric of each training step of a run, losses first."""
    return [_build_plot(lineage, name) for lineage in tree.steps for name in _list_metrics(lineage)]


def render_metrics_svg(title: str, tree: LineageTree) -> str:
    """Render the plots of a run; without any the picture says that no checkpoint has metrics."""
    plots, picture = list_metric_plots(tree), Picture(title)
    shown = plots[:MAX_PLOTS]
    height = -(-len(shown) // _COLUMNS) * PLOT_HEIGHT + 28
    for index, plot in enumerate(shown):
        _draw_plot(picture, PLOT_WIDTH * (index % _COLUMNS), PLOT_HEIGHT * (index // _COLUMNS), plot)
    if not plots:
        picture.write(10, 20, "No stored checkpoint has metrics yet.", "soft")
    if hidden := len(plots) - len(shown):
        picture.write(10, height - 8, f"{hidden} more are left out.", "soft")
    return picture.render(max(1, min(_COLUMNS, len(shown))) * PLOT_WIDTH, height)


def _draw_plot(picture: Picture, x: float, y: float, plot: MetricPlot) -> None:
    points = [point for line in plot.lines for point in line.points] or [(0, 0.0)]
    steps, values = zip(*points, strict=True)
    first, last, low, high = min(steps), max(steps), min(values), max(values)
    axes = Axes(x + 10, y + 40, PLOT_WIDTH - 24, PLOT_HEIGHT - 66, (first, last), (low, high))
    tooltip = f"{plot.metric} of {plot.step}"
    picture.write(axes.left, y + 16, shorten(plot.metric, 23), note=shorten(plot.step, 15), tooltip=tooltip)
    picture.write(axes.right, y + 16, "" if plot.newest is None else format_metric(plot.newest), "end")
    for edge in (axes.top, axes.bottom):
        picture.draw(f"M{axes.left:g} {edge:g}H{axes.right:g}", "grid")
    for line in plot.lines:
        stride = -(-len(line.points) // MAX_POINTS)
        path = axes.line([*line.points[:-1:stride], line.points[-1]])
        picture.draw(path, "kept" if line.is_kept else "again", tooltip=line.tooltip)
        if line.is_kept and plot.newest is not None and math.isfinite(plot.newest):
            end_x, end_y = axes.x(line.points[-1][0]), axes.y(line.points[-1][1])
            picture.draw(f"M{end_x:g} {end_y:g}h0", "kept point")
    picture.write(axes.left, axes.bottom + 16, f"step {first:,}", "soft")
    picture.write(axes.right, axes.bottom + 16, f"{last:,}", "soft end")
    picture.write(axes.left, axes.top - 4, format_metric(high), "soft")
    picture.write(axes.left, axes.bottom - 3, format_metric(low), "soft")


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


def _build_plot(lineage: StepLineage, name: str) -> MetricPlot:
    values = {
        (node.ref.attempt, node.ref.global_step): float(node.metrics[name])
        for _, node in _shown_nodes(lineage)
        if name in node.metrics
    }
    descent = [ref for ref in find_line_of_descent(lineage) if ref in values]
    finite = {ref: value for ref, value in values.items() if math.isfinite(value)}
    lines = list(_given_up_lines(finite, set(descent)))
    if kept := tuple((ref[1], finite[ref]) for ref in descent if ref in finite):
        lines.append(MetricLine(kept, f"{name} of the checkpoints that led to the newest one", is_kept=True))
    newest = values[descent[-1]] if descent else None
    return MetricPlot(lineage.name or lineage.step, name, newest, tuple(lines))


def _given_up_lines(values: Mapping[_Ref, float], descent: set[_Ref]) -> Iterator[MetricLine]:
    """The checkpoints of each attempt that are not on the line of descent, from the last one before them that is."""
    for attempt in sorted({attempt for attempt, _ in values}):
        own = sorted(step for number, step in values if number == attempt)
        others = [step for step in own if (attempt, step) not in descent]
        if not others:
            continue
        before = [step for step in own if step < others[0]][-1:]
        points = tuple((step, values[attempt, step]) for step in before + others)
        tooltip = f"attempt {attempt}: steps {others[0]:,} to {others[-1]:,} were done again or given up"
        yield MetricLine(points, tooltip, is_kept=False)


def format_metric(value: float) -> str:
    """A value in at most four digits, such as ``0.4123`` or ``1.2e-07``."""
    return f"{value:.4g}"
