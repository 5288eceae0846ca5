"""Who has to go in a replay: the job of the service that has trainings go, in virtual time."""

from dataclasses import dataclass
from datetime import datetime

from tiphys_plugin.quota.lease import Lease, Waiting
from tiphys_plugin.quota.preemption.victims import Victims, choose
from tiphys_plugin.quota.queues import Queue, Queues
from tiphys_plugin.quota.scheduler.decide import State
from tiphys_plugin.quota.scheduler.fair_share import level_of
from tiphys_plugin.quota.simulation.simulated_cluster import Running, Waiters


@dataclass(frozen=True)
class Going:
    """``gpus`` are all that there are."""

    queues: Queues
    running: Running
    waiters: Waiters
    gpus: int

    def look(self, now: datetime) -> bool:
        """Have trainings leave for those with the best places of each queue; whether any do.

        Who waits behind one of its queue that wants the same type, and for which
        nobody could go, is not asked about: what came free would not be for it.
        """
        asking = [queue for queue in self.queues.queues if queue.preempts and not queue.stopped]
        somebody = [self._look(queue, now) for queue in asking]
        return any(somebody)

    def _look(self, queue: Queue, now: datetime) -> bool:
        somebody = False
        in_vain: set[tuple[str | None, str]] = set()
        for mine in self.waiters.of_queue(queue.name, self.gpus):
            if mine.request.uid in self.running.promised or (mine.request.gpu_type, mine.request.spot) in in_vain:
                continue
            if victims := self._victims(queue, mine, now):
                self.running.ask_to_leave(victims, mine, now)
                somebody = True
            else:
                in_vain.add((mine.request.gpu_type, mine.request.spot))
        return somebody

    def _victims(self, queue: Queue, mine: Waiting, now: datetime) -> tuple[Lease, ...]:
        book = self.running.book
        if not any(self._may_have_to_go(queue, lease, mine, now) for lease in book.leases):
            return ()
        state = State(self.queues, book.leases, self._others(queue, mine), book.history)
        found = choose(state, mine, lambda leases: self.running.lost(leases, now), now)
        return found.leases if isinstance(found, Victims) else ()

    def _others(self, queue: Queue, mine: Waiting) -> tuple[Waiting, ...]:
        """Who else matters to what becomes of ``mine``: of its own queue only those before it."""
        own = self.waiters.of_queue(queue.name, self.gpus)
        others = [one for one in self.waiters.first(self.gpus) if one.request.queue != queue.name]
        known = [*self.running.promised.values(), *own[: own.index(mine)], *others]
        by_arrival = {one.arrival: one for one in known}
        return tuple(by_arrival[arrival] for arrival in sorted(by_arrival))

    def _may_have_to_go(self, queue: Queue, lease: Lease, mine: Waiting, now: datetime) -> bool:
        """Whether any rule at all speaks for it; cheap, since mostly none does."""
        held, wanted = lease.request, mine.request
        if lease.leaving is not None:
            return False
        if held.queue != queue.name:
            other = self.queues.find(held.queue)
            return queue.reclaims and other is not None and other.cohort == queue.cohort
        if queue.preempts_lower_priority and held.priority < wanted.priority:
            return True
        return queue.preempts_longer and level_of(queue, lease, now) > queue.level(wanted.attained)
