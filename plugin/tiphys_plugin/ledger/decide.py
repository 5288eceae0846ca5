"""May these GPUs be held now? A pure function, so that its laws can be proved by search.

Quota is kept per queue and pool; a pool is a GPU type named in the queue file,
or ``*`` for all the types it does not name. A typed request draws from the pool
of its type, or from ``*`` where the queue does not name the type. A request
without a type may draw from any pool; the one with the fewest GPUs left over
is taken, so that large holes stay for large requests.

Order is strict: higher priority first, then earlier arrival. A request that
does not fit is not overtaken by a smaller one of the same pool, so nobody
starves; requests for other pools pass. Where an inventory is declared, GPUs
that exist are a second limit, and the same order holds across queues.
"""

from dataclasses import dataclass

from tiphys_plugin.ledger import pools
from tiphys_plugin.ledger.model import Admission, Admitted, Deferred, Lease, LeaseRequest, Reason, Rejected, Waiting
from tiphys_plugin.queues import ANY_TYPE, Misconfigured, Queue, QueueRules, Queues, in_words


@dataclass(frozen=True)
class State:
    """What is known at the instant of the decision. None of ``leases`` and ``waiting`` is the request itself."""

    queues: QueueRules
    leases: tuple[Lease, ...] = ()
    waiting: tuple[Waiting, ...] = ()


def decide(state: State, request: LeaseRequest, arrival: int) -> Admission:
    """Admit, defer or reject ``request``, which arrived as number ``arrival``. `Admitted.lease` is left empty."""
    if state.queues is None:
        return Admitted(lease="", pool=request.gpu_type or ANY_TYPE)
    if isinstance(state.queues, Misconfigured):
        return _wait_for_repair(state.queues, state.waiting, request, arrival)
    queue = state.queues.find(request.queue)
    if queue is None:
        known = ", ".join(state.queues.names) or "none"
        return Rejected(Reason.QUEUE_UNKNOWN, f"there is no queue {request.queue!r}; the queues are: {known}")
    return _reject(state.queues, queue, request) or _admit(state, state.queues, queue, request, arrival)


def _wait_for_repair(
    rules: Misconfigured, waiting: tuple[Waiting, ...], request: LeaseRequest, arrival: int
) -> Deferred:
    """Nothing is granted by rules that cannot be read, and what was asked keeps its place in the line."""
    mine = _order(request, arrival)
    ahead = [w for w in waiting if w.request.queue == request.queue and _order(w.request, w.arrival) < mine]
    return Deferred(Reason.MISCONFIGURED, rules.why, len(ahead) + 1)


def _reject(queues: Queues, queue: Queue, request: LeaseRequest) -> Rejected | None:
    """Why the request can never be satisfied, if so."""
    inventory = queues.inventory
    if inventory is not None and request.gpu_type is not None and request.gpu_type not in inventory:
        types = ", ".join(sorted(inventory)) or "none"
        return Rejected(Reason.NO_MATCHING_GPU_TYPE, f"the cluster has no {request.gpu_type}; it has: {types}")
    if inventory is not None and not pools.fitting_types(queues, request):
        return Rejected(
            Reason.GPU_MEMORY_TOO_SMALL,
            f"no GPU of the wanted type has {request.min_gpu_memory_mb} MB; ask for less memory or another type",
        )
    open_to = pools.of(queues, queue, request)
    if not open_to:
        types = ", ".join(sorted(queue.gpus)) or "none"
        wanted = request.gpu_type or "GPU that fits"
        return Rejected(Reason.NO_MATCHING_GPU_TYPE, f"queue {queue.name} has no {wanted}; it has: {types}")
    return _reject_by_size(queues, queue, request, open_to)


def _reject_by_size(queues: Queues, queue: Queue, request: LeaseRequest, open_to: list[str]) -> Rejected | None:
    largest = max(queue.gpus[pool] for pool in open_to)
    if request.gpus > largest:
        return Rejected(
            Reason.EXCEEDS_MAX_QUOTA,
            f"{_asked(request)} can never be had: queue {queue.name} may hold at most {largest}; "
            f"{_nearest(queues, queue, request)}",
        )
    exist = max((pools.existing(queues, request, pool) for pool in open_to), default=request.gpus)
    if request.gpus > exist:
        return Rejected(
            Reason.EXCEEDS_MAX_QUOTA,
            f"{_asked(request)} can never be had: the cluster has {exist:g}; ask for fewer",
        )
    return None


