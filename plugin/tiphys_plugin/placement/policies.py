"""Which of the nodes that fit a request should be taken. The smaller rank goes first."""

import math
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from tiphys_plugin.placement.hole import Hole, devices, fits, less
from tiphys_plugin.placement.request import WHOLE_GPU, Ask

Rank = tuple[float, ...]


class Measure(Protocol):
    """How bad it is to leave ``left`` of ``before``."""

    def __call__(self, before: Hole, left: Hole, /) -> Rank: ...


class Pick(NamedTuple):
    """A hole that fits, its rank, and what is free of the GPU that a share of it should come from."""

    rank: Rank
    hole: Hole
    device_milli: int


class Policy:
    """Compares holes by a measure. What was found for a hole and a request is remembered."""

    _REMEMBERED = 1000
    """Different requests; whoever invents new ones all the time is not remembered for ever."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._picks: dict[Ask, _Picks] = {}

    def choose(self, holes: Iterable[Hole], ask: Ask) -> Pick | None:
        """The best of those that fit; None if none does. Equal ones are told apart by the hole itself."""
        picks = self._picks.get(ask)
        if picks is None:
            if len(self._picks) >= self._REMEMBERED:
                self._picks.clear()
            picks = self._picks[ask] = _Picks(self._measure, ask)
        best = min(map(picks.__getitem__, holes), default=_FULL)
        return None if best is _FULL else best


_FULL = Pick((math.inf,), Hole("", 0, 0, (), 0, 0), 0)


class _Picks(dict[Hole, Pick]):
    def __init__(self, measure: Measure, ask: Ask) -> None:
        self._measure = measure
        self._ask = ask

    def __missing__(self, hole: Hole) -> Pick:
        found = self[hole] = self._best(hole) if fits(hole, self._ask) else _FULL
        return found

    def _best(self, hole: Hole) -> Pick:
        choices = devices(hole, self._ask) if self._ask.is_share else [WHOLE_GPU]
        ranks = ((self._measure(hole, less(hole, self._ask, device)), device) for device in choices)
        rank, device = min(ranks)
        return Pick(rank, hole, device)


def best_fit(_before: Hole, left: Hole) -> Rank:
    """Fewest GPUs left on the node, then least memory of each GPU, then no new GPU for a share, then least CPU."""
    return left.milli, left.gpu_memory_mb, -left.whole, left.cpu_milli
