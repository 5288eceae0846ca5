"""Decides which leases a request may preempt under the rules of the queues.

Only three rules make a lease a candidate of preemption:

* a strictly lower priority in the queue of the preemptor (`preempts_lower_priority`);
* no higher priority there, and a position behind the preemptor (`is_behind`), by a higher
  level of attained service (`preempts_longer`) or by ``backfill: preemptible``;
* GPUs that a queue of its cohort has borrowed, while the preemptor stays within
  the quota of its own queue (`reclaims`).

The leases of a queue, sorted by priority and then by age, use up its quota in
this order; the leases beyond the quota are the borrowing ones. So other queues
never preempt a training within the quota, whatever its queue borrows later, and
a queue gets back all that it has lent. Two trainings never preempt each other in
turn: priorities are strictly ordered, levels never fall, and a reclaiming
preemptor does not borrow.

A smaller training of the same queue that is no candidate may be moved (`is_movable`): it
starts again at once, on other nodes.
"""

from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from tiphys_plugin.quota.lease import Lease, LeaseRequest, PendingRequest
from tiphys_plugin.quota.queue import Queue
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler import pools
from tiphys_plugin.quota.scheduler.capacity import Capacity, HeldGpus
from tiphys_plugin.quota.scheduler.pool_options import PoolOptions, get_pool_options
from tiphys_plugin.quota.scheduler.queue_order import is_behind, is_movable


class VictimCandidates(NamedTuple):
    """Leases that may be preempted now; ``protected`` ones may be preempted after ``min_runtime_seconds``.

    ``movable`` ones may be preempted now if they find room on other nodes.
    """

    leases: tuple[Lease, ...] = ()
    protected: tuple[Lease, ...] = ()
    movable: tuple[Lease, ...] = ()


