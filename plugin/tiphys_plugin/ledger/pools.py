"""Counting: which pools a request may draw from, what is left of them, and which GPUs exist.

Kept apart from the decision so that each number in a message and each number
that decides come from the same function.
"""

import math
from collections import Counter
from collections.abc import Iterable

from tiphys_plugin.ledger.model import Lease, LeaseRequest
from tiphys_plugin.queues import ANY_TYPE, Queue, QueueRules, Queues


def of(queues: Queues, queue: Queue, request: LeaseRequest) -> list[str]:
    """Pools of ``queue`` that the request may draw from, in order of name."""
    if request.gpu_type is None:
        return [pool for pool in sorted(queue.gpus) if _may_serve(queues, pool, request)]
    if request.gpu_type in queue.gpus:
        return [request.gpu_type]
    return [ANY_TYPE] if ANY_TYPE in queue.gpus else []


def _may_serve(queues: Queues, pool: str, request: LeaseRequest) -> bool:
    """Whether a pool suits a request without a type: its GPUs exist and have the memory."""
    return pool == ANY_TYPE or queues.inventory is None or pool in fitting_types(queues, request)


def fitting_types(queues: Queues, request: LeaseRequest) -> list[str]:
    """Types of the inventory that satisfy the request; memory that is not declared is taken as enough."""
    need = request.min_gpu_memory_mb or 0
    return [
        name
        for name, stock in (queues.inventory or {}).items()
        if request.gpu_type in (None, name) and (stock.memory_mb is None or stock.memory_mb >= need)
    ]


def gpu_type(request: LeaseRequest, pool: str) -> str | None:
    """The type that the request would hold in ``pool``; None if it may be any."""
    return request.gpu_type or (None if pool == ANY_TYPE else pool)


def counted_against(rules: QueueRules, request: LeaseRequest, chosen: str | None) -> str:
    """Pool of a lease that was given under these queues or others; ``chosen`` is the type that an untyped one got."""
    queue = rules.find(request.queue) if isinstance(rules, Queues) else None
    wanted = request.gpu_type or chosen or ANY_TYPE
    return wanted if queue is None or wanted in queue.gpus else ANY_TYPE


def left_over(queues: Queues, queue: Queue, request: LeaseRequest, leases: Iterable[Lease]) -> dict[str, int]:
    """Quota that is free, by pool that the request may draw from; negative where a quota was lowered."""
    held = used(queues, queue, leases)
    return {pool: queue.gpus[pool] - held[pool] for pool in of(queues, queue, request)}


def used(queues: Queues, queue: Queue, leases: Iterable[Lease]) -> Counter[str]:
    """GPUs that leases of ``queue`` hold, by pool. Queues may be edited, so each counts where it would be today."""
    held: Counter[str] = Counter()
    for lease in leases:
        if lease.request.queue == queue.name:
            held[counted_against(queues, lease.request, lease.pool)] += lease.request.gpus
    return held


def existing(queues: Queues, request: LeaseRequest, pool: str) -> float:
    """GPUs in the inventory that the request could hold through ``pool``; infinite without an inventory."""
    if queues.inventory is None:
        return math.inf
    wanted = gpu_type(request, pool)
    types = [wanted] if wanted else fitting_types(queues, request)
    return sum(queues.inventory[name].count for name in types if name in queues.inventory)


def unused(queues: Queues, request: LeaseRequest, pool: str, leases: Iterable[Lease]) -> float:
    """How many of `existing` no lease holds: neither of this type, nor of all types together."""
    if queues.inventory is None:
        return math.inf
    held = tuple(leases)
    wanted = gpu_type(request, pool)
    of_type = sum(lease.request.gpus for lease in held if wanted in (None, gpu_type(lease.request, lease.pool)))
    total = sum(stock.count for stock in queues.inventory.values())
    return min(existing(queues, request, pool) - of_type, total - sum(lease.request.gpus for lease in held))