def _admit(state: State, queues: Queues, queue: Queue, request: LeaseRequest, arrival: int) -> Admission:
    ahead = [w for w in state.waiting if _order(w.request, w.arrival) < _order(request, arrival)]
    rivals = [w for w in ahead if _competes(state, queues, queue, request, w)]
    position = len(rivals) + 1
    left = pools.left_over(queues, queue, request, state.leases)
    within_quota = [pool for pool, free in left.items() if free >= request.gpus]
    if not within_quota:
        holding = _holding(queue, left, request)
        return Deferred(Reason.WAITING_FOR_QUOTA, f"{holding}; position {position}", position)
    in_stock = [p for p in within_quota if pools.unused(queues, request, p, state.leases) >= request.gpus]
    if not in_stock:
        stock = _stock(queues, request, within_quota[0], state.leases)
        return Deferred(Reason.WAITING_FOR_INVENTORY, f"{stock}; position {position}", position)
    if rivals:
        return _behind(rivals, request, position)
    return Admitted(lease="", pool=min(in_stock, key=lambda pool: (left[pool], pool)))


def _competes(state: State, queues: Queues, queue: Queue, request: LeaseRequest, other: Waiting) -> bool:
    """Whether both want the same quota, or the other queue's request waits for the same GPUs to exist."""
    theirs = queues.find(other.request.queue)
    if theirs is None:
        return False
    if theirs.name == queue.name:
        return bool(set(pools.of(queues, queue, request)) & set(pools.of(queues, queue, other.request)))
    if queues.inventory is None:
        return False
    left = pools.left_over(queues, theirs, other.request, state.leases)
    within_quota = any(free >= other.request.gpus for free in left.values())
    shared = set(pools.fitting_types(queues, request)) & set(pools.fitting_types(queues, other.request))
    return within_quota and bool(shared)


def _behind(rivals: list[Waiting], request: LeaseRequest, position: int) -> Deferred:
    first = min(rivals, key=lambda w: _order(w.request, w.arrival)).request
    place = f"{_asked(request)} asked; position {position}, behind {first.run}/{first.step} ({_asked(first)}"
    if first.priority > request.priority:
        return Deferred(Reason.BEHIND_HIGHER_PRIORITY, f"{place}, priority {first.priority})", position)
    return Deferred(Reason.BEHIND_EARLIER_REQUEST, f"{place}, asked earlier)", position)


def _order(request: LeaseRequest, arrival: int) -> tuple[int, int]:
    return (-request.priority, arrival)


def _asked(request: LeaseRequest) -> str:
    return in_words(request.gpus, request.gpu_type)


def _holding(queue: Queue, left: dict[str, int], request: LeaseRequest) -> str:
    parts = [
        f"{queue.gpus[pool] - free} of {in_words(queue.gpus[pool], None if pool == ANY_TYPE else pool)}"
        for pool, free in left.items()
    ]
    return f"queue {queue.name} holds {', '.join(parts)}; {_asked(request)} asked"


def _stock(queues: Queues, request: LeaseRequest, pool: str, leases: tuple[Lease, ...]) -> str:
    exist = pools.existing(queues, request, pool)
    in_use = exist - pools.unused(queues, request, pool, leases)
    stock = in_words(int(exist), pools.gpu_type(request, pool))
    return f"{in_use:g} of {stock} of the cluster are in use; {_asked(request)} asked"


def _nearest(queues: Queues, queue: Queue, request: LeaseRequest) -> str:
    """What to do about a request that is too large for its queue."""
    ceilings = {q.name: max((q.gpus[p] for p in pools.of(queues, q, request)), default=0) for q in queues.queues}
    name = max(sorted(ceilings), key=lambda n: ceilings[n])
    if ceilings[name] >= request.gpus:
        return f"queue {name} may hold {ceilings[name]}"
    if ceilings[name] > ceilings[queue.name]:
        return f"ask for fewer; the largest quota is {ceilings[name]}, of queue {name}"
    return "ask for fewer"
