"""Draws how many GPUs each queue held over time, as one SVG picture with a plot for each queue.

A plot has a fixed number of intervals, and shows the mean of each, so that a short
attempt is neither lost nor drawn as long as the interval.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from typing import NamedTuple

from hera_pipelines.draw.lineage_svg import load_picture_template
from hera_pipelines.draw.simulation_svg import time_marks
from tiphys.protocol.quantities import format_duration

MAX_QUEUES = 20
"""Most queues in a picture, those that held most; it says how many it leaves out."""
INTERVALS = 240
WIDTH, LEFT, PLOT_WIDTH, PLOT_HEIGHT, ROW_HEIGHT = 1000, 250, 700, 52, 84


class GpuHold(NamedTuple):
    """GPUs that an attempt held; ``end`` is None while it goes on."""

    queue: str
    gpus: int
    begin: datetime
    end: datetime | None


@dataclass(frozen=True)
class QueuePlot:
    """The GPUs of one queue over time; paths in pixels of the plot."""

    queue: str
    mean: str
    """GPUs held on average, and the share of the quota."""
    share: str
    """Share of all GPU time of the picture."""
    area: str
    quota_y: float | None
    """Height of the quota; None if it is not known."""
    most: str
    """GPUs at the upper edge of the plot."""


@dataclass(frozen=True)
class SharePicture:
    """``marks`` are x and label of each mark on the axis, whose right end is now."""

    plots: tuple[QueuePlot, ...]
    hidden: int
    marks: tuple[tuple[float, str], ...]

    @property
    def height(self) -> int:
        return ROW_HEIGHT * max(1, len(self.plots)) + 30


def lay_out_shares(holds: Iterable[GpuHold], begin: datetime, now: datetime, quotas: Mapping[str, int]) -> SharePicture:
    """A plot of each queue that held GPUs between ``begin`` and ``now``, the largest first.

    Args:
        holds: What attempts held.
        begin: Left end of the axis.
        now: Right end of the axis, and end of the holds that go on.
        quotas: GPUs by queue; a queue without one is drawn without.
    """
    grouped: defaultdict[str, list[GpuHold]] = defaultdict(list)
    for hold in holds:
        if hold.begin < now and (hold.end or now) > begin:
            grouped[hold.queue].append(hold)
    means = {queue: average_held(members, begin, now) for queue, members in grouped.items()}
    total = sum(map(sum, means.values())) or 1.0
    order = sorted(means, key=lambda queue: (-sum(means[queue]), queue))
    seconds = (now - begin).total_seconds()
    marks = tuple(
        (round(PLOT_WIDTH * (1 - ago / seconds), 1), f"{format_duration(ago)} ago") for ago, _ in time_marks(seconds, 6)
    )
    plots = tuple(_lay_out_plot(queue, means[queue], quotas.get(queue), total) for queue in order[:MAX_QUEUES])
    return SharePicture(plots, len(order) - len(plots), marks)


def average_held(holds: Iterable[GpuHold], begin: datetime, now: datetime) -> list[float]:
    """GPUs held on average in each of `INTERVALS` equal intervals between ``begin`` and ``now``."""
    width = (now - begin).total_seconds() / INTERVALS
    # A change counts in its interval for the rest of it, and in all later ones as a whole.
    partial, whole = [0.0] * INTERVALS, [0.0] * (INTERVALS + 1)
    for hold in holds:
        end = max(hold.begin, hold.end or now)  # the clocks of the writers of claim and end may differ
        for moment, gpus in ((hold.begin, hold.gpus), (end, -hold.gpus)):
            at = min(max((moment - begin).total_seconds() / width, 0.0), float(INTERVALS))
            index = min(int(at), INTERVALS - 1)
            partial[index] += gpus * (index + 1 - at)
            whole[index + 1] += gpus
    return [round(part + held, 6) for part, held in zip(partial, accumulate(whole), strict=False)]


def render_shares_svg(title: str, picture: SharePicture) -> str:
    """Render the picture; without plots it says that no GPUs were held."""
    template = load_picture_template("shares.svg.jinja")
    places = {"width": WIDTH, "left": LEFT, "plot_width": PLOT_WIDTH, "plot_height": PLOT_HEIGHT, "row": ROW_HEIGHT}
    return template.render(title=title, picture=picture, **places)


def _lay_out_plot(queue: str, held: Sequence[float], quota: int | None, total: float) -> QueuePlot:
    most = max(*held, float(quota or 0), 1.0)
    mean = sum(held) / len(held)
    of_quota = f" of {quota} ({mean / quota:.0%})" if quota else ""
    return QueuePlot(
        queue=queue,
        mean=f"{mean:.1f}{of_quota} on average",
        share=f"{sum(held) / total:.0%} of all GPU time",
        area=_draw_area([value / most for value in held]),
        quota_y=round(PLOT_HEIGHT * (1 - quota / most), 1) if quota else None,
        most=f"{most:g}" if most == int(most) else f"{most:.1f}",
    )


def _draw_area(heights: Sequence[float]) -> str:
    """SVG path of an area of bars without gaps; equal neighbours are one bar."""
    width = PLOT_WIDTH / len(heights)
    path, before = [f"M0 {PLOT_HEIGHT}"], 0.0
    for index, height in enumerate(heights):
        if height != before:
            path.append(f"H{index * width:.4g}V{PLOT_HEIGHT * (1 - height):.4g}")
            before = height
    return "".join((*path, f"H{PLOT_WIDTH}V{PLOT_HEIGHT}Z"))
