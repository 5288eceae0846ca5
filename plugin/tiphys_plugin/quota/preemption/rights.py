"""Who may be asked to leave for a request, by what the queues say.

Three rules make somebody a candidate, and nothing else does:

* a strictly lower priority in the queue of the request;
* no higher priority there, and a level of GPU time that is above that of the request;
* GPUs that a queue of its cohort has borrowed, while the request stays within
  the quota of its own.

Which GPUs of a queue are borrowed follows from the order of its trainings, by
priority and then by age: those that its quota has no room for any more. So a
training that keeps to a quota is left alone by other queues, whatever its own
queue borrows after it, and what a queue has lent comes back in full. Two never
chase each other away in turn: priorities are strictly ordered, levels never
fall, and who takes back is no borrower.
"""

from collections import Counter
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from tiphys_plugin.quota.lease import Lease, LeaseRequest
from tiphys_plugin.quota.queues import Queue, Queues
from tiphys_plugin.quota.scheduler import pools
from tiphys_plugin.quota.scheduler.capacity import Capacity, Hold
from tiphys_plugin.quota.scheduler.fair_share import level_of


class Candidates(NamedTuple):
    """``protected`` would be among the ``leases`` if they had run for longer."""

    leases: tuple[Lease, ...] = ()
    protected: tuple[Lease, ...] = ()


class Rights:
    """What ``request`` may ask of those who hold ``leases``; its queue is ``queue``."""

    def __init__(self, queues: Queues, queue: Queue, leases: Sequence[Lease], request: LeaseRequest) -> None:
        self._queues = queues
        self._queue = queue
        self._leases = leases
        self._request = request
        self._pools = pools.of(queues, queue, request)
        self._held = Capacity(queues, leases)
        self._holds = {one.id: self._held.hold_of(one) for one in leases}
        self._borrowed = frozenset(_borrowed(queues, self._holds, leases) if queue.reclaims else ())

    def candidates(self, known: Container[str], now: datetime) -> Candidates:
        """Everybody of the leases with ``known`` ids who may be asked; none of them is leaving already."""
        asked = [one for one in self._leases if one.leaving is None and one.id in known]
        may = [one for one in asked if self._may_go(one, now) and self._is_of_use(one)]
        return Candidates(
            tuple(one for one in may if protected_until(self._queues, one) <= now),
            tuple(one for one in may if protected_until(self._queues, one) > now),
        )

    def allow(self, victims: Collection[Lease], pool: str) -> bool:
        """Whether these candidates may go together, so that the request starts in ``pool``.

        Who has others go stays within its own quota. That each of them is beyond that of its own queue needs no look:
        it is so for every borrower while those stay that come before it.
        """
        if all(self._is_own(one) for one in victims):
            return True
        own: Counter[str] = Counter()
        for one in victims:
            if self._is_own(one):
                own[self._holds[one.id].pool] += one.request.gpus
        return self._held.left(self._queue, pool) + own[pool] >= self._request.gpus

    def pool_without(self, victims: Collection[Lease]) -> str | None:
        """The pool in which the request fits when these are gone; None if there is none."""
        left = self._held.copy()
        for one in victims:
            left.give_back(self._holds[one.id])
        return next(iter(left.fitting(self._queue, self._request)), None)

    def short(self) -> float:
        """GPUs that have to come back at the least, whoever goes."""
        held = self._held
        free = (min(held.room(self._queue, pool), held.unused(self._request, pool)) for pool in self._pools)
        return self._request.gpus - max(free, default=0)

    def _may_go(self, lease: Lease, now: datetime) -> bool:
        if self._is_own(lease):
            return self._is_lower(lease) or self._is_longer(lease, now)
        if not self._queue.reclaims or self._queue.cohort is None:
            return False
        return self._holds[lease.id].cohort == self._queue.cohort and lease.id in self._borrowed

    def _is_lower(self, lease: Lease) -> bool:
        return self._queue.preempts_lower_priority and lease.request.priority < self._request.priority

    def _is_longer(self, lease: Lease, now: datetime) -> bool:
        if not self._queue.preempts_longer or lease.request.priority > self._request.priority:
            return False
        return level_of(self._queue, lease, now) > self._queue.level(self._request.attained)

    def _is_own(self, lease: Lease) -> bool:
        return lease.request.queue == self._request.queue

    def _is_of_use(self, lease: Lease) -> bool:
        """Whether the request could gain anything by what the lease gives back."""
        hold = self._holds[lease.id]
        return hold.pool in self._pools or (
            self._queues.inventory is not None and any(self._meets(hold, pool) for pool in self._pools)
        )

    def _meets(self, hold: Hold, pool: str) -> bool:
        wanted = pools.gpu_type(self._request, pool)
        return wanted is None or hold.gpu_type is None or wanted == hold.gpu_type


def _borrowed(queues: Queues, holds: Mapping[str, Hold], leases: Sequence[Lease]) -> Iterator[str]:
    """Ids of the leases that the quotas of their queues have no room for."""
    held: Counter[tuple[str, str]] = Counter()
    for one in sorted(leases, key=lambda one: (-one.request.priority, one.granted_at, one.id)):
        hold = holds[one.id]
        owner = queues.find(hold.queue)
        held[hold.queue, hold.pool] += hold.gpus
        if owner is not None and held[hold.queue, hold.pool] > owner.gpus.get(hold.pool, 0):
            yield one.id


def protected_until(queues: Queues, lease: Lease) -> datetime:
    """When the shortest time is over that its queue gives to a training."""
    queue = queues.find(lease.request.queue)
    return lease.granted_at + timedelta(seconds=queue.min_runtime_seconds if queue is not None else 0)
