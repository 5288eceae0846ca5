"""Who has used how much: what makes queues take turns at what is left over.

A queue's share is what it holds, and what it has held lately, of all quotas
of that GPU type in its cohort; the type with the largest share counts (DRF:
A. Ghodsi et al., "Dominant Resource Fairness", NSDI 2011), divided by the weight
of the queue. "Lately" is a mean that forgets half in each half-life. What is
held counts at once and in full, so a burst is not admitted before anybody has
noticed (Kueue's entry penalty).

How much GPU time a training has had, by which some queues give GPUs out.

Nobody has to know how long a training takes for this: what it has had already
is a fair guess of what it still needs (J. Gu et al., "Tiresias", NSDI 2019).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from tiphys_plugin.quota.lease import Lease, LeaseRequest
from tiphys_plugin.quota.queues import Queue, QueueRules, Queues
from tiphys_plugin.quota.scheduler import pools
from tiphys_plugin.quota.scheduler.capacity import Capacity

_FORGOTTEN = 0.01
"""GPUs that are not worth a line in the book."""


@dataclass(frozen=True)
class Consumed:
    """What leases that are over have left in the mean of a queue: GPUs of a pool, as of a time."""

    queue: str
    pool: str
    gpus: float
    at: datetime


def ended(
    history: Sequence[Consumed], leases: Sequence[Lease], rules: QueueRules, now: datetime
) -> tuple[Consumed, ...]:
    """The history once ``leases`` are over."""
    if not isinstance(rules, Queues):
        return tuple(history)
    means = Means(rules, leases, history).at(now)
    return tuple(
        Consumed(queue, pool, round(gpus, 4), now) for (queue, pool), gpus in sorted(means.items()) if gpus > _FORGOTTEN
    )


class Means:
    """What queues have held lately, for any time: a sum for each queue and pool, and no look at each lease."""

    def __init__(self, queues: Queues, leases: Sequence[Lease], history: Iterable[Consumed]) -> None:
        self._queues = queues
        self._half_life = queues.usage_half_life
        self._held: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._yet_to_count: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._since = max((lease.granted_at for lease in leases), default=datetime.min.replace(tzinfo=UTC))
        self._history = tuple(history)
        for lease in leases:
            self._count(lease, 1)

    def after(self, come: Sequence[Lease], gone: Sequence[Lease], history: Iterable[Consumed]) -> "Means":
        """The same, once some leases have come and others are gone."""
        twin = copy(self)
        twin._held, twin._yet_to_count = self._held.copy(), self._yet_to_count.copy()
        twin._since = max((lease.granted_at for lease in come), default=self._since)
        twin._since = max(twin._since, self._since)
        rest = _kept(self._since, twin._since, self._half_life)
        for place in twin._yet_to_count:
            twin._yet_to_count[place] *= rest
        for lease in come:
            twin._count(lease, 1)
        for lease in gone:
            twin._count(lease, -1)
        twin._history = tuple(history)
        return twin

    def at(self, now: datetime) -> dict[tuple[str, str], float]:
        """Mean GPUs by queue and pool."""
        rest = _kept(self._since, now, self._half_life)
        means = defaultdict(
            float, {place: max(0.0, held - rest * self._yet_to_count[place]) for place, held in self._held.items()}
        )
        for one in self._history:
            means[one.queue, one.pool] += one.gpus * _kept(one.at, now, self._half_life)
        return means

    def _count(self, lease: Lease, times: int) -> None:
        place = (lease.request.queue, pools.counted_against(self._queues, lease.request, lease.pool))
        gpus = times * lease.request.gpus
        self._held[place] += gpus
        self._yet_to_count[place] += gpus * _kept(lease.granted_at, self._since, self._half_life)


class Shares:
    """The share of each queue at one instant."""

    def __init__(self, queues: Queues, means: Means, now: datetime) -> None:
        self._queues = queues
        self._means = means.at(now)

    def of(self, queue: Queue, capacity: Capacity) -> float:
        """Larger for who has more, from 0; ``capacity`` says what is held."""
        used = (
            (capacity.held(queue, pool) + self._means.get((queue.name, pool), 0.0))
            / max(1, self._queues.shared(queue, pool))
            for pool in queue.gpus
        )
        return max(used, default=0.0) / queue.weight


def _kept(since: datetime, now: datetime, half_life: timedelta) -> float:
    """What is left of one after this time; a clock that was put back forgets nothing."""
    return math.exp2(-max(0.0, (now - since) / half_life))


Place = tuple[int, int, float, int]
"""Priority from the highest, level of GPU time, first start, arrival."""


def attained(lease: Lease, now: datetime) -> float:
    """GPU-seconds of all attempts of the step that holds ``lease``."""
    return lease.request.attained + lease.request.gpus * max(0.0, (now - lease.granted_at).total_seconds())


def level_of(queue: Queue, lease: Lease, now: datetime) -> int:
    """The level that a lease of ``queue`` has reached. It never falls, not from one attempt to the next either."""
    return queue.level(attained(lease, now))


def place_in_queue(queue: Queue | None, request: LeaseRequest, arrival: int) -> Place:
    """Where a request stands among those of its queue; the smallest is next. None: nothing is known of the queue.

    Within a level the one that began first goes on first, however often it had
    to go: so as few as possible are under way at once.
    """
    if queue is None or queue.order == "arrival":
        return -request.priority, 0, math.inf, arrival
    began = math.inf if request.first_start is None else request.first_start
    return -request.priority, queue.level(request.attained), began, arrival


def as_it_counts(rules: QueueRules, request: LeaseRequest) -> LeaseRequest:
    """``request`` without a GPU time that its queue does not go by, so that a book says nothing that nobody needs."""
    queue = rules.find(request.queue) if isinstance(rules, Queues) else None
    if (queue is not None and queue.order == "attained") or (request.attained == 0 and request.first_start is None):
        return request
    return replace(request, attained=0.0, first_start=None)
