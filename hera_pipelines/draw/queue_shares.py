"""Draws how many GPUs each queue held over time, as one SVG picture with a plot for each queue."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import NamedTuple

from hera_pipelines.draw.charts import Axes, Picture, compute_mean_levels, time_marks
from hera_pipelines.draw.templates import shorten
from tiphys.protocol.quantities import format_duration

MAX_QUEUES = 20
"""Most queues in a picture, those that held most; it says how many it leaves out."""
INTERVALS = 240
WIDTH, LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT, ROW_HEIGHT = 1000, 250, 10, 700, 52, 84
_HELD_COLOUR = "#2f9e6e"
_NAME_CHARACTERS = 29


class GpuHold(NamedTuple):
    """GPUs that an attempt held; ``end`` is None while it goes on."""

    queue: str
    gpus: int
    begin: datetime
    end: datetime | None


def render_shares_svg(
    title: str, holds: Iterable[GpuHold], begin: datetime, now: datetime, quotas: Mapping[str, int]
) -> str:
    """A plot of each queue that held GPUs between ``begin`` and ``now``, the largest first.

    Holds that go on end ``now``. A queue is drawn without quota unless ``quotas`` has its GPUs.
    """
    grouped: defaultdict[str, list[GpuHold]] = defaultdict(list)
    for hold in holds:
        if hold.begin < now and (hold.end or now) > begin:
            grouped[hold.queue].append(hold)
    means = {queue: average_held(members, begin, now) for queue, members in grouped.items()}
    total = sum(map(sum, means.values())) or 1.0
    order = sorted(means, key=lambda queue: (-sum(means[queue]), queue))
    shown, picture = order[:MAX_QUEUES], Picture(title)
    seconds, bottom = (now - begin).total_seconds(), TOP + ROW_HEIGHT * max(1, len(shown))
    if shown:
        time_axis = Axes(LEFT, 4, PLOT_WIDTH, bottom - 20, (seconds, 0.0))
        picture.mark_times(time_axis, [(ago, f"{format_duration(ago)} ago") for ago, _ in time_marks(seconds, 6)])
    else:
        picture.write(10, 22, "No run of this store held GPUs in this time.", "soft")
    for row, queue in enumerate(shown):
        _draw_queue(picture, TOP + ROW_HEIGHT * row, queue, means[queue], quotas.get(queue), total)
    if hidden := len(order) - len(shown):
        picture.write(4, bottom + 10, f"{hidden} more queues are left out.", "soft")
    return picture.render(WIDTH, bottom + 20)


def average_held(holds: Iterable[GpuHold], begin: datetime, now: datetime) -> list[float]:
    """GPUs held on average in each of `INTERVALS` equal intervals between ``begin`` and ``now``."""
    return compute_mean_levels(_list_changes(holds, begin, now), 0.0, (now - begin).total_seconds(), INTERVALS)


def _list_changes(holds: Iterable[GpuHold], begin: datetime, now: datetime) -> Iterator[tuple[float, int]]:
    for hold in holds:
        end = max(hold.begin, hold.end or now)  # the clocks of the writers of claim and end may differ
        yield (hold.begin - begin).total_seconds(), hold.gpus
        yield (end - begin).total_seconds(), -hold.gpus


def _draw_queue(picture: Picture, top: float, queue: str, held: list[float], quota: int | None, total: float) -> None:
    most = max(*held, float(quota or 0), 1.0)
    axes = Axes(LEFT, top, PLOT_WIDTH, PLOT_HEIGHT, (0.0, 1.0), (0.0, most))
    mean = sum(held) / len(held)
    on_average = f"{mean:.1f}{f' of {quota} ({mean / quota:.0%})' if quota else ''} on average"
    picture.write(4, top + 16, shorten(queue, _NAME_CHARACTERS), tooltip=queue)
    picture.write(4, top + 34, on_average, "soft")
    picture.write(4, top + 51, f"{sum(held) / total:.0%} of all GPU time", "soft")
    picture.write(axes.right + 6, top + 9, f"{most:g}" if most == int(most) else f"{most:.1f}", "soft")
    picture.write(axes.right + 6, axes.bottom, "0", "soft")
    picture.draw_level(axes, most)
    picture.draw(axes.steps([0.0] * len(held), held), colour=_HELD_COLOUR, tooltip=f"{queue}: {on_average}")
    picture.draw_level(axes, 0.0)
    if quota:
        picture.draw_level(axes, quota, "limit", tooltip="quota")
