"""May these GPUs be held now? A pure function, so that its laws can be proved by search.

Quota is kept per queue and pool; a pool is a flavor or a GPU type named in the
queue file, or ``*`` for all the types it does not name. A typed request draws
from the flavors of its type, or from its type, or from ``*`` where the queue
does not name it. A request without a type may draw from any pool. Where an
inventory is declared, GPUs that exist are a second limit, across queues.

What can never be had is rejected at once. Whether the rest is admitted follows
from its turn in the line (`tiphys_plugin.quota.scheduler.cycle`); here it is put in words.

How people name steps and times, and what a step is told that waits for others to save and to go.
"""

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from operator import attrgetter
from typing import NamedTuple

from tiphys_plugin.quota.lease import (
    Admission,
    Admitted,
    Because,
    Deferred,
    Lease,
    LeaseRequest,
    Reason,
    Rejected,
    Waiting,
)
from tiphys_plugin.quota.placement.place import Unplaceable, place
from tiphys_plugin.quota.queues import ANY_TYPE, Misconfigured, Queue, QueueRules, Queues, in_words
from tiphys_plugin.quota.scheduler import pools
from tiphys_plugin.quota.scheduler.backfill import Reservation
from tiphys_plugin.quota.scheduler.capacity import Capacity
from tiphys_plugin.quota.scheduler.cycle import Seen, Turn, turn
from tiphys_plugin.quota.scheduler.fair_share import Consumed, place_in_queue
from tiphys_plugin.quota.scheduler.pools import Alike, alike_of, gang
from tiphys_plugin.quota.scheduler.snapshot import Latest


def waiting_for(leaving: Sequence[Lease]) -> Because:
    """Why a request waits for which all of ``leaving``, one at least, were asked to leave."""
    asked = [(lease.leaving, lease) for lease in leaving if lease.leaving is not None]
    last, lease = max(asked, key=lambda one: one[0].deadline)
    who = called(lease.request)
    if len(asked) > 1:
        who += f" and {len(asked) - 1} other{'s' if len(asked) > 2 else ''} were"
    else:
        who += " was"
    first = min(leaving.asked_at for leaving, _ in asked)
    return Because(
        Reason.WAITING_FOR_PREEMPTED_CHECKPOINT,
        f"{who} asked to save and go at {clock(first)}, by {clock(last.deadline)} at the latest",
    )


def called(request: LeaseRequest) -> str:
    """A step as people name it."""
    return f"{request.run}/{request.step}"


def clock(moment: datetime) -> str:
    """The time of day, which is enough for what happens within minutes."""
    return f"{moment:%H:%M:%S}"


