"""What the live Workflow object says: is it stopping, and can what holds a lease be alive?"""

from typing import Any, Protocol

import structlog

from tiphys.errors import IntegrityError, StoreError, UsageError
from tiphys.records import AttemptEnd
from tiphys.store import RunLayout, Store, find_record
from tiphys_plugin import pods
from tiphys_plugin.cluster import Cluster
from tiphys_plugin.identity import Binding
from tiphys_plugin.ledger import Lease

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
    found = pods.of_instance(cluster, held.namespace, held.workflow, held.uid, held.attempt, held.instance)
    if pods.living(found) is not None:
        return False
    workflow = _live(cluster, held.namespace, held.workflow, held.uid)
    if workflow is None or _is_over(workflow):
        return True
    try:
        store = stores.store(held.namespace)
        end = find_record(store, RunLayout(held.run).attempt_end(held.step, held.attempt), AttemptEnd)
    except (IntegrityError, StoreError, UsageError) as error:
        _log.warning("lease.not_examined", run=held.run, step=held.step, attempt=held.attempt, error=str(error))
        return False
    return end is not None


def _live(cluster: Cluster, namespace: str, name: str, uid: str) -> dict[str, Any] | None:
    """The workflow, if it is the one that is meant, and not a later one of the same name."""
    for look in (cluster.glance, cluster.workflow):  # the glance may show an earlier one of the same name
        workflow = look(namespace, name)
        if workflow is None or workflow.get("metadata", {}).get("uid") == uid:
            return workflow
    return None


def _is_over(workflow: dict[str, Any]) -> bool:
    return (workflow.get("status") or {}).get("phase") in _FINAL_PHASES
