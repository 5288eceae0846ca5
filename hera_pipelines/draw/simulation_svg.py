"""Renders simulations of queues in one self-contained SVG file: GPUs held and waited for over time, by queue.

All simulations have the same scales, so that their areas can be compared. A
picture has fewer columns than a trace has changes, so each column shows the mean
of its time: an area is always an amount of GPU-hours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiphys_plugin.quota.simulation.jobs import ReplayResult
from tiphys_plugin.quota.simulation.results import list_changes

from hera_pipelines.draw.charts import Axes, Picture, axis_maximum, compute_mean_levels, time_marks

COLUMNS = 480
MAX_BANDS = 8
OTHER_QUEUES = "other queues"
WIDTH, LEFT, CHART_WIDTH = 960, 72, 860
HELD_HEIGHT, WAITING_HEIGHT = 190, 90
_TOP, _HEADING, _BETWEEN, _BELOW = 92, 30, 26, 44
PANEL_HEIGHT = _HEADING + HELD_HEIGHT + _BETWEEN + WAITING_HEIGHT + _BELOW
_BAND_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#3fa7a0", "#d4a72c", "#9c755f")
_OTHERS_COLOUR = "#8c959f"


@dataclass(frozen=True)
class Band:
    """Mean GPUs of one queue, or of several together, in each column."""

    label: str
    colour: str
    held: list[float]
    waiting: list[float]


def build_bands(replay: ReplayResult, begin: float, seconds: float, queue_names: Sequence[str]) -> list[Band]:
    """Sample a replay in columns, from the second ``begin`` on; queues that are not in ``queue_names`` share a band."""
    others = [queue.name for queue in replay.queues.queues if queue.name not in queue_names]
    groups = [(name, colour, {name}) for name, colour in zip(queue_names, _BAND_COLOURS, strict=False)]
    groups += [(OTHER_QUEUES, _OTHERS_COLOUR, set(others))] * bool(others)
    changes, end = list(list_changes(replay)), begin + seconds
    bands = []
    for label, colour, names in groups:
        own = [change for change in changes if change.queue in names]
        held = compute_mean_levels(((change.seconds, change.held) for change in own), begin, end, COLUMNS)
        waiting = compute_mean_levels(((change.seconds, change.pending) for change in own), begin, end, COLUMNS)
        bands.append(Band(label, colour, held, waiting))
    return bands


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


def render_simulation_svg(title: str, replays: Mapping[str, ReplayResult], begin: float, seconds: float) -> str:
    """Render ``replays`` by their headings, from the second ``begin`` on for ``seconds``."""
    shown = largest_queues(list(replays.values()))
    panels = {heading: build_bands(replay, begin, seconds, shown) for heading, replay in replays.items()}
    limits = {heading: _list_limits(replay) for heading, replay in replays.items()}
    most_held = max(_find_maximum([band.held for band in bands]) for bands in panels.values())
    held_top = axis_maximum(max(most_held, *(value for lines in limits.values() for value, _ in lines)))
    waiting_top = axis_maximum(max(_find_maximum([band.waiting for band in bands]) for bands in panels.values()))
    picture = Picture(title)
    picture.write(24, 36, title, "title")
    picture.add_legend(24, 56, {band.label: band.colour for bands in panels.values() for band in bands}.items())
    for number, (heading, bands) in enumerate(panels.items()):
        top = _TOP + PANEL_HEIGHT * number
        picture.write(24, top + 6, heading, "section")
        held = Axes(LEFT, top + _HEADING, CHART_WIDTH, HELD_HEIGHT, (0.0, seconds), (0.0, held_top))
        below = held.bottom + _BETWEEN
        waiting = Axes(LEFT, below, CHART_WIDTH, WAITING_HEIGHT, (0.0, seconds), (0.0, waiting_top))
        picture.mark_times(waiting, time_marks(seconds))
        _draw_areas(picture, held, "GPUs held", [(band, band.held) for band in bands])
        _draw_areas(picture, waiting, "GPUs waited for", [(band, band.waiting) for band in bands])
        for value, label in limits[heading]:
            picture.draw_level(held, value, "limit")
            picture.write(held.right, held.y(value) - 5, label, "limit-label")
    return picture.render(WIDTH, _TOP + PANEL_HEIGHT * len(panels), is_framed=True)


def _find_maximum(series: Sequence[Sequence[float]]) -> float:
    """The highest sum of one column."""
    return max(map(sum, zip(*series, strict=True)), default=0.0)


def _list_limits(replay: ReplayResult) -> list[tuple[float, str]]:
    quota, inventory = sum(sum(queue.gpus.values()) for queue in replay.queues.queues), replay.queues.gpu_inventory
    existing = None if inventory is None else sum(stock.count for stock in inventory.values())
    if existing == quota:  # two labels at the same height would be unreadable
        return [(quota, f"quotas and inventory {quota}")]
    return [(quota, f"quotas {quota}"), *([] if existing is None else [(existing, f"inventory {existing}")])]


def _draw_areas(picture: Picture, axes: Axes, title: str, series: Sequence[tuple[Band, Sequence[float]]]) -> None:
    """The bands on top of each other."""
    picture.write(axes.left, axes.top - 6, title, "soft")
    for value in (0.0, axes.y_range[1] / 2, axes.y_range[1]):
        picture.draw_level(axes, value)
        picture.write(axes.left - 8, axes.y(value) + 4, f"{value:,g}", "soft end")
    lower = [0.0] * COLUMNS
    for band, values in series:
        upper = [below + value for below, value in zip(lower, values, strict=True)]
        if any(values):
            picture.draw(axes.steps(lower, upper), colour=band.colour, tooltip=band.label)
        lower = upper
