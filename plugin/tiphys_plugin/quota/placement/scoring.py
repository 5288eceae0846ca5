"""Placement policies: which of the nodes that fit a pod it takes.

A `PlacementScorer` scores the free capacity before and after a placement; the
smallest score wins. `best_fit` leaves the fewest free GPUs. `FragmentationScorer`
implements least fragmentation (FGD): Q. Weng et al., "Beware of Fragmentation:
Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent", ATC 2023.

A request that several GPU types may serve must not take GPUs for which others have
no substitute. So both policies know how much is typically asked for each type
(`compute_relative_demand`), and prefer the types that are wanted least.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Literal, NamedTuple, Protocol

from pydantic import Field

from tiphys_plugin.quota.placement.model import (
    WHOLE_GPU,
    NodeFreeCapacity,
    PodRequest,
    can_fit_pod,
    has_matching_gpus,
    list_shareable_devices,
    subtract_pod,
)

PlacementScore = tuple[float, ...]


class PlacementScorer(Protocol):
    """Scores a placement that changes the free capacity of a node from ``before`` to ``after``; smaller is better."""

    def __call__(self, before: NodeFreeCapacity, after: NodeFreeCapacity, /) -> PlacementScore: ...


class ScoredCapacity(NamedTuple):
    """A free capacity that fits, its score, and the free thousandths of the GPU for a share."""

    score: PlacementScore
    capacity: NodeFreeCapacity
    device_free_milli: int


class PlacementPolicy:
    """Chooses among free capacities by a scorer. Scores are cached by request and free capacity."""

    _CACHE_SIZE = 1000
    """Most distinct requests in the cache; a bound, because requests come from users."""

    def __init__(self, scorer: PlacementScorer) -> None:
        self._scorer = scorer
        self._score_caches: dict[PodRequest, _ScoreCache] = {}

    def choose_capacity(self, capacities: Iterable[NodeFreeCapacity], pod: PodRequest) -> ScoredCapacity | None:
        """The best capacity that fits; None if none fits. The capacity itself breaks ties between equal scores."""
        scores = self._score_caches.get(pod)
        if scores is None:
            if len(self._score_caches) >= self._CACHE_SIZE:
                self._score_caches.clear()
            scores = self._score_caches[pod] = _ScoreCache(self._scorer, pod)
        best = min(map(scores.__getitem__, capacities), default=_NO_FIT)
        return None if best is _NO_FIT else best


_NO_FIT = ScoredCapacity((math.inf,), NodeFreeCapacity("", 0, 0, (), 0, 0), 0)


class _ScoreCache(dict[NodeFreeCapacity, ScoredCapacity]):
    def __init__(self, scorer: PlacementScorer, pod: PodRequest) -> None:
        self._scorer = scorer
        self._pod = pod

    def __missing__(self, capacity: NodeFreeCapacity) -> ScoredCapacity:
        scored = self[capacity] = self._best_score(capacity) if can_fit_pod(capacity, self._pod) else _NO_FIT
        return scored

    def _best_score(self, capacity: NodeFreeCapacity) -> ScoredCapacity:
        devices = list_shareable_devices(capacity, self._pod) if self._pod.is_fractional else [WHOLE_GPU]
        scores = ((self._scorer(capacity, subtract_pod(capacity, self._pod, device)), device) for device in devices)
        score, device = min(scores)
        return ScoredCapacity(score, capacity, device)


def best_fit(_before: NodeFreeCapacity, after: NodeFreeCapacity) -> PlacementScore:
    """Scorer: fewest free GPUs, then least GPU memory, then a GPU that is shared already, then fewest free CPUs."""
    return after.free_gpu_milli, after.gpu_memory_mb, -after.free_gpus, after.cpu_milli


def compute_relative_demand(typical: Mapping[PodRequest, float], stock: Mapping[str, int]) -> dict[str, float]:
    """Typical demand for a GPU of each type in ``stock``, relative to the mean over all GPUs.

    It is 1 for each type if no request names types. A request asks for all types that may serve it, in proportion to
    their GPUs.
    """
    demand: defaultdict[str, float] = defaultdict(float)
    existing = {gpu_type: gpus for gpu_type, gpus in stock.items() if gpus}
    for pod, frequency in typical.items():
        accepted = [gpu_type for gpu_type in existing if pod.gpus and pod.accepts_type(gpu_type)]
        for gpu_type in accepted:
            demand[gpu_type] += frequency * pod.gpus * pod.gpu_milli / sum(map(existing.__getitem__, accepted))
    total = sum(demand[gpu_type] * gpus for gpu_type, gpus in existing.items())
    mean = total / sum(existing.values()) if total else 1.0
    return {gpu_type: round(demand[gpu_type] / mean, _DEMAND_DIGITS) for gpu_type in existing} if total else {}


_DEMAND_DIGITS = 6
"""Equal demands stay equal beside the rounding of sums."""


class BestFitScorer:
    """Scorer: the GPU type that is wanted least, then `best_fit`."""

    def __init__(self, typical: Mapping[PodRequest, float], stock: Mapping[str, int]) -> None:
        self._demand = compute_relative_demand(typical, stock)

    def __call__(self, before: NodeFreeCapacity, after: NodeFreeCapacity, /) -> PlacementScore:
        return self._demand.get(before.gpu_type, 1.0), *best_fit(before, after)


_SIGNIFICANT_GROWTH_MILLI = WHOLE_GPU / 10
"""Differences in fragmentation below this are ignored: it is an estimate, and best fit decides better there."""
_ROUNDING_TOLERANCE = 1e-9
"""Keeps rounded sums of floats that should be zero from being negative."""


class FragmentationScorer:
    """Scorer: least growth of the expected fragmentation for typical requests.

    A free GPU is fragmented for a request that cannot use it: every GPU of a node
    that does not fit the request, and on other nodes each GPU with less free than
    the request needs. The expected fragmentation is the mean over the ``typical``
    requests, weighted by their frequency. The paper (see module) compares the growth
    exactly; this scorer compares tenths of a GPU, and best fit breaks ties.

    ``stock`` are the existing GPUs by type. A GPU of a type for which more is asked than for the mean of all counts
    as a growth, too: by the demand for it beyond that mean, or less if the demand is below it.
    """

    def __init__(self, typical: Mapping[PodRequest, float], stock: Mapping[str, int]) -> None:
        self._demand = compute_relative_demand(typical, stock)
        total = sum(typical.values())
        by_cpu = sorted(typical.items(), key=lambda item: item[0].cpu_milli)
        self._typical = [(pod, frequency / total) for pod, frequency in by_cpu]
        self._cpu = [pod.cpu_milli for pod, _ in self._typical]
        self._tables: dict[tuple[object, ...], list[float]] = {}

    def __call__(self, before: NodeFreeCapacity, after: NodeFreeCapacity, /) -> PlacementScore:
        growth = self.expected_fragmentation_milli(after) - self.expected_fragmentation_milli(before)
        excess_demand = self._demand.get(before.gpu_type, 1.0) - 1.0
        price = excess_demand * (before.free_gpu_milli - after.free_gpu_milli) / _SIGNIFICANT_GROWTH_MILLI
        tenths = math.floor(growth / _SIGNIFICANT_GROWTH_MILLI + _ROUNDING_TOLERANCE)
        return tenths + price, *best_fit(before, after)

    def expected_fragmentation_milli(self, capacity: NodeFreeCapacity) -> float:
        """Expected free thousandths of GPUs that a typical request cannot use."""
        gpus = capacity[:4]
        if (table := self._tables.get(gpus)) is None:
            table = self._tables[gpus] = self._table(capacity)
        return table[bisect_right(self._cpu, capacity.cpu_milli)]

    def _table(self, capacity: NodeFreeCapacity) -> list[float]:
        """Expected fragmentation if the CPUs suffice for no typical request, for the first, for the first two etc."""
        expected = [float(capacity.free_gpu_milli)]
        for pod, probability in self._typical:
            expected.append(expected[-1] - probability * _usable_milli(capacity, pod))
        return expected


def _usable_milli(capacity: NodeFreeCapacity, pod: PodRequest) -> int:
    """Free thousandths of GPUs that ``pod`` can use, regardless of CPUs."""
    if pod.gpus == 0 or not has_matching_gpus(capacity, pod):
        return 0
    if not pod.is_fractional:
        return WHOLE_GPU * capacity.free_gpus if capacity.free_gpus >= pod.gpus else 0
    return WHOLE_GPU * max(0, capacity.free_gpus) + sum(
        part for part in capacity.shared_gpu_free_milli if part >= pod.gpu_milli
    )


TypicalGpus = Annotated[str, Field(max_length=1024, pattern=r"^[1-9][0-9]{0,3} [^ |]+(\|[^ |]+)*$")]
"""Number of GPUs and the types of which any will do: ``8 H100|A100``."""


def build_placement_policy(
    name: Literal["best-fit", "fragmentation"],
    typical_gpus: Mapping[int | str, float],
    stock: Mapping[str, int],
    kinds_of: Callable[[str], Iterable[str]],
) -> PlacementPolicy:
    """The policy of a queue file.

    ``typical_gpus`` has the frequency of requests for a number of GPUs, or for `TypicalGpus`; ``stock`` the existing
    GPUs by kind; ``kinds_of`` returns the GPU kinds of a type.
    """
    typical: defaultdict[PodRequest, float] = defaultdict(float)
    for gpus, weight in typical_gpus.items():
        typical[_parse_typical_request(gpus, kinds_of)] += weight
    scorer = FragmentationScorer if name == "fragmentation" and typical else BestFitScorer
    return PlacementPolicy(scorer(typical, stock))


def _parse_typical_request(gpus: int | str, kinds_of: Callable[[str], Iterable[str]]) -> PodRequest:
    if isinstance(gpus, int):
        return PodRequest(gpus)
    number, _, types = gpus.partition(" ")
    kinds = dict.fromkeys(kind for gpu_type in types.split("|") for kind in kinds_of(gpu_type))
    return PodRequest(int(number), gpu_types=tuple(sorted(kinds)))
