"""Where the marks of an axis stand, at numbers that a person would choose."""

import math

_TIMES = (
    (1, "s"), (5, "s"), (15, "s"), (60, "m"), (300, "m"), (900, "m"), (3600, "h"), (3 * 3600, "h"), (6 * 3600, "h"),
    (12 * 3600, "h"),
)  # fmt: skip
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DAY = 86400


def top_of(most: float) -> float:
    """The end of an axis from 0 that holds ``most``: 1, 2, 4, 5 or 8 times a power of ten."""
    if most <= 1:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(power * step for step in (1, 2, 4, 5, 8, 10) if power * step >= most)


def time_marks(seconds: float, most: int = 8) -> list[tuple[float, str]]:
    """At most ``most`` marks after 0, as seconds and label."""
    step, unit = next(((step, unit) for step, unit in _TIMES if seconds / step <= most), (_days(seconds, most), "d"))
    return [(n * step, f"{n * step / _UNITS[unit]:g}{unit}") for n in range(1, int(seconds / step) + 1)]


def _days(seconds: float, most: int) -> int:
    """The step in seconds: a number of days that is 1, 2 or 5 times a power of ten."""
    power: int = 10 ** max(0, math.floor(math.log10(max(1.0, seconds / _DAY / most))))
    return next(_DAY * power * step for step in (1, 2, 5, 10) if seconds / (_DAY * power * step) <= most)
