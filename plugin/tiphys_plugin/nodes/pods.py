"""What a pod means for its node: GPUs that are not free for trainings, or a failure that points at the node.

Which pods are ours follows from the label of attempts. The GPUs of ours are
those of leases, whether or not their pods are there yet; all others are foreign.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Any, NamedTuple

from tiphys.kube import Object
from tiphys.protocol.policy import ATTEMPT_LABEL, RUN_LABEL, STEP_LABEL
from tiphys_plugin.kubernetes.judging import pod_status
from tiphys_plugin.nodes.health import Evidence
from tiphys_plugin.nodes.settings import GPU

FAULTS_OF_NODES = (
    *("NodeLost", "UnexpectedAdmissionError"),
    *("StartError", "ContainerCannotRun", "RunContainerError", "CreateContainerError"),
)
"""Ends of a pod that are more often its node's doing than its own: lost, devices that could not be handed out, and a
container runtime that could not start a program whose image was there."""


class PodFacts(NamedTuple):
    """Of one pod that was given a node."""

    node: str
    """Name of the Node object."""
    foreign_gpus: int = 0
    hint: Evidence | None = None


def facts_of(pod: Object) -> PodFacts | None:
    """None for a pod that means nothing to any node."""
    node = (pod.get("spec") or {}).get("nodeName")
    if not node:
        return None
    if ATTEMPT_LABEL in (pod["metadata"].get("labels") or {}):
        hint = _hint(pod)
        return PodFacts(node, hint=hint) if hint is not None else None
    gpus = 0 if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed") else gpus_of(pod)
    return PodFacts(node, gpus) if gpus else None


def gpus_of(pod: Object) -> int:
    """GPUs that the scheduler counts for a pod (Kubernetes, ``component-helpers/resource``: PodRequests)."""
    spec = pod["spec"]
    kept, most = sum(map(_gpus, spec.get("containers") or ())), 0
    beside = 0
    for container in spec.get("initContainers") or ():
        if container.get("restartPolicy") == "Always":
            beside += _gpus(container)
            most = max(most, beside)
        else:
            most = max(most, beside + _gpus(container))
    return max(kept + beside, most)


def _gpus(container: Object) -> int:
    resources: dict[str, Any] = container.get("resources") or {}
    asked = (resources.get("requests") or {}).get(GPU) or (resources.get("limits") or {}).get(GPU) or 0
    return int(asked)


def _hint(pod: Object) -> Evidence | None:
    seen = pod_status(pod)
    if seen.reason not in FAULTS_OF_NODES:
        return None
    labels = seen.labels
    at = seen.trouble_at or datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
    source = f"attempts of {labels.get(RUN_LABEL, '?')}/{labels.get(STEP_LABEL, '?')}"
    told = f"attempt {labels[ATTEMPT_LABEL]} ended as {seen.reason}" + (f" ({seen.message})" if seen.message else "")
    return Evidence(source, told, "hint", at)


def foreign_by_node(facts: Iterable[PodFacts]) -> dict[str, int]:
    """GPUs of foreign pods, by Node object."""
    used: dict[str, int] = {}
    for one in facts:
        if one.foreign_gpus:
            used[one.node] = used.get(one.node, 0) + one.foreign_gpus
    return used
