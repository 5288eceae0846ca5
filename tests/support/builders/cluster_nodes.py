"""Nodes and pods of others, as an API server holds them."""

from typing import Any

Object = dict[str, Any]
MODEL = "NVIDIA-A100"
SPOT = "aws-node-termination-handler/spot-itn"


def condition(name: str, status: str = "True", message: str = "") -> Object:
    return {"type": name, "status": status, "message": message, "lastHeartbeatTime": "2026-01-01T00:00:00Z"}


def node(
    name: str = "n1",
    gpus: int = 8,
    *conditions: Object,
    installed: int | None = None,
    labels: dict[str, str] | None = None,
    taints: tuple[str, ...] = (),
    resources: dict[str, str] | None = None,
    **spec: Any,
) -> Object:
    """A node that is ready; ``installed`` is its capacity where that is more than it offers, beside ``resources``."""
    known = {"kubernetes.io/hostname": name, "nvidia.com/gpu.product": MODEL, **(labels or {})}
    ready = () if any(one["type"] == "Ready" for one in conditions) else (condition("Ready"),)
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": {key: one for key, one in known.items() if one}},
        "spec": {**({"taints": [{"key": key, "effect": "NoSchedule"} for key in taints]} if taints else {}), **spec},
        "status": {
            "conditions": [*ready, *conditions],
            "allocatable": {"nvidia.com/gpu": str(gpus), "cpu": "128", **(resources or {})},
            "capacity": {"nvidia.com/gpu": str(gpus if installed is None else installed), **(resources or {})},
        },
    }


def foreign_pod(
    name: str = "notebook",
    gpus: int = 2,
    on: str = "n1",
    phase: str = "Running",
    resource: str = "nvidia.com/gpu",
) -> Object:
    """A pod of somebody else."""
    container = {"name": "main", "image": "none", "resources": {"limits": {resource: str(gpus)}}}
    spec = {"containers": [container], **({"nodeName": on} if on else {})}
    return {"metadata": {"name": name, "uid": f"uid-{name}"}, "spec": spec, "status": {"phase": phase}}


def labelled_pod(
    name: str = "digits-1",
    gpus: int = 2,
    namespace: str = "ml",
    uid: str = "u1",
    attempt: str = "1",
    phase: str = "Running",
    resource: str = "nvidia.com/gpu",
) -> Object:
    """A pod that says that it belongs to an attempt of the Workflow ``uid``, as each tenant may."""
    pod = foreign_pod(name, gpus, phase=phase, resource=resource)
    labels = {"tiphys.dev/workflow-uid": uid, "tiphys.dev/attempt": attempt}
    pod["metadata"] |= {"namespace": namespace, "labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return pod


def member(run: str, rank: int, on: str) -> Object:
    """A pod of an attempt on several nodes, of the Workflow that holds the lease of `support.builders.ledger.lease`."""
    labels = {
        "tiphys.dev/workflow-uid": run.removeprefix("run-"),
        "tiphys.dev/run": run,
        "tiphys.dev/step": "fit",
        "tiphys.dev/attempt": "1",
        "batch.kubernetes.io/job-completion-index": str(rank),
    }
    metadata = {
        "name": f"{run}-{rank}",
        "labels": labels,
        "annotations": {"tiphys.dev/node": f"{run.replace('run', 'wf', 1)}.fit(0).run"},
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    return {"metadata": metadata, "spec": {"containers": [], "nodeName": on}, "status": {"phase": "Running"}}


def failed_pod(
    reason: str = "UnexpectedAdmissionError", step: str = "fit", on: str = "n1", at: str = "2026-01-01T00:00:00Z"
) -> Object:
    """A pod of an attempt that did not get as far as its program."""
    labels = {"tiphys.dev/attempt": "1", "tiphys.dev/run": "digits", "tiphys.dev/step": step}
    name = f"digits-{step}-{on}"
    metadata = {"name": name, "uid": f"uid-{name}-{at}", "labels": labels, "creationTimestamp": at}
    spec = {"nodeName": on, "containers": [{"name": "main", "image": "none"}]}
    ended = {"name": "main", "state": {"terminated": {"exitCode": 1, "finishedAt": at}}}
    return {
        "metadata": metadata,
        "spec": spec,
        "status": {"phase": "Failed", "reason": reason, "containerStatuses": [ended]},
    }
