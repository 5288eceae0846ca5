"""A Node object of Kubernetes as a node of the inventory, with a verdict on its health.

What a Node object says of the node's health: a table of conditions, labels and taints.

They are those of kubelet, node-problem-detector, NVIDIA's NVSentinel, and of the
monitors and termination handlers of clouds. Each is set by somebody who looked
at the hardware, or knows what will happen to the machine.

What a pod means for its node: GPUs that are not free for trainings, or a failure that points at the node.

Which pods are ours follows from the label of attempts. The GPUs of ours are
those of leases, whether or not their pods are there yet; all others are foreign.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from tiphys.kube import Object
from tiphys.protocol.step_spec import ATTEMPT_LABEL, RUN_LABEL, STEP_LABEL
from tiphys_plugin.attempts.gangs import HOSTNAME_LABEL
from tiphys_plugin.cluster.pod_status import pod_status
from tiphys_plugin.nodes.health import Evidence, State, Verdict, judge
from tiphys_plugin.quota.flavors import GPU, GPU_TYPE_LABEL, ClusterNodes, Sign
from tiphys_plugin.quota.placement.model import Node

_NOT_WELL = ("False",)


def _conditions(means: Literal["cordon", "fault", "hint"], *names: str, values: tuple[str, ...] = ()) -> Iterator[Sign]:
    return (Sign(kind="condition", name=name, values=values, means=means) for name in names)


def _taints(means: Literal["cordon", "notice"], *names: str) -> Iterator[Sign]:
    return (Sign(kind="taint", name=name, means=means) for name in names)


USUAL: tuple[Sign, ...] = (
    *_conditions("cordon", "Ready", values=("False", "Unknown")),
    # node-problem-detector
    *_conditions("cordon", "KernelDeadlock", "ReadonlyFilesystem"),
    *_conditions("hint", "FrequentKubeletRestart", "FrequentUnregisterNetDevice"),
    # NVSentinel: what it takes for fatal becomes a condition; memory and ECC, bus, NVLink, firmware, Xid, heat, power
    *_conditions("fault", "GpuMemWatch", "GpuPcieWatch", "GpuNvlinkWatch", "GpuNvswitchFatalWatch", "GpuInforomWatch"),
    *_conditions("fault", "GpuDriverWatch", "SysLogsXIDError", "SysLogsSXIDError", "SysLogsGPUFallenOff"),
    *_conditions("cordon", "GpuThermalWatch", "GpuPowerWatch"),
    Sign(
        kind="label",
        name="dgxc.nvidia.com/nvsentinel-state",
        values=("quarantined", "draining", "drain-succeeded", "drain-failed", "remediating", "remediation-failed"),
        means="fault",
    ),
    # AKS, EKS, Nebius
    *_conditions("fault", "GPUMissing", "XIDErrors", "NVLinkStatusInactive", "NebiusGPUError"),
    *_conditions("fault", "AcceleratedHardwareReady", values=_NOT_WELL),
    *_conditions("hint", "IBLinkFlapping"),
    *_conditions("hint", "NetworkingReady", values=_NOT_WELL),
    # machines that go: a spot node's notice, maintenance, a cluster that shrinks
    *_taints("notice", "aws-node-termination-handler/spot-itn", "aws-node-termination-handler/scheduled-maintenance"),
    *_taints("notice", "aws-node-termination-handler/asg-lifecycle-termination", "karpenter.sh/disrupted"),
    *_taints("notice", "cloud.google.com/impending-node-termination", "ToBeDeletedByClusterAutoscaler"),
    *_taints("cordon", "node.kubernetes.io/out-of-service", "node.cloudprovider.kubernetes.io/shutdown"),
)


def signs_of(node: Object, settings: ClusterNodes) -> Iterator[Evidence]:
    """The evidence that a Node object gives now."""
    table = _table(settings.signs)
    spec, status = node.get("spec") or {}, node.get("status") or {}
    conditions = {one["type"]: one for one in status.get("conditions") or ()}
    if "Ready" not in conditions:
        yield Evidence("condition Ready", "its kubelet has not reported yet", "cordon")
    for name, condition in sorted(conditions.items()):
        told = str(condition.get("message") or condition.get("reason") or "")
        yield from _says(table, "condition", name, condition["status"], told)
    for name, value in sorted(((node["metadata"].get("labels")) or {}).items()):
        yield from _says(table, "label", name, value, value)
    for taint in spec.get("taints") or ():
        yield from _says(table, "taint", taint["key"], taint.get("value", ""), taint.get("value", ""))


def _says(table: Mapping[tuple[str, str], Sign], kind: str, name: str, value: str, message: str) -> Iterator[Evidence]:
    sign = table.get((kind, name))
    if sign is None or sign.means == "nothing":
        return
    values = sign.values or (("True",) if kind == "condition" else ())
    if not values or value in values:
        yield Evidence(f"{kind} {name}", message, sign.means)


@lru_cache(maxsize=4)
def _table(signs: tuple[Sign, ...]) -> Mapping[tuple[str, str], Sign]:
    """These and the usual ones, by kind and name; the first of several counts."""
    return {(sign.kind, sign.name): sign for sign in reversed((*signs, *USUAL))}


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


UNKNOWN_TYPE = "unknown"
"""Type of GPUs whose node does not say it: they serve those who do not ask for a type."""


@dataclass(frozen=True)
class SeenNode:
    """What is known of one node. ``node`` is cordoned if somebody has cordoned it, or the verdict is not healthy."""

    node: Node
    object_name: str
    """Pods say by it where they are; what they ask for is the host name, by which ``node`` is called."""
    unschedulable: bool
    verdict: Verdict


def essence(node: Object) -> Object:
    """The part of a Node object that counts here; its heartbeats and images are not."""
    metadata, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}
    conditions = status.get("conditions") or ()
    taints = spec.get("taints") or ()
    return {
        "metadata": {"name": metadata["name"], "labels": metadata.get("labels") or {}},
        "spec": {
            "unschedulable": bool(spec.get("unschedulable")),
            "taints": [{"key": one["key"], "value": one.get("value") or ""} for one in taints],
        },
        "status": {
            "conditions": [{key: one.get(key) or "" for key in ("type", "status", "message")} for one in conditions],
            "gpus": _amount(status.get("allocatable")),
            "installed": _amount(status.get("capacity")),
        },
    }


def read(
    node: Object,
    settings: ClusterNodes,
    foreign: int,
    hints: Sequence[Evidence],
    now: datetime,
    told_apart_by: Collection[str] = (),
) -> SeenNode | None:
    """The node of an `essence`; None if it is none of those that count.

    Of its labels only those are kept that flavors are ``told_apart_by``: others may change every minute.
    """
    labels, status = node["metadata"]["labels"], node["status"]
    wanted = all(labels.get(key) == value for key, value in settings.selector.items())
    host = labels.get(HOSTNAME_LABEL)
    if not wanted or not host or not status["installed"]:
        return None
    verdict = judge(
        (*signs_of(node, settings), *_missing(status), *hints), now, timedelta(hours=settings.suspect_hours)
    )
    memory = labels.get(settings.memory_label, "")
    seen = Node(
        name=host,
        gpu_type=labels.get(GPU_TYPE_LABEL) or UNKNOWN_TYPE,
        gpus=status["gpus"],
        memory_mb=int(memory) if memory.isdecimal() and int(memory) else None,
        block=labels.get(settings.block_label, ""),
        rack=labels.get(settings.rack_label, ""),
        nvlink_domain=labels.get(settings.nvlink_label, ""),
        labels={key: value for key, value in labels.items() if key in told_apart_by},
        cordoned=node["spec"]["unschedulable"] or verdict.state is not State.HEALTHY,
        foreign_gpus=foreign,
    )
    return SeenNode(seen, node["metadata"]["name"], node["spec"]["unschedulable"], verdict)


def observe(
    nodes: Iterable[Object],
    pods: Iterable[Object],
    settings: ClusterNodes,
    now: datetime,
    told_apart_by: Collection[str] = (),
    heard: Mapping[str, tuple[Evidence, ...]] = MappingProxyType({}),
) -> list[SeenNode]:
    """All nodes that count, by name, from Node and Pod objects as they are listed.

    ``heard`` is what others say of nodes, by Node object.
    """
    facts = [found for pod in pods if (found := facts_of(pod)) is not None]
    foreign, hints = foreign_by_node(facts), hints_by_node(facts)
    essences = map(essence, nodes)
    names = ((one, one["metadata"]["name"]) for one in essences)
    against = ((one, name, (*hints.get(name, ()), *heard.get(name, ()))) for one, name in names)
    seen = (read(one, settings, foreign.get(name, 0), said, now, told_apart_by) for one, name, said in against)
    return one_of_each_host(one for one in seen if one is not None)


def one_of_each_host(seen: Iterable[SeenNode]) -> list[SeenNode]:
    """By name. Two nodes that give themselves out as one host would both get the pods of one: the first counts."""
    found: dict[str, SeenNode] = {}
    for one in sorted(seen, key=lambda one: (one.node.name, one.object_name)):
        found.setdefault(one.node.name, one)
    return list(found.values())


def hints_by_node(facts: Iterable[PodFacts]) -> dict[str, tuple[Evidence, ...]]:
    """What failed pods point at, by Node object."""
    found: dict[str, tuple[Evidence, ...]] = {}
    for one in facts:
        if one.hint is not None:
            found[one.node] = (*found.get(one.node, ()), one.hint)
    return found


def _missing(status: dict[str, Any]) -> Iterable[Evidence]:
    """GPUs that the device plugin has taken out, as it does after an Xid: those that are left go on."""
    lost = status["installed"] - status["gpus"]
    if lost > 0:
        said = f"{lost} of {status['installed']} GPUs are not offered by the device plugin"
        yield Evidence("allocatable GPUs", said, "hint")


def _amount(resources: dict[str, Any] | None) -> int:
    text = str((resources or {}).get(GPU, "0"))
    return int(text) if text.isdecimal() else 0
