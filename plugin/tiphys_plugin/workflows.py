"""What the live Workflow object says: is it stopping, and can what holds a lease be alive?"""

from typing import Any

from tiphys.errors import IntegrityError
from tiphys.records import AttemptEnd
from tiphys.store import RunLayout, Store, find_record
from tiphys_plugin import pods
from tiphys_plugin.cluster import Cluster
from tiphys_plugin.identity import Binding
from tiphys_plugin.ledger import Lease

_FINAL_PHASES = ("Succeeded", "Failed", "Error")


def is_stopping(cluster: Cluster, binding: Binding) -> bool:
    """Whether ``argo stop`` or ``argo terminate`` was asked for, or the workflow is over or gone."""
    workflow = _live(cluster, binding.namespace, binding.workflow, binding.uid)
    return workflow is None or _is_over(workflow) or bool(workflow.get("spec", {}).get("shutdown"))


def lease_is_gone(store: Store, cluster: Cluster, lease: Lease) -> bool:
    """Whether nothing can use a lease any more: no pod lives, and none can come.

    None can come once the attempt has an end, or the workflow is over. A lease
    whose pod has not been made yet is therefore kept.
    """
    held = lease.request
    found = pods.of_instance(cluster, held.namespace, held.uid, held.attempt, held.instance)
    if pods.living(found) is not None:
        return False
    workflow = _live(cluster, held.namespace, held.workflow, held.uid)
    if workflow is None or _is_over(workflow):
        return True
    try:
        end = find_record(store, RunLayout(held.run).attempt_end(held.step, held.attempt), AttemptEnd)
    except IntegrityError:  # a damaged record of another run is no reason to refuse the one that asks
        return False
    return end is not None


def _live(cluster: Cluster, namespace: str, name: str, uid: str) -> dict[str, Any] | None:
    workflow = cluster.workflow(namespace, name)
    return workflow if workflow is not None and workflow.get("metadata", {}).get("uid") == uid else None


def _is_over(workflow: dict[str, Any]) -> bool:
    return (workflow.get("status") or {}).get("phase") in _FINAL_PHASES
