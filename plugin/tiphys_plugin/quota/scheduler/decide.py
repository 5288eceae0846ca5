"""Admits, defers or rejects one request, and explains the decision.

The decision is a pure function of a `LedgerState`, whatever the cache has seen before,
so property tests can search for counterexamples to its laws. A request that the queues can never serve
is rejected at once. For other requests the scheduling cycle decides
(`tiphys_plugin.quota.scheduler.cycle`), and this module explains its outcome.

Quota is kept per queue and pool: a flavor or a GPU type named in the queue file,
or ``*`` for all types that the queue does not name. A request with a GPU type uses
the flavors of its type, or its type, or ``*`` if the queue does not name the type.
A request without a GPU type may use any pool. Existing GPUs are a second limit,
across queues, where an inventory is declared.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime

from tiphys_plugin.quota.lease import (
    Admission,
    AdmissionReason,
    Admitted,
    DeferralReason,
    Deferred,
    Lease,
    LeaseRequest,
    LedgerState,
    PendingRequest,
    Rejected,
)
from tiphys_plugin.quota.placement.place import PlacementFailure
from tiphys_plugin.quota.queue import ANY_TYPE, Queue
from tiphys_plugin.quota.queues import MisconfiguredQueues, Queues, format_gpus
from tiphys_plugin.quota.scheduler import pools
from tiphys_plugin.quota.scheduler.backfill import Reservation
from tiphys_plugin.quota.scheduler.cache import SchedulerCache
from tiphys_plugin.quota.scheduler.capacity import Capacity
from tiphys_plugin.quota.scheduler.cycle import run_cycle
from tiphys_plugin.quota.scheduler.cycle_result import PoolAssignment, RankedRequest, RequestOutcome
from tiphys_plugin.quota.scheduler.fair_share import attained_level
from tiphys_plugin.quota.scheduler.pending_queues import PendingQueues
from tiphys_plugin.quota.scheduler.pool_options import is_feasible, list_eligible_pools
from tiphys_plugin.quota.scheduler.queue_order import queue_position
from tiphys_plugin.quota.scheduler.rejection import find_rejection, format_requested_gpus


def explain_pending_preemptions(preempted: Sequence[Lease]) -> DeferralReason:
    """The reason of a request that waits for its victims ``preempted``, which must not be empty."""
    victims = [(lease.preemption, lease) for lease in preempted if lease.preemption is not None]
    last, lease = max(victims, key=lambda victim: victim[0].deadline)
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


def select_admissible(state: LedgerState, now: datetime, cache: SchedulerCache) -> list[PoolAssignment]:
    """The requests that may start now, in scheduling order."""
    assert isinstance(state.queues, Queues)
    pending_queues = PendingQueues(state.queues, state.pending)
    return list(run_cycle(cache.derive(state.queues, state), pending_queues, now).assignments)


def decide_admission(
    state: LedgerState, request: LeaseRequest, arrival: int, now: datetime, cache: SchedulerCache | None = None
) -> Admission:
    """Admit, defer or reject a new request with this arrival number; see `decide_pending`."""
    return decide_pending(state, PendingRequest(request, arrival, since=now, seen_at=now), now, cache)


def decide_pending(
    state: LedgerState, own: PendingRequest, now: datetime, cache: SchedulerCache | None = None
) -> Admission:
    """Admit, defer or reject a pending request. `Admitted.lease` is left empty.

    ``state`` is without the request, or has an earlier version of it among its pending requests. ``cache`` None: for a
    single decision.
    """
    request = own.request
    if state.queues is None:
        return Admitted(lease="", pool=request.gpu_type or ANY_TYPE)
    if isinstance(state.queues, MisconfiguredQueues):
        return _defer(state, own, AdmissionReason.MISCONFIGURED, state.queues.message)
    queue = state.queues.find(request.queue)
    if queue is None:
        usable = state.queues.list_usable_by(request.namespace)
        message = f"there is no queue {request.queue!r}; namespace {request.namespace} may use: {usable}"
        return Rejected(AdmissionReason.QUEUE_UNKNOWN, message)
    if not queue.accepts(request.namespace, request.priority):
        return _reject_by_owner(state.queues, queue, request)
    if not is_feasible(state.queues, queue, request):
        return _reject_or_defer(state, state.queues, queue, own)
    if queue.stopped:
        explanation = f"queue {queue.name} is stopped: nothing new starts until its administrator opens it again"
        return _defer(state, own, AdmissionReason.QUEUE_STOPPED, explanation, queue)
    outcome = (cache or SchedulerCache()).evaluate(state.queues, state, own, now)
    if outcome.verdict.pool is not None:
        return Admitted(lease="", pool=outcome.verdict.pool, nodes=outcome.verdict.nodes)
    reasons = tuple(_explain_deferral(queue, own, outcome))
    if outcome.is_promised:
        victims = [lease for lease in state.leases if lease.preemption is not None and lease.preemption.is_for(request)]
        reasons = (*([explain_pending_preemptions(victims)] if victims else []), *reasons)
    message = f"{reasons[0].message}; position {outcome.position}{_expected_start_text(outcome.expected_start)}"
    return Deferred(reasons[0].reason, message, outcome.position, reasons, outcome.expected_start)


def _reject_or_defer(state: LedgerState, queues: Queues, queue: Queue, own: PendingRequest) -> Admission:
    """Reject a request that the queues cannot serve; defer it if only the present nodes of a cluster cannot."""
    rejection = find_rejection(queues, queue, own.request)
    assert rejection is not None
    # Nodes may be added to a cluster, so a rejection that depends on its present nodes is only a deferral.
    permanent = find_rejection(queues.without_nodes, queue, own.request) if queues.has_current_nodes else rejection
    return permanent or _defer(state, own, rejection.reason, f"for now, {rejection.message}", queue)


def _defer(
    state: LedgerState, own: PendingRequest, reason: AdmissionReason, message: str, queue: Queue | None = None
) -> Deferred:
    """A deferral without a scheduling cycle; the position counts the requests of the same queue."""
    position = queue_position(queue, own)
    ahead = sum(
        queue_position(queue, pending) < position
        for pending in state.pending
        if pending.request.queue == own.request.queue and pending.arrival != own.arrival
    )
    return Deferred(reason, message, ahead + 1, (DeferralReason(reason, message),))


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


def _explain_deferral(queue: Queue, pending: PendingRequest, outcome: RequestOutcome) -> Iterator[DeferralReason]:
    """All reasons: first the held GPUs, then the reservation or the request that goes first."""
    request, capacity = pending.request, outcome.capacity
    eligible_pools = list_eligible_pools(capacity.queues, queue, request)
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
    delayed, own = outcome.verdict.reservation, outcome.verdict.own_reservation
    if delayed is not None and delayed.start.expected_start is not None:
        yield _explain_reservation(pending, delayed)
    elif delayed is not None and _is_line_closed(delayed, request):
        yield _explain_closed_line(pending, delayed)
    elif outcome.first_ahead is not None:
        yield _explain_order(queue, outcome.first_ahead, pending)
    if own is not None and own.start.expected_start is None:
        yield from _explain_backfill(own)


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
    return DeferralReason(reason, f"{message}; {format_requested_gpus(request)} asked")


def _inventory_message(capacity: Capacity, request: LeaseRequest, pool: str) -> str:
    existing = pools.count_existing_gpus(capacity.queues, request, pool)
    in_use = existing - capacity.free_inventory(request, pool)
    total = format_gpus(int(existing), pools.gpu_kind_in_pool(request, pool))
    return f"{in_use:g} of {total} of the cluster are in use; {format_requested_gpus(request)} asked"


def _explain_placement(capacity: Capacity, request: LeaseRequest, eligible_pools: list[str]) -> DeferralReason | None:
    """The reason of a request for which enough GPUs are free, but not where the pods could use them."""
    placements = [capacity.find_placement(request, pool) for pool in eligible_pools]
    failures = [placement for placement in placements if isinstance(placement, PlacementFailure)]
    if not failures or len(failures) < len(placements):
        return None
    nearest = max(failures, key=lambda failure: (failure.placeable_members, failure.free_gpus))
    return DeferralReason(
        AdmissionReason(nearest.reason.value), f"{nearest.message}; {format_requested_gpus(request)} asked"
    )


def _explain_reservation(pending: PendingRequest, reservation: Reservation) -> DeferralReason:
    first = reservation.pending.request
    return DeferralReason(
        AdmissionReason.RESERVED,
        f"{format_requested_gpus(pending.request)} would be free, and "
        f"{'are' if pending.request.gpus > 1 else 'is'} kept for {format_step_name(first)} "
        f"({format_requested_gpus(first)}){_expected_start_text(reservation.start.expected_start)}",
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
        f"{format_requested_gpus(pending.request)} asked; nothing starts before {format_step_name(first)} "
        f"({format_requested_gpus(first)}), which has been the first of the queue for "
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
        f"{format_requested_gpus(pending.request)} asked; behind {format_step_name(first.request)} "
        f"({format_requested_gpus(first.request)}"
    )
    if ahead.is_promised:
        return DeferralReason(AdmissionReason.RESERVED, f"{behind}, for which GPUs are kept)")
    if first.request.priority > pending.request.priority:
        return DeferralReason(AdmissionReason.BEHIND_HIGHER_PRIORITY, f"{behind}, priority {first.request.priority})")
    first_attained, own_attained = first.request.attained, pending.request.attained
    is_same_queue = first.request.queue == queue.name
    first_level, own_level = (
        attained_level(queue, asked.attained, asked.most_gpus) for asked in (first.request, pending.request)
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


def _expected_start_text(start: datetime | None) -> str:
    return f", expected to start by {_format_moment(start)}" if start is not None else ""


def _format_moment(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S %Z}"
