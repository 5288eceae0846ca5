"""Selects victims for a pending request: a minimal set of leases that loses the fewest GPU-seconds.

The selection is a pure function of the ledger state. `decide_admission` itself,
placement included, checks that the request starts without the victims, so no
training is preempted in vain.

An elastic gang counts as one lease of its fewest members and one lease for each
optional member (`split_elastic_leases`). The same rules choose among optional
members first, so whole trainings are preempted only where members do not suffice.

Where enough GPUs are idle, but not on the same nodes, trainings that would find room on
the rest are moved (`vacate_nodes`).
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import islice

from tiphys_plugin.quota.lease import (
    AdmissionReason,
    Admitted,
    Lease,
    LeaseRequest,
    LedgerState,
    PendingRequest,
    PreemptionNotice,
)
from tiphys_plugin.quota.preemption.consolidation import drop_needless, vacate_nodes
from tiphys_plugin.quota.preemption.rights import PreemptionPolicy, VictimCandidates, protected_until
from tiphys_plugin.quota.queue import Queue
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.cache import SchedulerCache
from tiphys_plugin.quota.scheduler.decide import decide_pending, format_clock_time, format_step_name
from tiphys_plugin.quota.scheduler.fair_share import held_gpu_seconds

_MEMBER_SEPARATOR = "/"
"""Separates the id of a lease, which is hexadecimal, from the number of a member."""


def is_member_id(lease_id: str) -> bool:
    """Whether the id is that of one member of a lease."""
    return _MEMBER_SEPARATOR in lease_id


def lease_id_of(lease_id: str) -> str:
    """Id of the lease that a member belongs to; the id of a whole lease is returned as it is."""
    return lease_id.partition(_MEMBER_SEPARATOR)[0]


def split_elastic_leases(state: LedgerState) -> LedgerState:
    """``state`` with a separate lease for each optional member; the same object if there are no optional members."""
    if all(lease.request.min_members is None for lease in state.leases):
        return state
    leases = tuple(part for lease in state.leases for part in split_lease(lease))
    return state if len(leases) == len(state.leases) else replace(state, leases=leases)


def exclude_whole_leases(state: LedgerState, unreachable_leases: Container[str]) -> frozenset[str]:
    """Ids that are no candidates where only optional members are: whole leases, and members of unreachable leases."""
    return frozenset(
        lease.id for lease in state.leases if not is_member_id(lease.id) or lease_id_of(lease.id) in unreachable_leases
    )


def split_lease(lease: Lease) -> tuple[Lease, ...]:
    """The lease of the fewest members of an elastic gang, and one lease for each optional member."""
    request = lease.request
    if request.min_members is None or lease.preemption is not None or request.tensor_parallel > 1:
        return (lease,)
    optional = [
        replace(
            lease,
            id=f"{lease.id}{_MEMBER_SEPARATOR}{number}",
            request=request.with_members(1),
            nodes=lease.nodes[number : number + 1],
        )
        for number in range(request.min_members, request.members)
    ]
    return (shrink_lease(lease, request.min_members), *optional) if optional else (lease,)


def shrink_lease(lease: Lease, members: int) -> Lease:
    """The lease with only its first ``members`` members."""
    return replace(lease, request=lease.request.with_members(members), nodes=lease.nodes[:members])


def mark_lease_preempted(
    lease: Lease,
    victims: Collection[Lease],
    preemptor: tuple[str, str],
    now: datetime,
    grace: timedelta,
    *,
    moves: bool = False,
) -> Lease:
    """The lease with a preemption notice for ``preemptor``, a `LeaseRequest.workflow_step`.

    ``victims`` are members of the lease, or the whole lease. The nodes of the victims are moved to the end of
    ``nodes``, because the eviction frees the last ones.
    """
    uid, step = preemptor
    if not all(is_member_id(victim.id) for victim in victims):
        return replace(lease, preemption=PreemptionNotice(uid, step, now, now + grace, moves=moves))
    keeps = lease.request.members - len(victims)
    freed_nodes = [node for victim in victims for node in victim.nodes]
    kept_nodes = list((Counter(lease.nodes) - Counter(freed_nodes)).elements())
    notice = PreemptionNotice(uid, step, now, now + grace, keeps)
    return replace(lease, nodes=(*kept_nodes, *freed_nodes), preemption=notice)


OVERDUE_AFTER = timedelta(minutes=2)
"""A victim that still exists this long after its deadline is not expected to end: its node may be lost."""

_MAX_TRIED_SETS = 200
"""Most sets of leases for which the selection tests whether the request would start without them."""
_MAX_SETS = 20_000
"""Most sets of leases that the enumeration by cost yields."""
_MAX_TRIED_MOVES = 8
"""Most sets of moving trainings for which the selection lets the scheduler decide."""
_MAX_MOVED = 32
"""Most trainings that one request moves."""
_LARGEST_LOSS = 0.1
"""Largest loss by a move, counted since the last checkpoint, as a part of the GPU-seconds that the lease has held."""
_MAX_WEIGHED_CANDIDATES = 128
"""Most candidates whose loss is estimated, more for a large request. Those that held fewest GPU-seconds come first,
because a lease cannot lose more than it has held."""

LossEstimator = Callable[[Sequence[Lease]], Mapping[str, float]]
"""GPU-seconds that each of these leases, by id, would lose if it ended now."""


@dataclass(frozen=True)
class VictimSelection:
    """The victims, the cheapest first, and the GPU-seconds that each would lose, by lease id."""

    leases: tuple[Lease, ...]
    gpu_seconds_by_lease: Mapping[str, float]
    moved_leases: frozenset[str] = frozenset()
    """Ids of those that have room on other nodes, and start again there."""

    @property
    def gpu_seconds_lost(self) -> float:
        return sum(self.gpu_seconds_by_lease[lease.id] for lease in self.leases)


@dataclass(frozen=True)
class NoVictims:
    """Why the request preempts no training; ``reason`` if it belongs among the reasons of a deferral."""

    message: str
    reason: AdmissionReason | None = None


def select_victims(
    state: LedgerState,
    preemptor: PendingRequest,
    estimate_losses: LossEstimator,
    now: datetime,
    unreachable_leases: Container[str] = (),
    cache: SchedulerCache | None = None,
) -> VictimSelection | NoVictims:
    """Select the victims for ``preemptor``: optional members of elastic gangs if they suffice, else whole leases.

    ``state`` does not have ``preemptor`` among its pending requests. The service cannot evict the pods of
    ``unreachable_leases``, which are ids. ``cache`` None: for a single selection.
    """
    cache = cache or SchedulerCache()
    # There are three types of victims, tried in this order: optional members of elastic gangs, which go on with fewer;
    # whole leases that a rule lets the request preempt, which queue again; and smaller trainings that no rule touches,
    # but that start again at once on other nodes. The request has no claim to the GPUs of these, only to their place.
    split_state = split_elastic_leases(state)
    if split_state is not state:
        whole_leases = exclude_whole_leases(split_state, unreachable_leases)
        members = PreemptionCase.build(split_state, preemptor, now, cache, whole_leases)
        selection = _select_victims(members, estimate_losses)
        if isinstance(selection, VictimSelection):
            return selection
    return _select_victims(PreemptionCase.build(state, preemptor, now, cache, unreachable_leases), estimate_losses)


def _select_victims(case: "PreemptionCase | NoVictims", estimate_losses: LossEstimator) -> VictimSelection | NoVictims:
    if isinstance(case, NoVictims):
        return case
    selection = _select_candidates(case, estimate_losses)
    if isinstance(selection, VictimSelection):
        return selection
    return _select_moves(case, estimate_losses) or selection


def _select_moves(case: "PreemptionCase", estimate_losses: LossEstimator) -> VictimSelection | None:
    """Victims of which some move to other nodes, so that idle GPUs of several nodes come together on one."""
    for victims in islice(case.iterate_moves(), _MAX_TRIED_MOVES):
        moved = case.find_moved(victims)
        if len(victims) > _MAX_MOVED or not case.start_elsewhere(moved, victims):
            continue
        losses = _weigh(victims, estimate_losses, case.now)
        if all(losses[lease.id] <= _LARGEST_LOSS * held_gpu_seconds(lease, case.now) for lease in moved):
            return VictimSelection(victims, losses, frozenset(lease.id for lease in moved))
    return None


def _select_candidates(case: "PreemptionCase", estimate_losses: LossEstimator) -> VictimSelection | NoVictims:
    if not case.candidates.leases:
        return case.explain_no_candidates()
    # A loss is read from a store, so only those that cannot lose much are weighed; twice the GPUs leave a choice.
    weighed = sorted(case.candidates.leases, key=lambda lease: (held_gpu_seconds(lease, case.now), lease.id))
    weighed = weighed[: max(_MAX_WEIGHED_CANDIDATES, 2 * case.preemptor.request.gpus)]
    costs = _weigh(weighed, estimate_losses, case.now)
    victims = case.select_cheapest(weighed, lambda candidate: costs[candidate.id])
    if victims is None:
        return case.explain_useless_candidates()
    return VictimSelection(victims, {victim.id: costs[victim.id] for victim in victims})


def _weigh(leases: Sequence[Lease], estimate_losses: LossEstimator, now: datetime) -> dict[str, float]:
    """GPU-seconds that each lease, by id, would lose; all that it has held if there is no estimate."""
    estimates = estimate_losses(leases)
    return {lease.id: estimates.get(lease.id, held_gpu_seconds(lease, now)) for lease in leases}


def check_victims(
    state: LedgerState, preemptor: PendingRequest, victims: Sequence[Lease], now: datetime, cache: SchedulerCache
) -> frozenset[str] | NoVictims:
    """The ids of those of the ``victims`` that move to other nodes; or why they must not be preempted."""
    case = PreemptionCase.build(state, preemptor, now, cache)
    if isinstance(case, NoVictims):
        return case
    moved = case.find_moved(victims)
    objection = _find_objection(case, victims, moved)
    return frozenset(lease.id for lease in moved) if objection is None else NoVictims(objection)


def _find_objection(case: "PreemptionCase", victims: Sequence[Lease], moved: Sequence[Lease]) -> str | None:
    candidate_ids = {lease.id for lease in (*case.candidates.leases, *case.movable)}
    if forbidden := [lease for lease in victims if lease.id not in candidate_ids]:
        return f"no rule allows the preemption of {format_step_name(forbidden[0].request)}"
    if not victims or not case.starts_without(tuple(victims)):
        return "the request would not start without the victims"
    if moved and (len(victims) > _MAX_MOVED or not case.start_elsewhere(moved, victims)):
        return "a training that would move finds no room on other nodes"
    if needless := [lease for lease in victims if case.fits_without([kept for kept in victims if kept is not lease])]:
        return f"the preemption of {format_step_name(needless[0].request)} is not needed"
    return None


@dataclass(frozen=True)
class PreemptionCase:
    """A pending request, and the leases that it may preempt."""

    state: LedgerState
    """The state after the end of all present victims; see `apply_pending_preemptions`."""
    preemptor: PendingRequest
    now: datetime
    queue: Queue
    queues: Queues
    rights: PreemptionPolicy
    candidates: VictimCandidates
    cache: SchedulerCache

    @classmethod
    def build(
        cls,
        state: LedgerState,
        preemptor: PendingRequest,
        now: datetime,
        cache: SchedulerCache,
        unreachable_leases: Container[str] = (),
    ) -> "PreemptionCase | NoVictims":
        """The case of a request that may preempt; `NoVictims` if no rule applies or no more victims are needed."""
        queues, request = state.queues, preemptor.request
        queue = queues.find(request.queue) if isinstance(queues, Queues) else None
        if not isinstance(queues, Queues) or queue is None:
            return NoVictims("there are no queues to go by")
        if not queue.preempts:
            return NoVictims(
                f"queue {queue.name} preempts no training: it sets none of preempts_lower_priority, reclaims, "
                "preempts_longer and backfill: preemptible"
            )
        if any(is_expected_to_end(lease, now) and _is_preempted_for(lease, request) for lease in state.leases):
            return NoVictims(f"others were asked to leave for {format_step_name(request)} already")
        later = apply_pending_preemptions(state, now, cache)
        if isinstance(decide_pending(later, preemptor, now, cache), Admitted):
            return NoVictims(
                f"enough GPUs are free for {format_step_name(request)}, or will be after the preemptions under way"
            )
        rights = PreemptionPolicy(queues, queue, later.leases, preemptor)
        reachable_ids = {lease.id for lease in state.leases if lease.id not in unreachable_leases}
        return cls(later, preemptor, now, queue, queues, rights, rights.candidates(reachable_ids, now), cache)

    def starts_without(self, victims: Sequence[Lease]) -> bool:
        """Whether the rules allow these victims, and the request starts without them before other pending requests."""
        victim_ids = {lease.id for lease in victims}
        remaining = replace(
            self.state, leases=tuple(lease for lease in self.state.leases if lease.id not in victim_ids)
        )
        admission = decide_pending(remaining, self.preemptor, self.now, self.cache)
        return isinstance(admission, Admitted) and self.rights.allows(victims, admission.pool)

    def fits_without(self, victims: Sequence[Lease]) -> bool:
        """Whether the rules allow these victims, and the request fits without them if no other request is pending.

        Cheaper than `starts_without`, because the selection tries hundreds of sets.
        """
        pool = self.rights.pool_without(victims)
        return pool is not None and self.rights.allows(victims, pool)

    def select_cheapest(self, leases: Sequence[Lease], cost: Callable[[Lease], float]) -> tuple[Lease, ...] | None:
        """The cheapest minimal set of victims; with too many sets to try, a minimal set found greedily.

        None if the request does not start even without all ``leases``.
        """
        own_leases = [lease for lease in leases if lease.request.queue == self.queue.name]
        if not self.starts_without(leases):
            # A preemptor that would exceed its own quota reclaims nothing, but may still preempt in its own queue.
            return self.select_cheapest(own_leases, cost) if 0 < len(own_leases) < len(leases) else None
        # The first minimal set by rising cost is the cheapest. Kueue tries no sets: it adds candidates until the
        # request fits, and drops needless ones afterwards, as `_select_greedily` does where there are too many sets.
        missing_gpus = self.rights.missing_gpus()
        sets = (
            victims
            for victims in _iterate_by_cost(leases, cost)
            if sum(lease.request.gpus for lease in victims) >= missing_gpus
        )
        for victims in islice(sets, _MAX_TRIED_SETS):
            if self._is_minimal(victims):
                return victims
        return self._select_greedily(leases, cost)

    @property
    def movable(self) -> tuple[Lease, ...]:
        """The trainings that may move to other nodes. One member of an elastic gang does not."""
        return tuple(lease for lease in self.candidates.movable if not is_member_id(lease.id))

    def iterate_moves(self) -> Iterator[tuple[Lease, ...]]:
        """Sets of victims that would leave their nodes to the request, those with the fewest GPUs first.

        There are none if not enough GPUs are idle, or if those that the rules ask to yield are only protected for now.
        """
        candidates, protected = self.candidates.leases, self.candidates.protected
        movable = self.rights.select_fitting(self.movable)
        if not movable or self.rights.missing_gpus() > sum(lease.request.gpus for lease in candidates):
            return iter(())
        if protected and self.fits_without((*candidates, *protected)):
            return iter(())
        return vacate_nodes((*candidates, *movable), self.fits_without, self.rights.has_room_on)

    def start_elsewhere(self, moved: Sequence[Lease], victims: Sequence[Lease]) -> bool:
        """Whether the request and all that would move start, in the order of the queues, without the ``victims``.

        Together those that move have fewer GPUs than the request.
        """
        if sum(lease.request.gpus for lease in moved) >= self.preemptor.request.gpus:
            return False
        victim_ids = {lease.id for lease in victims}
        remaining = tuple(lease for lease in self.state.leases if lease.id not in victim_ids)
        # All of them are promised GPUs, as after the mark, so no other request takes the room of one that moves.
        mine = replace(self.preemptor, promised_at=self.now)
        last = max(waiting_request.arrival for waiting_request in (*self.state.pending, mine))
        moves = [
            PendingRequest(lease.request, last + number, self.now, self.now, promised_at=self.now)
            for number, lease in enumerate(moved, 1)
        ]
        pending = tuple(sorted((*self.state.pending, mine, *moves), key=lambda pending: pending.arrival))
        state = replace(self.state, leases=remaining, pending=pending)
        admissions = [decide_pending(state, pending, self.now, self.cache) for pending in (mine, *moves)]
        pools = [admission.pool for admission in admissions if isinstance(admission, Admitted)]
        return len(pools) == len(admissions) and self.rights.stays_within_quota(pools[0])

    def find_moved(self, victims: Sequence[Lease]) -> list[Lease]:
        """Those of the victims that may only be moved."""
        movable_ids = {lease.id for lease in self.movable}
        return [lease for lease in victims if lease.id in movable_ids]

    def explain_no_candidates(self) -> NoVictims:
        """Why there are no candidates."""
        if self.candidates.protected:
            return self._explain_protection(self.candidates.protected)
        rules = [
            *(["has a lower priority in its own queue"] if self.queue.preempts_lower_priority else []),
            *(["has had more GPU time in its own queue"] if self.queue.preempts_longer else []),
            *(["started behind it in its own queue"] if self.queue.is_backfill_preemptible else []),
            *(["borrows GPUs in its cohort that its queue may reclaim"] if self.queue.reclaims else []),
        ]
        moves = ", and none may move to other nodes now" if self.queue.moves_trainings else ""
        return NoVictims(f"no training {' or '.join(rules)}{moves}")

    def explain_useless_candidates(self) -> NoVictims:
        """Why the request would not start without the candidates."""
        if self.candidates.protected:
            return self._explain_protection(self.candidates.protected)
        count = len(self.candidates.leases)
        candidates = f"the {count} trainings that" if count > 1 else "the one training that"
        reason = "other requests go first, or other trainings hold the GPUs"
        return NoVictims(f"it would not start without {candidates} it may preempt: {reason}")

    def _is_minimal(self, victims: Sequence[Lease]) -> bool:
        """Whether the request starts without these victims, and does not fit without a smaller set of them."""
        return (
            self.fits_without(victims)
            and not any(self.fits_without([other for other in victims if other is not victim]) for victim in victims)
            and self.starts_without(victims)
        )

    def _select_greedily(self, leases: Sequence[Lease], cost: Callable[[Lease], float]) -> tuple[Lease, ...] | None:
        """Add cheap leases until the request fits, then drop needless ones, the most expensive first."""
        victims: list[Lease] = []
        for lease in sorted(leases, key=lambda lease: (cost(lease) / lease.request.gpus, lease.id)):
            victims.append(lease)
            if self.fits_without(victims):
                break
        else:
            return None
        needed = drop_needless(victims, lambda victim: -cost(victim), self.fits_without)
        return tuple(sorted(needed, key=cost)) if self.starts_without(needed) else None

    def _explain_protection(self, protected: Sequence[Lease]) -> NoVictims:
        lease = min(protected, key=lambda candidate: protected_until(self.queues, candidate))
        more = f", and {len(protected) - 1} more" if len(protected) > 1 else ""
        return NoVictims(
            f"{format_step_name(lease.request)}{more} may only be preempted after min_runtime_seconds of queue "
            f"{lease.request.queue}, at {format_clock_time(protected_until(self.queues, lease))}",
            AdmissionReason.MIN_RUNTIME_PROTECTED,
        )


def apply_pending_preemptions(state: LedgerState, now: datetime, cache: SchedulerCache) -> LedgerState:
    """The state after the end of all victims: their preemptors hold leases, and those that move hold GPUs again.

    Victims that are overdue (see `OVERDUE_AFTER`) keep their leases.
    """
    leases = [remaining for lease in state.leases if (remaining := _apply_preemption(lease, now)) is not None]
    pending = list(state.pending)
    # Each is decided as if nothing else were pending: GPUs of its victims are promised to it, so no other goes first.
    for preemptor in state.pending:
        request = preemptor.request
        if any(is_expected_to_end(lease, now) and _is_preempted_for(lease, request) for lease in state.leases):
            alone = replace(state, leases=tuple(leases), pending=())
            admission = decide_pending(alone, preemptor, now, cache)
            if isinstance(admission, Admitted):
                lease_id = f"promised-{preemptor.arrival}"
                leases.append(Lease(lease_id, request, admission.pool, now, now, admission.nodes))
                pending.remove(preemptor)
    for moving in state.leases:
        if moving.preemption is not None and moving.preemption.moves and is_expected_to_end(moving, now):
            alone = replace(state, leases=tuple(leases), pending=())
            admission = decide_pending(alone, PendingRequest(moving.request, 1, now, now), now, cache)
            if isinstance(admission, Admitted):
                leases.append(replace(moving, pool=admission.pool, nodes=admission.nodes))
    return replace(state, leases=tuple(leases), pending=tuple(pending))


def is_expected_to_end(lease: Lease, now: datetime) -> bool:
    """Whether the lease is that of a victim that is not overdue."""
    return lease.preemption is not None and lease.preemption.deadline + OVERDUE_AFTER > now


def _apply_preemption(lease: Lease, now: datetime) -> Lease | None:
    if not is_expected_to_end(lease, now):
        return lease
    keeps = lease.preemption.keeps if lease.preemption is not None else None
    return shrink_lease(lease, min(keeps, lease.request.members)) if keeps is not None else None


def _is_preempted_for(lease: Lease, request: LeaseRequest) -> bool:
    return lease.preemption is not None and lease.preemption.is_for(request)


def _iterate_by_cost(leases: Sequence[Lease], cost: Callable[[Lease], float]) -> Iterator[tuple[Lease, ...]]:
    """Sets of leases by rising cost, the smaller first at equal cost.

    Leases that hold the same form a group, and a set takes the cheapest leases of each group. This keeps the number
    of sets small where many leases are alike.
    """
    leases_by_shape: defaultdict[tuple[object, ...], list[Lease]] = defaultdict(list)
    for lease in sorted(leases, key=lambda lease: (cost(lease), lease.id)):
        request = lease.request
        shape = (request.queue, request.gpu_type, lease.pool, request.gpus, request.members, lease.nodes)
        leases_by_shape[shape].append(lease)
    # A set is extended only at its last group or a later one, so it is reached by one path and yielded once.
    groups = list(leases_by_shape.values())
    heap: list[tuple[float, int, tuple[int, ...]]] = [(0.0, 0, (0,) * len(groups))]
    for _ in range(_MAX_SETS):
        if not heap:
            return
        total, size, counts = heapq.heappop(heap)
        if size:
            yield tuple(lease for group, count in zip(groups, counts, strict=True) for lease in group[:count])
        last = max((index for index, count in enumerate(counts) if count), default=0)
        for index in range(last, len(groups)):
            if counts[index] < len(groups[index]):
                more = (*counts[:index], counts[index] + 1, *counts[index + 1 :])
                heapq.heappush(heap, (total + cost(groups[index][counts[index]]), size + 1, more))
