"""Withdraws the pending requests of Workflows that were deleted, or that start no more steps.

A step of such a Workflow repeats its request no more, and nothing calls the service about it. Its request would
keep GPUs idle until it counts as forgotten, and would stay in the ledger for ever.
"""

import structlog

from tiphys.errors import TiphysError
from tiphys_plugin.attempts.liveness import NamespaceStores, is_workflow_stopping
from tiphys_plugin.cluster.interface import Cluster
from tiphys_plugin.quota.lease import AdmissionBackend, LeaseRequest
from tiphys_plugin.runtime.background import PeriodicTask

_EVERY_SECONDS = 5.0
_FIRST_WORKFLOWS, _OTHER_WORKFLOWS = 8, 8
"""Workflows that a round reads: those that have waited longest delay others, and the rest take turns."""
_log = structlog.get_logger()


class PendingRequestSweep(PeriodicTask):
    """Sweeps every ``every_seconds`` between ``__enter__`` and ``__exit__``; a round reads a bounded number of
    Workflows, each from the API server.
    """

    def __init__(
        self,
        ledger: AdmissionBackend,
        cluster: Cluster,
        stores: NamespaceStores,
        every_seconds: float = _EVERY_SECONDS,
    ) -> None:
        super().__init__("pending_sweep", every_seconds)
        self._ledger = ledger
        self._cluster = cluster
        self._stores = stores
        self._turn = 0

    def run_once(self) -> None:
        """Run one round.

        Raises:
            StoreError: the ledger did not answer.
        """
        for request in self._select_requests():
            try:
                if is_workflow_stopping(self._cluster, request.namespace, request.workflow, request.uid):
                    self._ledger.withdraw(request.uid)
                    _log.info("request.withdrawn", namespace=request.namespace, workflow=request.workflow)
            except TiphysError as error:
                _log.warning("request.not_examined", namespace=request.namespace, error=str(error))

    def _select_requests(self) -> list[LeaseRequest]:
        """One request of each Workflow that this round reads."""
        pending = [one.request for one in self._ledger.snapshot().pending if self._stores.serves(one.request.namespace)]
        by_workflow = list({request.uid: request for request in pending}.values())
        first, others = by_workflow[:_FIRST_WORKFLOWS], by_workflow[_FIRST_WORKFLOWS:]
        start = self._turn % len(others) if others else 0
        self._turn = start + _OTHER_WORKFLOWS
        return first + [*others[start:], *others[:start]][:_OTHER_WORKFLOWS]
