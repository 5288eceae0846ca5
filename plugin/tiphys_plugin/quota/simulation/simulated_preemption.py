"""The preemption loop of a simulation: as `tiphys_plugin.eviction.loop`, in virtual time and without pods."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from tiphys_plugin.quota.lease import Lease, PendingRequest
from tiphys_plugin.quota.preemption.victims import VictimSelection, select_victims
from tiphys_plugin.quota.queue import Queue
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.fair_share import attained_level
from tiphys_plugin.quota.scheduler.queue_order import is_behind, is_movable
from tiphys_plugin.quota.simulation.simulated_cluster import PendingJobs, SimulatedCluster

NEVER = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True)
class SimulatedPreemptionLoop:
    """Preempts running jobs of ``cluster`` for ``pending`` jobs; ``total_gpus`` is the number of existing GPUs."""

    queues: Queues
    cluster: SimulatedCluster
    pending: PendingJobs
    total_gpus: int

    def run_round(self, now: datetime) -> bool:
        """Preempt for the first pending requests of each queue; whether any job was preempted.

        A request like one before it in its queue that has no victims has none either, unless it has waited for
        longer. Without preemptible backfill, that holds for all later requests of the same GPU type, because freed
        GPUs would go to the first one.
        """
        preempting = [queue for queue in self.queues.queues if queue.preempts and not queue.stopped]
        has_victims = [self._preempt_for_queue(queue, now) for queue in preempting]
        return any(has_victims)

    def _preempt_for_queue(self, queue: Queue, now: datetime) -> bool:
        has_victims = False
        without_victims: dict[tuple[object, ...], datetime] = {}
        for preemptor in self.pending.select_relevant_in_queue(queue.name, self.total_gpus, self._promised):
            if self.cluster.has_promise(preemptor.request.uid, now):
                continue
            shape, since = _preemptor_shape(queue, preemptor), preemptor.since
            if since >= without_victims.get(shape, NEVER):
                continue
            if selection := self._select_victims(queue, preemptor, now):
                self.cluster.preempt(selection, preemptor, now)
                has_victims = True
            else:
                without_victims[shape] = since
        return has_victims

    @property
    def _promised(self) -> tuple[PendingRequest, ...]:
        return tuple(self.cluster.promised.values())

    def _select_victims(self, queue: Queue, preemptor: PendingRequest, now: datetime) -> VictimSelection | None:
        ledger = self.cluster.ledger_state
        usable = sum(
            lease.request.gpus for lease in ledger.leases if self._may_be_preempted(queue, lease, preemptor, now)
        )
        free = self.total_gpus - sum(lease.request.gpus for lease in ledger.leases)
        if not usable or usable + free < preemptor.request.gpus:
            return None
        selection = select_victims(
            replace(ledger, pending=self._select_others(queue, preemptor)),
            preemptor,
            lambda leases: self.cluster.lost_gpu_seconds(leases, now),
            now,
            cache=self.cluster.cache,
        )
        return selection if isinstance(selection, VictimSelection) else None

    def _select_others(self, queue: Queue, preemptor: PendingRequest) -> tuple[PendingRequest, ...]:
        """The pending requests that can affect ``preemptor``: of its own queue only those that go before it."""
        same_queue = self.pending.select_relevant_in_queue(queue.name, self.total_gpus, self._promised)
        position = self.pending.position_of(preemptor)
        before = [
            pending
            for pending in same_queue
            if self.pending.position_of(pending) < position or self.pending.goes_first(pending, self._promised)
        ]
        others = self.pending.select_relevant(self.total_gpus, self._promised)
        other_queues = [other for other in others if other.request.queue != queue.name]
        relevant = [*self._promised, *before, *other_queues]
        by_arrival = {pending.arrival: pending for pending in relevant if pending.arrival != preemptor.arrival}
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
        return is_behind(queue, lease, preemptor, now) or is_movable(queue, lease, preemptor, now)


def _preemptor_shape(queue: Queue, preemptor: PendingRequest) -> tuple[object, ...]:
    request = preemptor.request
    if not queue.is_backfill_preemptible:
        return request.type_text, request.spot
    level = attained_level(queue, request.attained, request.most_gpus)
    return request.type_text, request.spot, request.gpus, request.members, request.seconds, request.priority, level
