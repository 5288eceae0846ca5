"""Which pools a request may draw from, where a lease counts, and which GPUs exist: what no lease changes.

A pool is what a queue has a quota of: a flavor, a GPU type that means itself, or
``*`` for all such types that the queue does not name. The kind of a lease is the
flavor or type of its GPUs, as far as it is known.

What a kind of request may draw from, and which limits it meets there: what no lease changes.

A walk asks this for everybody who waits, and of thousands only few differ in what
decides whether they fit. So it is worked out once for each kind under the same
queues, and those that are alike have the very same terms.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from tiphys_plugin.quota.lease import LeaseRequest
from tiphys_plugin.quota.placement.model import Ask, Gang
from tiphys_plugin.quota.queues import ANY_TYPE, Queue, QueueRules, Queues

_REMEMBERED = 4096
"""Kinds of requests under the same queues; whoever invents new ones all the time is not remembered for ever."""


def of(queues: Queues, queue: Queue, request: LeaseRequest) -> list[str]:
    """Pools of ``queue`` that the request may draw from: in the order of its flavors, without these by name."""
    if queues.flavors:
        size = request.gpus if request.spot == "avoided" else 0
        alike = (queue.name, request.gpu_type, request.min_gpu_memory_mb, request.spot, size)
        if (known := queues.drawn.get(alike)) is None:
            if len(queues.drawn) >= _REMEMBERED:
                queues.drawn.clear()
            known = queues.drawn[alike] = _of_flavors(queues, queue, request)
        return known
    if request.gpu_type is None:
        return [pool for pool in sorted(queue.gpus) if _may_serve(queues, pool, request)]
    if request.gpu_type in queue.gpus:
        return [request.gpu_type]
    return [ANY_TYPE] if ANY_TYPE in queue.gpus else []


def _of_flavors(queues: Queues, queue: Queue, request: LeaseRequest) -> list[str]:
    """Who names no type does not draw from ``*``: nobody could say which nodes its pods have to stay away from."""
    if request.spot == "avoided":
        others = _of_flavors(queues, queue, replace(request, spot="no"))
        enough = any(_at_once(queues, queue, request, pool) >= request.gpus for pool in others)
        return others if enough else _of_flavors(queues, queue, replace(request, spot="allowed"))
    wanted = request.gpu_type
    found = [pool for pool in in_order(queues, queue) if suits(queues, pool, request)]
    if found or wanted is None or not queues.kinds.is_plain(wanted):
        return found
    return [ANY_TYPE] if ANY_TYPE in queue.gpus and wanted not in queue.gpus else []


def _at_once(queues: Queues, queue: Queue, request: LeaseRequest, pool: str) -> float:
    """The most that the request could ever hold of a pool."""
    return min(queues.most(queue, pool), existing(queues, request, pool))


def in_order(queues: Queues, queue: Queue) -> list[str]:
    """What the queue has a quota of by name, in the order in which it is tried."""
    first = list(queue.flavor_order)
    return first + queues.kinds.sorted(pool for pool in queue.gpus if pool != ANY_TYPE and pool not in first)


def suits(queues: Queues, kind: str, request: LeaseRequest) -> bool:
    """Whether GPUs of this kind are what the request wants; memory that is not declared is taken as enough."""
    flavor = queues.kinds.by_name.get(kind)
    if request.gpu_type not in (None, kind if flavor is None else flavor.gpu_type):
        return False
    if queues.stock is not None and kind not in queues.stock:
        return False
    if flavor is not None and not flavor.serves(request.spot):
        return False
    known = flavor if queues.stock is None else queues.stock[kind]
    memory = None if known is None else known.memory_mb
    return memory is None or memory >= (request.min_gpu_memory_mb or 0)


def _may_serve(queues: Queues, pool: str, request: LeaseRequest) -> bool:
    """Whether a pool suits a request without a type: its GPUs exist and have the memory."""
    return pool == ANY_TYPE or queues.stock is None or pool in fitting_types(queues, request)


def fitting_types(queues: Queues, request: LeaseRequest) -> list[str]:
    """Kinds of the inventory that satisfy the request."""
    return [kind for kind in queues.stock or {} if suits(queues, kind, request)]


def gpu_type(request: LeaseRequest, pool: str) -> str | None:
    """The kind that the request would hold in ``pool``; None if it may be any."""
    return request.gpu_type if pool == ANY_TYPE else pool


def counted_against(rules: QueueRules, request: LeaseRequest, chosen: str | None) -> str:
    """Pool of a lease that was given under these queues or others; ``chosen`` is the kind that it got, if known."""
    return pool_of(rules, request.queue, request.gpu_type, chosen)


def pool_of(rules: QueueRules, queue_name: str, gpu_type: str | None, chosen: str | None = None) -> str:
    """Pool of a queue in which GPUs count that were asked for as this type; None: as any."""
    queue = rules.find(queue_name) if isinstance(rules, Queues) else None
    if isinstance(rules, Queues) and queue is not None and rules.flavors:
        return _pool_of_flavor(rules, queue, kind_of(rules, gpu_type, chosen) or ANY_TYPE)
    wanted = gpu_type or chosen or ANY_TYPE
    return wanted if queue is None or wanted in queue.gpus else ANY_TYPE


def _pool_of_flavor(queues: Queues, queue: Queue, kind: str) -> str:
    """The kind itself; of a flavor that the queue does not name, or names no more, the first of the same type."""
    if kind in queue.gpus:
        return kind
    wanted = queues.kinds.type_of(kind)
    alike = (pool for pool in in_order(queues, queue) if queues.kinds.type_of(pool) == wanted)
    return next(alike, ANY_TYPE)


def kind_of(queues: Queues, asked_type: str | None, pool: str | None) -> str | None:
    """The kind of a lease that was given under these queues or others; None if it may be any.

    Where its flavor is gone, or had not been declared when it was given, it is the type that was asked for: a kind
    that counts in every flavor of the type.
    """
    given = None if pool == ANY_TYPE else pool
    return given if given in queues.kinds.by_name else asked_type or given


def existing(queues: Queues, request: LeaseRequest, pool: str) -> float:
    """GPUs in the inventory that the request could hold through ``pool``; infinite without an inventory."""
    if queues.stock is None:
        return math.inf
    wanted = gpu_type(request, pool)
    kinds = [wanted] if wanted else fitting_types(queues, request)
    return sum(queues.stock[kind].count for kind in kinds if kind in queues.stock)


Alike = tuple[str, str | None, int, int, int, int | None, str]
"""All of a request that decides whether it fits."""


class Limit(NamedTuple):
    """Something that can be used up: the quota of a queue, what a cohort lends, the GPUs of a type."""

    kind: str
    name: str
    pool: str = ""


@dataclass(frozen=True, eq=False)
class Source:
    """A pool that may serve it. ``types`` are limits of GPUs that exist; there are none where nobody declared them."""

    pool: str
    kind: str | None
    """Of the GPUs that it would get; None if they may be any."""
    existing: float
    types: frozenset[Limit]
    own: frozenset[Limit]
    """What it brings nearer while its queue has to borrow nothing."""
    borrowed: frozenset[Limit]
    """What it brings nearer, and can lack, otherwise."""
    gang: Gang


@dataclass(frozen=True, eq=False)
class Terms:
    """``sources`` are in the order in which they are tried, ``wants`` is all that requests of the kind could lack."""

    sources: tuple[Source, ...]
    wants: frozenset[Limit]


def alike_of(request: LeaseRequest) -> Alike:
    """Requests for which this is the same fit where one of them does."""
    shape = (request.gpus, request.members, request.tensor_parallel)
    return request.queue, request.gpu_type, *shape, request.min_gpu_memory_mb, request.spot


def terms_of(queues: Queues, queue: Queue, request: LeaseRequest) -> Terms:
    """The terms of ``request`` in ``queue``, which is its own; the same object for all that are alike."""
    alike = alike_of(request)
    if (known := queues.terms.get(alike)) is None:
        if len(queues.terms) >= _REMEMBERED:
            queues.terms.clear()
        known = queues.terms[alike] = _terms(queues, queue, request)
    assert isinstance(known, Terms)
    return known


def gang(request: LeaseRequest, pool: str) -> Gang:
    """What the nodes are asked for."""
    each, kind = request.gpus // request.members, gpu_type(request, pool)
    return _gang(each, kind, request.min_gpu_memory_mb, request.members, request.tensor_parallel)


@lru_cache(maxsize=4096)
def _gang(gpus: int, gpu_type: str | None, memory_mb: int | None, members: int, tensor_parallel: int) -> Gang:
    return Gang(Ask(gpus, gpu_type, memory_mb), members, tensor_parallel)


def _terms(queues: Queues, queue: Queue, request: LeaseRequest) -> Terms:
    sources = tuple(_source(queues, queue, request, pool) for pool in of(queues, queue, request))
    return Terms(sources, frozenset(limit for source in sources for limit in source.borrowed))


def _source(queues: Queues, queue: Queue, request: LeaseRequest, pool: str) -> Source:
    types = _types(queues, request, pool)
    own = {Limit("queue", queue.name, pool)} | types
    lent = {Limit("cohort", queue.cohort, pool)} if queue.cohort is not None else set()
    return Source(
        pool,
        gpu_type(request, pool),
        existing(queues, request, pool),
        frozenset(types),
        frozenset(own),
        frozenset(own | lent),
        gang(request, pool),
    )


def _types(queues: Queues, request: LeaseRequest, pool: str) -> set[Limit]:
    if queues.stock is None:
        return set()
    wanted = gpu_type(request, pool)
    return {Limit("type", name) for name in ([wanted] if wanted else fitting_types(queues, request))}
