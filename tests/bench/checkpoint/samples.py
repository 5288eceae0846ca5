"""What becomes of repeated measurements: medians with their spread, rates with their bound. Pure."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

Z_95 = 1.96


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and range of measurements; the measurements themselves, in their order."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {
        "median": significant(statistics.median(values)),
        "quartiles": [significant(low), significant(high)],
        "range": [significant(min(values)), significant(max(values))],
        "samples": [significant(value) for value in values],
    }


def ratio(above: dict[str, Any], below: dict[str, Any]) -> float:
    """Quotient of two medians of `summary`."""
    return significant(above["median"] / below["median"])


def significant(value: float, digits: int = 4) -> float:
    """``value`` with so many significant digits; what is beyond them was not measured."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, digits - 1 - math.floor(math.log10(abs(value))))


def wilson_lower(successes: int, trials: int, z: float = Z_95) -> float:
    """Lower end of Wilson's interval: what the rate is at least, if the trials are all that is known.

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference" (1927).
    """
    if trials == 0:
        return 0.0
    share = successes / trials
    middle = share + z * z / (2 * trials)
    width = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, (middle - width) / (1 + z * z / trials))
