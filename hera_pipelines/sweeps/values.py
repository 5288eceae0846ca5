"""Which values a parameter can have, and when two of them are the same trial."""

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

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
