"""How much GPU time a training has had, by which some queues give GPUs out.

Nobody has to know how long a training takes for this: what it has had already
is a fair guess of what it still needs (J. Gu et al., "Tiresias", NSDI 2019).
"""

from dataclasses import replace
from datetime import datetime

from tiphys_plugin.ledger.model import Lease, LeaseRequest, Waiting
from tiphys_plugin.queues import Queue, QueueRules, Queues


def attained(lease: Lease, now: datetime) -> float:
    """GPU-seconds of all attempts of the step that holds ``lease``."""
    return lease.request.attained + lease.request.gpus * max(0.0, (now - lease.granted_at).total_seconds())


def level_of(queue: Queue, lease: Lease, now: datetime) -> int:
    """The level that a lease of ``queue`` has reached. It never falls, not from one attempt to the next either."""
    return queue.level(attained(lease, now))


def place_in_queue(queue: Queue, one: Waiting) -> tuple[int, int, int]:
    """Where a request stands among those of its queue; the smallest is next."""
    return -one.request.priority, queue.level(one.request.attained), one.arrival


def as_it_counts(rules: QueueRules, request: LeaseRequest) -> LeaseRequest:
    """``request`` without a GPU time that its queue does not go by, so that a book says nothing that nobody needs."""
    queue = rules.find(request.queue) if isinstance(rules, Queues) else None
    if request.attained == 0 or (queue is not None and queue.order == "attained"):
        return request
    return replace(request, attained=0.0)
