"""What a replay looked like over time: GPUs that were held and waited for, by queue.

A picture has fewer columns than a trace has changes, so each column shows the
mean of its time: areas are GPU-hours, whatever the width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tiphys_plugin.simulation import Replay, Span, spans

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
