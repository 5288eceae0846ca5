"""Withdraws the pending requests of Workflows that were deleted, or that start no more steps, and releases their GPUs.

A step of such a Workflow repeats its request no more, and nothing calls the service about it. Its request would
keep GPUs idle until it counts as forgotten, and would stay in the ledger for ever. Its lease would be held after
its pods are gone: until Argo starts finalize, or until another request asks for the GPUs.
"""

from collections.abc import Iterable, Iterator

import structlog

from tiphys.errors import TiphysError
from tiphys_plugin.attempts.liveness import NamespaceStores, is_lease_abandoned, is_workflow_stopping
from tiphys_plugin.cluster.interface import Cluster
from tiphys_plugin.quota.lease import AdmissionBackend, Lease, LeaseRequest
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
        self._turn += _OTHER_WORKFLOWS
        return first + _take_turns(others, self._turn - _OTHER_WORKFLOWS)


def _take_turns(requests: list[LeaseRequest], turn: int) -> list[LeaseRequest]:
    start = turn % len(requests) if requests else 0
    return [*requests[start:], *requests[:start]][:_OTHER_WORKFLOWS]


class StoppedLeaseSweep(PeriodicTask):
    """Releases the leases of stopped, ended and deleted Workflows once their pods are gone.

    Sweeps every ``every_seconds`` between ``__enter__`` and ``__exit__``. A lease goes in the round after the one that
    found its Workflow stopping: Argo may have started a pod at that moment.
    """

    def __init__(
        self,
        ledger: AdmissionBackend,
        cluster: Cluster,
        stores: NamespaceStores,
        every_seconds: float = _EVERY_SECONDS,
    ) -> None:
        super().__init__("stopped_leases", every_seconds)
        self._ledger = ledger
        self._cluster = cluster
        self._stores = stores
        self._turn = 0
        self._stopping: set[str] = set()
        """Uids of Workflows with leases that an earlier round found stopping."""

    def run_once(self) -> None:
        """Run one round, which reads a bounded number of Workflows.

        Raises:
            StoreError: the ledger did not answer.
        """
        leases = [one for one in self._ledger.snapshot().leases if self._stores.serves(one.request.namespace)]
        requests = {lease.request.uid: lease.request for lease in leases}
        known = [request for uid, request in requests.items() if uid in self._stopping]
        others = [request for uid, request in requests.items() if uid not in self._stopping]
        looked_at = [*_take_turns(known, self._turn), *_take_turns(others, self._turn)]
        self._turn += _OTHER_WORKFLOWS
        stopping = set(self._find_stopping(looked_at))
        due = stopping & self._stopping
        self._stopping = stopping | (self._stopping & requests.keys()) - {request.uid for request in looked_at}
        for lease in self._ledger.release_dead_leases(self._is_gone, [one for one in leases if one.request.uid in due]):
            request = lease.request
            _log.info("lease.released", namespace=request.namespace, workflow=request.workflow, gpus=request.gpus)

    def _find_stopping(self, requests: Iterable[LeaseRequest]) -> Iterator[str]:
        for request in requests:
            try:
                if is_workflow_stopping(self._cluster, request.namespace, request.workflow, request.uid):
                    yield request.uid
            except TiphysError as error:
                _log.warning("lease.not_examined", namespace=request.namespace, error=str(error))

    def _is_gone(self, lease: Lease) -> bool:
        try:
            return is_lease_abandoned(self._stores, self._cluster, lease, is_stopped=True)
        except TiphysError as error:
            _log.warning("lease.not_examined", namespace=lease.request.namespace, error=str(error))
            return False
