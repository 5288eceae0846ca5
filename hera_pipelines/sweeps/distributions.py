"""Distributions for a random search, and the values that a swept parameter may have.

A distribution maps a point between 0 and 1 to a value, so that the search alone
decides about random numbers. `value_identity` decides if two values make the
same trial.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol

from tiphys.errors import UsageError
from tiphys.records import canonical_json, item_hash

_MAX_INTEGER = 2**63 - 1

SweepValue = str | bool | int | float
"""Types with exactly one spelling as text, which Argo makes of every parameter."""


def validate_value(value: Any, where: str) -> SweepValue:
    """Convert ``value`` to a type of JSON, also from types of numpy.

    Raises:
        UsageError: ``value`` is not a text, boolean or finite number.
    """
    if isinstance(value, str):
        if "{{" in value:
            raise UsageError(
                f"{where} cannot be {value!r}: Argo would replace the braces as a tag; use a text without them"
            )
        return value
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        if abs(int(value)) > _MAX_INTEGER:
            raise UsageError(f"{where} cannot be {value}: Kubernetes stores no whole number of that size; write a text")
        return int(value)
    if isinstance(value, Real):
        if not math.isfinite(value):
            raise UsageError(f"{where} cannot be {value}, which has no number in JSON; give a finite number")
        return float(value)
    raise UsageError(
        f"{where} cannot be {value!r}: the values of trials are numbers, texts and booleans; "
        "write a list as a text, such as '64,64'"
    )


def validate_values(values: Any, where: str) -> tuple[SweepValue, ...]:
    """Validate all of ``values``, and return them in their order.

    Raises:
        UsageError: there are no values, one occurs twice, or one is not valid.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UsageError(f"{where} is {values!r}, which is not a list of values; write [{values!r}]")
    validated = tuple(validate_value(value, where) for value in values)
    if not validated:
        raise UsageError(f"{where} has no values, so there would be no trials; give at least one")
    identities: set[str] = set()
    for value in validated:
        if (identity := value_identity(value)) in identities:
            raise UsageError(f"{where} has {value!r} twice; each trial runs once, so drop one")
        identities.add(identity)
    return validated


def value_identity(item: Any) -> str:
    """Hash that is equal for values of the same fan-out item, such as ``1`` and ``1.0``."""
    return item_hash(canonical_json(item).decode())


_SIGNIFICANT_DIGITS = 4
"""Significant digits of a drawn number: short enough for the Argo UI, and precise enough for training."""


class Distribution(Protocol):
    """Maps a point between 0 and 1 to a value of one parameter."""

    @property
    def size(self) -> float:
        """Number of different values; infinite for a continuous distribution."""

    def at(self, point: float) -> SweepValue:
        """Return the value at ``point``, which is at least 0 and below 1."""


@dataclass(frozen=True)
class CategoricalDistribution:
    """One of a few values, all equally likely."""

    values: tuple[SweepValue, ...]

    @property
    def size(self) -> float:
        return len(self.values)

    def at(self, point: float) -> SweepValue:
        return self.values[int(point * len(self.values))]

    def __str__(self) -> str:
        return f"choice({', '.join(map(repr, self.values))})"


@dataclass(frozen=True)
class IntegerDistribution:
    """Whole numbers from ``low`` to ``high``, both included."""

    low: int
    high: int

    @property
    def size(self) -> float:
        return self.high - self.low + 1

    def at(self, point: float) -> SweepValue:
        return self.low + int(point * (self.high - self.low + 1))

    def __str__(self) -> str:
        return f"integers({self.low}, {self.high})"


@dataclass(frozen=True)
class UniformDistribution:
    """Numbers from ``low`` to ``high``, uniform on a logarithmic scale if ``log`` is true."""

    low: float
    high: float
    log: bool = False

    @property
    def size(self) -> float:
        return math.inf

    def at(self, point: float) -> SweepValue:
        if self.log:
            drawn = math.exp(math.log(self.low) + point * (math.log(self.high) - math.log(self.low)))
        else:
            drawn = self.low + point * (self.high - self.low)
        return min(max(float(f"{drawn:.{_SIGNIFICANT_DIGITS}g}"), self.low), self.high)

    def __str__(self) -> str:
        return f"{'log_uniform' if self.log else 'uniform'}({self.low:g}, {self.high:g})"


def choice(*values: Any) -> CategoricalDistribution:
    """One of ``values``, all equally likely.

    Raises:
        UsageError: there are no values, one occurs twice, or one is not a text, boolean or finite number.
    """
    return CategoricalDistribution(validate_values(values, "choice(…)"))


def integers(low: int, high: int) -> IntegerDistribution:
    """Whole numbers from ``low`` to ``high``, both included, all equally likely.

    Raises:
        UsageError: a bound is not a whole number, or ``low`` is not below ``high``.
    """
    first, last = _bounds(low, high, "integers")
    if not isinstance(first, int) or not isinstance(last, int):
        raise UsageError(f"integers({low}, {high}): its bounds are whole numbers; use uniform(…) for others")
    return IntegerDistribution(first, last)


def uniform(low: float, high: float) -> UniformDistribution:
    """Numbers from ``low`` to ``high``, rounded to four significant digits.

    Raises:
        UsageError: a bound is not a number, or ``low`` is not below ``high``.
    """
    first, last = _bounds(low, high, "uniform")
    return UniformDistribution(float(first), float(last))


def log_uniform(low: float, high: float) -> UniformDistribution:
    """Numbers from ``low`` to ``high``, all orders of magnitude equally likely; for learning rates.

    Raises:
        UsageError: a bound is not a number above 0, or ``low`` is not below ``high``.
    """
    first, last = _bounds(low, high, "log_uniform")
    if first <= 0:
        raise UsageError(f"log_uniform({low}, {high}): a logarithmic scale begins above 0")
    return UniformDistribution(float(first), float(last), log=True)


def _bounds(low: Any, high: Any, name: str) -> tuple[int | float, int | float]:
    where = f"{name}({low}, {high}): a bound"
    first, last = validate_value(low, where), validate_value(high, where)
    if isinstance(first, str | bool) or isinstance(last, str | bool):
        raise UsageError(f"{name}({low!r}, {high!r}): its bounds are numbers")
    if first >= last:
        raise UsageError(f"{name}({low}, {high}): nothing lies between its bounds; the lower one comes first")
    return first, last
