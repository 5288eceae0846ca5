"""The `Cluster` of a Kubernetes API server; each method is a request at the moment of the decision.

Whether a pod lives decides on GPUs and on the next attempt, so it is never read
from a cache: an informer that has lost its watch would report a pod as gone that
it has not seen yet. Only the summary of a running workflow is cached, because
every waiting step reads it repeatedly.

Costs: one admitted training step needs a GET of the Workflow and two LISTs of
its own attempt's pods; each workflow needs one more GET; each holder of GPUs
that another request waits for needs a LIST and at most a GET every 30 seconds.
For a gang, a GET of its workload accompanies each LIST.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

from cachetools import TTLCache

from tiphys.errors import ConflictError, ForbiddenError, NotFoundError
from tiphys.kube import KubeApi, Object
from tiphys.kube.gang_workloads import (
    GANG_RESOURCES,
    count_remaining_members,
    find_first_failure,
    gang_phase,
    has_waiting_pods,
    is_gang_complete,
    members_job_name,
)
from tiphys.kube.resources import AGENT_POD_LABEL, JOBS, PODS, WORKFLOWS, Resource
from tiphys.protocol.gang import HOSTNAME_LABEL, WORKFLOW_UID_LABEL, FirstFailure, GangBackend, GangPhase
from tiphys.protocol.phases import is_final_workflow_phase
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL
from tiphys_plugin.cluster.interface import GangStatus, PodStatus
from tiphys_plugin.cluster.pod_status import NODE_LOST, pod_status

_SUMMARY_MAX_AGE_SECONDS = 5.0
_MAX_SUMMARIES = 1024


class KubernetesCluster:
    """A `Cluster` behind an API server.

    ``namespaces`` are those that the plugin serves, None for all. ``name`` is by `tiphys.kube.identify_cluster`.
    """

    def __init__(
        self,
        api: KubeApi,
        namespaces: tuple[str, ...] | None,
        name: str,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api = api
        self._namespaces = namespaces
        self._name = name
        self._summaries: TTLCache[tuple[str, str], Object] = TTLCache(
            _MAX_SUMMARIES, _SUMMARY_MAX_AGE_SECONDS, timer=monotonic
        )
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self._name

    def workflow(self, namespace: str, name: str) -> dict[str, Any] | None:
        self._check_served(namespace)
        workflow = self._api.get(WORKFLOWS, namespace, name)
        if workflow is not None:
            self._cache_summary(namespace, name, workflow)
        return workflow

    def workflow_summary(self, namespace: str, name: str) -> dict[str, Any] | None:
        with self._lock:
            summary = self._summaries.get((namespace, name))
        if summary is not None:
            return summary
        workflow = self.workflow(namespace, name)  # a missing workflow is not cached: it may exist now
        return None if workflow is None else _summarize_workflow(workflow)

    def pods(self, namespace: str, run: str, workflow_uid: str, attempt: str) -> list[PodStatus]:
        self._check_served(namespace)
        # Selected by the label of Tiphys, because Argo's label of the workflow is missing on the pods of a gang.
        labels = f"{ATTEMPT_LABEL}={attempt},{RUN_LABEL}={run}"
        pod_statuses = map(pod_status, self._api.list(PODS, namespace, labels).items)
        return [pod for pod in pod_statuses if pod.workflow_uid == workflow_uid]

    def attempt_pods(self, namespace: str | None = None, *, pending_only: bool = False) -> list[PodStatus]:
        namespaces = (namespace,) if namespace is not None else self._namespaces or (None,)
        fields = "status.phase=Pending" if pending_only else ""
        return [
            pod_status(pod)
            for searched in namespaces
            for pod in self._api.list(PODS, searched, ATTEMPT_LABEL, fields, transform=_check_readable).items
        ]

    def pods_on_node(self, node: str) -> list[PodStatus]:
        """Unfinished pods on a node, of attempts and of Argo's agent, of all namespaces that are served."""
        return [
            pod
            for searched in self._namespaces or (None,)
            for found in self._api.list(PODS, searched, fields=f"spec.nodeName={node}", transform=_keep_own_pod).items
            if not (pod := pod_status(found)).finished
        ]

    def delete_pod(self, pod: PodStatus, grace_seconds: int | None = None) -> None:
        """As in `Cluster`; ``grace_seconds`` replaces the grace period, and 0 does not wait for the node."""
        self._check_served(pod.namespace)
        with contextlib.suppress(ConflictError):  # another pod has its name by now
            self._api.delete(PODS, pod.namespace, pod.name, uid=pod.uid, grace_seconds=grace_seconds)

    def end_lost_pod(self, pod: PodStatus, message: str) -> None:
        """Mark a pod as Failed because its node is lost, and delete it without the word of the node.

        Argo and Job keep a pod with a finalizer until they know its end, which only the node reports. The mark is
        that end, as Kubernetes' garbage collector sets it for the pods of a deleted node.
        """
        self._check_served(pod.namespace)
        failed = {"phase": "Failed", "reason": NODE_LOST, "message": message}
        body = {"metadata": {"uid": pod.uid}, "status": failed}
        with contextlib.suppress(ConflictError, NotFoundError):  # it is gone, or another pod has its name by now
            self._api.patch(PODS, pod.namespace, pod.name, body, subresource="status")
            self.delete_pod(pod, grace_seconds=0)

    def gang(self, backend: GangBackend, namespace: str, name: str, workflow_uid: str) -> GangStatus | None:
        self._check_served(namespace)
        workload = self._gang_object(GANG_RESOURCES[backend], namespace, name)
        if workload is None or (workload["metadata"].get("labels") or {}).get(WORKFLOW_UID_LABEL) != workflow_uid:
            return None
        uid = workload["metadata"]["uid"]
        return GangStatus(
            backend,
            namespace,
            name,
            uid,
            gang_phase(workload),
            self._first_failure(backend, workload),
            count_remaining_members(workload),
            is_gang_complete(workload),
            int((workload.get("spec") or {}).get("completions") or 0),
            has_waiting_pods(workload),
            workload["metadata"].get("resourceVersion", ""),
        )

    def _first_failure(self, backend: GangBackend, workload: Object) -> FirstFailure | None:
        metadata = workload["metadata"]
        job_name = members_job_name(backend, metadata["name"])
        if job_name is None or gang_phase(workload) is GangPhase.ACTIVE:
            return find_first_failure(workload)
        job = self._gang_object(JOBS, metadata["namespace"], job_name)
        return None if job is None else find_first_failure(job)

    def _gang_object(self, resource: Resource, namespace: str, name: str) -> Object | None:
        try:
            return self._api.get(resource, namespace, name)
        except ForbiddenError as error:
            raise ForbiddenError(
                f"{error}; enable trainings on several nodes (the values gangs.* of the chart), or stop the workflow"
            ) from error

    def delete_gang(self, gang: GangStatus) -> None:
        with contextlib.suppress(ConflictError):  # another workload has its name by now
            self._api.delete(
                GANG_RESOURCES[gang.backend], gang.namespace, gang.name, uid=gang.uid, propagation="Background"
            )

    def grow_gang(self, gang: GangStatus, made: int, min_members: int) -> None:
        # An Indexed Job changes both numbers together (KEP-3715). It makes a new index for each member, because it
        # never makes one again whose failure it has counted.
        spec = {"completions": made, "parallelism": made, "maxFailedIndexes": made - min_members}
        body = {"metadata": {"uid": gang.uid, "resourceVersion": gang.version}, "spec": spec}
        with contextlib.suppress(ConflictError, NotFoundError):
            self._api.patch(GANG_RESOURCES[gang.backend], gang.namespace, gang.name, body)

    def place_pod(self, pod: PodStatus, node: str) -> None:
        self._check_served(pod.namespace)
        # A gated pod takes further node selectors (KEP-3838), which decide once the gate is gone.
        spec = {"nodeSelector": {HOSTNAME_LABEL: node}, "schedulingGates": None}
        body = {"metadata": {"uid": pod.uid, "resourceVersion": pod.version}, "spec": spec}
        with contextlib.suppress(ConflictError, NotFoundError):
            self._api.patch(PODS, pod.namespace, pod.name, body)

    def _check_served(self, namespace: str) -> None:
        if self._namespaces is not None and namespace not in self._namespaces:
            raise ConflictError(
                f"this plugin does not serve namespace {namespace}, where the workflow ran; "
                "have the administrator add it to the plugin's namespaces"
            )

    def _cache_summary(self, namespace: str, name: str, workflow: Object) -> None:
        summary = _summarize_workflow(workflow)
        with self._lock:
            self._summaries.pop((namespace, name), None)
            # Not cached unless it runs: `argo retry` may restart it at any time, and a refused step stays refused.
            if _is_workflow_running(summary):
                self._summaries[namespace, name] = summary


def _check_readable(pod: Object) -> Object:
    pod_status(pod)
    return pod


def _keep_own_pod(pod: Object) -> Object | None:
    labels = pod["metadata"].get("labels") or {}
    return _check_readable(pod) if ATTEMPT_LABEL in labels or AGENT_POD_LABEL in labels.items() else None


def _is_workflow_running(summary: Object) -> bool:
    return not summary["spec"]["shutdown"] and not is_final_workflow_phase(summary["status"]["phase"])


def _summarize_workflow(workflow: Object) -> Object:
    """The fields of a Workflow that a waiting step needs; the object itself may be a megabyte."""
    return {
        "metadata": {"uid": workflow["metadata"].get("uid")},
        "spec": {"shutdown": (workflow.get("spec") or {}).get("shutdown")},
        "status": {"phase": (workflow.get("status") or {}).get("phase")},
    }
