"""The only interface between the plugin and the authority that decides on GPUs.

Another authority can replace the built-in ledger, as Kueue does.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tiphys.errors import StoreError
from tiphys_plugin.quota.lease import Admission, Lease, LeaseRequest, LedgerState
from tiphys_plugin.quota.scheduler.cache import SchedulerCache


class LedgerLostError(StoreError):
    """The ledger was deleted or replaced, or is not there; nothing is granted until it is recovered."""


class AdmissionBackend(Protocol):
    """Decides on lease requests and records the decisions. Every method raises `StoreError` if it cannot answer."""

    cache: SchedulerCache
    """What decisions on its states have in common. Callers pass it on when they decide on a `snapshot`."""

    def request(self, request: LeaseRequest) -> Admission:
        """Decide and record in one step. A repeated request gets the lease that it already holds."""

    def restore(
        self,
        lease: str,
        request: LeaseRequest,
        gpu_type: str | None,
        nodes: tuple[str, ...] = (),
        running_members: int | None = None,
    ) -> int:
        """Record a lease that was granted before; no effect if the attempt has one. Returns the GPUs of its lease.

        The first ``running_members`` members (None: all) hold their GPUs, which count even beyond a quota. The others
        count only if the quota has room for the whole lease. A lease is never recorded in a queue that the namespace
        may not use.

        ``gpu_type`` is the type that was chosen for a request without one, ``nodes`` the node of each member.
        """

    def withdraw(self, uid: str) -> None:
        """Drop the pending requests of a workflow that will not repeat them."""

    def release(self, lease: str) -> None:
        """Return the GPUs of a lease whose pods are gone. No error if they were returned before."""

    def shrink(self, lease: str, members: int, nodes: tuple[str, ...] = (), made: int | None = None) -> None:
        """Return the GPUs of lost members of an elastic gang, of which ``members`` remain and the other pods are gone.

        ``nodes`` are the nodes of the remaining members, where nodes are declared, and ``made`` counts the members that
        the workload had made when that was seen. No error if the lease is not larger, has ended, has grown since, or
        holds nothing on one of ``nodes``.
        """

    def grow(self, lease: str, made: int) -> Lease | None:
        """Grant an elastic gang as many more members as idle GPUs allow; None if it gets none.

        ``made`` counts the members that its workload has made until now. The caller has the workload make the others.
        """

    def release_workflow(self, uid: str) -> None:
        """Withdraw the requests of a workflow, and make its leases due for the next `release_dead_leases`."""

    def mark_preempted(self, preemptor: tuple[str, str], grace_seconds: Mapping[str, float]) -> tuple[Lease, ...]:
        """Mark leases as victims of ``preemptor``, a pending `LeaseRequest.workflow_step`: all of them or none.

        They are marked only if the newest ledger state keeps every rule of preemption. ``grace_seconds`` gives the
        termination grace period by lease id. Returns the marked leases.
        """

    def release_dead_leases(
        self, is_gone: Callable[[Lease], bool], leases: Sequence[Lease] | None = None
    ) -> list[Lease]:
        """Release and return those of ``leases`` for which ``is_gone`` is true; the others are kept.

        None: those whose check is due, unless another call checks them at the moment.
        """

    def snapshot(self) -> LedgerState:
        """The newest state; changes nothing."""
