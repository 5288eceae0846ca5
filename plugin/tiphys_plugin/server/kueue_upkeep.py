"""What an installation with Kueue does in the background, apart from its evictions.

It records lost leases, reports that pods run, and deletes Workloads that are over.

A Workload may be deleted by hand while its pods run; Kueue would then admit others
onto their GPUs. So the leases of live pods are recorded again, when a service
starts and with every round. Kueue does not delete the Workloads of attempts that
nothing goes on with, because no owner does: the pods must be gone first.
"""

from dataclasses import dataclass

from tiphys_plugin.eviction.evict import list_unfinished_pods
from tiphys_plugin.operations.lease_reclaim import find_unleased_pods
from tiphys_plugin.quota.kueue.backend import KueueAdmission
from tiphys_plugin.quota.lease import Lease
from tiphys_plugin.server.ledger_recovery import LeaseRecovery
from tiphys_plugin.server.tenants import Tenants


@dataclass
class KueueUpkeep(LeaseRecovery):
    """Looks at the Workloads of Kueue."""

    name = "kueue_upkeep"
    kueue: KueueAdmission
    tenants: Tenants
    every_seconds: float = 30.0

    def run_once(self) -> None:
        super().run_once()
        self.kueue.report_ready(self._has_all_pods)
        self.kueue.sweep()

    def recover(self) -> None:
        if find_unleased_pods(self.tenants.cluster, self.kueue):
            self.tenants.forget_recovery()
            self.tenants.recover_leases()

    def _has_all_pods(self, lease: Lease) -> bool:
        running = [pod for pod in list_unfinished_pods(self.tenants.cluster, lease) if pod.phase == "Running"]
        return len(running) >= lease.request.members
