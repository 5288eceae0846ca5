"""The order of one queue: positions of pending requests, and which running trainings are behind them.

With preemptible backfill, requests behind a blocked one run on what stands idle,
and the blocked one may preempt them as soon as it can start. So a lease needs a
position too. The position of a step does not change while it runs or waits, except
for its level of attained service, which only rises. So of two trainings each
preempts the other at most once in a level.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from tiphys_plugin.quota.lease import Lease, LeaseRequest, PendingRequest, declared_end
from tiphys_plugin.quota.queue import PREEMPTIBLE_MIN_RUNTIME_SECONDS, Queue
from tiphys_plugin.quota.queues import QueueRules, Queues
from tiphys_plugin.quota.scheduler.capacity import Capacity
from tiphys_plugin.quota.scheduler.fair_share import attained_level, attained_level_of

QueuePosition = tuple[int, int, float, int]
"""Negated priority, level of attained service, seniority, arrival; the smallest position is served first."""
_PATIENCE = timedelta(seconds=PREEMPTIBLE_MIN_RUNTIME_SECONDS)


def queue_position(queue: Queue | None, pending: PendingRequest) -> QueuePosition:
    """Position of a request among those of its queue. ``queue`` None: an undeclared queue, ordered by arrival."""
    request = pending.request
    if queue is None or not has_seniority(queue):
        return -request.priority, 0, 0.0, pending.arrival
    return *_order_of(queue, request, pending.since), pending.arrival


def is_behind(queue: Queue, lease: Lease, pending: PendingRequest, now: datetime) -> bool:
    """Whether ``pending`` may preempt ``lease`` of the same queue because it goes first.

    Nothing is, until ``pending`` has waited for as long as trainings are protected, twenty minutes at most: meanwhile
    one may end by itself, and each preemption costs a save and a restart. Then a lease of a higher level is behind.
    One of the same level is behind if it started while ``pending`` waited, and would not go first if both were pending.
    """
    request = pending.request
    if lease.preemption is not None or lease.request.priority > request.priority:
        return False
    if now < patience_ends_at(queue, pending):
        return False
    level, own_level = attained_level_of(queue, lease, now), attained_level(queue, request.attained, request.most_gpus)
    if level != own_level:
        return level > own_level and queue.preempts_longer
    if not queue.is_backfill_preemptible or lease.granted_at <= pending.since:
        return False
    theirs = _seniority(queue, lease.request, level, lease.granted_at)
    return theirs > _seniority(queue, request, level, pending.since)


def is_movable(queue: Queue, lease: Lease, pending: PendingRequest, now: datetime) -> bool:
    """Whether a smaller ``lease`` of the same queue may move to other nodes for ``pending``."""
    moment = movable_from(queue, lease, pending)
    return moment is not None and moment <= now and not _ends_soon(lease, now)


def movable_from(queue: Queue, lease: Lease, pending: PendingRequest) -> datetime | None:
    """When a smaller ``lease`` of the same queue may move to other nodes for ``pending``; None if it never may.

    One that avoids nodes, or spot nodes, after a failure stays where it is: it would have to take what is idle.
    """
    mine, request = lease.request, pending.request
    if not queue.moves_trainings or mine.queue != queue.name or lease.preemption is not None:
        return None
    if mine.priority > request.priority or mine.gpus >= request.gpus or mine.avoided_nodes or mine.spot == "avoided":
        return None
    return max(lease.granted_at + timedelta(seconds=queue.settled_seconds), pending.since + _PATIENCE)


def _ends_soon(lease: Lease, now: datetime) -> bool:
    end = declared_end(lease.request, lease.granted_at)
    return end is not None and end - now < _PATIENCE


def patience_ends_at(queue: Queue, pending: PendingRequest) -> datetime:
    """When ``pending`` may preempt by its position in ``queue``: at most `PREEMPTIBLE_MIN_RUNTIME_SECONDS` later."""
    return pending.since + timedelta(seconds=min(queue.protected_seconds, PREEMPTIBLE_MIN_RUNTIME_SECONDS))


def could_start_without_those_behind(
    queue: Queue, pending: PendingRequest, leases: Sequence[Lease], capacity: Capacity, now: datetime
) -> bool:
    """Whether the turn of a blocked request has come: all that it lacks is held by trainings behind it.

    ``leases`` are those of the queue, and ``capacity`` has their GPUs.
    """
    remaining = capacity.copy()
    for lease in leases:
        if is_behind(queue, lease, pending, now):
            remaining.remove(remaining.held_gpus_of_lease(lease))
    return remaining.fits(queue, pending.request)


def find_first_since(queue: Queue, pending: PendingRequest, leases: Sequence[Lease]) -> datetime:
    """Since when a blocked request is the first of its queue: it was made, or the last one before it started.

    ``leases`` are those of the queue, in order of their grants.
    """
    order = _order_of(queue, pending.request, pending.since)
    first_since = pending.since
    for lease in reversed(leases):
        if lease.granted_at <= first_since:
            break
        if _order_of(queue, lease.request, lease.granted_at) < order:
            first_since = lease.granted_at
    return first_since


def request_of_lease(rules: QueueRules, pending: PendingRequest, granted: LeaseRequest) -> LeaseRequest:
    """``granted`` as its lease keeps it: with its cohort, and the time by which it keeps its position in its queue."""
    queue = rules.find(granted.queue) if isinstance(rules, Queues) else None
    granted = with_cohort(rules, granted)
    if queue is None or granted.first_start is not None or not (has_seniority(queue) or queue.is_backfill_bounded):
        return granted
    return replace(granted, first_start=pending.since.timestamp())


def with_cohort(rules: QueueRules, granted: LeaseRequest) -> LeaseRequest:
    """``granted`` with the cohort that lends to its queue now, against which it counts should its queue leave it."""
    queue = rules.find(granted.queue) if isinstance(rules, Queues) else None
    return granted if queue is None else replace(granted, cohort=queue.cohort or "")


def drop_unused_attained(rules: QueueRules, request: LeaseRequest) -> LeaseRequest:
    """``request`` without attained service if its queue has no use for it, so that the ledger does not store it."""
    queue = rules.find(request.queue) if isinstance(rules, Queues) else None
    attained = request.attained if queue is not None and queue.order == "attained" else 0.0
    first_start = request.first_start if queue is not None and has_seniority(queue) else None
    if (attained, first_start) == (request.attained, request.first_start):
        return request
    return replace(request, attained=attained, first_start=first_start)


def has_seniority(queue: Queue) -> bool:
    """Whether the queue goes by the time of the first request of a step and not by that of each attempt."""
    return queue.order == "attained" or queue.is_backfill_preemptible


def _order_of(queue: Queue, request: LeaseRequest, since: datetime) -> tuple[int, int, float]:
    """The position of a request without its arrival number; ``since`` as in `_seniority`."""
    level = attained_level(queue, request.attained, request.most_gpus)
    return -request.priority, level, _seniority(queue, request, level, since)


def _seniority(queue: Queue, request: LeaseRequest, level: int, since: datetime) -> float:
    """Unix time; ``since`` is that of the request, or of the lease, of a step that had none before."""
    first = since.timestamp() if request.first_start is None else request.first_start
    return first + queue.yield_seconds(level, request.gpus)
