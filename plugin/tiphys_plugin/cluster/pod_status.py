"""Reads from a Pod whether it has ended, and why: from what kubelet, scheduler and eviction record in its status.

The phase alone misleads in both directions. A pod that is being deleted shows
Running until its last container has ended, and a pod with a finalizer stays in
the API server long after that. A lost node reports nothing, so its pod counts as
alive until the cluster declares the node gone.

A deletion, eviction or drain explains the end of a pod only if it came before
that end, because Argo itself deletes finished pods. Sources: Kubernetes
``pkg/kubelet/status``, ``pkg/controller/podgc``, KEP-3329 (DisruptionTarget).
"""

import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from tiphys.kube import Object
from tiphys.protocol.gang import HOSTNAME_LABEL, MEMBER_GATE, WORKFLOW_UID_LABEL
from tiphys.protocol.phases import is_final_pod_phase
from tiphys.protocol.workflow_nodes import node_of_pod
from tiphys_plugin.cluster.interface import PodStatus, requested_resources

_EXECUTOR_LINE = re.compile(r"time=.* argo=true|Error: exit status \d+$")
"""Argo's executor shares the log with the program that it starts."""
_DEFAULT_CONTAINER_ANNOTATION = "kubectl.kubernetes.io/default-container"
_COMPLETION_INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
_POD_GC_REASON = "DeletionByPodGC"
_TAINT_MANAGER_REASON = "DeletionByTaintManager"
NODE_LOST = "NodeLost"
"""Reason of a pod whose node is lost; in the status of a Failed pod it is from `KubernetesCluster.end_lost_pod`."""


class _PodEnd(NamedTuple):
    """Why a pod ended: reason and message of Kubernetes."""

    reason: str = ""
    message: str = ""


def pod_status(pod: Object) -> PodStatus:
    """Convert a Pod of the API server to the status that the plugin uses."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    phase = _phase(pod)
    end = _end_of_finished_pod(pod) if is_final_pod_phase(phase) else _end_of_unfinished_pod(pod)
    main = _terminated(_container(status, _main_container_name(pod)))
    return PodStatus(
        name=metadata["name"],
        namespace=metadata.get("namespace", "default"),
        workflow_uid=_workflow_uid(metadata),
        node=node_of_pod(pod),
        labels=metadata.get("labels") or {},
        phase=phase,
        exit_code=main.get("exitCode") if main else None,
        reason=end.reason,
        message=end.message,
        trouble_at=_trouble_at(pod),
        rank=_rank(metadata),
        uid=metadata.get("uid", ""),
        grace_seconds=(pod.get("spec") or {}).get("terminationGracePeriodSeconds"),
        ending="deletionTimestamp" in metadata,
        termination_message=_without_executor_lines(str((main or {}).get("message") or "")),
        host=(pod.get("spec") or {}).get("nodeName") or "",
        is_gated=any(gate["name"] == MEMBER_GATE for gate in (pod.get("spec") or {}).get("schedulingGates") or ()),
        planned_host=((pod.get("spec") or {}).get("nodeSelector") or {}).get(HOSTNAME_LABEL, ""),
        version=metadata.get("resourceVersion", ""),
        resources=requested_resources(pod),
    )


def _without_executor_lines(log: str) -> str:
    """``log`` without the lines of Argo's executor."""
    return "".join(line for line in log.splitlines(keepends=True) if not _EXECUTOR_LINE.match(line))


def _main_container_name(pod: Object) -> str:
    """Name of the container that runs the author's program: the pod's default container, or Argo's ``main``."""
    annotations = pod["metadata"].get("annotations") or {}
    return str(annotations.get(_DEFAULT_CONTAINER_ANNOTATION) or "main")


def _trouble_at(pod: Object) -> datetime | None:
    status = pod.get("status") or {}
    ends = [_parse_time(ended.get("finishedAt")) for _, ended in _failed_containers(status)]
    moments = [_deletion_requested_at(pod["metadata"]), _disruption(status)[1], *ends]
    return min((moment for moment in moments if moment is not None), default=None)


def _rank(metadata: Object) -> int | None:
    labels = metadata.get("labels") or {}
    text = str(labels.get(_COMPLETION_INDEX_LABEL) or "")
    return int(text) if text.isdecimal() else None


def _phase(pod: Object) -> str:
    """The phase of Kubernetes, corrected by the states of the containers."""
    status = pod.get("status") or {}
    phase = str(status.get("phase") or "Pending")
    if is_final_pod_phase(phase):
        # Pods of a node that is gone are ended for it, whatever container states it reported last.
        is_ended_for_node = status.get("reason") == NODE_LOST or _disruption(status)[0].reason == _POD_GC_REASON
        return phase if is_ended_for_node or not _any_runs(status) else "Running"
    if phase != "Unknown" and _all_ended(pod):
        main = _terminated(_container(status, _main_container_name(pod))) or {}
        return "Succeeded" if main.get("exitCode") == 0 else "Failed"
    return phase


