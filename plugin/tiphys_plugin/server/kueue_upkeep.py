"""What an installation with Kueue does in the background, apart from its evictions.

It records lost leases, reports that pods run, and deletes Workloads that are over.

A Workload may be deleted by hand while its pods run; Kueue would then admit others
onto their GPUs. So the leases of live pods are recorded again, when a service
starts and with every round. Kueue does not delete the Workloads of attempts that
nothing goes on with, because no owner does: the pods must be gone first.
"""

import structlog

from tiphys.errors import TiphysError
from tiphys_plugin.eviction.evict import list_unfinished_pods
from tiphys_plugin.operations.lease_reclaim import find_unleased_pods
from tiphys_plugin.quota.kueue.backend import KueueAdmission
from tiphys_plugin.quota.lease import Lease
from tiphys_plugin.runtime.background import PeriodicTask
from tiphys_plugin.server.tenants import Tenants

_EVERY_SECONDS = 30.0
_log = structlog.get_logger()


class KueueUpkeep(PeriodicTask):
    """Runs a round in ``__enter__``, and every ``every_seconds`` until ``__exit__``."""

    def __init__(self, kueue: KueueAdmission, tenants: Tenants, every_seconds: float = _EVERY_SECONDS) -> None:
        super().__init__("kueue_upkeep", every_seconds)
        self._kueue = kueue
        self._tenants = tenants

    def __enter__(self) -> "PeriodicTask":
        try:
            self.run_once()
        except TiphysError as error:
            _log.error("kueue_upkeep.failed", error=str(error))
        return super().__enter__()

    def run_once(self) -> None:
        """Run one round.

        Raises:
            StoreError: Kueue, cluster or the store of a namespace with live pods failed; the next round goes on.
        """
        try:
            if find_unleased_pods(self._tenants.cluster, self._kueue):
                self._tenants.forget_recovery()
                self._tenants.recover_leases()
        except TiphysError as error:
            self._tenants.recovery_error = str(error)
            raise
        self._tenants.recovery_error = ""
        self._kueue.report_ready(self._has_all_pods)
        self._kueue.sweep()

    def _has_all_pods(self, lease: Lease) -> bool:
        running = [pod for pod in list_unfinished_pods(self._tenants.cluster, lease) if pod.phase == "Running"]
        return len(running) >= lease.request.members
