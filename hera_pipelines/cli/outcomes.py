"""The numbers of a replay for people: one table, or two replays side by side."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter

from rich.text import Text
from tiphys_plugin.simulation import Outcome, QueueOutcome

_NONE = "-"
_SELDOM = ("REJECTED", "NOT STARTED", "PREEMPTED", "LOST")
_ALL = "all"
_UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))
Value = float | None


class Unit(Enum):
    """How a number is told, and how the difference of two of them."""

    COUNT = "count"
    TIME = "time"
    FACTOR = "factor"
    SHARE = "share"


@dataclass(frozen=True)
class Measure:
    name: str
    unit: Unit
    of: Callable[[QueueOutcome], Value]


def _wait(name: str) -> Callable[[QueueOutcome], Value]:
    return lambda outcome: None if outcome.wait is None else attrgetter(name)(outcome.wait)


MEASURES = (
    Measure("JOBS", Unit.COUNT, lambda outcome: outcome.jobs),
    Measure("REJECTED", Unit.COUNT, lambda outcome: sum(outcome.rejected.values())),
    Measure("NOT STARTED", Unit.COUNT, lambda outcome: outcome.waiting),
    Measure("MEAN WAIT", Unit.TIME, _wait("mean")),
    Measure("P50", Unit.TIME, _wait("p50")),
    Measure("P90", Unit.TIME, _wait("p90")),
    Measure("P99", Unit.TIME, _wait("p99")),
    Measure("MAX", Unit.TIME, _wait("most")),
    Measure("JCT", Unit.TIME, lambda outcome: outcome.completion_seconds),
    Measure("SLOWDOWN", Unit.FACTOR, lambda outcome: outcome.slowdown),
    Measure("GPU-HOURS", Unit.COUNT, lambda outcome: outcome.gpu_hours),
    Measure("BORROWED", Unit.COUNT, lambda outcome: outcome.borrowed_gpu_hours),
    Measure("OF QUOTA", Unit.SHARE, lambda outcome: outcome.quota_utilisation),
    Measure("PREEMPTED", Unit.COUNT, lambda outcome: outcome.preemptions),
    Measure("LOST", Unit.COUNT, lambda outcome: outcome.lost_gpu_hours),
    Measure("LINE", Unit.COUNT, lambda outcome: outcome.longest_line),
)


def columns(outcome: Outcome) -> tuple[list[str], list[list[str | Text]]]:
    """Header and rows: one for each queue, and one for all. Columns of what need not happen only where it did."""
    shown = [one for one in MEASURES if one.name not in _SELDOM or one.of(outcome.total)]
    rows: list[list[str | Text]] = [
        [each.queue or _ALL, *(told(one.unit, one.of(each)) for one in shown)]
        for each in (*outcome.queues, outcome.total)
    ]
    rows[-1] = [Text(str(cell), style="bold") for cell in rows[-1]]
    return ["QUEUE", *(one.name for one in shown)], rows


def side_by_side(before: Outcome, after: Outcome) -> Iterator[Sequence[str | Text]]:
    """A row for each queue and measure: before, after, and the difference. Queues of only one side are there, too."""
    old = {each.queue: each for each in (*before.queues, before.total)}
    new = {each.queue: each for each in (*after.queues, after.total)}
    for queue in [*dict.fromkeys(one for one in [*old, *new] if one is not None), None]:
        for one in MEASURES:
            pair = [one.of(side[queue]) if queue in side else None for side in (old, new)]
            if any(pair) or one is MEASURES[0]:
                first = (queue or _ALL) if one is MEASURES[0] else ""
                yield first, one.name.lower(), *(told(one.unit, value) for value in pair), _change(one.unit, *pair)


def facts(outcome: Outcome) -> Iterator[tuple[str, Unit, Value]]:
    """What is not of one queue: name, unit, value."""
    yield "from first submission to last end", Unit.TIME, outcome.span_seconds
    if outcome.inventory_utilisation is not None:
        yield "inventory in use", Unit.SHARE, outcome.inventory_utilisation
    for cohort, index in outcome.fairness.items():
        yield f"fairness in cohort {cohort} (Jain)", Unit.FACTOR, index


def told(unit: Unit, value: Value) -> str:
    """A number for a person."""
    if value is None:
        return _NONE
    if unit is Unit.TIME:
        return cell_duration(value)
    if unit is Unit.SHARE:
        return f"{value:.1%}"
    return f"{value:,.0f}" if unit is Unit.COUNT else f"{value:,.2f}"


def cell_duration(seconds: float) -> str:
    """The two largest units that matter: ``3h 20m``."""
    left = round(seconds)
    counts: list[tuple[int, str]] = []
    for size, unit in _UNITS:
        count, left = divmod(left, size)
        if count or counts:
            counts.append((count, unit))
    return " ".join(f"{count}{unit}" for count, unit in counts[:2] if count) or "0s"


def _change(unit: Unit, before: Value, after: Value) -> str:
    if before is None or after is None or told(unit, before) == told(unit, after):
        return ""
    if unit is Unit.COUNT:
        return f"{after - before:+,.0f}"
    if unit is Unit.SHARE:
        return f"{100 * (after - before):+.1f} points"
    return f"{after / before - 1:+.0%}" if before else ""
