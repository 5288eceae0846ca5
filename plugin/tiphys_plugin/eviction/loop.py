"""The preemption loop of a plugin service: selects victims, marks their leases and evicts their pods.

Any number of services may run the loop at the same time. The mark is one
transition of the GPU ledger state, checked against the newest state, so one
service wins; a repeated eviction has no effect. Every round evicts all marked
leases until their pods are gone, so the next round completes the work of a
service that died between mark and eviction.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

import structlog

from tiphys.errors import TiphysError
from tiphys.faults import failpoint
from tiphys.records import utc_now
from tiphys_plugin.attempts.liveness import NamespaceStores
from tiphys_plugin.cluster.interface import Cluster
from tiphys_plugin.eviction.cost import CheckpointLossEstimator
from tiphys_plugin.eviction.evict import evict_lease, list_unfinished_pods, longest_grace_seconds
from tiphys_plugin.eviction.resize import resize_elastic_gangs
from tiphys_plugin.quota.admission_backend import AdmissionBackend
from tiphys_plugin.quota.lease import Lease, LedgerState, PendingRequest
from tiphys_plugin.quota.ledger.transitions import find_preemptor
from tiphys_plugin.quota.preemption.victims import VictimSelection, is_expected_to_end, lease_id_of, select_victims
from tiphys_plugin.quota.queue import Queue
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.decide import format_step_name
from tiphys_plugin.quota.scheduler.queue_order import queue_position
from tiphys_plugin.runtime.background import PeriodicTask
from tiphys_plugin.runtime.settings import PluginSettings

_MAX_FAILED_REQUESTS = 4
"""A round skips the rest of a queue after this many pending requests without victims."""
_log = structlog.get_logger()


@dataclass
class PreemptionLoop(PeriodicTask):
    """Without a queue that preempts, a round only resizes elastic gangs and evicts marked leases."""

    name = "preemption"
    join_timeout_seconds = 20.0  # the API server may hang
    ledger: AdmissionBackend
    cluster: Cluster
    stores: NamespaceStores
    every_seconds: float = PluginSettings.preemption_interval_seconds
    clock: Callable[[], datetime] = utc_now

    def __post_init__(self) -> None:
        self._estimate_losses = CheckpointLossEstimator(self.stores, self.clock)

    def run_once(self) -> None:
        """Run one round.

        Raises:
            StoreError: the ledger did not answer.
        """
        state = self.ledger.snapshot()
        resize_elastic_gangs(self.ledger, self.cluster, self.stores, state, self.clock())
        for lease in state.leases:
            if lease.preemption is not None:
                self._evict(lease)
        if isinstance(state.queues, Queues):
            for queue in filter(lambda queue: queue.preempts, state.queues.queues):
                self._preempt_for_queue(queue)

    def _preempt_for_queue(self, queue: Queue) -> None:
        """Preempt for the first pending requests of a queue, until `_MAX_FAILED_REQUESTS` of them find no victims."""
        state, failed_requests = self.ledger.snapshot(), 0
        now = self.clock()
        preemptors = {
            lease.preemption.preemptor
            for lease in state.leases
            if lease.preemption is not None and is_expected_to_end(lease, now)
        }
        pending = [waiting_request for waiting_request in state.pending if waiting_request.request.queue == queue.name]
        for preemptor in sorted(pending, key=lambda request: queue_position(queue, request)):
            if failed_requests == _MAX_FAILED_REQUESTS:
                return
            if preemptor.request.workflow_step in preemptors:
                continue
            if self._preempt_for(preemptor, state):
                state = self.ledger.snapshot()
            else:
                failed_requests += 1

    def _preempt_for(self, preemptor: PendingRequest, state: LedgerState) -> bool:
        """Select, mark and evict victims of a pending request; whether there are any."""
        now = self.clock()
        step, cache = preemptor.request.workflow_step, self.ledger.cache
        preemptor_case = find_preemptor(state, step, now, cache)
        if preemptor_case is None:
            return False
        unreachable = {lease.id for lease in state.leases if not self.stores.serves(lease.request.namespace)}
        selection = select_victims(*preemptor_case, self._estimate_losses, now, unreachable, cache)
        if not isinstance(selection, VictimSelection):
            return False
        grace_seconds = {
            lease.id: longest_grace_seconds(list_unfinished_pods(self.cluster, lease)) for lease in selection.leases
        }
        marked = self.ledger.mark_preempted(step, grace_seconds)
        failpoint("preemption.after_mark")
        for lease in marked:
            _log_preemption(lease, preemptor, selection)
            self._evict(lease)
        return bool(marked)

    def _evict(self, lease: Lease) -> None:
        """Evict the pods of a marked lease. An error is logged and retried in the next round."""
        request = lease.request
        try:
            if self.stores.serves(request.namespace) and evict_lease(self.cluster, lease):
                _log.info("preemption.asked", **request.log_fields)
        except TiphysError as error:
            _log.error("preemption.not_asked", **request.log_fields, error=str(error))


def _log_preemption(lease: Lease, preemptor: PendingRequest, selection: VictimSelection) -> None:
    notice = lease.preemption
    victims = [victim for victim in selection.leases if lease_id_of(victim.id) == lease.id]
    _log.info(
        "preemption.decided",
        **lease.request.log_fields,
        gpus=sum(victim.request.gpus for victim in victims),
        for_whom=format_step_name(preemptor.request),
        moves=lease.id in selection.moved_leases,
        deadline=str(notice.deadline) if notice else "",
        gpu_seconds_lost_at_most=round(sum(selection.gpu_seconds_by_lease[victim.id] for victim in victims)),
    )
