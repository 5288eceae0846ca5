"""What the live Workflow object says: is it stopping, and can what holds a lease be alive?"""

from collections.abc import Sequence
from typing import Any, Protocol

import structlog

from tiphys.errors import IntegrityError, StoreError, UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.protocol.gang import gang_name
from tiphys.records import AttemptEnd
from tiphys.store import RunLayout, Store, current_workflow, find_record
from tiphys_plugin.attempts import gangs, pods
from tiphys_plugin.attempts.run_binding import Binding
from tiphys_plugin.cluster.interface import Cluster, PodStatus
from tiphys_plugin.quota.lease import Lease, LeaseRequest

_log = structlog.get_logger()
_FINAL_PHASES = ("Succeeded", "Failed", "Error")


def is_stopping(cluster: Cluster, binding: Binding) -> bool:
    """Whether ``argo stop`` or ``argo terminate`` was asked for, or the workflow is over or gone."""
    workflow = _live(cluster, binding.namespace, binding.workflow, binding.uid)
    return workflow is None or _is_over(workflow) or bool(workflow.get("spec", {}).get("shutdown"))


class Stores(Protocol):
    """The stores of all tenants of one ledger."""

    def serves(self, namespace: str) -> bool:
        """Whether the namespace is one of them."""

    def store(self, namespace: str) -> Store:
        """Its store. Raises `StoreError` if it cannot be opened."""


def lease_is_gone(stores: Stores, cluster: Cluster, lease: Lease) -> bool:
    """Whether nothing can use a lease any more: no pod lives, and none can come.

    None can come once the attempt has an end, or the workflow is over. A lease
    whose pod has not been made yet is therefore kept. So is one that cannot be
    looked at, be it of a namespace that is not served any more, or of a tenant
    whose store fails: that is no reason to refuse the one that asks.
    """
    held = lease.request
    if not stores.serves(held.namespace):
        return False
    found = pods.of_instance(cluster, held.namespace, held.run, held.uid, held.attempt, held.instance)
    if pods.living(found) is not None:
        return False
    workflow = _live(cluster, held.namespace, held.workflow, held.uid)
    over = workflow is None or _is_over(workflow)
    if over and held.members == 1:
        return True
    try:
        store = stores.store(held.namespace)
        if held.members > 1 and _gang_goes_on(store, cluster, held, found):
            return False
        end = find_record(store, RunLayout(held.run).attempt_end(held.step, held.attempt), AttemptEnd)
    except (IntegrityError, StoreError, UsageError) as error:
        _log.warning("lease.not_examined", run=held.run, step=held.step, attempt=held.attempt, error=str(error))
        return False
    return over or end is not None


def attempt_is_over(stores: Stores, cluster: Cluster, lease: Lease) -> bool:
    """Whether nobody counts on what holds a lease any more, though a pod of it may live; False where nobody knows."""
    held = lease.request
    if not stores.serves(held.namespace):
        return False
    workflow = _live(cluster, held.namespace, held.workflow, held.uid)
    if workflow is None or _is_over(workflow):
        return True
    try:
        end = RunLayout(held.run).attempt_end(held.step, held.attempt)
        return find_record(stores.store(held.namespace), end, AttemptEnd) is not None
    except (IntegrityError, StoreError, UsageError):
        return False


def _gang_goes_on(store: Store, cluster: Cluster, held: LeaseRequest, found: Sequence[PodStatus]) -> bool:
    """Whether pods can come although none lives: what makes those of a gang outlives what Argo knows of it."""
    steps = CompiledPipeline.from_manifest(current_workflow(store, held.run)).steps
    gang = steps[held.step.partition(".")[0]].gang
    if gang is None:
        return False
    made_by = cluster.gang(gang.backend, held.namespace, gang_name(held.run, held.step, held.attempt))
    return gangs.goes_on(gang, made_by, found)


def _live(cluster: Cluster, namespace: str, name: str, uid: str) -> dict[str, Any] | None:
    """The workflow, if it is the one that is meant, and not a later one of the same name."""
    for look in (cluster.glance, cluster.workflow):  # the glance may show an earlier one of the same name
        workflow = look(namespace, name)
        if workflow is None or workflow.get("metadata", {}).get("uid") == uid:
            return workflow
    return None


def _is_over(workflow: dict[str, Any]) -> bool:
    return (workflow.get("status") or {}).get("phase") in _FINAL_PHASES