def _end_of_finished_pod(pod: Object) -> _PodEnd:
    """What ended a finished pod; the most specific reason that applies."""
    status = pod.get("status") or {}
    main = _terminated(_container(status, _main_container_name(pod)))
    if main and main.get("reason") == "OOMKilled":
        return _PodEnd("OOMKilled", str(main.get("message") or ""))
    if status.get("reason"):
        return _PodEnd(str(status["reason"]), str(status.get("message") or ""))
    ended_at = _parse_time(main.get("finishedAt")) if main else None
    disruption, at = _disruption(status)
    if disruption.reason and _happened_first(at, ended_at):
        return _PodEnd(NODE_LOST, disruption.message) if disruption.reason == _POD_GC_REASON else disruption
    if _happened_first(_deletion_requested_at(pod["metadata"]), ended_at):
        return _PodEnd("Deleted")
    return _end_by_containers(pod, main)


def _end_by_containers(pod: Object, main: Object | None) -> _PodEnd:
    for name, ended in _failed_containers(pod.get("status") or {}):
        if name != _main_container_name(pod):
            description = f"{name}: {ended.get('reason') or 'Error'} (exit code {ended.get('exitCode')})"
            return _PodEnd("", f"{description}: {ended['message']}" if ended.get("message") else description)
    if main is None:
        return _end_of_unstarted_pod(pod)
    reason = str(main.get("reason") or "")
    if reason in ("Error", "Completed"):  # the message is the program's own termination message, not a reason
        return _PodEnd()
    return _PodEnd(reason, str(main.get("message") or ""))


def _end_of_unfinished_pod(pod: Object) -> _PodEnd:
    """The reason and message of a pod that has not ended; used only if its attempt is ended by force."""
    status = pod.get("status") or {}
    disruption, _ = _disruption(status)
    if (
        status.get("reason") == NODE_LOST
        or status.get("phase") == "Unknown"
        or disruption.reason == _TAINT_MANAGER_REASON
    ):
        # A live kubelet would have ended the pod within its grace period.
        return _PodEnd(NODE_LOST, disruption.message or str(status.get("message") or ""))
    if disruption.reason:
        return disruption
    if pod["metadata"].get("deletionTimestamp"):
        return _PodEnd("Deleted")
    return _end_of_unstarted_pod(pod)


def _end_of_unstarted_pod(pod: Object) -> _PodEnd:
    """Why a container of a pod does not start, that of the program first; nothing once the program has started."""
    status = pod.get("status") or {}
    main = _container(status, _main_container_name(pod)) or {}
    if {"running", "terminated"} & (main.get("state") or {}).keys():
        return _PodEnd()
    for container in (main, *_containers(status)):
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason = str(waiting.get("reason") or "")
        if reason not in ("", "PodInitializing", "ContainerCreating"):
            return _PodEnd(reason, str(waiting.get("message") or ""))
    return _PodEnd()


def _happened_first(asked_at: datetime | None, ended_at: datetime | None) -> bool:
    """Whether an action on a pod came before the end of its program; also true if the end was not observed."""
    return asked_at is not None and (ended_at is None or asked_at <= ended_at)


def _deletion_requested_at(metadata: Object) -> datetime | None:
    """When the deletion was requested; ``deletionTimestamp`` is the end of the grace period."""
    terminating_at = _parse_time(metadata.get("deletionTimestamp"))
    return terminating_at and terminating_at - timedelta(seconds=metadata.get("deletionGracePeriodSeconds") or 0)


def _disruption(status: Object) -> tuple[_PodEnd, datetime | None]:
    for condition in status.get("conditions") or []:
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            end = _PodEnd(str(condition.get("reason") or ""), str(condition.get("message") or ""))
            return end, _parse_time(condition.get("lastTransitionTime"))
    return _PodEnd(), None


def _all_ended(pod: Object) -> bool:
    """Whether every container of the pod has ended for good; False if kubelet may restart containers."""
    if (pod.get("spec") or {}).get("restartPolicy") != "Never":
        return False
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    names = {container["name"] for container in (pod.get("spec") or {}).get("containers") or []}
    ended = {status["name"] for status in statuses if _terminated(status)}
    return bool(names) and names <= ended and not _any_runs(pod["status"])


def _any_runs(status: Object) -> bool:
    return any("running" in (container.get("state") or {}) for container in _containers(status))


def _failed_containers(status: Object) -> Iterator[tuple[str, Object]]:
    for container in _containers(status):
        ended = _terminated(container)
        if ended and ended.get("exitCode"):
            yield container["name"], ended


def _containers(status: Object) -> list[Any]:
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _container(status: Object, name: str) -> Object | None:
    return next(
        (container for container in status.get("containerStatuses") or [] if container.get("name") == name), None
    )


def _terminated(container: Object | None) -> Object | None:
    return ((container or {}).get("state") or {}).get("terminated")


def _workflow_uid(metadata: Object) -> str:
    if uid := (metadata.get("labels") or {}).get(WORKFLOW_UID_LABEL):
        return str(uid)  # a pod of a gang, whose owner is the gang's workload
    owners = metadata.get("ownerReferences") or []
    return str(next((owner["uid"] for owner in owners if owner.get("kind") == "Workflow"), ""))


def _parse_time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
