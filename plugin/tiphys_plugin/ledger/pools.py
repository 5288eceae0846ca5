"""Which pools a request may draw from, where a lease counts, and which GPUs exist: what no lease changes."""

import math

from tiphys_plugin.ledger.model import LeaseRequest
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
    return pool == ANY_TYPE or queues.stock is None or pool in fitting_types(queues, request)


def fitting_types(queues: Queues, request: LeaseRequest) -> list[str]:
    """Types of the inventory that satisfy the request; memory that is not declared is taken as enough."""
    need = request.min_gpu_memory_mb or 0
    return [
        name
        for name, stock in (queues.stock or {}).items()
        if request.gpu_type in (None, name) and (stock.memory_mb is None or stock.memory_mb >= need)
    ]


def gpu_type(request: LeaseRequest, pool: str) -> str | None:
    """The type that the request would hold in ``pool``; None if it may be any."""
    return request.gpu_type or type_of(pool)


def type_of(pool: str) -> str | None:
    """The type of all GPUs of ``pool``; None if there are several."""
    return None if pool == ANY_TYPE else pool


def counted_against(rules: QueueRules, request: LeaseRequest, chosen: str | None) -> str:
    """Pool of a lease that was given under these queues or others; ``chosen`` is the type that an untyped one got."""
    return pool_of(rules, request.queue, request.gpu_type or chosen)


def pool_of(rules: QueueRules, queue_name: str, gpu_type: str | None) -> str:
    """Pool of a queue in which GPUs of this type count; None: they may be of any."""
    queue = rules.find(queue_name) if isinstance(rules, Queues) else None
    wanted = gpu_type or ANY_TYPE
    return wanted if queue is None or wanted in queue.gpus else ANY_TYPE


def existing(queues: Queues, request: LeaseRequest, pool: str) -> float:
    """GPUs in the inventory that the request could hold through ``pool``; infinite without an inventory."""
    if queues.stock is None:
        return math.inf
    wanted = gpu_type(request, pool)
    types = [wanted] if wanted else fitting_types(queues, request)
    return sum(queues.stock[name].count for name in types if name in queues.stock)
