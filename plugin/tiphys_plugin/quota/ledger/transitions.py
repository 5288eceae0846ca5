"""Transitions of the GPU ledger state that need a decision: admit a request, and mark victims.

`admit_or_queue` finds an existing lease or queue place of a repeated request,
lets `decide_pending` decide, and records the result. `mark_victims` records
the choice of a preemption loop. Leases start and end between the choice and
the mark, so `mark_victims` checks the rules of preemption again on the newest
state.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from tiphys_plugin.quota.lease import Admission, Admitted, Deferred, Lease, LeaseRequest, PendingRequest
from tiphys_plugin.quota.ledger.entry_index import lease_index, pending_index, without_arrivals
from tiphys_plugin.quota.ledger.state import LedgerState
from tiphys_plugin.quota.preemption.victims import (
    NoVictims,
    check_victims,
    is_member_id,
    lease_id_of,
    mark_lease_preempted,
    split_elastic_leases,
)
from tiphys_plugin.quota.queues import QueueRules, Queues
from tiphys_plugin.quota.scheduler.decide import SchedulingState, decide_pending
from tiphys_plugin.quota.scheduler.queue_order import drop_unused_attained, request_of_lease

FORGET_AFTER = timedelta(minutes=2)
"""A pending request that was not repeated for this long no longer delays others."""


def admit_or_queue(
    ledger_state: LedgerState,
    rules: QueueRules,
    request: LeaseRequest,
    now: datetime,
    lease_id: str,
    forget_after: timedelta,
) -> tuple[LedgerState, Admission]:
    """Decide on ``request`` and record the decision.

    A pending request that was not repeated for ``forget_after`` delays no others. It keeps its place in case it
    comes back.

    Args:
        ledger_state: State before the decision.
        rules: Queues under which the scheduler decides.
        request: A new or repeated request.
        now: Time of the decision.
        lease_id: Id of the lease if one is granted.
        forget_after: Age at which pending requests are ignored.
    """
    after, admission = _decide_and_record(ledger_state, rules, request, now, lease_id, forget_after)
    if isinstance(admission, Admitted) and isinstance(rules, Queues):
        admission = replace(admission, flavor=rules.flavor_set.by_name.get(admission.pool))
    return after, admission


def _decide_and_record(
    ledger_state: LedgerState,
    rules: QueueRules,
    request: LeaseRequest,
    now: datetime,
    lease_id: str,
    forget_after: timedelta,
) -> tuple[LedgerState, Admission]:
    request = drop_unused_attained(rules, request)
    if (existing := _find_existing_lease(ledger_state, request)) is not None:
        return _transfer_lease(ledger_state, existing, request), _admitted_with_lease(existing)
    pending = _find_or_create_pending(ledger_state, request, now)
    others = without_arrivals(ledger_state.pending, (pending.arrival,))
    active = select_active(rules, ledger_state.pending, now, forget_after)
    sized_request, admission = _decide_largest_fit(
        SchedulingState(rules, ledger_state.leases, active, ledger_state.history), pending, now
    )
    match admission:
        case Admitted():
            granted = request_of_lease(rules, pending, sized_request)
            lease = Lease(lease_id, granted, admission.pool, granted_at=now, check_at=now, nodes=admission.nodes)
            waited_seconds = (now - pending.since).total_seconds()
            return replace(ledger_state, leases=(*ledger_state.leases, lease), pending=others), replace(
                _admitted_with_lease(lease), waited_seconds=waited_seconds
            )
        case Deferred():
            index = bisect_left(others, pending.arrival, key=lambda one: one.arrival)
            by_arrival = (*others[:index], pending, *others[index:])
            return replace(ledger_state, pending=by_arrival), admission
    return replace(ledger_state, pending=others), admission


def _decide_largest_fit(
    state: SchedulingState, pending: PendingRequest, now: datetime
) -> tuple[LeaseRequest, Admission]:
    """Decide on a request; an elastic gang that may start gets the most members that fit at once.

    An elastic gang queues with its fewest members, so there is no reservation and no victim for optional members.
    """
    admission = decide_pending(state, pending, now)
    if isinstance(admission, Admitted):
        for larger in pending.request.larger_sizes:
            larger_admission = decide_pending(state, replace(pending, request=larger), now)
            if isinstance(larger_admission, Admitted):
                return larger, larger_admission
    return pending.request, admission


def _admitted_with_lease(lease: Lease) -> Admitted:
    members = lease.request.members if lease.request.max_members is not None else None
    return Admitted(lease=lease.id, pool=lease.pool, nodes=lease.nodes, members=members)


def select_active(
    rules: QueueRules, pending: Iterable[PendingRequest], now: datetime, forget_after: timedelta
) -> tuple[PendingRequest, ...]:
    """The pending requests that were repeated within ``forget_after``, and that their queues still accept.

    ``pending`` must be in order of arrival. If all are active, it is returned itself.
    """
    return pending_index.select_active(rules, tuple(pending), now, forget_after)


def _find_existing_lease(ledger_state: LedgerState, request: LeaseRequest) -> Lease | None:
    """The lease of this admit node, or the orphaned lease of another admit node of the same attempt.

    An admit node that dies between its lease and its claim leaves a lease without pods, which no check of pods
    finds. The retry requests GPUs for the same attempt, and would wait for this lease until its workflow ends.
    """
    leases = lease_index.find(ledger_state.leases, request.workflow_step)
    same_node = [lease for lease in leases if lease.request.node_hash == request.node_hash]
    same_attempt = [lease for lease in leases if lease.request.attempt == request.attempt]
    return next(iter(same_node + same_attempt), None)


def _transfer_lease(ledger_state: LedgerState, lease: Lease, request: LeaseRequest) -> LedgerState:
    """The state in which ``lease`` has the attempt and the node of ``request``, by which its pods are found."""
    current_request = replace(lease.request, node_hash=request.node_hash, attempt=request.attempt)
    if current_request == lease.request:
        return ledger_state
    transferred = replace(lease, request=current_request)
    return replace(
        ledger_state, leases=tuple(transferred if one.id == lease.id else one for one in ledger_state.leases)
    )


def _find_or_create_pending(ledger_state: LedgerState, request: LeaseRequest, now: datetime) -> PendingRequest:
    """The pending request of the step; a retry keeps the arrival number of the attempt before it."""
    before = next(iter(pending_index.find(ledger_state.pending, request.workflow_step)), None)
    if before is None:
        return PendingRequest(request, ledger_state.next_arrival, since=now, seen_at=now)
    # An equal request keeps its object: `PendingQueues` detects changes by identity.
    return replace(before, request=before.request if before.request == request else request, seen_at=now)


def mark_victims(
    ledger_state: LedgerState,
    rules: QueueRules,
    preemptor: tuple[str, str],
    grace_seconds: Mapping[str, float],
    now: datetime,
    forget_after: timedelta,
) -> tuple[LedgerState, tuple[Lease, ...]]:
    """Mark leases as victims of ``preemptor``: the new state and the marked leases, or the same state and no leases.

    Args:
        ledger_state: State before the mark.
        rules: Queues whose rules of preemption apply.
        preemptor: `LeaseRequest.workflow_step` of the preemptor.
        grace_seconds: Termination grace period by id of a lease, or of a member that an elastic gang can spare.
        now: Time of the mark.
        forget_after: Age at which pending requests are ignored.
    """
    preemptor_case = find_preemptor(ledger_state, rules, preemptor, now, forget_after)
    if preemptor_case is None:
        return ledger_state, ()
    state, pending = preemptor_case
    if any(map(is_member_id, grace_seconds)):
        state = split_elastic_leases(state)
    victims = [one for one in state.leases if one.id in grace_seconds]
    if len(victims) < len(grace_seconds):
        return ledger_state, ()
    moved = check_victims(state, pending, victims, now)
    if isinstance(moved, NoVictims):
        return ledger_state, ()
    victims_by_lease: defaultdict[str, list[Lease]] = defaultdict(list)
    for victim in victims:
        victims_by_lease[lease_id_of(victim.id)].append(victim)

    def mark(lease: Lease) -> Lease:
        if lease.id not in victims_by_lease:
            return lease
        grace = timedelta(seconds=max(grace_seconds[victim.id] for victim in victims_by_lease[lease.id]))
        moves = lease.id in moved
        return mark_lease_preempted(lease, victims_by_lease[lease.id], preemptor, now, grace, moves=moves)

    after = replace(ledger_state, leases=tuple(map(mark, ledger_state.leases)))
    return after, tuple(one for one in after.leases if one.id in victims_by_lease)


def find_preemptor(
    ledger_state: LedgerState,
    rules: QueueRules,
    preemptor_step: tuple[str, str],
    now: datetime,
    forget_after: timedelta,
) -> tuple[SchedulingState, PendingRequest] | None:
    """The pending request of a step, and the scheduling state without it; None if it is not pending and active."""
    active = select_active(rules, ledger_state.pending, now, forget_after)
    preemptor = next((one for one in active if one.request.workflow_step == preemptor_step), None)
    if preemptor is None:
        return None
    others = tuple(one for one in active if one is not preemptor)
    return SchedulingState(rules, ledger_state.leases, others, ledger_state.history), preemptor
