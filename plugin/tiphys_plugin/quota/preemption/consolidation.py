"""Finds trainings that stand in the way of a request: their nodes together would have room for it.

Best-fit placement keeps nodes free, but trainings end in any order. After some time
each node has a few idle GPUs, and a request for a whole node waits although twice as
many GPUs are idle. If the trainings of one node move to the idle GPUs of the others,
it starts. The descheduler of Kubernetes and the consolidation of Karpenter move pods
likewise; here they save a checkpoint first.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from tiphys_plugin.quota.lease import Lease

_MAX_TRIED_NODES = 200
"""Most nodes that are tried, those with the fewest GPUs to vacate first."""


def vacate_nodes(
    leases: Sequence[Lease], fits_without: Callable[[Sequence[Lease]], bool]
) -> Iterator[tuple[Lease, ...]]:
    """Minimal sets of ``leases`` without which the request fits, those that hold the fewest GPUs first.

    Each is on one node; if no node is enough, there is at most one set, of several nodes.

    Args:
        leases: Leases that may end or move.
        fits_without: Whether the request fits without these leases.
    """
    by_node: defaultdict[str, list[Lease]] = defaultdict(list)
    for lease in leases:
        for node in set(lease.nodes):
            by_node[node].append(lease)
    nodes = sorted(by_node.values(), key=_sum_gpus)[:_MAX_TRIED_NODES]
    sufficient = [one for one in nodes if fits_without(one)] or _join_nodes(nodes, fits_without)
    minimal = [_drop_needless(one, fits_without) for one in sufficient]
    yield from sorted(minimal, key=_sum_gpus)


def _join_nodes(
    nodes: Sequence[Sequence[Lease]], fits_without: Callable[[Sequence[Lease]], bool]
) -> list[Sequence[Lease]]:
    """The leases of the first nodes that are enough together; nothing if all are not enough."""
    joined: dict[str, Lease] = {}
    for leases in nodes:
        joined |= {one.id: one for one in leases}
        if fits_without(tuple(joined.values())):
            return [tuple(joined.values())]
    return []


def _drop_needless(leases: Sequence[Lease], fits_without: Callable[[Sequence[Lease]], bool]) -> tuple[Lease, ...]:
    """The leases without those that need not go, the largest first."""
    needed = list(leases)
    for lease in sorted(leases, key=lambda one: (-one.request.gpus, one.id)):
        rest = [other for other in needed if other is not lease]
        if rest and fits_without(rest):
            needed = rest
    return tuple(needed)


def _sum_gpus(leases: Sequence[Lease]) -> int:
    return sum(one.request.gpus for one in leases)
