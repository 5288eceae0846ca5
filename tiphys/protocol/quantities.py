"""Amounts of memory as Kubernetes writes them: ``8Gi``, ``512M``, ``1.5e9``.

Argo's durations: ``10s``, ``1h30m``, or a bare number of seconds.
"""

import math
import re

from tiphys.errors import UsageError

_MEMORY_UNITS: dict[str, int] = {
    **{unit: 1024 ** (power + 1) for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"))},
    **{unit: 1000 ** (power + 1) for power, unit in enumerate(("k", "M", "G", "T", "P"))},
    "": 1,
}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*([KMGTP]i|[kMGTP]|)")
_MI = _MEMORY_UNITS["Mi"]


def memory_bytes(text: str | int, where: str) -> int:
    """Whole bytes of a quantity; ``where`` begins the message of the `UsageError` for what is none."""
    found = _AMOUNT.fullmatch(str(text).strip())
    if found is None or float(found[1]) == 0:
        raise UsageError(f"{where}: {text!r} is not an amount of memory; write it like 8Gi or 512M")
    return math.ceil(float(found[1]) * _MEMORY_UNITS[found[2]])


def memory_quantity(size_bytes: int) -> str:
    """At least ``size_bytes``, in whole Mi, or in Gi where that is exact."""
    size_mi = math.ceil(size_bytes / _MI)
    return f"{size_mi // 1024}Gi" if size_mi % 1024 == 0 else f"{size_mi}Mi"


_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def seconds(text: str) -> float:
    """Seconds that ``text`` stands for.

    Raises:
        UsageError: it is not a duration.
    """
    stripped = text.strip()
    if re.fullmatch(r"\d+", stripped):
        return float(stripped)
    if not stripped or _PART.sub("", stripped):
        raise UsageError(f"{text!r} is not a duration; write for example 10s, 5m or 1h30m")
    return sum(float(number) * _DURATION_UNITS[unit] for number, unit in _PART.findall(stripped))
