"""Evicts trainings from nodes that are broken or about to be removed, so that they can save a checkpoint first.

A spot node's notice leaves a minute or two, and not every cluster drains the
node in that time. A pod is evicted only once, so several replicas may run this
task, and each round starts without state.

If most nodes are reported as broken at once, the monitor is the more likely
fault. Then no training is evicted, and the nodes only get no new ones. A notice
of removal is always believed.
"""

from collections.abc import Mapping, Sequence

import structlog

from tiphys.errors import TiphysError
from tiphys.records import EvictionRecord
from tiphys.store import RunLayout, claim_record
from tiphys_plugin.attempts.liveness import NamespaceStores
from tiphys_plugin.cluster.interface import Cluster
from tiphys_plugin.eviction.evict import evict_from_nodes
from tiphys_plugin.nodes.node import ObservedNode
from tiphys_plugin.nodes.node_watch import ClusterInventory
from tiphys_plugin.quota.lease import AdmissionBackend, Lease, LeaseRequest
from tiphys_plugin.runtime.background import PeriodicTask

_EVERY_SECONDS = 5.0
_log = structlog.get_logger()


def nodes_to_evacuate(nodes: Sequence[ObservedNode]) -> dict[str, str]:
    """The evidence against each node whose trainings must be evicted, by its name."""
    broken = [observed for observed in nodes if observed.verdict.is_broken]
    believed = broken if 2 * len(broken) <= len(nodes) else []
    departing = [observed for observed in nodes if observed.verdict.is_departing]
    return {observed.node.name: observed.verdict.message for observed in (*believed, *departing)}


class NodeEvacuation(PeriodicTask):
    """Evicts every ``every_seconds`` between ``__enter__`` and ``__exit__``, in the namespaces that are served.

    The reason is recorded before the pods are deleted, for the message of the attempt's end.
    """

    def __init__(
        self,
        ledger: AdmissionBackend,
        cluster: Cluster,
        stores: NamespaceStores,
        nodes: ClusterInventory,
        every_seconds: float = _EVERY_SECONDS,
    ) -> None:
        super().__init__("evacuation", every_seconds)
        self._ledger = ledger
        self._cluster = cluster
        self._stores = stores
        self._nodes = nodes

    def run_once(self) -> None:
        """Run one round; reads nothing while no node has to be evacuated.

        Raises:
            StoreError: the ledger did not answer.
        """
        evacuated = nodes_to_evacuate(self._nodes.observed_nodes)
        if evacuated:
            for lease in self._ledger.snapshot().leases:
                if evacuated.keys() & set(lease.nodes) and self._stores.serves(lease.request.namespace):
                    self._evict(lease, {name: evacuated[name] for name in sorted(evacuated.keys() & set(lease.nodes))})

    def _evict(self, lease: Lease, evidence_by_node: Mapping[str, str]) -> None:
        request, nodes = lease.request, list(evidence_by_node)
        try:
            self._record_reason(request, evidence_by_node)
            if evict_from_nodes(self._cluster, lease, nodes):
                _log.info("node.left", run=request.run, step=request.step, attempt=request.attempt, nodes=nodes)
        except TiphysError as error:
            _log.error("node.not_left", run=request.run, step=request.step, attempt=request.attempt, error=str(error))

    def _record_reason(self, request: LeaseRequest, evidence_by_node: Mapping[str, str]) -> None:
        """Record why the pods are deleted; a store that fails does not keep them on the node."""
        evidence = "; ".join(f"{node}: {message}" for node, message in evidence_by_node.items())
        record = EvictionRecord(
            run=request.run,
            step=request.step,
            attempt=request.attempt,
            reason=f"Tiphys moved it away from its node ({evidence})",
        )
        try:
            key = RunLayout(request.run).eviction(request.step, request.attempt)
            claim_record(self._stores.store(request.namespace), key, record)
        except TiphysError as error:
            _log.warning("node.reason_not_stored", run=request.run, step=request.step, error=str(error))
