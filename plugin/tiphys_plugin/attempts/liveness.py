"""Decides from live Workflows and pods whether a workflow is stopping, and whether the holder of a lease is alive."""

from collections.abc import Sequence
from typing import Any, Protocol

import structlog

from tiphys.errors import IntegrityError, StoreError, UsageError
from tiphys.lineage.run_history import RunHistory
from tiphys.protocol.gang import GangSpec, gang_name
from tiphys.protocol.phases import is_final_workflow_phase
from tiphys.protocol.workflow_nodes import read_nodes
from tiphys.records import AttemptEndOutcome, task_name
from tiphys.store import Store, find_attempt_end
from tiphys_plugin.attempts import gangs, pods
from tiphys_plugin.cluster.interface import Cluster, GangStatus, PodStatus
from tiphys_plugin.quota.lease import Lease, LeaseRequest, hash_node_name

_log = structlog.get_logger()


def is_workflow_stopping(cluster: Cluster, namespace: str, name: str, uid: str) -> bool:
    """Whether ``argo stop`` or ``argo terminate`` was requested, or the workflow is over or gone."""
    workflow = _find_live_workflow(cluster, namespace, name, uid)
    return workflow is None or _is_workflow_over(workflow) or bool(workflow.get("spec", {}).get("shutdown"))


def is_stop_requested(cluster: Cluster, namespace: str, name: str, uid: str) -> bool:
    """Whether ``argo stop`` or ``argo terminate`` was requested for the workflow with this uid."""
    workflow = cluster.workflow(namespace, name) or {}  # a cached summary may be older than the stop
    return workflow.get("metadata", {}).get("uid") == uid and bool(workflow.get("spec", {}).get("shutdown"))


class NamespaceStores(Protocol):
    """The stores of all namespaces that share one ledger."""

    def serves(self, namespace: str) -> bool:
        """Whether the plugin serves the namespace."""

    def store(self, namespace: str) -> Store:
        """The store of the namespace. Raises `StoreError` if it cannot be opened."""


def is_lease_abandoned(stores: NamespaceStores, cluster: Cluster, lease: Lease, *, is_stopped: bool = False) -> bool:
    """Whether nothing can use a lease any more: no pod lives, and none can come.

    No pod can come once the workflow is over, or the attempt has an end. A fence is no such
    end: Argo may have the reply of admit, and create the pod minutes later. A lease whose pod
    may come is kept. So is one that cannot be examined, because its namespace is no longer
    served, or the store of its tenant fails; the caller's own request does not fail because of it.
    ``is_stopped`` says that Argo starts no more pods of the workflow, although it is not over.
    """
    request = lease.request
    if not stores.serves(request.namespace):
        return False
    workflow = None if is_stopped else _find_live_workflow(cluster, request.namespace, request.workflow, request.uid)
    over = workflow is None or _is_workflow_over(workflow)
    try:
        end = None
        if not over:
            end = find_attempt_end(stores.store(request.namespace), request.run, request.step, request.attempt)
            if end is None:  # the attempt goes on, as most do: to list its pods would cost the API server the most
                return False
        pod_statuses = pods.list_instance_pods(
            cluster, request.namespace, request.run, request.uid, request.attempt, request.instance_hash
        )
        if pods.find_live_pod(pod_statuses) is not None:
            return False
        if request.members > 1 and _is_gang_active(stores.store(request.namespace), cluster, request, pod_statuses):
            return False
        if end is None or end.outcome is not AttemptEndOutcome.FENCED or end.stopped:
            return True
        return bool(pod_statuses) or _has_program_ended(cluster, request)
    except (IntegrityError, StoreError, UsageError) as error:
        _log.warning("lease.not_examined", **request.log_fields, error=str(error))
        return False


def _has_program_ended(cluster: Cluster, request: LeaseRequest) -> bool:
    """Whether Argo has run the program of an attempt, by the node beside its admit; True if the workflow is gone."""
    workflow = cluster.workflow(request.namespace, request.workflow)
    ended = (node["name"] for node in read_nodes(workflow or {}) if is_final_workflow_phase(node.get("phase")))
    return workflow is None or any(
        hash_node_name(f"{name.removesuffix('.run')}.admit") == request.node_hash for name in map(str, ended)
    )


def is_attempt_over(stores: NamespaceStores, cluster: Cluster, lease: Lease) -> bool:
    """Whether the attempt of a lease is over, though a pod of it may live; False if that cannot be found out."""
    request = lease.request
    if not stores.serves(request.namespace):
        return False
    workflow = _find_live_workflow(cluster, request.namespace, request.workflow, request.uid)
    if workflow is None or _is_workflow_over(workflow):
        return True
    try:
        store = stores.store(request.namespace)
        return find_attempt_end(store, request.run, request.step, request.attempt) is not None
    except (IntegrityError, StoreError, UsageError):
        return False


def _is_gang_active(store: Store, cluster: Cluster, request: LeaseRequest, pod_statuses: Sequence[PodStatus]) -> bool:
    """Whether a gang can still create pods although none lives: its workload can outlive Argo's node."""
    gang = _read_gang_spec(store, request)
    return gang is not None and gangs.is_gang_active(gang, find_gang(store, cluster, request), pod_statuses)


def find_gang(store: Store, cluster: Cluster, request: LeaseRequest) -> GangStatus | None:
    """The workload that creates the pods of the attempt that holds a lease; None if there is none."""
    gang = _read_gang_spec(store, request)
    if gang is None:
        return None
    name = gang_name(request.run, request.step, request.attempt)
    return cluster.gang(gang.backend, request.namespace, name, request.uid)


def _read_gang_spec(store: Store, request: LeaseRequest) -> GangSpec | None:
    # A resume with a changed file may have left the step out.
    step = RunHistory(store, request.run).pipeline.steps.get(task_name(request.step))
    return step.gang if step is not None else None


def _find_live_workflow(cluster: Cluster, namespace: str, name: str, uid: str) -> dict[str, Any] | None:
    """The workflow with this uid; None if it is gone, also if another one has its name now."""
    for read in (cluster.workflow_summary, cluster.workflow):  # the cached summary may be of an earlier workflow
        workflow = read(namespace, name)
        if workflow is None or workflow.get("metadata", {}).get("uid") == uid:
            return workflow
    return None


def _is_workflow_over(workflow: dict[str, Any]) -> bool:
    return is_final_workflow_phase((workflow.get("status") or {}).get("phase"))
