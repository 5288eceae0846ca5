"""What decides whether a request fits, computed once for all requests of one shape.

A scheduling cycle needs the pool options of thousands of requests, of which few
differ in the fields that decide whether they fit (`RequestShape`). So the options
are computed once for each shape under the same queues, and requests of one shape
share one `PoolOptions` object.
"""

from dataclasses import dataclass
from typing import NamedTuple

from tiphys_plugin.quota.lease import LeaseRequest
from tiphys_plugin.quota.placement.model import GangRequest
from tiphys_plugin.quota.queue import Queue
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler import pools
from tiphys_plugin.quota.scheduler.rejection import find_rejection

RequestShape = tuple[str, str, str | None, tuple[str, ...], int, int, int, int | None, str, str | None, tuple[str, ...]]
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
    return request.queue, request.resource, request.gpu_type, request.gpu_types, *size, *kind, *place


def get_pool_options(queues: Queues, queue: Queue, request: LeaseRequest) -> PoolOptions:
    """The pool options of ``request`` in its queue ``queue``; the same object for all requests of one shape.

    It is the same for as long as anything refers to it, because pending requests are grouped by it.
    """
    shape, (recent, in_use) = request_shape(request), queues.pool_options_caches
    if (cached := recent.get(shape)) is None:
        if len(recent) >= pools.MAX_CACHED_SHAPES:
            recent.clear()
        cached = recent[shape] = in_use.setdefault(shape, _build_pool_options(queues, queue, request))
    assert isinstance(cached, PoolOptions)
    return cached


def list_eligible_pools(queues: Queues, queue: Queue, request: LeaseRequest) -> list[str]:
    """As `pools.find_eligible_pools`, computed once for each shape."""
    return [option.pool for option in get_pool_options(queues, queue, request).options]


def is_feasible(queues: Queues, queue: Queue, request: LeaseRequest) -> bool:
    """Whether the queues could serve such a request one day, see `find_rejection`; computed once for each shape."""
    options, known = get_pool_options(queues, queue, request), queues.feasibility_cache
    if options not in known:
        if len(known) >= pools.MAX_CACHED_SHAPES:
            known.clear()
        known[options] = find_rejection(queues, queue, request) is None
    return known[options]


def _build_pool_options(queues: Queues, queue: Queue, request: LeaseRequest) -> PoolOptions:
    options = tuple(
        _build_pool_option(queues, queue, request, pool) for pool in pools.find_eligible_pools(queues, queue, request)
    )
    return PoolOptions(options, frozenset(limit for option in options for limit in option.borrowing_limits))


def _build_pool_option(queues: Queues, queue: Queue, request: LeaseRequest, pool: str) -> PoolOption:
    inventory_limits = _find_inventory_limits(queues, request, pool)
    own_limits = {ResourceLimit("queue", queue.name, pool)} | inventory_limits
    cohort_limits = {ResourceLimit("cohort", queue.cohort, pool)} if queue.cohort is not None else set()
    return PoolOption(
        pool,
        pools.gpu_kind_in_pool(request, pool),
        pools.count_existing_gpus(queues, request, pool),
        frozenset(inventory_limits),
        frozenset(own_limits),
        frozenset(own_limits | cohort_limits),
        pools.build_gang_request(queues, request, pool),
    )


def _find_inventory_limits(queues: Queues, request: LeaseRequest, pool: str) -> set[ResourceLimit]:
    if queues.gpu_inventory is None:
        return set()
    kind = pools.gpu_kind_in_pool(request, pool)
    return {ResourceLimit("type", name) for name in ([kind] if kind else pools.find_suitable_kinds(queues, request))}
