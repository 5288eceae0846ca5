"""How much GPU time a training has had, by which some queues give GPUs out.

Nobody has to know how long a training takes for this: what it has had already
is a fair guess of what it still needs (J. Gu et al., "Tiresias", NSDI 2019).
"""

import math
from dataclasses import replace
from datetime import datetime

from tiphys_plugin.ledger.model import Lease, LeaseRequest
from tiphys_plugin.queues import Queue, QueueRules, Queues

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
