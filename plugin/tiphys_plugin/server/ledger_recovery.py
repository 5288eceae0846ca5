"""Begins the GPU ledger anew after its object was deleted, as soon as an object with queues is there again.

The new object knows no leases. So no GPUs are granted before the leases of live pods are recorded in it, as after
the start of a service.
"""

import structlog

from tiphys_plugin.quota.lease import LedgerLostError
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.runtime.background import PeriodicTask
from tiphys_plugin.server.tenants import Tenants

_EVERY_SECONDS = 5.0
_log = structlog.get_logger()


class LedgerRecovery(PeriodicTask):
    """Looks at the ledger every ``every_seconds`` between ``__enter__`` and ``__exit__``."""

    def __init__(self, ledger: KubernetesLedger, tenants: Tenants, every_seconds: float = _EVERY_SECONDS) -> None:
        super().__init__("ledger_recovery", every_seconds)
        self._ledger = ledger
        self._tenants = tenants

    def run_once(self) -> None:
        """Run one round.

        Raises:
            LedgerLostError: the object is gone, or has no queues.
            StoreError: ledger or cluster did not answer; the next round goes on.
        """
        try:
            self._ledger.snapshot()
        except LedgerLostError:
            self._ledger.begin_recovery()
        if self._ledger.is_recovering:
            self._tenants.restore_leases()
            self._ledger.end_recovery()
            _log.warning("ledger.recovered", leases=len(self._ledger.snapshot().leases))
