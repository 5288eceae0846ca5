"""How much of its time a training can use at best, if failures come by chance and all since the last save is lost."""

import math
from typing import NamedTuple


class Optimum(NamedTuple):
    interval: float
    """Seconds of training from one save to the next."""
    share: float
    """Useful time over all time."""


def lost_share(interval_seconds: float, cost_seconds: float, restart_seconds: float, mtbf_seconds: float) -> float:
    """Return the time lost to saves, restarts and repeated work as a share of useful time (Daly 2006, equation 20)."""
    if interval_seconds == 0:  # the limit: saves that cost nothing lose nothing but the restarts
        return math.inf if cost_seconds else math.expm1(restart_seconds / mtbf_seconds)
    exponent = (interval_seconds + cost_seconds) / mtbf_seconds
    if exponent + restart_seconds / mtbf_seconds > 500:  # beyond what a float holds
        return math.inf
    factor = mtbf_seconds / interval_seconds * math.exp(restart_seconds / mtbf_seconds)
    return factor * math.expm1(exponent) - 1


def optimum(stall: float, restart: float, mtbf: float, shortest: float) -> Optimum:
    """The best of all intervals from ``shortest`` on, which is one step; all in seconds.

    The product's own choice (`tiphys.checkpoint.save.interval.daly_interval_seconds`) solves an
    approximation; here the exact expectation is searched.
    """
    candidates = [shortest * 1.01**n for n in range(1500) if shortest * 1.01**n < 10 * mtbf]
    least, best = min((lost_share(interval, stall, restart, mtbf), interval) for interval in candidates)
    return Optimum(best, 1 / (1 + least))
