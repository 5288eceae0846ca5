"""Records the leases of live pods that the GPU ledger lacks, when a service starts and after the ledger was deleted.

A new ledger knows no leases, so GPUs that are in use look free in it. No GPUs are
granted before the leases of all live pods are recorded. A namespace whose store
fails holds this up for all, while it has a pod on GPUs without a lease: only its
records tell which lease the pod has. The error of the ledger in the status of the
service, which `tiphys doctor` prints, names that namespace. After ten minutes the
others are served again, so that no namespace can stop them; Kubernetes then still
keeps two pods from the same GPU, but a request may be granted GPUs that are in use.
"""

import time
from collections.abc import Callable

import structlog

from tiphys.errors import TiphysError
from tiphys_plugin.quota.lease import LedgerLostError
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger
from tiphys_plugin.runtime.background import PeriodicTask
from tiphys_plugin.server.tenants import Tenants, UnreadableLeasesError

_EVERY_SECONDS = 5.0
_LONGEST_HOLD_SECONDS = 600.0
_log = structlog.get_logger()


class LedgerRecovery(PeriodicTask):
    """Runs a round in ``__enter__``, and looks at the ledger every ``every_seconds`` until ``__exit__``."""

    def __init__(
        self,
        ledger: KubernetesLedger,
        tenants: Tenants,
        every_seconds: float = _EVERY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("ledger_recovery", every_seconds)
        self._ledger = ledger
        self._tenants = tenants
        self._clock = clock
        self._held_since: float | None = None

    def __enter__(self) -> "PeriodicTask":
        self._ledger.is_recovering = True
        try:
            self.run_once()
        except TiphysError as error:
            _log.error("recovery.failed", error=str(error))
        return super().__enter__()

    def run_once(self) -> None:
        """Run one round.

        Raises:
            LedgerLostError: the object is gone, or has no queues.
            StoreError: ledger or cluster failed, or the store of a namespace with live pods did and the others still
                wait for it; the next round goes on.
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
            self._ledger.begin_recovery()
            self._tenants.forget_recovery()
        if self._ledger.is_recovering:
            self._recover_leases()
            self._ledger.end_recovery()
            self._held_since = None
            _log.info("ledger.recovered", leases=len(self._ledger.snapshot().leases))

    def _recover_leases(self) -> None:
        """Record what can be read; raise only while the others are to wait for the rest."""
        try:
            self._tenants.recover_leases()
        except UnreadableLeasesError as error:
            self._held_since = self._clock() if self._held_since is None else self._held_since
            if self._clock() - self._held_since < _LONGEST_HOLD_SECONDS:
                raise
            _log.error("recovery.incomplete", error=str(error))
