"""How much of its time a training can use at best, if failures come by chance and everything since a save is lost.

Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (2006), equation 20:
the exact expectation for failures of a Poisson process. J. W. Young's interval (1974) is its first order.
"""

import math
from typing import NamedTuple


class Optimum(NamedTuple):
    interval: float
    """Seconds of training from one save to the next."""
    share: float
    """Useful time over all time."""


def share(interval: float, stall: float, restart: float, mtbf: float) -> float:
    """Useful share of the time with a save after each ``interval`` seconds of training, which it waits ``stall`` for.

    ``restart`` is the time from a failure to the first step, in which it can fail, too; all in seconds.
    """
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + stall) / mtbf))


def optimum(stall: float, restart: float, mtbf: float, shortest: float) -> Optimum:
    """The best of all intervals from ``shortest`` on, which is one step."""
    candidates = [shortest * 1.01**n for n in range(1500) if shortest * 1.01**n < 10 * mtbf]
    best = max(candidates, key=lambda interval: share(interval, stall, restart, mtbf))
    return Optimum(best, share(best, stall, restart, mtbf))


def young(stall: float, mtbf: float) -> float:
    """Young's interval."""
    return math.sqrt(2 * stall * mtbf)
