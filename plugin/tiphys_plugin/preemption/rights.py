"""Who may be asked to leave for a request, by what the queues say.

Two rules make somebody a candidate, and nothing else does: a strictly lower
priority in the queue of the request, or a queue of its cohort that holds more
than its own quota while the request stays within that of its queue. So nobody
who keeps to its quota has to go for another queue, and two never chase each
other away in turn: priorities are strictly ordered, and what is taken back is
taken from who is beyond its quota by who is not.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from tiphys_plugin.ledger import pools
from tiphys_plugin.ledger.capacity import Capacity, Hold
from tiphys_plugin.ledger.model import Lease, LeaseRequest
from tiphys_plugin.queues import Queue, Queues


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
        # Who leaves counts for whoever is on one side of a rule as gone, and for who is on the other as there.
        self._held = Capacity(queues, leases)
        self._staying = Capacity(queues, [one for one in leases if one.leaving is None])

    def candidates(self, now: datetime) -> Candidates:
        """Everybody who may be asked; none of them is leaving already."""
        may = [one for one in self._leases if one.leaving is None and self._may_go(one) and self._is_of_use(one)]
        return Candidates(
            tuple(one for one in may if protected_until(self._queues, one) <= now),
            tuple(one for one in may if protected_until(self._queues, one) > now),
        )

    def allow(self, victims: Collection[Lease], pool: str) -> bool:
        """Whether these candidates may go together, so that the request starts in ``pool``.

        Each has to be beyond the quota of its queue when it goes, which is so in
        some order if it is so with the largest last; and who takes back has to
        stay within its own quota.
        """
        others = [one for one in victims if not self._is_own(one)]
        if not others:
            return True
        own = [one for one in victims if self._is_own(one)]
        return self._each_is_beyond(others) and self._stays_within(own, pool)

    def short(self, leases: Sequence[Lease]) -> float:
        """GPUs that have to come back at the least, whoever goes, while these are held."""
        held = Capacity(self._queues, leases)
        free = (min(held.room(self._queue, pool), held.unused(self._request, pool)) for pool in self._pools)
        return self._request.gpus - max(free, default=0)

    def _may_go(self, lease: Lease) -> bool:
        if self._is_own(lease):
            return self._queue.preempts_lower_priority and lease.request.priority < self._request.priority
        if not self._queue.reclaims or self._queue.cohort is None:
            return False
        hold = self._held.hold_of(lease)
        return hold.cohort == self._queue.cohort and self._beyond(hold) > 0

    def _is_own(self, lease: Lease) -> bool:
        return lease.request.queue == self._request.queue

    def _is_of_use(self, lease: Lease) -> bool:
        """Whether the request could gain anything by what the lease gives back."""
        hold = self._held.hold_of(lease)
        return hold.pool in self._pools or (
            self._queues.inventory is not None and any(self._meets(hold, pool) for pool in self._pools)
        )

    def _meets(self, hold: Hold, pool: str) -> bool:
        wanted = pools.gpu_type(self._request, pool)
        return wanted is None or hold.gpu_type is None or wanted == hold.gpu_type

    def _beyond(self, hold: Hold) -> int:
        """GPUs that its queue holds in this pool beyond its quota."""
        owner = self._queues.find(hold.queue)
        return self._staying.held(owner, hold.pool) - owner.gpus.get(hold.pool, 0) if owner is not None else 0

    def _each_is_beyond(self, victims: Iterable[Lease]) -> bool:
        places: defaultdict[tuple[str, str], list[Hold]] = defaultdict(list)
        for one in victims:
            hold = self._held.hold_of(one)
            places[hold.queue, hold.pool].append(hold)
        return all(
            self._beyond(holds[0]) > sum(one.gpus for one in holds) - max(one.gpus for one in holds)
            for holds in places.values()
        )

    def _stays_within(self, own: Iterable[Lease], pool: str) -> bool:
        gone: Counter[str] = Counter()
        for one in own:
            gone[self._held.hold_of(one).pool] += one.request.gpus
        return self._held.left(self._queue, pool) + gone[pool] >= self._request.gpus


def protected_until(queues: Queues, lease: Lease) -> datetime:
    """When the shortest time is over that its queue gives to a training."""
    queue = queues.find(lease.request.queue)
    return lease.granted_at + timedelta(seconds=queue.min_runtime_seconds if queue is not None else 0)
