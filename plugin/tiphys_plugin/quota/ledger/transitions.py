"""The transitions of a ledger state: every rule about leases except the scheduling decision.

Each is a pure function from one state to the next. Callers pass in the time, new lease
ids, and the `SchedulerCache` of their ledger where a decision is needed. A backend only
loads the state, applies one transition, and stores the difference atomically; a
transition without an effect returns an equal state.

`admit_or_queue` finds an existing lease or queue place of a repeated request, lets
`decide_pending` decide, and records the result. `mark_victims` records the choice of a
preemption loop. Leases start and end between the choice and the mark, so `mark_victims`
checks the rules of preemption again on the newest state.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import compress, count
from operator import attrgetter, not_

from tiphys_plugin.quota.lease import (
    Admission,
    Admitted,
    Deferred,
    Growth,
    Lease,
    LeaseRequest,
    LedgerState,
    PendingRequest,
)
from tiphys_plugin.quota.preemption.victims import (
    NoVictims,
    check_victims,
    is_member_id,
    lease_id_of,
    mark_lease_preempted,
    split_elastic_leases,
)
from tiphys_plugin.quota.queue import ANY_TYPE
from tiphys_plugin.quota.queues import QueueRules, Queues
from tiphys_plugin.quota.scheduler import pools
from tiphys_plugin.quota.scheduler.cache import SchedulerCache
from tiphys_plugin.quota.scheduler.capacity import Capacity
from tiphys_plugin.quota.scheduler.decide import decide_pending
from tiphys_plugin.quota.scheduler.fair_share import add_ended_usage, attained_gpu_seconds
from tiphys_plugin.quota.scheduler.pool_options import list_eligible_pools
from tiphys_plugin.quota.scheduler.queue_order import drop_unused_attained, request_of_lease, with_cohort

GROWTH_EVERY = timedelta(minutes=10)
"""Shortest time between two growths of an elastic gang, or its start and the first: each has all its ranks save and
start again."""
_FEW = 16
_lease_id = attrgetter("id")
_granted_at = attrgetter("granted_at")
_arrival = attrgetter("arrival")


def admit_or_queue(
    state: LedgerState,
    request: LeaseRequest,
    now: datetime,
    lease_id: str,
    cache: SchedulerCache,
) -> tuple[LedgerState, Admission]:
    """Decide on a new or repeated ``request`` and record the decision; ``lease_id`` is for a lease that is granted."""
    request = drop_unused_attained(state.queues, request)
    if (existing := _find_existing_lease(state, request, cache)) is not None:
        return _transfer_lease(state, existing, request), _admit_with_lease(existing, state.queues)
    pending = _find_or_create_pending(state, request, now, cache)
    active = replace(state, pending=cache.select_active(state, now))
    sized_request, admission = _decide_largest_fit(active, pending, now, cache)
    match admission:
        case Admitted():
            granted = request_of_lease(state.queues, pending, sized_request)
            lease = Lease(lease_id, granted, admission.pool, granted_at=now, check_at=now, nodes=admission.nodes)
            after = replace(state, leases=(*state.leases, lease), pending=_put_pending(state.pending, pending, ()))
            waited_seconds = (now - pending.since).total_seconds()
            return after, replace(_admit_with_lease(lease, state.queues), waited_seconds=waited_seconds)
        case Deferred():
            return replace(state, pending=_put_pending(state.pending, pending, (pending,))), admission
    return replace(state, pending=_put_pending(state.pending, pending, ())), admission


def _put_pending(
    pending: tuple[PendingRequest, ...], own: PendingRequest, kept: tuple[PendingRequest, ...]
) -> tuple[PendingRequest, ...]:
    """``pending`` with ``kept`` at the place of the request with the arrival number of ``own``."""
    index = bisect_left(pending, own.arrival, key=_arrival)
    is_pending = index < len(pending) and pending[index].arrival == own.arrival
    # Concatenation copies tens of thousands of references at once; unpacking would go through a list.
    return pending[:index] + kept + pending[index + is_pending :]


def _decide_largest_fit(
    state: LedgerState, pending: PendingRequest, now: datetime, cache: SchedulerCache
) -> tuple[LeaseRequest, Admission]:
    """Decide on a request; an elastic gang that may start gets the most members that fit at once.

    An elastic gang queues with its fewest members, so there is no reservation and no victim for optional members.
    """
    admission = decide_pending(state, pending, now, cache)
    if isinstance(admission, Admitted):
        for larger in pending.request.larger_sizes:
            larger_admission = decide_pending(state, replace(pending, request=larger), now, cache)
            if isinstance(larger_admission, Admitted):
                return larger, larger_admission
    return pending.request, admission


def _admit_with_lease(lease: Lease, queues: QueueRules) -> Admitted:
    members = lease.request.members if lease.request.max_members is not None else None
    flavor = queues.flavor_set.by_name.get(lease.pool) if isinstance(queues, Queues) else None
    return Admitted(lease=lease.id, pool=lease.pool, nodes=lease.nodes, members=members, flavor=flavor)


def _find_existing_lease(state: LedgerState, request: LeaseRequest, cache: SchedulerCache) -> Lease | None:
    """The lease of this admit node, or the orphaned lease of another admit node of the same attempt.

    An admit node that dies between its lease and its claim leaves a lease without pods, which no check of pods
    finds. The retry requests GPUs for the same attempt, and would wait for this lease until its workflow ends.
    """
    leases = cache.find_leases(state, request.workflow_step)
    same_node = [lease for lease in leases if lease.request.node_hash == request.node_hash]
    same_attempt = [lease for lease in leases if lease.request.attempt == request.attempt]
    return next(iter(same_node + same_attempt), None)


def _transfer_lease(state: LedgerState, lease: Lease, request: LeaseRequest) -> LedgerState:
    """The state in which ``lease`` has the attempt and the node of ``request``, by which its pods are found."""
    current_request = replace(lease.request, node_hash=request.node_hash, attempt=request.attempt)
    if current_request == lease.request:
        return state
    transferred = replace(lease, request=current_request)
    return _replace_lease(state, transferred)


def _find_or_create_pending(
    state: LedgerState, request: LeaseRequest, now: datetime, cache: SchedulerCache
) -> PendingRequest:
    """The pending request of the step; a retry keeps the arrival number of the attempt before it."""
    before = cache.find_pending(state, request.workflow_step)
    if before is None:
        return PendingRequest(request, state.next_arrival, since=now, seen_at=now)
    # An equal request keeps its object: `PendingQueues` detects changes by identity.
    return replace(before, request=before.request if before.request == request else request, seen_at=now)


def mark_victims(
    state: LedgerState,
    preemptor: tuple[str, str],
    grace_seconds: Mapping[str, float],
    now: datetime,
    cache: SchedulerCache,
) -> tuple[LedgerState, tuple[Lease, ...]]:
    """Mark leases as victims of ``preemptor``, a `LeaseRequest.workflow_step`; returns them, or no leases.

    ``grace_seconds`` are termination grace periods by id of a lease, or of a member that an elastic gang can spare.
    """
    preemptor_case = find_preemptor(state, preemptor, now, cache)
    if preemptor_case is None:
        return state, ()
    others, pending = preemptor_case
    if any(map(is_member_id, grace_seconds)):
        others = split_elastic_leases(others)
    victims = [lease for lease in others.leases if lease.id in grace_seconds]
    # They were chosen on an older state. If one has ended since, its GPUs may be enough: the next round chooses anew.
    if len(victims) < len(grace_seconds):
        return state, ()
    moved = check_victims(others, pending, victims, now, cache)
    if isinstance(moved, NoVictims):
        return state, ()
    victims_by_lease: defaultdict[str, list[Lease]] = defaultdict(list)
    for victim in victims:
        victims_by_lease[lease_id_of(victim.id)].append(victim)

    def mark(lease: Lease) -> Lease:
        if lease.id not in victims_by_lease:
            return lease
        grace = timedelta(seconds=max(grace_seconds[victim.id] for victim in victims_by_lease[lease.id]))
        moves = lease.id in moved
        return mark_lease_preempted(lease, victims_by_lease[lease.id], preemptor, now, grace, moves=moves)

    after = replace(state, leases=tuple(map(mark, state.leases)))
    return after, tuple(lease for lease in after.leases if lease.id in victims_by_lease)


def find_preemptor(
    state: LedgerState, workflow_step: tuple[str, str], now: datetime, cache: SchedulerCache
) -> tuple[LedgerState, PendingRequest] | None:
    """The pending request of a step, and the state without it; None if it is not pending and active."""
    active = cache.select_active(state, now)
    preemptor = next((pending for pending in active if pending.request.workflow_step == workflow_step), None)
    if preemptor is None:
        return None
    return replace(state, pending=tuple(pending for pending in active if pending is not preemptor)), preemptor


def restore(
    state: LedgerState,
    lease_id: str,
    request: LeaseRequest,
    gpu_type: str | None,
    nodes: tuple[str, ...],
    running_members: int,
    now: datetime,
) -> tuple[LedgerState, int]:
    """Record a lease that was granted before, see `AdmissionBackend.restore`; also the GPUs that it holds then."""
    attempt = (request.workflow_step, request.attempt)
    for recorded in state.leases:
        if recorded.id == lease_id or attempt == (recorded.request.workflow_step, recorded.request.attempt):
            return state, recorded.request.gpus
    queue = state.queues.find(request.queue) if isinstance(state.queues, Queues) else None
    if queue is not None and not queue.is_usable_by(request.namespace):
        return state, 0
    if queue is not None and queue.max_priority is not None:
        request = replace(request, priority=min(request.priority, queue.max_priority))
    request = with_cohort(state.queues, request)
    pool = gpu_type or pools.find_pool(state.queues, request.queue, request.gpu_type, None)
    # Pods that run hold their GPUs whatever the quota is now. Those that do not run yet get theirs as a request would.
    if running_members < request.members and not _has_quota(state, request, pool):
        if running_members == 0:
            return state, 0
        request, nodes = request.with_members(running_members), nodes[:running_members]
    restored = Lease(lease_id, request, pool, granted_at=now, check_at=now, nodes=nodes)
    return replace(state, leases=(*state.leases, restored)), request.gpus


def _has_quota(state: LedgerState, request: LeaseRequest, granted_pool: str) -> bool:
    """Whether the queue may hold the GPUs of ``request`` beside what it holds."""
    queues = state.queues
    queue = queues.find(request.queue) if isinstance(queues, Queues) else None
    if not isinstance(queues, Queues) or queue is None:
        return False
    pool = pools.find_pool(queues, request.queue, request.gpu_type, granted_pool)
    return pool in queue.gpus and Capacity(queues, state.leases).available_gpus(queue, pool) >= request.gpus


def withdraw(state: LedgerState, uid: str) -> LedgerState:
    """Drop the pending requests of a workflow."""
    return replace(state, pending=tuple(pending for pending in state.pending if pending.request.uid != uid))


def release(state: LedgerState, lease_id: str, now: datetime, cache: SchedulerCache) -> LedgerState:
    """Release a lease; the same state if there is no such lease."""
    lease = cache.find_lease(state, lease_id)
    return state if lease is None else _without_leases(state, [lease], now)


def shrink(
    state: LedgerState,
    lease_id: str,
    members: int,
    nodes: tuple[str, ...],
    made: int | None,
    now: datetime,
    cache: SchedulerCache,
) -> LedgerState:
    """Release the GPUs of lost members of an elastic gang, of which ``members`` remain on ``nodes``.

    ``made`` is the number of members that its workload had made when that was seen, None if unknown.
    """
    before = cache.find_lease(state, lease_id)
    if before is not None and before.growth is not None and (made or 0) < before.growth.made:
        return state  # seen before it grew: the members that are missing are still to be made
    # A report that is late or repeated names more members, or other nodes, than are left, and must not bring them back.
    if before is None or not 0 < members < before.request.members:
        return state
    if before.nodes and (len(nodes) != members or Counter(nodes) - Counter(before.nodes)):
        return state
    notice = before.preemption
    has_shrunk_enough = notice is not None and notice.keeps is not None and members <= notice.keeps
    remaining = replace(
        before,
        request=before.request.with_members(members),
        nodes=nodes if before.nodes else (),
        preemption=None if has_shrunk_enough else notice,
    )
    released = replace(before, request=before.request.with_members(before.request.members - members))
    after = replace(_promise_freed_gpus(state, [released], now), history=add_ended_usage(state, [released], now))
    return _replace_lease(after, remaining)


def grow(
    state: LedgerState, lease_id: str, made: int, now: datetime, cache: SchedulerCache
) -> tuple[LedgerState, Lease | None]:
    """Grant an elastic gang as many more members as there is room for; None if it gets none.

    It gets idle GPUs only: as long as a request waits that may use GPUs of its kind, it gets none, and it grows neither
    while members of it are to leave nor before `GROWTH_EVERY`. So a growth and a preemption never alternate.

    ``made`` counts the members that its workload has made until now, lost ones included.
    """
    lease = cache.find_lease(state, lease_id)
    if lease is None or not is_growth_due(lease, now):
        return state, None
    active = replace(state, pending=cache.select_active(state, now))
    if any(_may_use(state.queues, pending.request, lease.pool) for pending in active.pending):
        return state, None
    for larger in lease.request.larger_sizes:
        added = lease.request.with_members(larger.members - lease.request.members)
        pending = PendingRequest(added, state.next_arrival, since=now, seen_at=now)
        admission = decide_pending(active, pending, now, cache)
        if not isinstance(admission, Admitted) or bool(admission.nodes) != bool(lease.nodes):
            continue  # with nodes on one side only, nodes have been declared or withdrawn since the start
        if admission.pool == lease.pool:
            used = (now - lease.usage_from) * (lease.request.gpus / larger.gpus)
            grown = replace(
                lease,
                request=larger,
                nodes=(*lease.nodes, *admission.nodes),
                growth=Growth(at=now, made=made + added.members, usage_from=now - used),
            )
            return _replace_lease(state, grown), grown
    return state, None


def is_growth_due(lease: Lease, now: datetime) -> bool:
    """Whether a lease is one of an elastic gang that may be granted more members now.

    What another authority has granted (`Lease.flavor`) does not grow, nor does a gang whose members must share a domain
    of the topology.
    """
    request, last = lease.request, lease.growth.at if lease.growth is not None else lease.granted_at
    can_grow = request.max_members is not None and request.members < request.max_members and request.within is None
    return can_grow and lease.preemption is None and lease.flavor is None and now - last >= GROWTH_EVERY


def _may_use(queues: QueueRules, request: LeaseRequest, pool: str) -> bool:
    """Whether a pending request may use GPUs of the pool, which its queue may count among all that it does not name."""
    queue = queues.find(request.queue) if isinstance(queues, Queues) else None
    if queue is None or not isinstance(queues, Queues):
        return True
    return pool == ANY_TYPE or not {pool, ANY_TYPE}.isdisjoint(list_eligible_pools(queues, queue, request))


def release_workflow(state: LedgerState, uid: str, now: datetime) -> LedgerState:
    """Drop the pending requests of a workflow, and make its leases due for a check."""
    leases = tuple(replace(lease, check_at=now) if lease.request.uid == uid else lease for lease in state.leases)
    return replace(withdraw(state, uid), leases=leases)


def find_due_leases(state: LedgerState, now: datetime, check_every: timedelta) -> list[Lease]:
    """Leases whose check is due. A check later than ``check_every`` ahead is due too: the clock was set back."""
    return [lease for lease in state.leases if lease.check_at <= now or lease.check_at > now + check_every]


def record_check(
    state: LedgerState, checked: Collection[Lease], gone: Sequence[Lease], check_at: datetime, now: datetime
) -> LedgerState:
    """Release the leases ``gone``, and set the next check of the other ``checked`` leases to ``check_at``."""
    checked_ids = {lease.id for lease in checked}
    # A lease that was transferred to another attempt since the check is kept: its request differs.
    gone_requests = {lease.id: lease.request for lease in gone}
    ended = [lease for lease in state.leases if gone_requests.get(lease.id) == lease.request]
    remaining = _without_leases(state, ended, now)
    leases = (replace(lease, check_at=check_at) if lease.id in checked_ids else lease for lease in remaining.leases)
    return replace(remaining, leases=tuple(leases))


def record_repeats(state: LedgerState, seen_at: Mapping[tuple[str, str, str], datetime]) -> LedgerState:
    """The state with later ``seen_at`` times of pending requests, by replay key."""

    def update(pending: PendingRequest) -> PendingRequest:
        latest = seen_at.get(pending.request.key, pending.seen_at)
        return replace(pending, seen_at=latest) if latest > pending.seen_at else pending

    return replace(state, pending=tuple(map(update, state.pending)))


def _replace_lease(state: LedgerState, changed: Lease) -> LedgerState:
    return replace(state, leases=tuple(changed if lease.id == changed.id else lease for lease in state.leases))


def _without_leases(state: LedgerState, ended_leases: Sequence[Lease], now: datetime) -> LedgerState:
    if not ended_leases:
        return state
    after = replace(
        _promise_freed_gpus(state, ended_leases, now),
        leases=_drop_leases(state.leases, ended_leases),
        history=add_ended_usage(state, ended_leases, now),
    )
    for lease in ended_leases:
        if lease.preemption is not None and lease.preemption.moves:
            after = _promise_move(after, lease, now)
    return after


def _promise_move(state: LedgerState, moved: Lease, now: datetime) -> LedgerState:
    """The state in which the next attempt of a lease that moves waits already, and GPUs are kept for it.

    Its request comes some seconds later. Meanwhile others would take the room that it leaves its nodes for.
    """
    if any(pending.request.workflow_step == moved.request.workflow_step for pending in state.pending):
        return state
    next_attempt = replace(moved.request, attempt=moved.request.attempt + 1, attained=attained_gpu_seconds(moved, now))
    request = drop_unused_attained(state.queues, next_attempt)
    pending = PendingRequest(request, state.next_arrival, since=now, seen_at=now, promised_at=now)
    return replace(state, pending=(*state.pending, pending))


def _promise_freed_gpus(state: LedgerState, ended_leases: Sequence[Lease], now: datetime) -> LedgerState:
    """Keep the GPUs of ended victims for their preemptors, which repeat their requests only every few seconds."""
    preemptors = {lease.preemption.preemptor for lease in ended_leases if lease.preemption is not None}
    if not preemptors:
        return state

    def promise(pending: PendingRequest) -> PendingRequest:
        return replace(pending, promised_at=now) if pending.request.workflow_step in preemptors else pending

    return replace(state, pending=tuple(map(promise, state.pending)))


def _drop_leases(leases: tuple[Lease, ...], ended: Sequence[Lease]) -> tuple[Lease, ...]:
    """``leases`` without those that have the ids of ``ended``."""
    if len(ended) > _FEW:
        ended_ids = {lease.id for lease in ended}
        return tuple(compress(leases, map(not_, map(ended_ids.__contains__, map(_lease_id, leases)))))
    for lease in ended:
        if (index := _index_of(leases, lease)) is not None:
            leases = leases[:index] + leases[index + 1 :]
    return leases


def _index_of(leases: tuple[Lease, ...], lease: Lease) -> int | None:
    """The place of the lease with this id. Leases are in order of their grants unless clocks of services differ."""
    first = bisect_left(leases, lease.granted_at, key=_granted_at)
    for index in range(first, min(first + _FEW, len(leases))):
        if leases[index].id == lease.id:
            return index
    return next(compress(count(), map(lease.id.__eq__, map(_lease_id, leases))), None)
