"""Eligible pools of a request, the pool of a lease, and existing GPUs: all that leases do not change.

A queue has its quotas by pool: a flavor, a GPU type without flavors, or ``*`` for
all such types that the queue does not name. The GPU kind of a lease is the flavor
or the type of its GPUs, as far as it is known.

A scheduling cycle needs the pool options of thousands of requests, of which few
differ in the fields that decide whether they fit (`RequestShape`). So the options
are computed once for each shape under the same queues, and requests of one shape
share one `PoolOptions` object.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from tiphys.protocol.step_spec import Proximity
from tiphys_plugin.quota.lease import LeaseRequest
from tiphys_plugin.quota.placement.model import GangRequest, PodRequest
from tiphys_plugin.quota.queue import ANY_TYPE, Queue
from tiphys_plugin.quota.queues import QueueRules, Queues

_ELIGIBLE_POOLS_CACHE_SIZE = 4096
"""Most request shapes in a cache of the same queues; a bound, because shapes come from user input."""


def find_eligible_pools(queues: Queues, queue: Queue, request: LeaseRequest) -> list[str]:
    """Pools of ``queue`` that may serve the request: in the order of its flavors, or without flavors by name."""
    if queues.flavors:
        size = request.gpus if request.spot == "avoided" else 0
        key = (queue.name, request.gpu_type, request.gpu_types, request.min_gpu_memory_mb, request.spot, size)
        if (cached := queues.eligible_pools_cache.get(key)) is None:
            if len(queues.eligible_pools_cache) >= _ELIGIBLE_POOLS_CACHE_SIZE:
                queues.eligible_pools_cache.clear()
            cached = queues.eligible_pools_cache[key] = _find_eligible_flavors(queues, queue, request)
        return cached
    if request.gpu_type is None:
        serving = (pool for pool in sorted(queue.gpus) if _may_serve(queues, pool, request))
        return _by_preference(queues, request, serving)
    if request.gpu_type in queue.gpus:
        return [request.gpu_type]
    return [ANY_TYPE] if ANY_TYPE in queue.gpus else []


def _find_eligible_flavors(queues: Queues, queue: Queue, request: LeaseRequest) -> list[str]:
    """Eligible pools of a queue under flavors.

    A request without a GPU type is not served from ``*``: no node selector could keep its pods off the nodes of
    flavors.
    """
    if request.spot == "avoided":
        without_spot = _find_eligible_flavors(queues, queue, replace(request, spot="no"))
        suffices = any(_max_holdable_gpus(queues, queue, request, pool) >= request.gpus for pool in without_spot)
        return without_spot if suffices else _find_eligible_flavors(queues, queue, replace(request, spot="allowed"))
    gpu_type = request.gpu_type
    suitable = [pool for pool in list_pools_in_order(queues, queue) if is_kind_suitable(queues, pool, request)]
    if request.gpu_types:
        return _by_preference(queues, request, suitable)
    if suitable or gpu_type is None or not queues.flavor_set.is_unflavored(gpu_type):
        return suitable
    return [ANY_TYPE] if ANY_TYPE in queue.gpus and gpu_type not in queue.gpus else []


def _by_preference(queues: Queues, request: LeaseRequest, pools: Iterable[str]) -> list[str]:
    """The pools of the types that the request names, its preferred type first and ``*`` last; all if it names none."""
    if not request.gpu_types:
        return list(pools)
    preference = {gpu_type: number for number, gpu_type in enumerate((*request.gpu_types, ANY_TYPE))}
    types = {pool: queues.flavor_set.gpu_type_of(pool) for pool in pools}
    return sorted((pool for pool in types if types[pool] in preference), key=lambda pool: preference[types[pool]])


def _max_holdable_gpus(queues: Queues, queue: Queue, request: LeaseRequest, pool: str) -> float:
    """Most GPUs of a pool that the request could ever hold."""
    return min(queues.max_gpus(queue, pool), count_existing_gpus(queues, request, pool))


def list_pools_in_order(queues: Queues, queue: Queue) -> list[str]:
    """The pools of a queue except ``*``, in the order in which the scheduler tries them."""
    ordered = list(queue.flavor_order)
    return ordered + queues.flavor_set.sort_gpu_kinds(
        pool for pool in queue.gpus if pool != ANY_TYPE and pool not in ordered
    )


def is_kind_suitable(queues: Queues, gpu_kind: str, request: LeaseRequest) -> bool:
    """Whether the request can use GPUs of this kind; undeclared memory counts as enough."""
    flavor = queues.flavor_set.by_name.get(gpu_kind)
    gpu_type = gpu_kind if flavor is None else flavor.gpu_type
    if request.gpu_type not in (None, gpu_type) or (request.gpu_types and gpu_type not in request.gpu_types):
        return False
    if queues.gpu_inventory is not None and gpu_kind not in queues.gpu_inventory:
        return False
    if flavor is not None and not flavor.accepts_spot_use(request.spot):
        return False
    declaration = flavor if queues.gpu_inventory is None else queues.gpu_inventory[gpu_kind]
    memory_mb = None if declaration is None else declaration.memory_mb
    return memory_mb is None or memory_mb >= (request.min_gpu_memory_mb or 0)


def _may_serve(queues: Queues, pool: str, request: LeaseRequest) -> bool:
    """Whether a pool can serve a request without a GPU type: its GPUs exist and have enough memory."""
    return pool == ANY_TYPE or queues.gpu_inventory is None or pool in find_suitable_kinds(queues, request)


def find_suitable_kinds(queues: Queues, request: LeaseRequest) -> list[str]:
    """GPU kinds of the inventory that the request can use."""
    return [kind for kind in queues.gpu_inventory or {} if is_kind_suitable(queues, kind, request)]


def gpu_kind_in_pool(request: LeaseRequest, pool: str) -> str | None:
    """GPU kind that the request would hold in ``pool``; None: any kind."""
    return request.gpu_type if pool == ANY_TYPE else pool


def find_pool_of_request(rules: QueueRules, request: LeaseRequest, chosen_kind: str | None) -> str:
    """Pool of a lease, also of one granted under older queues; ``chosen_kind`` is the granted kind, if known."""
    return find_pool(rules, request.queue, request.gpu_type, chosen_kind)


def find_pool(rules: QueueRules, queue_name: str, gpu_type: str | None, chosen_kind: str | None = None) -> str:
    """Pool of a queue in which a lease counts.

    Args:
        rules: The present queues.
        queue_name: Queue of the lease.
        gpu_type: Requested GPU type; None: any.
        chosen_kind: Granted GPU kind, if known.
    """
    queue = rules.find(queue_name) if isinstance(rules, Queues) else None
    if isinstance(rules, Queues) and queue is not None and rules.flavors:
        return _find_pool_of_kind(rules, queue, find_held_kind(rules, gpu_type, chosen_kind) or ANY_TYPE)
    kind = gpu_type or chosen_kind or ANY_TYPE
    return kind if queue is None or kind in queue.gpus else ANY_TYPE


def _find_pool_of_kind(queues: Queues, queue: Queue, kind: str) -> str:
    """The kind itself; for a flavor that the queue does not name, its first pool of the same GPU type."""
    if kind in queue.gpus:
        return kind
    gpu_type = queues.flavor_set.gpu_type_of(kind)
    same_type = (pool for pool in list_pools_in_order(queues, queue) if queues.flavor_set.gpu_type_of(pool) == gpu_type)
    return next(same_type, ANY_TYPE)


def find_held_kind(queues: Queues, requested_type: str | None, pool: str | None) -> str | None:
    """GPU kind of a lease that was granted under these queues or older ones; None: any kind.

    For a pool that is no present flavor this is the requested type, which counts in every flavor of the type.
    """
    granted = None if pool == ANY_TYPE else pool
    return granted if granted in queues.flavor_set.by_name else requested_type or granted


def count_existing_gpus(queues: Queues, request: LeaseRequest, pool: str) -> float:
    """GPUs of the inventory that the request could hold in ``pool``; infinite without an inventory."""
    if queues.gpu_inventory is None:
        return math.inf
    kind = gpu_kind_in_pool(request, pool)
    kinds = [kind] if kind else find_suitable_kinds(queues, request)
    return sum(queues.gpu_inventory[kind].count for kind in kinds if kind in queues.gpu_inventory)


RequestShape = tuple[str, str | None, tuple[str, ...], int, int, int, int | None, str, str | None, tuple[str, ...]]
"""All fields of a request that decide whether it fits."""


class ResourceLimit(NamedTuple):
    """A limited resource: the quota of a queue, the lendable GPUs of a cohort, or the existing GPUs of a kind."""

    kind: str
    name: str
    pool: str = ""


@dataclass(frozen=True, eq=False)
class PoolOption:
    """A pool that may serve requests of one shape."""

    pool: str
    gpu_kind: str | None
    """Kind of the GPUs in the pool; None: any kind."""
    existing_gpus: float
    inventory_limits: frozenset[ResourceLimit]
    """Limits of existing GPUs; empty without an inventory."""
    own_limits: frozenset[ResourceLimit]
    """Limits that a lease uses up if its queue does not borrow."""
    borrowing_limits: frozenset[ResourceLimit]
    """Limits that a lease uses up if its queue borrows; also all limits that a request can lack."""
    gang: GangRequest


@dataclass(frozen=True, eq=False)
class PoolOptions:
    """Options in the order in which the scheduler tries them, and all limits that requests of the shape could lack."""

    options: tuple[PoolOption, ...]
    limits: frozenset[ResourceLimit]


def request_shape(request: LeaseRequest) -> RequestShape:
    """Key of the fields that decide whether a request fits. Requests of one shape fit in the same states."""
    size = (request.gpus, request.members, request.tensor_parallel)
    kind, place = (request.min_gpu_memory_mb, request.spot), (request.within, request.avoided_nodes)
    return request.queue, request.gpu_type, request.gpu_types, *size, *kind, *place


def get_pool_options(queues: Queues, queue: Queue, request: LeaseRequest) -> PoolOptions:
    """The pool options of ``request`` in its queue ``queue``; the same object for all requests of one shape.

    It is the same for as long as anything refers to it, because pending requests are grouped by it.
    """
    shape, (recent, in_use) = request_shape(request), queues.pool_options_caches
    if (cached := recent.get(shape)) is None:
        if len(recent) >= _ELIGIBLE_POOLS_CACHE_SIZE:
            recent.clear()
        cached = recent[shape] = in_use.setdefault(shape, _build_pool_options(queues, queue, request))
    assert isinstance(cached, PoolOptions)
    return cached


def build_gang_request(request: LeaseRequest, pool: str) -> GangRequest:
    """The placement request for GPUs of ``pool``."""
    kind = gpu_kind_in_pool(request, pool)
    types = request.gpu_types if kind is None else ()
    pod = _cached_pod_request(request.gpus_per_member, kind, request.min_gpu_memory_mb, types)
    return _cached_gang_request(pod, request.members, request.tensor_parallel, request.within, request.avoided_nodes)


@lru_cache(maxsize=4096)
def _cached_pod_request(
    gpus: int, gpu_type: str | None, memory_mb: int | None, gpu_types: tuple[str, ...]
) -> PodRequest:
    return PodRequest(gpus, gpu_type, memory_mb, gpu_types=gpu_types)


@lru_cache(maxsize=4096)
def _cached_gang_request(
    pod: PodRequest, members: int, tensor_parallel: int, within: Proximity | None, avoided_nodes: tuple[str, ...]
) -> GangRequest:
    return GangRequest(pod, members, tensor_parallel, within, avoided_nodes)


def _build_pool_options(queues: Queues, queue: Queue, request: LeaseRequest) -> PoolOptions:
    options = tuple(
        _build_pool_option(queues, queue, request, pool) for pool in find_eligible_pools(queues, queue, request)
    )
    return PoolOptions(options, frozenset(limit for option in options for limit in option.borrowing_limits))


def _build_pool_option(queues: Queues, queue: Queue, request: LeaseRequest, pool: str) -> PoolOption:
    inventory_limits = _find_inventory_limits(queues, request, pool)
    own_limits = {ResourceLimit("queue", queue.name, pool)} | inventory_limits
    cohort_limits = {ResourceLimit("cohort", queue.cohort, pool)} if queue.cohort is not None else set()
    return PoolOption(
        pool,
        gpu_kind_in_pool(request, pool),
        count_existing_gpus(queues, request, pool),
        frozenset(inventory_limits),
        frozenset(own_limits),
        frozenset(own_limits | cohort_limits),
        build_gang_request(request, pool),
    )


def _find_inventory_limits(queues: Queues, request: LeaseRequest, pool: str) -> set[ResourceLimit]:
    if queues.gpu_inventory is None:
        return set()
    kind = gpu_kind_in_pool(request, pool)
    return {ResourceLimit("type", name) for name in ([kind] if kind else find_suitable_kinds(queues, request))}
