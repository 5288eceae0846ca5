"""Amounts of memory as Kubernetes writes them: ``8Gi``, ``512M``, ``1.5e9``."""

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
