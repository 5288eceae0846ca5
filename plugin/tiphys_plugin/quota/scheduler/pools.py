"""Eligible pools of a request, the pool of a lease, and existing GPUs: all that leases do not change.

A queue has its quotas by pool: a flavor, a GPU type without flavors, or ``*`` for
all such types that the queue does not name. The GPU kind of a lease is the flavor
or the type of its GPUs, as far as it is known.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

from tiphys_plugin.quota.lease import LeaseRequest
from tiphys_plugin.quota.placement.model import GangRequest, PodRequest
from tiphys_plugin.quota.queue import ANY_TYPE, Queue
from tiphys_plugin.quota.queues import QueueRules, Queues

MAX_CACHED_SHAPES = 4096
"""Most request shapes in a cache of the same queues; a bound, because shapes come from user input."""


def find_eligible_pools(queues: Queues, queue: Queue, request: LeaseRequest) -> list[str]:
    """Pools of ``queue`` that may serve the request: in the order of its flavors, or without flavors by name.

    `tiphys_plugin.quota.scheduler.pool_options.list_eligible_pools` computes them once for each shape.
    """
    if queues.flavors:
        return _find_eligible_flavors(queues, queue, request)
    if not serves_resource(queues, ANY_TYPE, request):
        return []
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
        suffices = any(
            min(queues.max_gpus(queue, pool), count_existing_gpus(queues, request, pool)) >= request.gpus
            for pool in without_spot
        )
        return without_spot if suffices else _find_eligible_flavors(queues, queue, replace(request, spot="allowed"))
    gpu_type = request.gpu_type
    suitable = [pool for pool in list_pools_in_order(queues, queue) if is_kind_suitable(queues, pool, request)]
    if request.gpu_types:
        return _by_preference(queues, request, suitable)
    is_unflavored = gpu_type is not None and queues.flavor_set.is_unflavored(gpu_type)
    if suitable or not is_unflavored or not serves_resource(queues, ANY_TYPE, request):
        return suitable
    return [ANY_TYPE] if ANY_TYPE in queue.gpus and gpu_type not in queue.gpus else []


def _by_preference(queues: Queues, request: LeaseRequest, pools: Iterable[str]) -> list[str]:
    """The pools of the types that the request names, its preferred type first and ``*`` last; all if it names none."""
    if not request.gpu_types:
        return list(pools)
    preference = {gpu_type: number for number, gpu_type in enumerate((*request.gpu_types, ANY_TYPE))}
    types = {pool: queues.flavor_set.gpu_type_of(pool) for pool in pools}
    return sorted((pool for pool in types if types[pool] in preference), key=lambda pool: preference[types[pool]])


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
    if not serves_resource(queues, gpu_kind, request):
        return False
    if request.gpu_type not in (None, gpu_type) or (request.gpu_types and gpu_type not in request.gpu_types):
        return False
    if queues.gpu_inventory is not None and gpu_kind not in queues.gpu_inventory:
        return False
    if flavor is not None and not flavor.accepts_spot_use(request.spot):
        return False
    declaration = flavor if queues.gpu_inventory is None else queues.gpu_inventory[gpu_kind]
    memory_mb = None if declaration is None else declaration.memory_mb
    return memory_mb is None or memory_mb >= (request.min_gpu_memory_mb or 0)


def serves_resource(queues: Queues, pool: str, request: LeaseRequest) -> bool:
    """Whether the GPUs of a pool are of the resource that the request asks for."""
    return request.resource in ("", queues.flavor_set.resource_of(pool))


def _may_serve(queues: Queues, pool: str, request: LeaseRequest) -> bool:
    """Whether a pool can serve a request without a GPU type: its GPUs exist and have enough memory."""
    return pool == ANY_TYPE or queues.gpu_inventory is None or pool in find_suitable_kinds(queues, request)


def find_suitable_kinds(queues: Queues, request: LeaseRequest) -> list[str]:
    """GPU kinds of the inventory that the request can use."""
    return [kind for kind in queues.gpu_inventory or {} if is_kind_suitable(queues, kind, request)]


def gpu_kind_in_pool(request: LeaseRequest, pool: str) -> str | None:
    """GPU kind that the request would hold in ``pool``; None: any kind."""
    return request.gpu_type if pool == ANY_TYPE else pool


def find_pool(rules: QueueRules, queue_name: str, gpu_type: str | None, chosen_kind: str | None) -> str:
    """Pool of a queue in which a lease counts, also one granted under older queues.

    ``gpu_type`` is the requested type, None for any; ``chosen_kind`` the granted GPU kind, if known.
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


def build_gang_request(queues: Queues, request: LeaseRequest, pool: str) -> GangRequest:
    """The placement request for GPUs of ``pool``; the same object for equal ones, because every lease has one."""
    kind, members = gpu_kind_in_pool(request, pool), request.members
    types = request.gpu_types if kind is None else ()
    place = (request.tensor_parallel, request.within, request.avoided_nodes)
    key = (request.gpus, members, kind, request.min_gpu_memory_mb, types, place)
    cache = queues.gang_requests_cache
    if (cached := cache.get(key)) is None:
        if len(cache) >= MAX_CACHED_SHAPES:
            cache.clear()
        pod = PodRequest(request.gpus_per_member, kind, request.min_gpu_memory_mb, gpu_types=types)
        cached = cache[key] = GangRequest(pod, members, *place)
    return cached
