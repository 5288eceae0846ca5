"""Reports the nodes of slow ranks as evidence to the inventory, for as long as the ranks are slow.

Pods are listed, to find the nodes of the ranks, only if a gang has slow members.
"""

from collections.abc import Callable
from datetime import datetime

import structlog

from tiphys_plugin.attempts.liveness import NamespaceStores
from tiphys_plugin.cluster.interface import Cluster
from tiphys_plugin.nodes.node_watch import ClusterInventory
from tiphys_plugin.nodes.stragglers import evidence_by_node, find_slow_gangs
from tiphys_plugin.quota.admission_backend import AdmissionBackend
from tiphys_plugin.runtime.background import PeriodicTask

_EVERY_SECONDS = 60.0
_log = structlog.get_logger()


class StragglerDetection(PeriodicTask):
    """Checks the gangs every ``every_seconds`` between ``__enter__`` and ``__exit__``."""

    def __init__(
        self,
        ledger: AdmissionBackend,
        cluster: Cluster,
        stores: NamespaceStores,
        nodes: ClusterInventory,
        clock: Callable[[], datetime],
        every_seconds: float = _EVERY_SECONDS,
    ) -> None:
        super().__init__("straggling", every_seconds)
        self._ledger = ledger
        self._cluster = cluster
        self._stores = stores
        self._nodes = nodes
        self._clock = clock

    def run_once(self) -> None:
        """Run one round; reads nothing if the queues do not use the nodes of the cluster.

        Raises:
            StoreError: ledger or API server did not answer.
        """
        if not self._nodes.observed_nodes:
            return
        slow = find_slow_gangs(self._stores, self._ledger.snapshot().leases, self._clock())
        evidence_of_nodes = evidence_by_node(slow, self._cluster.attempt_pods() if slow else ())
        for node, evidence in evidence_of_nodes.items():
            _log.info("node.slow", node=node, evidence=[f"{item.source}: {item.message}" for item in evidence])
        self._nodes.set_external_evidence("slow ranks", evidence_of_nodes)
