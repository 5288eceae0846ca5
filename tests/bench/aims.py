"""What a benchmark promises of its ratios and counts, and whether it is kept. Pure."""

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from bench.samples import median_of


class Aim(NamedTuple):
    """``sign`` is ≥ or ≤."""

    sign: str
    value: float

    def met(self, value: float) -> bool:
        compare: Callable[[float, float], bool] = {"≥": operator.ge, "≤": operator.le}[self.sign]
        return compare(value, self.value)


Measured = Mapping[str, Any] | float
"""A number, or a `bench.samples.summary`, of which the median counts."""


def verdicts(measured: Mapping[str, Measured], aims: Mapping[str, Aim]) -> Iterator[str]:
    """A line for each value: kept, MISSED, or without an aim of its own at the size that was measured."""
    for name, value in measured.items():
        spread = ""
        if isinstance(value, Mapping):
            low, high = value["quartiles"]
            spread = f"  [{low:g} … {high:g}, n={len(value['samples'])}]"
        aim = aims.get(name)
        middle = median_of(value)
        verdict = "      " if aim is None else "kept  " if aim.met(middle) else "MISSED"
        words = "not judged" if aim is None else f"{aim.sign} {aim.value:g}"
        yield f"{verdict}  {name} = {middle:g}{spread}  ({words})"


def has_missed_count(measured: Mapping[str, Measured], aims: Mapping[str, Aim]) -> bool:
    """Whether a count misses its aim, which no noise of the machine excuses; times and ratios are floats."""
    return any(
        isinstance(value, int) and name in aims and not aims[name].met(value) for name, value in measured.items()
    )


def number_line(measured: Mapping[str, Measured], names: Mapping[str, Aim]) -> str:
    """``key=value`` of all that was measured, in the order of ``names``."""
    return " ".join(f"{name}={median_of(measured[name]):g}" for name in names if name in measured)
