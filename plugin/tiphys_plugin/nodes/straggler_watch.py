"""Reports the nodes of slow ranks as evidence to the inventory, for as long as the ranks are slow.

Pods are listed, to find the nodes of the ranks, only if a gang has slow members.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

import structlog

from tiphys_plugin.attempts.liveness import NamespaceStores
from tiphys_plugin.cluster.interface import Cluster
from tiphys_plugin.nodes.node_watch import ClusterInventory
from tiphys_plugin.nodes.stragglers import evidence_by_node, find_slow_gangs
from tiphys_plugin.quota.admission_backend import AdmissionBackend
from tiphys_plugin.runtime.background import PeriodicTask

_log = structlog.get_logger()


@dataclass
class StragglerDetection(PeriodicTask):
    """Checks the gangs."""

    name = "straggling"
    ledger: AdmissionBackend
    cluster: Cluster
    stores: NamespaceStores
    nodes: ClusterInventory
    clock: Callable[[], datetime]
    every_seconds: float = 60.0

    def run_once(self) -> None:
        """Run one round; reads nothing if the queues do not use the nodes of the cluster.

        Raises:
            StoreError: ledger or API server did not answer.
        """
        if not self.nodes.observed_nodes:
            return
        slow = find_slow_gangs(self.stores, self.ledger.snapshot().leases, self.clock())
        evidence_of_nodes = evidence_by_node(slow, self.cluster.attempt_pods() if slow else ())
        for node, evidence in evidence_of_nodes.items():
            _log.info("node.slow", node=node, evidence=[f"{item.source}: {item.message}" for item in evidence])
        self.nodes.set_external_evidence("slow ranks", evidence_of_nodes)
