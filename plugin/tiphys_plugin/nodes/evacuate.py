"""Has trainings go from nodes that are broken or will go themselves: they save while they can.

A spot node's notice leaves a minute or two, and not every cluster has somebody
who drains the node then. Pods that were told to end are not told again, so any
number of services may do this, and each round begins anew.

If most nodes are said to be broken at once, rather the monitor is: nothing is
asked to go then, and only new trainings stay away. A notice is always believed.
"""

from collections.abc import Callable, Sequence

import structlog

from tiphys.errors import TiphysError
from tiphys_plugin.cluster.interface import Cluster
from tiphys_plugin.eviction.evict import ask_off
from tiphys_plugin.nodes.node import SeenNode
from tiphys_plugin.nodes.node_watch import ClusterInventory
from tiphys_plugin.quota.lease import AdmissionBackend, Lease
from tiphys_plugin.runtime.background import Rounds

_EVERY_SECONDS = 5.0
_log = structlog.get_logger()


def to_leave(nodes: Sequence[SeenNode]) -> set[str]:
    """Names of the nodes on which nothing should go on."""
    broken = [one for one in nodes if one.verdict.broken]
    believed = broken if 2 * len(broken) <= len(nodes) else []
    return {one.node.name for one in (*believed, *(one for one in nodes if one.verdict.going))}


class Evacuation(Rounds):
    """Looks every ``every_seconds`` between ``__enter__`` and ``__exit__``; ``serves`` says which namespaces count."""

    def __init__(
        self,
        ledger: AdmissionBackend,
        cluster: Cluster,
        serves: Callable[[str], bool],
        nodes: ClusterInventory,
        every_seconds: float = _EVERY_SECONDS,
    ) -> None:
        super().__init__("evacuation", every_seconds)
        self._ledger = ledger
        self._cluster = cluster
        self._serves = serves
        self._nodes = nodes

    def look(self) -> None:
        """One round; costs nothing while no node is about to go.

        Raises:
            StoreError: the ledger did not answer.
        """
        going = to_leave(self._nodes.seen)
        if going:
            for lease in self._ledger.snapshot().leases:
                if going & set(lease.nodes) and self._serves(lease.request.namespace):
                    self._ask(lease, sorted(going & set(lease.nodes)))

    def _ask(self, lease: Lease, nodes: list[str]) -> None:
        held = lease.request
        try:
            if ask_off(self._cluster, lease, nodes):
                _log.info("node.left", run=held.run, step=held.step, attempt=held.attempt, nodes=nodes)
        except TiphysError as error:
            _log.error("node.not_left", run=held.run, step=held.step, attempt=held.attempt, error=str(error))
