"""What a random search draws from: a point between 0 and 1 becomes a value.

Which values a parameter can have, and when two of them are the same trial.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol

from tiphys.errors import UsageError
from tiphys.records import canonical_json, item_hash

_LARGEST = 2**63 - 1

Value = str | bool | int | float
"""A parameter of Argo is a text in the end; these have one spelling each."""


def checked(value: Any, where: str) -> Value:
    """``value`` as JSON has it, also where numpy made it; ``where`` begins the message of the error.

    Raises:
        UsageError: it is no text, boolean or finite number.
    """
    if isinstance(value, str):
        if "{{" in value:
            raise UsageError(f"{where} cannot be {value!r}: Argo would take the braces for a tag of its own")
        return value
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        if abs(int(value)) > _LARGEST:
            raise UsageError(f"{where} cannot be {value}: Kubernetes keeps no whole number of that size; write a text")
        return int(value)
    if isinstance(value, Real):
        if not math.isfinite(value):
            raise UsageError(f"{where} cannot be {value}: no program could be told apart by it; give a finite number")
        return float(value)
    raise UsageError(
        f"{where} cannot be {value!r}: trials are told apart by numbers, texts and booleans; "
        "write a list as a text, such as '64,64'"
    )


def checked_list(values: Any, where: str) -> tuple[Value, ...]:
    """All of ``values``, in their order; `UsageError` if there are none, or one is there twice."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UsageError(f"{where} is {values!r}, which is no list of values; write [{values!r}]")
    found = tuple(checked(value, where) for value in values)
    if not found:
        raise UsageError(f"{where} has no values, so there would be no trials; give at least one")
    seen: set[str] = set()
    for value in found:
        if (kind := identity(value)) in seen:
            raise UsageError(f"{where} has {value!r} twice; each trial runs once, so drop one")
        seen.add(kind)
    return found


def identity(item: Any) -> str:
    """Equal for what a run would take for the same item: ``1`` and ``1.0`` are."""
    return item_hash(canonical_json(item).decode())


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
