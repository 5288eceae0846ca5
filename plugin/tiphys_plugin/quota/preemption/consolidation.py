"""Finds trainings that stand in the way of a request: their nodes together would have room for it.

Best-fit placement keeps nodes free, but trainings end in any order. After some time
each node has a few idle GPUs, and a request for a whole node waits although twice as
many GPUs are idle. If the trainings of one node move to the idle GPUs of the others,
it starts. The descheduler of Kubernetes and the consolidation of Karpenter move pods
likewise; here they save a checkpoint first.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tiphys_plugin.quota.lease import Lease

_MAX_TRIED_NODES = 200
"""Most nodes that are tried, those with the fewest GPUs to vacate first."""
_MAX_JOINED = 128
"""Most leases on the nodes that are tried together."""


def vacate_nodes(
    leases: Sequence[Lease],
    fits_without: Callable[[Sequence[Lease]], bool],
    has_room_on: Callable[[str, Sequence[Lease]], bool],
) -> Iterator[tuple[Lease, ...]]:
    """Minimal sets of ``leases`` without which the request fits, first of nodes that have few GPUs to vacate.

    Each is on one node; if no node is enough, there is at most one set, of several nodes.

    ``fits_without`` tells whether the request fits without some leases, ``has_room_on`` whether a node then has room
    for one member of it.
    """
    by_node: defaultdict[str, list[Lease]] = defaultdict(list)
    for lease in leases:
        for node in set(lease.nodes):
            by_node[node].append(lease)
    nodes = sorted((some for node, some in by_node.items() if has_room_on(node, some)), key=_sum_gpus)
    nodes = nodes[:_MAX_TRIED_NODES]
    sufficient = False
    for node_leases in nodes:
        if fits_without(node_leases):
            sufficient = True
            yield drop_needless(node_leases, _largest_first, fits_without)
    if not sufficient and (joined := _join_nodes(nodes, fits_without)):
        yield drop_needless(joined, _largest_first, fits_without)


def _join_nodes(nodes: Sequence[Sequence[Lease]], fits_without: Callable[[Sequence[Lease]], bool]) -> tuple[Lease, ...]:
    """The leases of the first nodes that are enough together; none if there is no such set."""
    joined: dict[str, Lease] = {}
    for leases in nodes:
        joined |= {lease.id: lease for lease in leases}
        if len(joined) > _MAX_JOINED:
            break
        if fits_without(tuple(joined.values())):
            return tuple(joined.values())
    return ()


def drop_needless(
    leases: Sequence[Lease], order: Callable[[Lease], Any], fits_without: Callable[[Sequence[Lease]], bool]
) -> tuple[Lease, ...]:
    """The leases without those that need not go; each is tried in turn, sorted by ``order``."""
    needed = list(leases)
    for lease in sorted(leases, key=order):
        rest = [other for other in needed if other is not lease]
        if rest and fits_without(rest):
            needed = rest
    return tuple(needed)


def _largest_first(lease: Lease) -> tuple[int, str]:
    return -lease.request.gpus, lease.id


def _sum_gpus(leases: Sequence[Lease]) -> int:
    return sum(lease.request.gpus for lease in leases)
