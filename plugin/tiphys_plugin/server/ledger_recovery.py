"""Records the leases of live pods that the GPU ledger lacks, when a service starts and after the ledger was deleted.

A new ledger knows no leases, so GPUs that are in use look free in it. No GPUs are
granted before the leases of all live pods are recorded, but for a minute at most:
a namespace whose store fails must not stop the others. Kubernetes keeps two pods
from the same GPU in any case. What is missing is tried again every few seconds until
it is recorded. Until then the error of the ledger in the status of the service, which
`tiphys doctor` prints, names the namespace. Each round also looks for records of the
ledger's log that were deleted or changed, and replaces such a log.
"""

import structlog

from tiphys.errors import TiphysError
from tiphys_plugin.quota.admission_backend import LedgerLostError
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.runtime.background import PeriodicTask
from tiphys_plugin.server.tenants import Tenants

_EVERY_SECONDS = 5.0
_log = structlog.get_logger()


class LedgerRecovery(PeriodicTask):
    """Runs a round in ``__enter__``, and looks at the ledger every ``every_seconds`` until ``__exit__``."""

    def __init__(self, ledger: KubernetesLedger, tenants: Tenants, every_seconds: float = _EVERY_SECONDS) -> None:
        super().__init__("ledger_recovery", every_seconds)
        self._ledger = ledger
        self._tenants = tenants
        self._is_complete = False

    def __enter__(self) -> "PeriodicTask":
        self._ledger.hold_grants()
        try:
            self.run_once()
        except TiphysError as error:
            _log.error("recovery.failed", error=str(error))
        return super().__enter__()

    def run_once(self) -> None:
        """Run one round.

        Raises:
            LedgerLostError: the object is gone, or has no queues.
            StoreError: ledger, cluster or the store of a namespace with live pods failed; the next round goes on.
        """
        try:
            self._recover()
        except TiphysError as error:
            self._tenants.recovery_error = str(error)
            raise
        self._tenants.recovery_error = ""

    def _recover(self) -> None:
        try:
            self._ledger.snapshot()
        except LedgerLostError:
            self._is_complete = False
            self._tenants.forget_recovery()
            self._ledger.begin_recovery()
        if not self._is_complete:
            self._ledger.build_indexes()
            self._tenants.recover_leases()
            self._ledger.end_recovery()
            self._is_complete = True
            _log.info("ledger.recovered", leases=len(self._ledger.snapshot().leases))
        self._ledger.replace_damaged_log()
