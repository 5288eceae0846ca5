"""Evicts trainings from nodes that are broken or about to be removed, so that they can save a checkpoint first.

A spot node's notice leaves a minute or two, and not every cluster drains the
node in that time. A pod is evicted only once, so several replicas may run this
task, and each round starts without state.

If most nodes are reported as broken at once, the monitor is the more likely
fault. Then no training is evicted, and the nodes only get no new ones. A notice
of removal is always believed.

The pods are deleted first, and the reason is stored afterwards by a thread of its
own, because a store that does not answer must not keep a training on its node.
The order is safe. A service that dies between the two leaves a lease on the
node, for which the next round of any replica deletes nothing and stores the
reason. An end that is recorded before the reason lacks only that sentence of its
message: pod and taint decide on its cause. And no reason is stored for an
eviction that the API server refused.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog

from tiphys.errors import TiphysError
from tiphys.records import EvictionRecord
from tiphys.store import RunLayout, claim_record
from tiphys.threads import BackgroundThread, start_background_thread
from tiphys_plugin.attempts.liveness import NamespaceStores
from tiphys_plugin.cluster.interface import Cluster
from tiphys_plugin.eviction.evict import evict_from_nodes
from tiphys_plugin.nodes.node import ObservedNode
from tiphys_plugin.nodes.node_watch import ClusterInventory
from tiphys_plugin.quota.admission_backend import AdmissionBackend
from tiphys_plugin.quota.lease import Lease
from tiphys_plugin.runtime.background import PeriodicTask

_log = structlog.get_logger()


def nodes_to_evacuate(nodes: Sequence[ObservedNode]) -> dict[str, str]:
    """The evidence against each node whose trainings must be evicted, by its name."""
    broken = [observed for observed in nodes if observed.verdict.is_broken]
    believed = broken if 2 * len(broken) <= len(nodes) else []
    departing = [observed for observed in nodes if observed.verdict.is_departing]
    return {observed.node.name: observed.verdict.message for observed in (*believed, *departing)}


@dataclass
class NodeEvacuation(PeriodicTask):
    """Evicts in the namespaces that are served.

    The reason is stored for the message of the attempt's end, at most by one thread per namespace at a time.
    """

    name = "evacuation"
    ledger: AdmissionBackend
    cluster: Cluster
    stores: NamespaceStores
    nodes: ClusterInventory
    every_seconds: float = 5.0
    _writers: dict[str, BackgroundThread | None] = field(default_factory=dict)
    """The thread that stores reasons, by namespace; a store that does not answer keeps its thread."""

    def run_once(self) -> None:
        """Run one round; reads nothing while no node has to be evacuated.

        Raises:
            StoreError: the ledger did not answer.
        """
        evacuated = nodes_to_evacuate(self.nodes.observed_nodes)
        records = defaultdict[str, list[EvictionRecord]](list)
        for lease in self.ledger.snapshot().leases if evacuated else ():
            nodes = sorted(evacuated.keys() & set(lease.nodes))
            if nodes and self.stores.serves(lease.request.namespace) and self._evict(lease, nodes):
                records[lease.request.namespace].append(_build_record(lease, {name: evacuated[name] for name in nodes}))
        for namespace, of_namespace in records.items():
            writer = self._writers.get(namespace)
            if writer is None or not writer.is_alive():
                self._writers[namespace] = start_background_thread(partial(self._store, namespace, of_namespace))

    def _evict(self, lease: Lease, nodes: Sequence[str]) -> bool:
        """Delete the pods that must leave ``nodes``; False if the API server did not allow it."""
        try:
            if evict_from_nodes(self.cluster, lease, nodes):
                _log.info("node.left", **lease.request.log_fields, nodes=nodes)
        except TiphysError as error:
            _log.error("node.not_left", **lease.request.log_fields, error=str(error))
            return False
        return True

    def _store(self, namespace: str, records: Sequence[EvictionRecord]) -> None:
        for record in records:
            try:
                key = RunLayout(record.run).eviction(record.step, record.attempt)
                claim_record(self.stores.store(namespace), key, record)
            except TiphysError as error:
                _log.warning("node.reason_not_stored", run=record.run, step=record.step, error=str(error))


def _build_record(lease: Lease, evidence_by_node: Mapping[str, str]) -> EvictionRecord:
    evidence = "; ".join(f"{node}: {message}" for node, message in evidence_by_node.items())
    return EvictionRecord(
        run=lease.request.run,
        step=lease.request.step,
        attempt=lease.request.attempt,
        nodes=tuple(evidence_by_node),
        reason=f"Tiphys moved it away from its node ({evidence})",
    )
