"""Has nodes of slow ranks be told of, for as long as they are slow.

Pods say which nodes they are on, and are only asked where somebody is slow.
"""

from collections.abc import Callable
from datetime import datetime

import structlog

from tiphys_plugin.attempts.liveness import Stores
from tiphys_plugin.cluster.interface import Cluster
from tiphys_plugin.nodes.node_watch import ClusterInventory
from tiphys_plugin.nodes.stragglers import evidence_by_node, slow_in
from tiphys_plugin.quota.lease import AdmissionBackend
from tiphys_plugin.runtime.background import Rounds

_EVERY_SECONDS = 60.0
_log = structlog.get_logger()


class Straggling(Rounds):
    """Looks every ``every_seconds`` between ``__enter__`` and ``__exit__``."""

    def __init__(
        self,
        ledger: AdmissionBackend,
        cluster: Cluster,
        stores: Stores,
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

    def look(self) -> None:
        """One round; costs nothing where nobody goes by the nodes of the cluster.

        Raises:
            StoreError: ledger or API server did not answer.
        """
        if not self._nodes.seen:
            return
        slow = slow_in(self._stores, self._ledger.snapshot().leases, self._clock())
        found = evidence_by_node(slow, self._cluster.attempt_pods() if slow else ())
        for node, evidence in found.items():
            _log.info("node.slow", node=node, evidence=[f"{one.source}: {one.message}" for one in evidence])
        self._nodes.hear(found)