class PreemptionPolicy:
    """The rules of preemption for ``preemptor`` of ``queue`` against ``leases``."""

    def __init__(self, queues: Queues, queue: Queue, leases: Sequence[Lease], preemptor: PendingRequest) -> None:
        self._queues = queues
        self._queue = queue
        self._leases = leases
        self._preemptor, self._request = preemptor, preemptor.request
        self._pools = pools.find_eligible_pools(queues, queue, preemptor.request)
        self._capacity = Capacity(queues, leases)
        self._held_gpus = {lease.id: self._capacity.held_gpus_of_lease(lease) for lease in leases}
        self._borrowed = frozenset(_find_borrowing_leases(queues, self._held_gpus, leases) if queue.reclaims else ())

    def candidates(self, lease_ids: Container[str], now: datetime) -> VictimCandidates:
        """The candidates among the leases with these ids; leases that are marked already are none."""
        unmarked = [lease for lease in self._leases if lease.preemption is None and lease.id in lease_ids]
        usable = [lease for lease in unmarked if self._frees_usable_gpus(lease)]
        candidates = [lease for lease in usable if self._may_preempt(lease, now)]
        candidate_ids = {candidate.id for candidate in candidates}
        return VictimCandidates(
            tuple(lease for lease in candidates if protected_until(self._queues, lease) <= now),
            tuple(lease for lease in candidates if protected_until(self._queues, lease) > now),
            tuple(
                lease
                for lease in usable
                if lease.id not in candidate_ids and is_movable(self._queue, lease, self._preemptor, now)
            ),
        )

    def allows(self, victims: Collection[Lease], pool: str) -> bool:
        """Whether these candidates may be preempted together, so that the request starts in ``pool``.

        A preemptor that reclaims must stay within the quota of its queue. Each victim of another queue is beyond the
        quota of that queue as long as the leases before it stay, so this needs no check.
        """
        if all(self._is_in_same_queue(victim) for victim in victims):
            return True
        freed_in_own_queue: Counter[str] = Counter()
        for victim in victims:
            if self._is_in_same_queue(victim):
                freed_in_own_queue[self._held_gpus[victim.id].pool] += victim.request.gpus
        return self._capacity.remaining_quota(self._queue, pool) + freed_in_own_queue[pool] >= self._request.gpus

    def pool_without(self, victims: Collection[Lease]) -> str | None:
        """The pool in which the request fits without ``victims``; None if it fits in no pool."""
        remaining = self._capacity.copy()
        for victim in victims:
            remaining.remove(self._held_gpus[victim.id])
        return next(iter(remaining.find_fitting_pools(self._queue, self._request)), None)

    def select_fitting(self, leases: Sequence[Lease]) -> list[Lease]:
        """Those of the ``leases`` for whose like there is room on what is idle now."""
        fitting: dict[PoolOptions, bool] = {}

        def is_fitting(request: LeaseRequest) -> bool:
            options = get_pool_options(self._queues, self._queue, request)
            if options not in fitting:
                fitting[options] = self._capacity.fits(self._queue, request)
            return fitting[options]

        return [lease for lease in leases if is_fitting(lease.request)]

    def has_room_on(self, node: str, victims: Collection[Lease]) -> bool:
        """Whether ``node`` has the GPUs of one member without ``victims``, which are on it."""
        freed = sum(victim.nodes.count(node) * victim.request.gpus_per_member for victim in victims)
        return self._capacity.free_gpus_on(node) + freed >= self._request.gpus_per_member

    def stays_within_quota(self, pool: str) -> bool:
        """Whether the queue borrows nothing once the request has started in ``pool``.

        Of trainings that borrow, those that started last are reclaimed first, and a move is a start.
        """
        return self._queue.cohort is None or self._capacity.remaining_quota(self._queue, pool) >= self._request.gpus

    def missing_gpus(self) -> float:
        """Lower bound of the GPUs that victims must release."""
        capacity = self._capacity
        free = (
            min(capacity.available_gpus(self._queue, pool), capacity.free_inventory(self._request, pool))
            for pool in self._pools
        )
        return self._request.gpus - max(free, default=0)

    def _may_preempt(self, lease: Lease, now: datetime) -> bool:
        if self._is_in_same_queue(lease):
            return self._has_lower_priority(lease) or is_behind(self._queue, lease, self._preemptor, now)
        if not self._queue.reclaims or self._queue.cohort is None:
            return False
        return self._held_gpus[lease.id].cohort == self._queue.cohort and lease.id in self._borrowed

    def _has_lower_priority(self, lease: Lease) -> bool:
        return self._queue.preempts_lower_priority and lease.request.priority < self._request.priority

    def _is_in_same_queue(self, lease: Lease) -> bool:
        return lease.request.queue == self._request.queue

    def _frees_usable_gpus(self, candidate: Lease) -> bool:
        """Whether the request could use GPUs that the candidate releases."""
        held_gpus = self._held_gpus[candidate.id]
        return held_gpus.pool in self._pools or (
            self._queues.inventory is not None and any(self._matches_kind(held_gpus, pool) for pool in self._pools)
        )

    def _matches_kind(self, held_gpus: HeldGpus, pool: str) -> bool:
        required_kind = pools.gpu_kind_in_pool(self._request, pool)
        return required_kind is None or held_gpus.gpu_type is None or required_kind == held_gpus.gpu_type


def _find_borrowing_leases(queues: Queues, held_gpus: Mapping[str, HeldGpus], leases: Sequence[Lease]) -> Iterator[str]:
    """Ids of the leases beyond the quotas of their queues."""
    total: Counter[tuple[str, str]] = Counter()
    for lease in sorted(leases, key=lambda lease: (-lease.request.priority, lease.granted_at, lease.id)):
        held = held_gpus[lease.id]
        queue = queues.find(held.queue)
        total[held.queue, held.pool] += held.gpus
        if queue is not None and total[held.queue, held.pool] > queue.gpus.get(held.pool, 0):
            yield lease.id


def protected_until(queues: Queues, lease: Lease) -> datetime:
    """When ``min_runtime_seconds`` of its queue have passed since the grant of the lease."""
    queue = queues.find(lease.request.queue)
    return lease.granted_at + timedelta(seconds=queue.protected_seconds if queue is not None else 0)
