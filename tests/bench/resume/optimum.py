"""How much of its time a training can use at best, if failures come by chance and all since the last save is lost."""

from typing import NamedTuple

from tiphys.checkpoint.save.interval import lost_share


class Optimum(NamedTuple):
    interval: float
    """Seconds of training from one save to the next."""
    share: float
    """Useful time over all time."""


def optimum(stall: float, restart: float, mtbf: float, shortest: float) -> Optimum:
    """The best of all intervals from ``shortest`` on, which is one step; all in seconds.

    The product's own choice (`tiphys.checkpoint.save.interval.daly_interval_seconds`) solves an
    approximation; here the exact expectation is searched.
    """
    candidates = [shortest * 1.01**n for n in range(1500) if shortest * 1.01**n < 10 * mtbf]
    least, best = min((lost_share(interval, stall, restart, mtbf), interval) for interval in candidates)
    return Optimum(best, 1 / (1 + least))