@dataclass(frozen=True)
class State:
    """What is known at the instant of the decision. None of ``leases`` and ``waiting`` is the request itself."""

    queues: QueueRules
    leases: tuple[Lease, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    history: tuple[Consumed, ...] = ()


def decide(
    state: State, request: LeaseRequest, arrival: int, now: datetime, promised_at: datetime | None = None
) -> Admission:
    """Admit, defer or reject ``request``, which arrived as number ``arrival``. `Admitted.lease` is left empty.

    ``promised_at`` is that of its `Waiting`.
    """
    if state.queues is None:
        return Admitted(lease="", pool=request.gpu_type or ANY_TYPE)
    if isinstance(state.queues, Misconfigured):
        return _wait(state.waiting, request, arrival, Reason.MISCONFIGURED, state.queues.why)
    queue = state.queues.find(request.queue)
    if queue is None:
        known = ", ".join(state.queues.names) or "none"
        return Rejected(Reason.QUEUE_UNKNOWN, f"there is no queue {request.queue!r}; the queues are: {known}")
    if (never := _reject(state.queues, queue, request)) is not None:
        if not state.queues.changing or _reject(state.queues.quotas, queue, request) is not None:
            return never
        return _wait(state.waiting, request, arrival, never.reason, f"for now, {never.message}", queue)
    if queue.stopped:
        why = f"queue {queue.name} is stopped: nothing new starts until its administrator opens it again"
        return _wait(state.waiting, request, arrival, Reason.QUEUE_STOPPED, why, queue)
    mine = Waiting(request, arrival, since=now, seen_at=now, promised_at=promised_at)
    line = list(_hopeful(state.queues, state.waiting))
    insort(line, mine, key=attrgetter("arrival"))
    seen = turn(state.queues, state.leases, state.history, line, arrival, now)
    if seen.pool is not None:
        return Admitted(lease="", pool=seen.pool, nodes=seen.nodes)
    because = tuple(_reasons(queue, mine, seen))
    if seen.is_promised:
        leaving = [one for one in state.leases if one.leaving is not None and one.leaving.is_for(request)]
        because = (*([waiting_for(leaving)] if leaving else []), *because)
    message = f"{because[0].message}; position {seen.position}{_expected(seen.start)}"
    return Deferred(because[0].reason, message, seen.position, because, seen.start)


def _wait(
    waiting: tuple[Waiting, ...],
    request: LeaseRequest,
    arrival: int,
    reason: Reason,
    why: str,
    queue: Queue | None = None,
) -> Deferred:
    """Nothing is granted, and what was asked keeps its place in the line."""
    mine = place_in_queue(queue, request, arrival)
    line = [one for one in waiting if one.request.queue == request.queue]
    ahead = [one for one in line if place_in_queue(queue, one.request, one.arrival) < mine]
    return Deferred(reason, why, len(ahead) + 1, (Because(reason, why),))


def _hopeful(queues: Queues, waiting: tuple[Waiting, ...]) -> tuple[Waiting, ...]:
    """Those whom the nodes of today could serve: nobody else is held up by who waits for nodes to come."""
    if not queues.changing:
        return waiting
    requests = [one.request for one in waiting]
    known = _latest.find(lambda one: one.queues is queues and one.requests == requests)
    if known is None:
        known = _latest.remember(_Hopeless(queues, requests, _hopeless(queues, requests)))
    return tuple(one for place, one in enumerate(waiting) if place not in known.places) if known.places else waiting


class _Hopeless(NamedTuple):
    """Places in the line of those who want more than all nodes together could give them."""

    queues: Queues
    requests: list[LeaseRequest]
    places: frozenset[int]


_latest: Latest[_Hopeless] = Latest(2)


def _hopeless(queues: Queues, requests: Sequence[LeaseRequest]) -> frozenset[int]:
    found: dict[Alike, bool] = {}

    def is_hopeless(request: LeaseRequest) -> bool:
        alike = alike_of(request)
        if alike not in found:
            queue = queues.find(request.queue)
            found[alike] = queue is not None and _reject(queues, queue, request) is not None
        return found[alike]

    return frozenset(place for place, request in enumerate(requests) if is_hopeless(request))


def _reject(queues: Queues, queue: Queue, request: LeaseRequest) -> Rejected | None:
    """Why the request can never be satisfied, if so."""
    inventory = queues.stock
    if inventory is not None and request.gpu_type is not None and request.gpu_type not in queues.types:
        has = ", ".join(sorted(queues.types)) or "none"
        return Rejected(Reason.NO_MATCHING_GPU_TYPE, f"the cluster has no {request.gpu_type}; it has: {has}")
    if inventory is not None and not pools.fitting_types(queues, request):
        return _reject_by_kind(queues, inventory, request)
    open_to = pools.of(queues, queue, request)
    if not open_to:
        has = ", ".join(sorted(queue.gpus)) or "none"
        wanted = request.gpu_type or "GPU that fits"
        why = f"queue {queue.name} has no {wanted}; it has: {has}{_untyped(queues, queue, request)}"
        return Rejected(Reason.NO_MATCHING_GPU_TYPE, why)
    return _reject_by_size(queues, queue, request, open_to)


def _reject_by_kind(queues: Queues, kinds: Iterable[str], request: LeaseRequest) -> Rejected:
    """There are GPUs of its type, and none that suits."""
    anyway = replace(request, min_gpu_memory_mb=None)
    if not queues.flavors or any(pools.suits(queues, kind, anyway) for kind in kinds):
        return Rejected(
            Reason.GPU_MEMORY_TOO_SMALL,
            f"no GPU of the wanted type has {request.min_gpu_memory_mb} MB; ask for less memory or another type",
        )
    why = f"no flavor of {request.gpu_type or 'any type'} is for this step{_spot(queues, request)}"
    return Rejected(Reason.NO_MATCHING_GPU_TYPE, why)


def _untyped(queues: Queues, queue: Queue, request: LeaseRequest) -> str:
    """What to do about a ``*`` that is of no use to a step without a type; else that it may be for spot nodes."""
    if queues.flavors and request.gpu_type is None and ANY_TYPE in queue.gpus:
        return (
            f"; beside flavors, {ANY_TYPE} is only for steps that name a type which has none: name one (gpu_type), or "
            "give the queue a quota of a flavor"
        )
    return _spot(queues, request)


def _spot(queues: Queues, request: LeaseRequest) -> str:
    """That the use of spot nodes may be what excludes flavors."""
    if not any(one.spot for one in queues.flavors) or request.spot == "allowed":
        return ""
    only = "; it asks for spot nodes alone"
    return only if request.spot == "only" else "; those of spot nodes are for steps with spot=True"


def _reject_by_size(queues: Queues, queue: Queue, request: LeaseRequest, open_to: list[str]) -> Rejected | None:
    largest = max(queues.most(queue, pool) for pool in open_to)
    if request.gpus > largest:
        borrowed = ", borrowed ones included" if largest > max(queue.gpus[pool] for pool in open_to) else ""
        return Rejected(
            Reason.EXCEEDS_MAX_QUOTA,
            f"{_asked(request)} can never be had: queue {queue.name} may hold at most {largest}{borrowed}; "
            f"{_nearest(queues, queue, request)}",
        )
    exist = {pool: pools.existing(queues, request, pool) for pool in open_to}
    if request.gpus > max(exist.values()):
        return Rejected(
            Reason.EXCEEDS_MAX_QUOTA,
            f"{_asked(request)} can never be had: the cluster has {max(exist.values()):g}; ask for fewer",
        )
    at_once = max(min(queues.most(queue, pool), exist[pool]) for pool in open_to)
    if request.gpus > at_once:
        return Rejected(
            Reason.EXCEEDS_MAX_QUOTA,
            f"{_asked(request)} can never be had: of the types that queue {queue.name} may hold so many of, the "
            f"cluster has fewer; {at_once:g} at most",
        )
    return _reject_by_place(queues, request, open_to)


def _reject_by_place(queues: Queues, request: LeaseRequest, open_to: list[str]) -> Rejected | None:
    """Not even an empty cluster has room for its pods."""
    if queues.emptied is None:
        return None
    found = [place(queues.emptied, gang(request, pool), queues.placing) for pool in open_to]
    nowhere = [one for one in found if isinstance(one, Unplaceable)]
    if len(nowhere) < len(found):
        return None
    nearest = max(nowhere, key=lambda one: (one.room, one.largest_node))
    return Rejected(
        Reason(nearest.reason.value),
        f"{_asked(request)} can never be had: {nearest.message} even if nobody else ran; ask for at most "
        f"{nearest.largest_node} on one node, or for several nodes",
    )


def _nearest(queues: Queues, queue: Queue, request: LeaseRequest) -> str:
    """What to do about a request that is too large for its queue."""
    ceilings = {
        q.name: max((queues.most(q, p) for p in pools.of(queues, q, request)), default=0) for q in queues.queues
    }
    name = max(sorted(ceilings), key=lambda n: ceilings[n])
    if ceilings[name] >= request.gpus:
        return f"queue {name} may hold {ceilings[name]}"
    if ceilings[name] > ceilings[queue.name]:
        return f"ask for fewer; the largest quota is {ceilings[name]}, of queue {name}"
    return "ask for fewer"


def _reasons(queue: Queue, mine: Waiting, seen: Turn) -> Iterator[Because]:
    """Everything that stands in the way: what leases hold, then who is before it."""
    request, held = mine.request, seen.held
    open_to = pools.of(held.queues, queue, request)
    within_quota = [pool for pool in open_to if held.room(queue, pool) >= request.gpus]
    if not within_quota:
        yield _quota(held, queue, request, open_to)
    short = [pool for pool in within_quota or open_to if held.unused(request, pool) < request.gpus]
    if short and len(short) == len(within_quota or open_to):
        yield Because(Reason.WAITING_FOR_INVENTORY, _stock(held, request, short[0]))
    elif (nowhere := _nowhere(held, request, within_quota or open_to)) is not None:
        yield nowhere
    if seen.reserved is not None and seen.reserved.start is not None:
        yield _kept(mine, seen.reserved)
    elif seen.first is not None:
        yield _behind(queue, seen.first, mine)


def _quota(held: Capacity, queue: Queue, request: LeaseRequest, open_to: list[str]) -> Because:
    at_limit = all(held.held(queue, pool) + request.gpus > queue.ceiling(pool) for pool in open_to)
    reason = Reason.BORROWING_LIMIT_REACHED if queue.cohort and at_limit else Reason.WAITING_FOR_QUOTA
    parts = [
        f"{held.held(queue, pool)} of {in_words(queue.gpus[pool], None if pool == ANY_TYPE else pool)}"
        for pool in open_to
    ]
    message = f"queue {queue.name} holds {', '.join(parts)}"
    if queue.cohort is not None:
        more = max(max(0, held.room(queue, pool)) for pool in open_to)
        message += f" and may take {more} more now, what cohort {queue.cohort} lends included"
    return Because(reason, f"{message}; {_asked(request)} asked")


def _stock(held: Capacity, request: LeaseRequest, pool: str) -> str:
    exist = pools.existing(held.queues, request, pool)
    in_use = exist - held.unused(request, pool)
    stock = in_words(int(exist), pools.gpu_type(request, pool))
    return f"{in_use:g} of {stock} of the cluster are in use; {_asked(request)} asked"


def _nowhere(held: Capacity, request: LeaseRequest, open_to: list[str]) -> Because | None:
    """There are enough GPUs and they are not where the pods could use them."""
    found = [held.place(request, pool) for pool in open_to]
    nowhere = [one for one in found if isinstance(one, Unplaceable)]
    if not nowhere or len(nowhere) < len(found):
        return None
    nearest = max(nowhere, key=lambda one: (one.room, one.free))
    return Because(Reason(nearest.reason.value), f"{nearest.message}; {_asked(request)} asked")


def _kept(mine: Waiting, reserved: Reservation) -> Because:
    first = reserved.waiting.request
    return Because(
        Reason.RESERVED,
        f"{_asked(mine.request)} would be free, and {'are' if mine.request.gpus > 1 else 'is'} kept for "
        f"{called(first)} ({_asked(first)}){_expected(reserved.start)}",
    )


def _behind(queue: Queue, seen: Seen, mine: Waiting) -> Because:
    first = seen.waiting
    place = f"{_asked(mine.request)} asked; behind {called(first.request)} ({_asked(first.request)}"
    if seen.is_promised:
        return Because(Reason.RESERVED, f"{place}, for which others were asked to leave)")
    if first.request.priority > mine.request.priority:
        return Because(Reason.BEHIND_HIGHER_PRIORITY, f"{place}, priority {first.request.priority})")
    hers, own = first.request.attained, mine.request.attained
    if first.request.queue == queue.name and queue.level(hers) < queue.level(own):
        had = f"which has had {hers / 3600:.1f} GPU-hours so far, and this one {own / 3600:.1f}"
        return Because(Reason.BEHIND_LESS_ATTAINED, f"{place}, {had})")
    if first.arrival < mine.arrival:
        return Because(Reason.BEHIND_EARLIER_REQUEST, f"{place}, asked earlier)")
    if first.request.queue == queue.name:
        return Because(Reason.BEHIND_EARLIER_REQUEST, f"{place}, began earlier)")
    return Because(
        Reason.BEHIND_SMALLER_SHARE, f"{place}, of queue {first.request.queue}, which uses less of what it shares)"
    )


def _asked(request: LeaseRequest) -> str:
    return in_words(request.gpus, request.gpu_type)


def _expected(start: datetime | None) -> str:
    return f", expected to start by {start:%Y-%m-%d %H:%M:%S %Z}" if start is not None else ""
