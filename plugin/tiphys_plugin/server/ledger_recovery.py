"""Records the leases of live pods that the GPU ledger lacks, when a service starts and after the ledger was deleted.

A new ledger knows no leases, so GPUs that are in use look free in it. No GPUs are
granted before the leases of all live pods are recorded, but for a minute at most:
a namespace whose store fails must not stop the others. Kubernetes keeps two pods
from the same GPU in any case. What is missing is tried again every few seconds until
it is recorded. Until then the error of the ledger in the status of the service, which
`tiphys doctor` prints, names the namespace. Each round also looks for records of the
ledger's log that were deleted or changed, and replaces such a log.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Self

import structlog

from tiphys.errors import TiphysError
from tiphys_plugin.quota.admission_backend import LedgerLostError
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.runtime.background import PeriodicTask
from tiphys_plugin.server.tenants import Tenants

_log = structlog.get_logger()


class LeaseRecovery(PeriodicTask):
    """Also runs a round in ``__enter__``. A round records the leases of live pods that are lost, by `recover`."""

    tenants: Tenants

    def __enter__(self) -> Self:
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
            self.recover()
        except TiphysError as error:
            self.tenants.recovery_error = str(error)
            raise
        self.tenants.recovery_error = ""

    @abstractmethod
    def recover(self) -> None:
        """Record the leases that are lost. Raises as `run_once` does."""


@dataclass
class LedgerRecovery(LeaseRecovery):
    """Looks at the ledger in a `GPULedger` object."""

    name = "ledger_recovery"
    ledger: KubernetesLedger
    tenants: Tenants
    every_seconds: float = 5.0
    _is_complete: bool = False

    def __enter__(self) -> Self:
        self.ledger.hold_grants()
        return super().__enter__()

    def recover(self) -> None:
        try:
            self.ledger.snapshot()
        except LedgerLostError:
            self._is_complete = False
            self.tenants.forget_recovery()
            self.ledger.begin_recovery()
        if not self._is_complete:
            self.ledger.build_indexes()
            self.tenants.recover_leases()
            self.ledger.end_recovery()
            self._is_complete = True
            _log.info("ledger.recovered", leases=len(self.ledger.snapshot().leases))
        self.ledger.replace_damaged_log()
