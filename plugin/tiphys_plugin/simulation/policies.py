"""Who may start now: the service's own rule, and two plain ones to compare it with.

All hold the same quotas; they differ in order and in what is kept for whom.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime

from tiphys_plugin.ledger.capacity import Capacity
from tiphys_plugin.ledger.line import admissible
from tiphys_plugin.ledger.model import Lease, Waiting
from tiphys_plugin.ledger.shares import Consumed
from tiphys_plugin.ledger.verdict import Start
from tiphys_plugin.queues import Queue, Queues

Policy = Callable[[Queues, Sequence[Lease], Sequence[Consumed], Iterable[Waiting], datetime], list[Start]]
"""Queues, leases, history, who waits, and the time; everybody who may start, in order."""


def fifo(
    queues: Queues, leases: Sequence[Lease], _history: Sequence[Consumed], waiting: Iterable[Waiting], _now: datetime
) -> list[Start]:
    """Strictly in order of arrival, all queues in one line: whoever does not fit stops everybody behind it."""
    return list(_first_fit(queues, leases, waiting, passes_over=False))


def skip(
    queues: Queues, leases: Sequence[Lease], _history: Sequence[Consumed], waiting: Iterable[Waiting], _now: datetime
) -> list[Start]:
    """In order of arrival, passing over whoever does not fit, and keeping nothing for anybody."""
    return list(_first_fit(queues, leases, waiting, passes_over=True))


POLICIES: Mapping[str, Policy] = {"tiphys": admissible, "fifo": fifo, "skip": skip}


def _first_fit(
    queues: Queues, leases: Sequence[Lease], waiting: Iterable[Waiting], *, passes_over: bool
) -> Iterator[Start]:
    capacity = Capacity(queues, tuple(leases))
    too_large: set[tuple[str, str | None, int | None, int, str]] = set()
    for queue, one in _pending_by_arrival(queues, waiting):
        kind = (queue.name, one.request.gpu_type, one.request.min_gpu_memory_mb, one.request.gpus, one.request.spot)
        pool = next(iter(capacity.fitting(queue, one.request)), None) if kind not in too_large else None
        if pool is not None:
            hold = capacity.placed(one.request, pool)
            capacity.take(hold)
            yield Start(one, pool, hold.placement.nodes if hold.placement is not None else ())
        elif passes_over:
            too_large.add(kind)  # nothing comes back during one look
        else:
            return


def _pending_by_arrival(queues: Queues, waiting: Iterable[Waiting]) -> Iterator[tuple[Queue, Waiting]]:
    """Everybody whose queue admits at all."""
    for one in sorted(waiting, key=lambda one: one.arrival):
        queue = queues.find(one.request.queue)
        if queue is not None and not queue.stopped:
            yield queue, one
