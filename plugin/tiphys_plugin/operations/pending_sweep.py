"""Withdraws the pending requests of Workflows that were deleted, or that start no more steps, and releases their GPUs.

A step of such a Workflow repeats its request no more, and nothing calls the service about it. Its request would
keep GPUs idle until it counts as forgotten, and would stay in the ledger for ever. Its lease would be held after
its pods are gone: until Argo starts finalize, or until another request asks for the GPUs.
"""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import structlog

from tiphys.errors import TiphysError
from tiphys_plugin.attempts.liveness import NamespaceStores, is_lease_abandoned, is_workflow_stopping
from tiphys_plugin.cluster.interface import Cluster
from tiphys_plugin.quota.admission_backend import AdmissionBackend
from tiphys_plugin.quota.lease import Lease, LeaseRequest
from tiphys_plugin.runtime.background import PeriodicTask

_FIRST_WORKFLOWS, _OTHER_WORKFLOWS = 8, 8
"""Workflows that a round reads: those that have waited longest delay others, and the rest take turns."""
_log = structlog.get_logger()


@dataclass
class _WorkflowSweep(PeriodicTask):
    """A round reads a bounded number of Workflows, each from the API server."""

    _subject: ClassVar[str]
    """What is swept, in the log."""
    ledger: AdmissionBackend
    cluster: Cluster
    stores: NamespaceStores
    every_seconds: float = 5.0
    _turn: int = 0

    @contextlib.contextmanager
    def _passing_over_errors(self, request: LeaseRequest) -> Iterator[None]:
        try:
            yield
        except TiphysError as error:
            _log.warning(f"{self._subject}.not_examined", namespace=request.namespace, error=str(error))

    def _is_stopping(self, request: LeaseRequest) -> bool:
        return is_workflow_stopping(self.cluster, request.namespace, request.workflow, request.uid)

    def _take_turns(self, requests: list[LeaseRequest]) -> list[LeaseRequest]:
        """The requests whose turn it is in this round, which `_end_turn` ends."""
        start = self._turn % len(requests) if requests else 0
        return [*requests[start:], *requests[:start]][:_OTHER_WORKFLOWS]

    def _end_turn(self) -> None:
        self._turn += _OTHER_WORKFLOWS


class PendingRequestSweep(_WorkflowSweep):
    """Withdraws the pending requests of Workflows that start no more steps."""

    name, _subject = "pending_sweep", "request"

    def run_once(self) -> None:
        """Run one round.

        Raises:
            StoreError: the ledger did not answer.
        """
        for request in self._select_requests():
            with self._passing_over_errors(request):
                if self._is_stopping(request):
                    self.ledger.withdraw(request.uid)
                    _log.info("request.withdrawn", namespace=request.namespace, workflow=request.workflow)

    def _select_requests(self) -> list[LeaseRequest]:
        """One request of each Workflow that this round reads."""
        pending = [
            waiting_request.request
            for waiting_request in self.ledger.snapshot().pending
            if self.stores.serves(waiting_request.request.namespace)
        ]
        by_workflow = list({request.uid: request for request in pending}.values())
        first, others = by_workflow[:_FIRST_WORKFLOWS], by_workflow[_FIRST_WORKFLOWS:]
        selected = first + self._take_turns(others)
        self._end_turn()
        return selected


class StoppedLeaseSweep(_WorkflowSweep):
    """Releases the leases of stopped, ended and deleted Workflows once their pods are gone.

    A lease goes in the round after the one that found its Workflow stopping: Argo may have started a pod at that
    moment.
    """

    name, _subject = "stopped_leases", "lease"

    _stopping: frozenset[str] = frozenset()
    """Uids of Workflows with leases that an earlier round found stopping."""

    def run_once(self) -> None:
        """Run one round.

        Raises:
            StoreError: the ledger did not answer.
        """
        leases = [lease for lease in self.ledger.snapshot().leases if self.stores.serves(lease.request.namespace)]
        requests = {lease.request.uid: lease.request for lease in leases}
        known = [request for uid, request in requests.items() if uid in self._stopping]
        others = [request for uid, request in requests.items() if uid not in self._stopping]
        looked_at = [*self._take_turns(known), *self._take_turns(others)]
        self._end_turn()
        stopping = self._find_stopping(looked_at)
        due = stopping & self._stopping
        unseen = requests.keys() - {request.uid for request in looked_at}
        self._stopping = stopping | (self._stopping & unseen)
        dead = self.ledger.release_dead_leases(self._is_gone, [lease for lease in leases if lease.request.uid in due])
        for request in (lease.request for lease in dead):
            _log.info("lease.released", namespace=request.namespace, workflow=request.workflow, gpus=request.gpus)

    def _find_stopping(self, requests: Iterable[LeaseRequest]) -> frozenset[str]:
        found = set[str]()
        for request in requests:
            with self._passing_over_errors(request):
                if self._is_stopping(request):
                    found.add(request.uid)
        return frozenset(found)

    def _is_gone(self, lease: Lease) -> bool:
        with self._passing_over_errors(lease.request):
            return is_lease_abandoned(self.stores, self.cluster, lease, is_stopped=True)
        return False
