"""Admits, defers or rejects one request, and explains the decision.

The decision is a pure function of a `SchedulingState`, so property tests can
search for counterexamples to its laws. A request that the queues can never serve
is rejected at once. For other requests the scheduling cycle decides
(`tiphys_plugin.quota.scheduler.cycle`), and this module explains its outcome.

Quota is kept per queue and pool: a flavor or a GPU type named in the queue file,
or ``*`` for all types that the queue does not name. A request with a GPU type uses
the flavors of its type, or its type, or ``*`` if the queue does not name the type.
A request without a GPU type may use any pool. Existing GPUs are a second limit,
across queues, where an inventory is declared.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple

from tiphys_plugin.quota.lease import (
    Admission,
    AdmissionReason,
    Admitted,
    DeferralReason,
    Deferred,
    EndedUsage,
    Lease,
    LeaseRequest,
    PendingRequest,
    Rejected,
)
from tiphys_plugin.quota.placement.place import PlacementFailure, find_placement
from tiphys_plugin.quota.queue import ANY_TYPE, Queue
from tiphys_plugin.quota.queues import MisconfiguredQueues, QueueRules, Queues, format_gpus
from tiphys_plugin.quota.scheduler import pools
from tiphys_plugin.quota.scheduler.backfill import Reservation
from tiphys_plugin.quota.scheduler.capacity import Capacity
from tiphys_plugin.quota.scheduler.changes import find_changes
from tiphys_plugin.quota.scheduler.cycle import evaluate_request
from tiphys_plugin.quota.scheduler.cycle_result import RankedRequest, RequestOutcome
from tiphys_plugin.quota.scheduler.fair_share import attained_level
from tiphys_plugin.quota.scheduler.pools import RequestShape, build_gang_request, request_shape
from tiphys_plugin.quota.scheduler.queue_order import queue_position
from tiphys_plugin.quota.scheduler.snapshot import RecentResults


def explain_pending_preemptions(preempted: Sequence[Lease]) -> DeferralReason:
    """The reason of a request that waits for its victims ``preempted``, which must not be empty."""
    victims = [(lease.preemption, lease) for lease in preempted if lease.preemption is not None]
    last, lease = max(victims, key=lambda one: one[0].deadline)
    subject = format_step_name(lease.request)
    if len(victims) > 1:
        subject += f" and {len(victims) - 1} other{'s' if len(victims) > 2 else ''} were"
    else:
        subject += " was"
    what = "move to other nodes" if all(notice.moves for notice, _ in victims) else "go"
    first_asked_at = min(notice.asked_at for notice, _ in victims)
    return DeferralReason(
        AdmissionReason.WAITING_FOR_PREEMPTED_CHECKPOINT,
        f"{subject} asked to save and {what} at {format_clock_time(first_asked_at)}, "
        f"by {format_clock_time(last.deadline)} at the latest",
    )


def format_step_name(request: LeaseRequest) -> str:
    """Name of a step in messages: run and step, such as ``digits/fit[2]``."""
    return f"{request.run}/{request.step_name}"


def format_clock_time(moment: datetime) -> str:
    """Time of day, for events within minutes."""
    return f"{moment:%H:%M:%S}"


@dataclass(frozen=True)
class SchedulingState:
    """Input of a decision.

    ``leases`` do not contain the request itself. ``pending``, in order of arrival, may have an earlier version of it.
    """

    queues: QueueRules
    leases: tuple[Lease, ...] = ()
    pending: tuple[PendingRequest, ...] = ()
    history: tuple[EndedUsage, ...] = ()


def decide_admission(state: SchedulingState, request: LeaseRequest, arrival: int, now: datetime) -> Admission:
    """Admit, defer or reject a new request with this arrival number; see `decide_pending`."""
    return decide_pending(state, PendingRequest(request, arrival, since=now, seen_at=now), now)


def decide_pending(state: SchedulingState, own: PendingRequest, now: datetime) -> Admission:
    """Admit, defer or reject a pending request. `Admitted.lease` is left empty.

    Args:
        state: State without the request, or with an earlier version of it.
        own: The request.
        now: Time of the decision.
    """
    request = own.request
    if state.queues is None:
        return Admitted(lease="", pool=request.gpu_type or ANY_TYPE)
    if isinstance(state.queues, MisconfiguredQueues):
        return _defer(state.pending, own, AdmissionReason.MISCONFIGURED, state.queues.message)
    queue = state.queues.find(request.queue)
    if queue is None:
        usable = state.queues.list_usable_by(request.namespace)
        message = f"there is no queue {request.queue!r}; namespace {request.namespace} may use: {usable}"
        return Rejected(AdmissionReason.QUEUE_UNKNOWN, message)
    if not queue.accepts(request.namespace, request.priority):
        return _reject_by_owner(state.queues, queue, request)
    if (rejection := _find_rejection(state.queues, queue, request)) is not None:
        permanent: Rejected | None = rejection
        if state.queues.has_current_nodes:
            permanent = _find_rejection(state.queues.without_nodes, queue, request)
        # Nodes may be added to a cluster, so a rejection that depends on its present nodes is only a deferral.
        return permanent or _defer(state.pending, own, rejection.reason, f"for now, {rejection.message}", queue)
    if queue.stopped:
        explanation = f"queue {queue.name} is stopped: nothing new starts until its administrator opens it again"
        return _defer(state.pending, own, AdmissionReason.QUEUE_STOPPED, explanation, queue)
    feasible = _find_feasible(state.queues, state.pending)
    outcome = evaluate_request(state.queues, state.leases, state.history, feasible, own, now)
    if outcome.pool is not None:
        return Admitted(lease="", pool=outcome.pool, nodes=outcome.nodes)
    reasons = tuple(_explain_deferral(queue, own, outcome))
    if outcome.is_promised:
        victims = [one for one in state.leases if one.preemption is not None and one.preemption.is_for(request)]
        reasons = (*([explain_pending_preemptions(victims)] if victims else []), *reasons)
    message = f"{reasons[0].message}; position {outcome.position}{_expected_start_text(outcome.expected_start)}"
    return Deferred(reasons[0].reason, message, outcome.position, reasons, outcome.expected_start)


def _defer(
    pending: tuple[PendingRequest, ...],
    own: PendingRequest,
    reason: AdmissionReason,
    message: str,
    queue: Queue | None = None,
) -> Deferred:
    """A deferral without a scheduling cycle; the position counts the requests of the same queue."""
    position = queue_position(queue, own)
    same_queue = [one for one in pending if one.request.queue == own.request.queue and one.arrival != own.arrival]
    ahead = [one for one in same_queue if queue_position(queue, one) < position]
    return Deferred(reason, message, len(ahead) + 1, (DeferralReason(reason, message),))


def _find_feasible(queues: Queues, pending: tuple[PendingRequest, ...]) -> tuple[PendingRequest, ...]:
    """The requests that the present nodes could serve; a request that waits for new nodes must not delay others."""
    if not queues.has_current_nodes:
        return pending
    cached = _recent_feasible.find(lambda one: one.queues is queues and one.pending is pending)
    if cached is None:
        cached = _recent_feasible.remember(_drop_infeasible(queues, pending, _recent_feasible.newest))
    return cached.feasible


class _FeasibleRequests(NamedTuple):
    """The requests of ``pending`` that fit at least on all present nodes without any leases."""

    queues: Queues
    pending: tuple[PendingRequest, ...]
    infeasible: frozenset[int]
    """Arrival numbers of the others."""
    feasible: tuple[PendingRequest, ...]


_recent_feasible: RecentResults[_FeasibleRequests] = RecentResults(2)


def _drop_infeasible(
    queues: Queues, pending: tuple[PendingRequest, ...], before: _FeasibleRequests | None
) -> _FeasibleRequests:
    """Look only at what is new since ``before``, if that was under the same queues."""
    if before is None or before.queues is not queues:
        before = _FeasibleRequests(queues, (), frozenset(), ())
    removed, added = find_changes(before.pending, pending)
    infeasible = before.infeasible - {one.arrival for one in removed} | _find_infeasible(queues, added)
    feasible = tuple(one for one in pending if one.arrival not in infeasible) if infeasible else pending
    return _FeasibleRequests(queues, pending, infeasible, feasible)


def _find_infeasible(queues: Queues, pending: Iterable[PendingRequest]) -> frozenset[int]:
    infeasible_shapes: dict[RequestShape, bool] = {}

    def is_infeasible(request: LeaseRequest) -> bool:
        shape = request_shape(request)
        if shape not in infeasible_shapes:
            queue = queues.find(request.queue)
            infeasible_shapes[shape] = queue is not None and _find_rejection(queues, queue, request) is not None
        return infeasible_shapes[shape]

    return frozenset(one.arrival for one in pending if is_infeasible(one.request))


def _reject_by_owner(queues: Queues, queue: Queue, request: LeaseRequest) -> Rejected:
    """Rejects a request that `Queue.accepts` does not accept."""
    if not queue.is_usable_by(request.namespace):
        usable = queues.list_usable_by(request.namespace)
        message = f"namespace {request.namespace} may not use queue {queue.name}; it may use: {usable}"
        return Rejected(AdmissionReason.QUEUE_NOT_ALLOWED, message)
    return Rejected(
        AdmissionReason.PRIORITY_TOO_HIGH,
        f"queue {queue.name} takes priorities up to {queue.max_priority}, and the step has {request.priority}; "
        "lower the priority of the step",
    )


def _find_rejection(queues: Queues, queue: Queue, request: LeaseRequest) -> Rejected | None:
    """Why the request can never be served under these queues; None if it can."""
    inventory = queues.gpu_inventory
    wanted = {request.gpu_type} if request.gpu_type else set(request.gpu_types)
    if inventory is not None and wanted and not wanted & queues.gpu_types:
        gpu_types = ", ".join(sorted(queues.gpu_types)) or "none"
        return Rejected(
            AdmissionReason.NO_MATCHING_GPU_TYPE, f"the cluster has no {request.type_text}; it has: {gpu_types}"
        )
    if inventory is not None and not pools.find_suitable_kinds(queues, request):
        return _reject_by_kind(queues, inventory, request)
    eligible_pools = pools.find_eligible_pools(queues, queue, request)
    if not eligible_pools:
        declared = ", ".join(sorted(queue.gpus)) or "none"
        missing = request.type_text or "GPU that fits"
        message = f"queue {queue.name} has no {missing}; it has: {declared}"
        return Rejected(
            AdmissionReason.NO_MATCHING_GPU_TYPE, f"{message}{_untyped_request_hint(queues, queue, request)}"
        )
    return _reject_by_size(queues, queue, request, eligible_pools)


def _reject_by_kind(queues: Queues, gpu_kinds: Iterable[str], request: LeaseRequest) -> Rejected:
    """Rejects a request whose GPU type exists, but of which no GPU kind is suitable."""
    any_memory = replace(request, min_gpu_memory_mb=None)
    if not queues.flavors or any(pools.is_kind_suitable(queues, kind, any_memory) for kind in gpu_kinds):
        return Rejected(
            AdmissionReason.GPU_MEMORY_TOO_SMALL,
            f"no GPU of the wanted type has {request.min_gpu_memory_mb} MB; ask for less memory or another type",
        )
    message = f"no flavor of {request.type_text or 'any type'} is for this step{_spot_hint(queues, request)}"
    return Rejected(AdmissionReason.NO_MATCHING_GPU_TYPE, message)


def _untyped_request_hint(queues: Queues, queue: Queue, request: LeaseRequest) -> str:
    """Hint for a step without a GPU type in a queue whose only quota is ``*``; else the `_spot_hint`."""
    if queues.flavors and request.gpu_type is None and ANY_TYPE in queue.gpus:
        return (
            f"; beside flavors, {ANY_TYPE} is only for steps that name a type which has none: name one (gpu_type), or "
            "give the queue a quota of a flavor"
        )
    return _spot_hint(queues, request)


def _spot_hint(queues: Queues, request: LeaseRequest) -> str:
    """Hint that ``spot`` of the request may exclude flavors."""
    if not any(one.spot for one in queues.flavors) or request.spot == "allowed":
        return ""
    if request.spot == "only":
        return "; the step requests spot nodes only"
    return "; flavors of spot nodes are for steps with spot=True"


def _reject_by_size(queues: Queues, queue: Queue, request: LeaseRequest, eligible_pools: list[str]) -> Rejected | None:
    largest = max(queues.max_gpus(queue, pool) for pool in eligible_pools)
    if request.gpus > largest:
        borrowed = ", borrowed ones included" if largest > max(queue.gpus[pool] for pool in eligible_pools) else ""
        return Rejected(
            AdmissionReason.EXCEEDS_MAX_QUOTA,
            f"{_format_requested_gpus(request)} can never be had: queue {queue.name} may hold at most "
            f"{largest}{borrowed}; "
            f"{_too_large_hint(queues, queue, request)}",
        )
    existing = {pool: pools.count_existing_gpus(queues, request, pool) for pool in eligible_pools}
    if request.gpus > max(existing.values()):
        return Rejected(
            _inventory_reason(queues),
            f"{_format_refused_gpus(queues, request)}: the cluster has {max(existing.values()):g}; ask for fewer",
        )
    largest_in_one_pool = max(min(queues.max_gpus(queue, pool), existing[pool]) for pool in eligible_pools)
    if request.gpus > largest_in_one_pool:
        return Rejected(
            _inventory_reason(queues),
            f"{_format_refused_gpus(queues, request)}: no single GPU type is in both the cluster and the "
            f"quota of queue {queue.name} in this number; ask for at most {largest_in_one_pool:g}",
        )
    return _reject_by_placement(queues, request, eligible_pools)


def _reject_by_placement(queues: Queues, request: LeaseRequest, eligible_pools: list[str]) -> Rejected | None:
    """Rejects a request that not even an empty cluster could place; None if it could."""
    if queues.empty_cluster_capacity is None:
        return _reject_without_nodes(request)
    placements = [
        find_placement(queues.empty_cluster_capacity, build_gang_request(request, pool), queues.placement_policy)
        for pool in eligible_pools
    ]
    failures = [one for one in placements if isinstance(one, PlacementFailure)]
    if len(failures) < len(placements):
        return None
    nearest = max(failures, key=lambda one: (one.placeable_members, one.largest_node_gpus))
    return Rejected(
        AdmissionReason(nearest.reason.value),
        f"{_format_refused_gpus(queues, request)}: {nearest.message} even if nothing else ran; "
        f"ask for at most {nearest.largest_node_gpus} on one node, or for several nodes",
    )


def _reject_without_nodes(request: LeaseRequest) -> Rejected | None:
    """Rejects a gang whose pods must share a domain of the topology, where the service knows no nodes."""
    if request.members == 1 or (request.within is None and request.tensor_parallel == 1):
        return None
    return Rejected(
        AdmissionReason.TOPOLOGY_PLACEMENT_FAILED,
        "the pods of the step must be near each other (within, tensor_parallel), and the queues know no nodes; declare "
        "nodes in the queue file, or read those of the cluster (cluster_nodes), or drop the condition",
    )


def _inventory_reason(queues: Queues) -> AdmissionReason:
    """Reason of a request for more GPUs than exist. Nodes of a cluster may be added, a declared inventory is final."""
    return AdmissionReason.WAITING_FOR_INVENTORY if queues.has_current_nodes else AdmissionReason.EXCEEDS_MAX_QUOTA


def _format_refused_gpus(queues: Queues, request: LeaseRequest) -> str:
    return f"{_format_requested_gpus(request)} {'cannot' if queues.has_current_nodes else 'can never'} be had"


def _too_large_hint(queues: Queues, queue: Queue, request: LeaseRequest) -> str:
    """Hint for a request that is too large for its queue."""
    ceilings = {
        q.name: max((queues.max_gpus(q, p) for p in pools.find_eligible_pools(queues, q, request)), default=0)
        for q in queues.queues
        if q.accepts(request.namespace, request.priority)
    }
    name = max(sorted(ceilings), key=lambda n: ceilings[n])
    if ceilings[name] >= request.gpus:
        return f"queue {name} may hold {ceilings[name]}"
    if ceilings[name] > ceilings[queue.name]:
        return f"ask for fewer; the largest quota is {ceilings[name]}, of queue {name}"
    return "ask for fewer"


def _explain_deferral(queue: Queue, pending: PendingRequest, outcome: RequestOutcome) -> Iterator[DeferralReason]:
    """All reasons: first the held GPUs, then the reservation or the request that goes first."""
    request, capacity = pending.request, outcome.capacity
    eligible_pools = pools.find_eligible_pools(capacity.queues, queue, request)
    within_quota = [pool for pool in eligible_pools if capacity.available_gpus(queue, pool) >= request.gpus]
    if not within_quota:
        yield _explain_quota(capacity, queue, request, eligible_pools)
    candidates = within_quota or eligible_pools
    exhausted = [pool for pool in candidates if capacity.free_inventory(request, pool) < request.gpus]
    if exhausted and len(exhausted) == len(candidates):
        message = _inventory_message(capacity, request, exhausted[0])
        yield DeferralReason(AdmissionReason.WAITING_FOR_INVENTORY, message)
    elif (placement_reason := _explain_placement(capacity, request, candidates)) is not None:
        yield placement_reason
    if outcome.reservation is not None and outcome.reservation.start.expected_start is not None:
        yield _explain_reservation(pending, outcome.reservation)
    elif outcome.reservation is not None and _is_line_closed(outcome.reservation, request):
        yield _explain_closed_line(pending, outcome.reservation)
    elif outcome.first_ahead is not None:
        yield _explain_order(queue, outcome.first_ahead, pending)
    if outcome.own_reservation is not None and outcome.own_reservation.start.expected_start is None:
        yield from _explain_backfill(outcome.own_reservation)


def _explain_quota(
    capacity: Capacity, queue: Queue, request: LeaseRequest, eligible_pools: list[str]
) -> DeferralReason:
    at_limit = all(
        capacity.held_in_pool(queue, pool) + request.gpus > queue.max_with_borrowing(pool) for pool in eligible_pools
    )
    reason = AdmissionReason.BORROWING_LIMIT_REACHED if queue.cohort and at_limit else AdmissionReason.WAITING_FOR_QUOTA
    parts = [
        f"{capacity.held_in_pool(queue, pool)} of {format_gpus(queue.gpus[pool], None if pool == ANY_TYPE else pool)}"
        for pool in eligible_pools
    ]
    message = f"queue {queue.name} holds {', '.join(parts)}"
    if queue.cohort is not None:
        available = max(max(0, capacity.available_gpus(queue, pool)) for pool in eligible_pools)
        message += f" and may take {available} more now, what cohort {queue.cohort} lends included"
    return DeferralReason(reason, f"{message}; {_format_requested_gpus(request)} asked")


def _inventory_message(capacity: Capacity, request: LeaseRequest, pool: str) -> str:
    existing = pools.count_existing_gpus(capacity.queues, request, pool)
    in_use = existing - capacity.free_inventory(request, pool)
    total = format_gpus(int(existing), pools.gpu_kind_in_pool(request, pool))
    return f"{in_use:g} of {total} of the cluster are in use; {_format_requested_gpus(request)} asked"


def _explain_placement(capacity: Capacity, request: LeaseRequest, eligible_pools: list[str]) -> DeferralReason | None:
    """The reason of a request for which enough GPUs are free, but not where the pods could use them."""
    placements = [capacity.find_placement(request, pool) for pool in eligible_pools]
    failures = [one for one in placements if isinstance(one, PlacementFailure)]
    if not failures or len(failures) < len(placements):
        return None
    nearest = max(failures, key=lambda one: (one.placeable_members, one.free_gpus))
    return DeferralReason(
        AdmissionReason(nearest.reason.value), f"{nearest.message}; {_format_requested_gpus(request)} asked"
    )


def _explain_reservation(pending: PendingRequest, reservation: Reservation) -> DeferralReason:
    first = reservation.pending.request
    return DeferralReason(
        AdmissionReason.RESERVED,
        f"{_format_requested_gpus(pending.request)} would be free, and "
        f"{'are' if pending.request.gpus > 1 else 'is'} kept for {format_step_name(first)} "
        f"({_format_requested_gpus(first)}){_expected_start_text(reservation.start.expected_start)}",
    )


def _is_line_closed(reservation: Reservation, request: LeaseRequest) -> bool:
    """Whether ``request`` could have overtaken the reserved one until ``closes_at``."""
    first = reservation.pending.request
    could_overtake = (first.queue, first.priority) == (request.queue, request.priority)
    return reservation.start.closes_at is not None and not reservation.start.is_open and could_overtake


def _explain_closed_line(pending: PendingRequest, reservation: Reservation) -> DeferralReason:
    first = reservation.pending.request
    return DeferralReason(
        AdmissionReason.LINE_CLOSED,
        f"{_format_requested_gpus(pending.request)} asked; nothing starts before {format_step_name(first)} "
        f"({_format_requested_gpus(first)}), which has been the first of the queue for "
        f"{reservation.queue.backfill_hours:g} hours",
    )


def _explain_backfill(own: Reservation) -> Iterator[DeferralReason]:
    """Which bound on overtaking applies to the first blocked request of a queue, and until when."""
    hours = f"(backfill_hours {own.queue.backfill_hours:g})"
    is_open, closes_at = own.start.is_open, own.start.closes_at
    if closes_at is None and not is_open:
        return
    if closes_at is None:
        message = (
            "later requests of the queue may start on what it lacks until its turn has come; it may preempt them "
            f"once they have run for {own.queue.protected_seconds} s"
        )
    elif is_open:
        message = f"later requests of the queue may start on what it lacks until {_format_moment(closes_at)} {hours}"
    else:
        message = f"no later request of the queue starts on what it lacks since {_format_moment(closes_at)} {hours}"
    yield DeferralReason(AdmissionReason.FIRST_IN_LINE, message)


def _explain_order(queue: Queue, ahead: RankedRequest, pending: PendingRequest) -> DeferralReason:
    first = ahead.pending
    behind = (
        f"{_format_requested_gpus(pending.request)} asked; behind {format_step_name(first.request)} "
        f"({_format_requested_gpus(first.request)}"
    )
    if ahead.is_promised:
        return DeferralReason(AdmissionReason.RESERVED, f"{behind}, for which GPUs are kept)")
    if first.request.priority > pending.request.priority:
        return DeferralReason(AdmissionReason.BEHIND_HIGHER_PRIORITY, f"{behind}, priority {first.request.priority})")
    first_attained, own_attained = first.request.attained, pending.request.attained
    is_same_queue = first.request.queue == queue.name
    first_level, own_level = (
        attained_level(queue, one.attained, one.most_gpus) for one in (first.request, pending.request)
    )
    if is_same_queue and first_level < own_level:
        hours = f"{first_attained / 3600:.1f} GPU-hours so far, and this one {own_attained / 3600:.1f}"
        return DeferralReason(AdmissionReason.BEHIND_LESS_ATTAINED, f"{behind}, which has had {hours})")
    if first.arrival < pending.arrival:
        return DeferralReason(AdmissionReason.BEHIND_EARLIER_REQUEST, f"{behind}, asked earlier)")
    if is_same_queue:
        return DeferralReason(AdmissionReason.BEHIND_EARLIER_REQUEST, f"{behind}, began earlier)")
    return DeferralReason(
        AdmissionReason.BEHIND_SMALLER_SHARE,
        f"{behind}, of queue {first.request.queue}, which uses a smaller share of its quota)",
    )


def _format_requested_gpus(request: LeaseRequest) -> str:
    return format_gpus(request.gpus, request.type_text)


def _expected_start_text(start: datetime | None) -> str:
    return f", expected to start by {_format_moment(start)}" if start is not None else ""


def _format_moment(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S %Z}"
