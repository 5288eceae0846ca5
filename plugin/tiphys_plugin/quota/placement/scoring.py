"""Where a request breaks up least of what others will want: the measure of the policy ``fragmentation``.

Which of the nodes that fit a request should be taken. The smaller rank goes first.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol

from tiphys_plugin.quota.placement.model import WHOLE_GPU, Ask, Hole, devices, fits, less, suits

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


_NOTICED = WHOLE_GPU / 10
"""Growth of fragmentation that matters. It is an estimate, and below a tenth of a GPU best fit knows better."""
_NEARLY_ALL = 0.95
_ROUNDING = 1e-9
"""So that sums of floats which should be zero are not below it."""


class Fragmentation:
    """Where the expected fragmentation grows least, for requests as they usually come.

    A GPU is fragmented for a request that cannot use it: all of a node that
    does not fit the request, and of a node that does, the GPUs of which less is
    free than the request needs of each. What is expected is the mean over
    ``typical`` requests. Source: Q. Weng et al., "Beware of Fragmentation:
    Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent", ATC 2023.
    There the growth is compared exactly; here in tenths of a GPU, and best fit
    decides between equals.
    """

    def __init__(self, typical: Mapping[Ask, float]) -> None:
        everything = sum(typical.values())
        usual = sorted(typical.items(), key=lambda item: item[0].cpu_milli)
        self._typical = [(ask, share / everything) for ask, share in usual]
        self._cpu = [ask.cpu_milli for ask, _ in self._typical]
        self._tables: dict[tuple[object, ...], list[float]] = {}

    def __call__(self, before: Hole, left: Hole, /) -> Rank:
        growth = self.expected(left) - self.expected(before)
        return math.floor(growth / _NOTICED + _ROUNDING), *best_fit(before, left)

    def expected(self, hole: Hole) -> float:
        """Thousandths of GPUs that the typical request could not use."""
        gpus = hole[:4]
        if (table := self._tables.get(gpus)) is None:
            table = self._tables[gpus] = self._table(hole)
        return table[bisect_right(self._cpu, hole.cpu_milli)]

    def _table(self, hole: Hole) -> list[float]:
        """What is expected if the CPUs are enough for none of the typical requests, for the first, and so on."""
        expected = [float(hole.milli)]
        for ask, share in self._typical:
            expected.append(expected[-1] - share * _usable(hole, ask))
        return expected


def _usable(hole: Hole, ask: Ask) -> int:
    """Thousandths of the free GPUs that are of use to ``ask``, however many CPUs there are."""
    if ask.gpus == 0 or not suits(hole, ask):
        return 0
    if not ask.is_share:
        return WHOLE_GPU * hole.whole if hole.whole >= ask.gpus else 0
    return WHOLE_GPU * max(0, hole.whole) + sum(part for part in hole.parts if part >= ask.gpu_milli)


def typical(asks: Iterable[Ask]) -> dict[Ask, float]:
    """What is usually asked for: the most frequent of ``asks``, so many of them that they are nearly all."""
    counts = Counter(replace(ask, host_memory_mb=0) for ask in asks)
    usual: dict[Ask, float] = {}
    for ask, times in counts.most_common():
        if sum(usual.values()) >= _NEARLY_ALL * counts.total():
            break
        usual[ask] = times
    return usual
