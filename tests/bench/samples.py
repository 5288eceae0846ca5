"""Repeated measurements: rounds in turns with a baseline, medians with their spread, ratios, bounds of rates.

A benchmark compares Tiphys with a baseline of the same run: a memcpy, one SHA-256 pass, a plain loop over the same
requests. `interleaved` measures all of them in turns, and `ratio` divides round by round. So a machine that is slower
than another, or slower in some rounds, changes times but hardly a ratio:

    times = interleaved({"save": stall_seconds, "memcpy": copy.seconds}, rounds=7)
    stall = ratio(times["save"], times["memcpy"])
    # {"median": 0.33, "quartiles": [0.32, 0.35], "range": [0.3, 0.4], "samples": [...]}

Aims are stated on medians of ratios (`bench.aims`). What the machine did meanwhile is told by `bench.machine`.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Z_95 = 1.96


def interleaved(measurements: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Take every measurement once per round; every second round takes them in reverse order.

    Args:
        measurements: By name, a call that returns what was measured; `seconds` measures any call.
        rounds: Number of rounds.

    Returns:
        By name, what was measured in each round.
    """
    found: dict[str, list[float]] = {name: [] for name in measurements}
    for number in range(rounds):
        names = list(measurements)
        for name in reversed(names) if number % 2 else names:
            found[name].append(measurements[name]())
    return found


def seconds(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """What a call takes, by a clock of seconds; `time.process_time` counts CPU time in its place."""
    before = clock()
    call()
    return clock() - before


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and range of measurements; the measurements themselves, in their order."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return {
        "median": significant(statistics.median(values)),
        "quartiles": [significant(low), significant(high)],
        "range": [significant(min(values)), significant(max(values))],
        "samples": [significant(value) for value in values],
    }


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """`summary` of the quotients of each round.

    Raises:
        ValueError: they are not of the same rounds.
    """
    return summary([one / other for one, other in zip(above, below, strict=True)])


def median_of(value: Mapping[str, Any] | float) -> float:
    """The median of a `summary`; a plain number is its own."""
    return float(value["median"] if isinstance(value, Mapping) else value)


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank: a value that was measured, to four digits."""
    ordered = sorted(values)
    return significant(ordered[max(1, math.ceil(len(ordered) * percent / 100)) - 1])


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
