"""What a random search draws from: a point between 0 and 1 becomes a value."""

import math
from dataclasses import dataclass
from typing import Any, Protocol

from hera_pipelines.sweeps.values import Value, checked, checked_list
from tiphys.errors import UsageError

_DIGITS = 4
"""Significant digits of a drawn number: people read it in the Argo UI, and no training can tell more apart."""


class Distribution(Protocol):
    """Where the values of one parameter come from."""

    @property
    def size(self) -> float:
        """How many different values there are; infinite where nobody counts them."""

    def at(self, point: float) -> Value:
        """The value at ``point``, which is at least 0 and below 1."""


@dataclass(frozen=True)
class Choice:
    """One of a few values, each as likely as the others."""

    values: tuple[Value, ...]

    @property
    def size(self) -> float:
        return len(self.values)

    def at(self, point: float) -> Value:
        return self.values[int(point * len(self.values))]

    def __str__(self) -> str:
        return f"choice({', '.join(map(repr, self.values))})"


@dataclass(frozen=True)
class Integers:
    """Whole numbers from ``low`` to ``high``, both among them."""

    low: int
    high: int

    @property
    def size(self) -> float:
        return self.high - self.low + 1

    def at(self, point: float) -> Value:
        return self.low + int(point * (self.high - self.low + 1))

    def __str__(self) -> str:
        return f"integers({self.low}, {self.high})"


@dataclass(frozen=True)
class Uniform:
    """Numbers from ``low`` to ``high``; on a logarithmic scale where ``log`` is set."""

    low: float
    high: float
    log: bool = False

    @property
    def size(self) -> float:
        return math.inf

    def at(self, point: float) -> Value:
        if self.log:
            drawn = math.exp(math.log(self.low) + point * (math.log(self.high) - math.log(self.low)))
        else:
            drawn = self.low + point * (self.high - self.low)
        return min(max(float(f"{drawn:.{_DIGITS}g}"), self.low), self.high)

    def __str__(self) -> str:
        return f"{'log_uniform' if self.log else 'uniform'}({self.low:g}, {self.high:g})"


def choice(*values: Any) -> Choice:
    """One of ``values``, each as likely as the others.

    Raises:
        UsageError: there are none, one is there twice, or one is no text, boolean or finite number.
    """
    return Choice(checked_list(values, "choice(…)"))


def integers(low: int, high: int) -> Integers:
    """Whole numbers from ``low`` to ``high``, both among them, each as likely as the others."""
    first, last = _bounds(low, high, "integers")
    if not isinstance(first, int) or not isinstance(last, int):
        raise UsageError(f"integers({low}, {high}): its bounds are whole numbers; use uniform(…) for others")
    return Integers(first, last)


def uniform(low: float, high: float) -> Uniform:
    """Numbers from ``low`` to ``high``, rounded to four significant digits."""
    first, last = _bounds(low, high, "uniform")
    return Uniform(float(first), float(last))


def log_uniform(low: float, high: float) -> Uniform:
    """Numbers from ``low`` to ``high``, each order of magnitude as likely as the others; for learning rates."""
    first, last = _bounds(low, high, "log_uniform")
    if first <= 0:
        raise UsageError(f"log_uniform({low}, {high}): a logarithmic scale begins above 0")
    return Uniform(float(first), float(last), log=True)


def _bounds(low: Any, high: Any, name: str) -> tuple[int | float, int | float]:
    where = f"{name}({low}, {high}): a bound"
    first, last = checked(low, where), checked(high, where)
    if isinstance(first, str | bool) or isinstance(last, str | bool):
        raise UsageError(f"{name}({low!r}, {high!r}): its bounds are numbers")
    if first >= last:
        raise UsageError(f"{name}({low}, {high}): nothing lies between its bounds; the lower one comes first")
    return first, last
