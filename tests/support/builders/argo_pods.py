"""Pods as an API server holds them after Argo has made them: what kubelet and others write, and when."""

from datetime import UTC, datetime, timedelta
from typing import Any

Object = dict[str, Any]

BEGAN = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)


def at(seconds: float) -> str:
    """A moment after the pod began, as Kubernetes writes it."""
    return (BEGAN + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def ended(name: str, code: int, reason: str = "", message: str = "", after: float = 100.0) -> Object:
    """Status of a container that has ended."""
    end: Object = {"exitCode": code, "reason": reason or ("Error" if code else "Completed"), "finishedAt": at(after)}
    return {"name": name, "state": {"terminated": {**end, "message": message} if message else end}}


def runs(name: str) -> Object:
    return {"name": name, "state": {"running": {"startedAt": at(0)}}}


def waits(name: str, reason: str, message: str = "") -> Object:
    return {"name": name, "state": {"waiting": {"reason": reason, **({"message": message} if message else {})}}}


def disruption(reason: str, message: str = "", after: float = 50.0) -> Object:
    """The condition DisruptionTarget."""
    return {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": reason,
        "message": message,
        "lastTransitionTime": at(after),
    }


def pod(
    *containers: Object,
    phase: str = "Running",
    init: Object | None = None,
    conditions: tuple[Object, ...] = (),
    deleted_after: float | None = None,
    grace: int = 30,
    name: str = "digits-abc12-fit-run-1",
    node: str = "digits-abc12.fit(0).run",
    workflow: str = "digits-abc12",
    uid: str = "uid-1",
    namespace: str = "ml",
    labels: dict[str, str] | None = None,
    **status: str,
) -> Object:
    """A pod of Argo; without containers, both run. ``deleted_after``: when its deletion was asked for."""
    metadata: Object = {
        "name": name,
        "namespace": namespace,
        "labels": {
            "workflows.argoproj.io/workflow": workflow,
            "tiphys.dev/run": workflow,
            "tiphys.dev/attempt": "1",
            **(labels or {}),
        },
        "annotations": {"workflows.argoproj.io/node-name": node},
        "ownerReferences": [{"kind": "Workflow", "name": workflow, "uid": uid}],
    }
    if deleted_after is not None:
        metadata |= {"deletionTimestamp": at(deleted_after + grace), "deletionGracePeriodSeconds": grace}
    shown: Object = {
        "phase": phase,
        "initContainerStatuses": [init or ended("init", 0, after=1)],
        "containerStatuses": list(containers) or [runs("wait"), runs("main")],
        "conditions": [{"type": "Ready", "status": "True"}, *conditions],
        **status,
    }
    spec = {"restartPolicy": "Never", "containers": [{"name": "wait"}, {"name": "main"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": shown}
