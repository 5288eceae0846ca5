"""The preemption loop of a simulation: as `tiphys_plugin.eviction.loop`, in virtual time and without pods."""

from dataclasses import dataclass
from datetime import datetime

from tiphys_plugin.quota.lease import Lease, PendingRequest
from tiphys_plugin.quota.preemption.victims import VictimSelection, select_victims
from tiphys_plugin.quota.queues import Queue, Queues
from tiphys_plugin.quota.scheduler.decide import SchedulingState
from tiphys_plugin.quota.scheduler.fair_share import attained_level_of
from tiphys_plugin.quota.simulation.simulated_cluster import PendingJobs, SimulatedCluster


@dataclass(frozen=True)
class SimulatedPreemptionLoop:
    """Preempts running jobs of ``cluster`` for ``pending`` jobs; ``total_gpus`` is the number of existing GPUs."""

    queues: Queues
    cluster: SimulatedCluster
    pending: PendingJobs
    total_gpus: int

    def run_round(self, now: datetime) -> bool:
        """Preempt for the first pending requests of each queue; whether any job was preempted.

        A request behind one of its queue with the same GPU type and without victims is skipped, because freed GPUs
        would go to that one.
        """
        preempting = [queue for queue in self.queues.queues if queue.preempts and not queue.stopped]
        has_victims = [self._preempt_for_queue(queue, now) for queue in preempting]
        return any(has_victims)

    def _preempt_for_queue(self, queue: Queue, now: datetime) -> bool:
        has_victims = False
        failed_types: set[tuple[str | None, str]] = set()
        for preemptor in self.pending.select_relevant_in_queue(queue.name, self.total_gpus):
            request = preemptor.request
            if request.uid in self.cluster.promised or (request.gpu_type, request.spot) in failed_types:
                continue
            if victims := self._select_victims(queue, preemptor, now):
                self.cluster.preempt(victims, preemptor, now)
                has_victims = True
            else:
                failed_types.add((request.gpu_type, request.spot))
        return has_victims

    def _select_victims(self, queue: Queue, preemptor: PendingRequest, now: datetime) -> tuple[Lease, ...]:
        ledger = self.cluster.ledger_state
        if not any(self._may_be_preempted(queue, lease, preemptor, now) for lease in ledger.leases):
            return ()
        state = SchedulingState(self.queues, ledger.leases, self._select_others(queue, preemptor), ledger.history)
        selection = select_victims(state, preemptor, lambda leases: self.cluster.lost_gpu_seconds(leases, now), now)
        return selection.leases if isinstance(selection, VictimSelection) else ()

    def _select_others(self, queue: Queue, preemptor: PendingRequest) -> tuple[PendingRequest, ...]:
        """The pending requests that can affect ``preemptor``: of its own queue only those before it."""
        same_queue = self.pending.select_relevant_in_queue(queue.name, self.total_gpus)
        others = [one for one in self.pending.select_relevant(self.total_gpus) if one.request.queue != queue.name]
        relevant = [*self.cluster.promised.values(), *same_queue[: same_queue.index(preemptor)], *others]
        by_arrival = {one.arrival: one for one in relevant}
        return tuple(by_arrival[arrival] for arrival in sorted(by_arrival))

    def _may_be_preempted(self, queue: Queue, lease: Lease, preemptor: PendingRequest, now: datetime) -> bool:
        """Whether a rule of preemption could apply. A cheap test before the selection, and mostly false."""
        victim_request, request = lease.request, preemptor.request
        if lease.preemption is not None:
            return False
        if victim_request.queue != queue.name:
            other = self.queues.find(victim_request.queue)
            return queue.reclaims and other is not None and other.cohort == queue.cohort
        if queue.preempts_lower_priority and victim_request.priority < request.priority:
            return True
        return queue.preempts_longer and attained_level_of(queue, lease, now) > queue.attained_level(request.attained)
