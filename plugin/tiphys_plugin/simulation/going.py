"""Who has to go in a replay: the job of the service that has trainings go, in virtual time."""

from collections.abc import Iterator
from datetime import datetime

from tiphys_plugin.ledger.attained import level_of
from tiphys_plugin.ledger.decide import State
from tiphys_plugin.ledger.model import Lease, Waiting
from tiphys_plugin.preemption.choice import Victims, choose
from tiphys_plugin.queues import Queue, Queues
from tiphys_plugin.simulation.running import Running
from tiphys_plugin.simulation.waiters import Waiters


def somebody_goes(queues: Queues, running: Running, waiters: Waiters, gpus: int, now: datetime) -> bool:
    """Have trainings leave for those with the best places; whether any do. ``gpus`` are all that there are.

    Who waits behind one of its queue that wants the same type, and for which
    nobody could go, is not asked about: what came free would not be for it.
    """
    somebody = False
    for queue in filter(lambda one: one.preempts and not one.stopped, queues.queues):
        in_vain: set[str | None] = set()
        for mine in waiters.of_queue(queue.name, gpus):
            if mine.request.uid in running.promised or mine.request.gpu_type in in_vain:
                continue
            found = _victims(queues, queue, running, waiters, gpus, mine, now)
            if found is None:
                in_vain.add(mine.request.gpu_type)
                continue
            running.ask_to_leave(found.leases, mine, now)
            somebody = True
    return somebody


def _victims(
    queues: Queues, queue: Queue, running: Running, waiters: Waiters, gpus: int, mine: Waiting, now: datetime
) -> Victims | None:
    if not any(_may_have_to_go(queues, queue, lease, mine, now) for lease in running.book.leases):
        return None
    others = tuple(_others(queue, running, waiters, gpus, mine))
    state = State(queues, running.book.leases, others, running.book.history)
    found = choose(state, mine, lambda leases: running.lost(leases, now), now)
    return found if isinstance(found, Victims) else None


def _others(queue: Queue, running: Running, waiters: Waiters, gpus: int, mine: Waiting) -> Iterator[Waiting]:
    """Who else matters to what becomes of ``mine``: of its own queue only those before it."""
    before = {one.arrival: one for one in running.promised.values()}
    for one in waiters.of_queue(queue.name, gpus):
        if one is mine:
            break
        before[one.arrival] = one
    rest = {one.arrival: one for one in waiters.first(gpus) if one.request.queue != queue.name}
    known = before | rest
    return (known[arrival] for arrival in sorted(known))


def _may_have_to_go(queues: Queues, queue: Queue, lease: Lease, mine: Waiting, now: datetime) -> bool:
    """Whether any rule at all speaks for it; cheap, since mostly none does."""
    request = lease.request
    if lease.leaving is not None:
        return False
    if request.queue != queue.name:
        other = queues.find(request.queue)
        return queue.reclaims and other is not None and other.cohort == queue.cohort
    if request.priority < mine.request.priority and queue.preempts_lower_priority:
        return True
    return queue.preempts_longer and level_of(queue, lease, now) > queue.level(mine.request.attained)
