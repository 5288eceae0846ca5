"""How did this pod end, or has it not? Read from what kubelet, scheduler and eviction leave on a real Pod.

A phase alone misleads in both directions. A pod that is being deleted says
Running until its last container has ended, and one that a finalizer holds stays
in the API long after. A lost node tells nothing, so its pod counts as alive
until the cluster says that the node is gone.

What was done to a pod (deletion, eviction, drain) explains its end only if it
came before that end: Argo itself deletes finished pods. Sources: Kubernetes
``pkg/kubelet/status``, ``pkg/controller/podgc``, KEP-3329 (DisruptionTarget).
"""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from tiphys.kube import Object
from tiphys.protocol.gang import NODE_ANNOTATION, WORKFLOW_UID_LABEL
from tiphys_plugin.cluster.interface import PodStatus

NODE_NAME = "workflows.argoproj.io/node-name"
_DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
_INDEX = "batch.kubernetes.io/job-completion-index"
_FINAL_PHASES = ("Succeeded", "Failed")
_NODE_GONE = "DeletionByPodGC"
_TAINTED = "DeletionByTaintManager"


class _End(NamedTuple):
    """Why a pod ended, in Kubernetes' words."""

    reason: str = ""
    message: str = ""


def pod_status(pod: Object) -> PodStatus:
    """What the plugin needs to know of a Pod as the API server holds it."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    phase = _phase(pod)
    end = _finished(pod) if phase in _FINAL_PHASES else _still(pod)
    main = _terminated(_container(status, _main(pod)))
    annotations = metadata.get("annotations") or {}
    return PodStatus(
        name=metadata["name"],
        namespace=metadata.get("namespace", "default"),
        workflow_uid=_workflow_uid(metadata),
        node=annotations.get(NODE_NAME) or annotations.get(NODE_ANNOTATION, ""),
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
        told=str((main or {}).get("message") or ""),
        host=(pod.get("spec") or {}).get("nodeName") or "",
    )


def _main(pod: Object) -> str:
    """Name of the container that runs the author's program: Argo's word, or that of the pod itself."""
    annotations = pod["metadata"].get("annotations") or {}
    return str(annotations.get(_DEFAULT_CONTAINER) or "main")


def _trouble_at(pod: Object) -> datetime | None:
    status = pod.get("status") or {}
    ends = [_time(ended.get("finishedAt")) for _, ended in _failures(status)]
    moments = [_deletion_asked_at(pod["metadata"]), _disruption(status)[1], *ends]
    return min((moment for moment in moments if moment is not None), default=None)


def _rank(metadata: Object) -> int | None:
    labels = metadata.get("labels") or {}
    text = str(labels.get(_INDEX) or "")
    return int(text) if text.isdecimal() else None


def _phase(pod: Object) -> str:
    """Kubernetes' phase, unless its containers say otherwise."""
    status = pod.get("status") or {}
    phase = str(status.get("phase") or "Pending")
    if phase in _FINAL_PHASES:
        # The garbage collector ends the pods of a node that does not exist any more, whatever they said last.
        return phase if _disruption(status)[0].reason == _NODE_GONE or not _any_runs(status) else "Running"
    if phase != "Unknown" and _all_ended(pod):
        main = _terminated(_container(status, _main(pod))) or {}
        return "Succeeded" if main.get("exitCode") == 0 else "Failed"
    return phase


def _finished(pod: Object) -> _End:
    """What ended a finished pod; the most specific word that applies."""
    status = pod.get("status") or {}
    main = _terminated(_container(status, _main(pod)))
    if main and main.get("reason") == "OOMKilled":
        return _End("OOMKilled", str(main.get("message") or ""))
    if status.get("reason"):
        return _End(str(status["reason"]), str(status.get("message") or ""))
    ended_at = _time(main.get("finishedAt")) if main else None
    disruption, at = _disruption(status)
    if disruption.reason and _came_first(at, ended_at):
        return _End("NodeLost", disruption.message) if disruption.reason == _NODE_GONE else disruption
    if _came_first(_deletion_asked_at(pod["metadata"]), ended_at):
        return _End("Deleted")
    return _by_containers(pod, main)


