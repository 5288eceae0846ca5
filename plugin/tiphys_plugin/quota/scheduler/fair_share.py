"""Orders queues by fair share, and measures the attained service of trainings.

The share of a queue is the GPUs that it holds plus its decayed past usage, relative
to all quotas of the pool in its cohort. The pool with the largest share counts
(DRF: A. Ghodsi et al., "Dominant Resource Fairness", NSDI 2011), divided by the
weight of the queue. Past usage decays with a half-life. Held GPUs count at once
and in full, so a burst of requests raises the share of its queue immediately
(Kueue's entry penalty).

A queue with ``order: attained`` serves the training with the least attained
service first. No training declares its duration: the GPU time that a training
has had is a fair estimate of the time that it still needs (J. Gu et al.,
"Tiresias", NSDI 2019).
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from datetime import UTC, datetime, timedelta
from itertools import count

from tiphys_plugin.quota.lease import EndedUsage, Lease, LedgerState
from tiphys_plugin.quota.queue import Queue
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler import pools
from tiphys_plugin.quota.scheduler.capacity import Capacity

_NEGLIGIBLE_GPUS = 0.01
"""Mean GPUs below which the usage of a queue is dropped from the history."""


def add_ended_usage(state: LedgerState, leases: Sequence[Lease], now: datetime) -> tuple[EndedUsage, ...]:
    """The usage history of ``state`` after the end of ``leases``."""
    if not isinstance(state.queues, Queues):
        return state.history
    means = DecayedUsage(state.queues, leases, state.history).usage_at(now)
    return tuple(
        EndedUsage(queue, pool, round(gpus, 4), now)
        for (queue, pool), gpus in sorted(means.items())
        if gpus > _NEGLIGIBLE_GPUS
    )


class DecayedUsage:
    """Decayed mean usage by queue and pool, at any time. Sums replace an iteration over the leases."""

    def __init__(self, queues: Queues, leases: Sequence[Lease], history: Iterable[EndedUsage]) -> None:
        self._queues = queues
        self._half_life = queues.usage_half_life
        self._held: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._not_yet_counted: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._since = max((lease.usage_from for lease in leases), default=datetime.min.replace(tzinfo=UTC))
        self._history = tuple(history)
        for lease in leases:
            self._count(lease, 1)

    def with_changes(
        self, added: Sequence[Lease], removed: Sequence[Lease], history: Iterable[EndedUsage]
    ) -> "DecayedUsage":
        """The usage after leases were added and removed."""
        twin = copy(self)
        twin._held, twin._not_yet_counted = self._held.copy(), self._not_yet_counted.copy()
        twin._since = max((lease.usage_from for lease in added), default=self._since)
        twin._since = max(twin._since, self._since)
        decay = _decay_factor(self._since, twin._since, self._half_life)
        for key in twin._not_yet_counted:
            twin._not_yet_counted[key] *= decay
        for lease in added:
            twin._count(lease, 1)
        for lease in removed:
            twin._count(lease, -1)
        twin._history = tuple(history)
        return twin

    def usage_at(self, now: datetime) -> dict[tuple[str, str], float]:
        """Mean GPUs by queue and pool."""
        decay = _decay_factor(self._since, now, self._half_life)
        means = defaultdict(
            float, {key: max(0.0, held - decay * self._not_yet_counted[key]) for key, held in self._held.items()}
        )
        for usage in self._history:
            means[usage.queue, usage.pool] += usage.gpus * _decay_factor(usage.measured_at, now, self._half_life)
        return means

    def _count(self, lease: Lease, times: int) -> None:
        request = lease.request
        key = (request.queue, pools.find_pool(self._queues, request.queue, request.gpu_type, lease.pool))
        gpus = times * request.gpus
        self._held[key] += gpus
        self._not_yet_counted[key] += gpus * _decay_factor(lease.usage_from, self._since, self._half_life)


def compute_fair_share(queue: Queue, capacity: Capacity, past_usage: Mapping[tuple[str, str], float]) -> float:
    """Weighted dominant share of ``queue``, from 0.

    ``capacity`` has the held GPUs, and ``past_usage`` is `DecayedUsage.usage_at` the same time.
    """
    used = (
        (capacity.held_in_pool(queue, pool) + past_usage.get((queue.name, pool), 0.0))
        / max(1, capacity.queues.cohort_quota(queue, pool))
        for pool in queue.gpus
    )
    return max(used, default=0.0) / queue.weight


def _decay_factor(since: datetime, now: datetime, half_life: timedelta) -> float:
    """Decay from ``since`` to ``now``, from 0 to 1; 1 if the clock was set back."""
    return math.exp2(-max(0.0, (now - since) / half_life))


def held_gpu_seconds(lease: Lease, now: datetime) -> float:
    """GPU-seconds that a lease has held until ``now``; 0 if the clock was set back."""
    return lease.request.gpus * max(0.0, (now - lease.usage_from).total_seconds())


def attained_gpu_seconds(lease: Lease, now: datetime) -> float:
    """Attained service: GPU-seconds of all attempts of the step that holds ``lease``."""
    return lease.request.attained + held_gpu_seconds(lease, now)


TIME_SLICE_HOURS = 48.0
"""Hours of run time that trainings beyond the last level get in turn. Without turns a gang would wait there until every
long training has ended; a save and a restart of some minutes are little beside two days."""


def attained_level(queue: Queue, gpu_seconds: float, gpus: int) -> int:
    """Level of a training on ``gpus`` GPUs with this attained service; 0 in a queue with ``order: arrival``.

    Beyond the last of ``attained_gpu_hours`` each `TIME_SLICE_HOURS` of run time are one more level.
    """
    if queue.order != "attained":
        return 0
    gpu_hours, levels = gpu_seconds / 3600, queue.attained_gpu_hours
    return bisect_right(levels, gpu_hours) + int(max(0.0, gpu_hours - levels[-1]) / (gpus * TIME_SLICE_HOURS))


def level_ends(queue: Queue, gpus: int) -> Iterator[float]:
    """Attained GPU-seconds at which a training on ``gpus`` GPUs reaches its next levels, without an end."""
    yield from (3600 * hours for hours in queue.attained_gpu_hours)
    yield from (3600 * (queue.attained_gpu_hours[-1] + number * gpus * TIME_SLICE_HOURS) for number in count(1))


def attained_level_of(queue: Queue, lease: Lease, now: datetime) -> int:
    """The level of attained service of a lease of ``queue``. It never falls, also across attempts."""
    return attained_level(queue, attained_gpu_seconds(lease, now), lease.request.most_gpus)