def _by_containers(pod: Object, main: Object | None) -> _End:
    for name, ended in _failures(pod.get("status") or {}):
        if name != _main(pod):
            words = f"{name}: {ended.get('reason') or 'Error'} (exit code {ended.get('exitCode')})"
            return _End("", f"{words}: {ended['message']}" if ended.get("message") else words)
    if main is None:
        return _never_started(pod)
    reason = str(main.get("reason") or "")
    if reason in ("Error", "Completed"):  # its message is the program's own, which may write there what it likes
        return _End()
    return _End(reason, str(main.get("message") or ""))


def _still(pod: Object) -> _End:
    """What is known of a pod that has not ended; asked only if its attempt is ended by force."""
    status = pod.get("status") or {}
    disruption, _ = _disruption(status)
    if status.get("reason") == "NodeLost" or status.get("phase") == "Unknown" or disruption.reason == _TAINTED:
        # A kubelet that lives ends a pod within its grace period.
        return _End("NodeLost", disruption.message or str(status.get("message") or ""))
    if disruption.reason:
        return disruption
    if pod["metadata"].get("deletionTimestamp"):
        return _End("Deleted")
    return _never_started(pod)


def _never_started(pod: Object) -> _End:
    waiting = ((_container(pod.get("status") or {}, _main(pod)) or {}).get("state") or {}).get("waiting") or {}
    reason = str(waiting.get("reason") or "")
    if reason in ("", "PodInitializing", "ContainerCreating"):
        return _End()
    return _End(reason, str(waiting.get("message") or ""))


def _came_first(asked_at: datetime | None, ended_at: datetime | None) -> bool:
    """Whether something was done to a pod before its program ended; also if nobody saw the end."""
    return asked_at is not None and (ended_at is None or asked_at <= ended_at)


def _deletion_asked_at(metadata: Object) -> datetime | None:
    """``deletionTimestamp`` is when the grace period is over."""
    over_at = _time(metadata.get("deletionTimestamp"))
    return over_at and over_at - timedelta(seconds=metadata.get("deletionGracePeriodSeconds") or 0)


def _disruption(status: Object) -> tuple[_End, datetime | None]:
    for condition in status.get("conditions") or []:
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            end = _End(str(condition.get("reason") or ""), str(condition.get("message") or ""))
            return end, _time(condition.get("lastTransitionTime"))
    return _End(), None


def _all_ended(pod: Object) -> bool:
    """Whether every container of the pod has ended, none of which is ever started again."""
    if (pod.get("spec") or {}).get("restartPolicy") != "Never":
        return False
    wanted = {one["name"] for one in (pod.get("spec") or {}).get("containers") or []}
    ended = {one["name"] for one in (pod.get("status") or {}).get("containerStatuses") or [] if _terminated(one)}
    return bool(wanted) and wanted <= ended and not _any_runs(pod["status"])


def _any_runs(status: Object) -> bool:
    return any("running" in (one.get("state") or {}) for one in _containers(status))


def _failures(status: Object) -> Iterator[tuple[str, Object]]:
    for one in _containers(status):
        ended = _terminated(one)
        if ended and ended.get("exitCode"):
            yield one["name"], ended


def _containers(status: Object) -> list[Any]:
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _container(status: Object, name: str) -> Object | None:
    return next((one for one in status.get("containerStatuses") or [] if one.get("name") == name), None)


def _terminated(container: Object | None) -> Object | None:
    return ((container or {}).get("state") or {}).get("terminated")


def _workflow_uid(metadata: Object) -> str:
    if told := (metadata.get("labels") or {}).get(WORKFLOW_UID_LABEL):
        return str(told)  # of a gang, whose pods belong to what made them
    owners = metadata.get("ownerReferences") or []
    return str(next((owner["uid"] for owner in owners if owner.get("kind") == "Workflow"), ""))


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
