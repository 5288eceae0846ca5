"""Converts Node and Pod objects of Kubernetes to nodes of the inventory, with a verdict on their health.

The health signals of a Node object are conditions, labels and taints, listed in
`DEFAULT_SIGNALS`. They come from kubelet, node-problem-detector, NVIDIA's
NVSentinel, and the monitors and termination handlers of clouds, which check the
hardware or know the plans for the machine.

A pod can use GPUs of its node, or be evidence against the node by its failure.
The label of attempts marks the pods of Tiphys. Their GPUs are counted by leases,
whether or not the pods exist yet; all other pods are foreign. Each tenant may write
that label, so GPUs of a labelled pod beyond the lease of its attempt are foreign too.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple

from tiphys.kube import Object
from tiphys.protocol.gang import HOSTNAME_LABEL
from tiphys.protocol.phases import is_final_pod_phase
from tiphys.protocol.step_spec import (
    ATTEMPT_LABEL,
    GPU_RESOURCE,
    GPU_TYPE_LABEL,
    RUN_LABEL,
    STEP_LABEL,
    is_gpu_resource,
)
from tiphys_plugin.cluster.interface import extended_resources, requested_resources
from tiphys_plugin.cluster.pod_status import pod_status
from tiphys_plugin.nodes.health import NodeEvidence, NodeHealth, NodeHealthVerdict, judge_node_health
from tiphys_plugin.quota.flavors import ClusterNodes, FlavorSet, HealthSignal
from tiphys_plugin.quota.lease import Lease, LeaseRequest
from tiphys_plugin.quota.placement.model import GpuNode

NO_FLAVORS = FlavorSet(())
_FALSE_VALUES = ("False",)


def _conditions(
    means: Literal["cordon", "fault", "hint"], *names: str, values: tuple[str, ...] = ()
) -> Iterator[HealthSignal]:
    return (HealthSignal(kind="condition", name=name, values=values, means=means) for name in names)


def _taints(means: Literal["cordon", "notice"], *names: str) -> Iterator[HealthSignal]:
    return (HealthSignal(kind="taint", name=name, means=means) for name in names)


DEFAULT_SIGNALS: tuple[HealthSignal, ...] = (
    *_conditions("cordon", "Ready", values=("False", "Unknown")),
    # node-problem-detector
    *_conditions("cordon", "KernelDeadlock", "ReadonlyFilesystem"),
    *_conditions("hint", "FrequentKubeletRestart", "FrequentUnregisterNetDevice"),
    # NVSentinel sets a condition for fatal faults: memory and ECC, bus, NVLink, firmware, Xid, heat, power
    *_conditions("fault", "GpuMemWatch", "GpuPcieWatch", "GpuNvlinkWatch", "GpuNvswitchFatalWatch", "GpuInforomWatch"),
    *_conditions("fault", "GpuDriverWatch", "SysLogsXIDError", "SysLogsSXIDError", "SysLogsGPUFallenOff"),
    *_conditions("cordon", "GpuThermalWatch", "GpuPowerWatch"),
    HealthSignal(
        kind="label",
        name="dgxc.nvidia.com/nvsentinel-state",
        values=("quarantined", "draining", "drain-succeeded", "drain-failed", "remediating", "remediation-failed"),
        means="fault",
    ),
    # AKS, EKS, Nebius
    *_conditions("fault", "GPUMissing", "XIDErrors", "NVLinkStatusInactive", "NebiusGPUError"),
    *_conditions("fault", "AcceleratedHardwareReady", values=_FALSE_VALUES),
    *_conditions("hint", "IBLinkFlapping"),
    *_conditions("hint", "NetworkingReady", values=_FALSE_VALUES),
    # removal of the machine: a spot node's notice, maintenance, a scale-down of the cluster
    *_taints("notice", "aws-node-termination-handler/spot-itn", "aws-node-termination-handler/scheduled-maintenance"),
    *_taints("notice", "aws-node-termination-handler/asg-lifecycle-termination", "karpenter.sh/disrupted"),
    *_taints("notice", "cloud.google.com/impending-node-termination", "ToBeDeletedByClusterAutoscaler"),
    *_taints("cordon", "node.kubernetes.io/out-of-service", "node.cloudprovider.kubernetes.io/shutdown"),
)


def health_evidence(node: Object, settings: ClusterNodes) -> Iterator[NodeEvidence]:
    """The evidence against a node in its Node object."""
    table = _signal_table(settings.signs)
    spec, status = node.get("spec") or {}, node.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    if "Ready" not in conditions:
        yield NodeEvidence("condition Ready", "its kubelet has not reported yet", "cordon")
    for name, condition in sorted(conditions.items()):
        message = str(condition.get("message") or condition.get("reason") or "")
        yield from _match_signal(table, "condition", name, condition["status"], message)
    for name, value in sorted(((node["metadata"].get("labels")) or {}).items()):
        yield from _match_signal(table, "label", name, value, value)
    for taint in spec.get("taints") or ():
        yield from _match_signal(table, "taint", taint["key"], taint.get("value", ""), taint.get("value", ""))


def _match_signal(
    table: Mapping[tuple[str, str], HealthSignal], kind: str, name: str, value: str, message: str
) -> Iterator[NodeEvidence]:
    signal = table.get((kind, name))
    if signal is None or signal.means == "nothing":
        return
    values = signal.values or (("True",) if kind == "condition" else ())
    if not values or value in values:
        yield NodeEvidence(f"{kind} {name}", message, signal.means)


@lru_cache(maxsize=4)
def _signal_table(signs: tuple[HealthSignal, ...]) -> Mapping[tuple[str, str], HealthSignal]:
    """``signs`` and the default signals, by kind and name; ``signs`` override defaults, the first of several counts."""
    return {(signal.kind, signal.name): signal for signal in reversed((*signs, *DEFAULT_SIGNALS))}


NODE_FAULT_REASONS = (
    *("NodeLost", "UnexpectedAdmissionError"),
    *("StartError", "ContainerCannotRun", "RunContainerError", "CreateContainerError"),
)
"""Reasons of a pod's end that the node causes more often than the pod: a lost node, devices that could not be
allocated, and a container runtime that could not start a program although its image was present."""


class PodFacts(NamedTuple):
    """The relevant facts of a pod that has a node."""

    node: str
    """Name of the Node object."""
    resources: Mapping[str, int] = MappingProxyType({})
    """Extended resources, such as GPUs, by name."""
    attempt: str = ""
    """Namespace, Workflow uid and number of the attempt that the pod says it belongs to; empty without its label."""
    hint: NodeEvidence | None = None


def read_pod_facts(pod: Object) -> PodFacts | None:
    """Extract the facts of a pod; None if it neither uses GPUs nor is evidence against its node."""
    node = (pod.get("spec") or {}).get("nodeName")
    if not node:
        return None
    is_final = is_final_pod_phase((pod.get("status") or {}).get("phase"))
    resources = {} if is_final else requested_resources(pod)
    if ATTEMPT_LABEL not in (pod["metadata"].get("labels") or {}):
        return PodFacts(node, resources) if resources else None
    hint = _failure_hint(pod)
    if not resources and hint is None:
        return None
    status = pod_status(pod)
    attempt = f"{status.namespace}/{status.workflow_uid}/{status.labels[ATTEMPT_LABEL]}"
    return PodFacts(node, resources, attempt, hint)


def name_attempt(request: LeaseRequest) -> str:
    """The attempt of a request, as `PodFacts` names it."""
    return f"{request.namespace}/{request.uid}/{request.attempt}"


def _failure_hint(pod: Object) -> NodeEvidence | None:
    ended = pod_status(pod)
    if ended.reason not in NODE_FAULT_REASONS:
        return None
    labels = ended.labels
    at = ended.trouble_at or datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
    source = f"attempts of {labels.get(RUN_LABEL, '?')}/{labels.get(STEP_LABEL, '?')}"
    message = f"attempt {labels[ATTEMPT_LABEL]} ended as {ended.reason}" + (
        f" ({ended.message})" if ended.message else ""
    )
    return NodeEvidence(source, message, "hint", at)


def foreign_gpus_by_node(
    facts: Iterable[PodFacts], nodes: Iterable[Object], leases: Iterable[Lease] | None
) -> Mapping[str, Counter[str]]:
    """GPUs and other extended resources that no lease counts, by Node object and name.

    Args:
        facts: Facts of the pods.
        nodes: Results of `relevant_node_fields`, because leases name nodes by their host name label.
        leases: All leases; None trusts the labels of pods, while the ledger is being recovered from them.
    """
    unleased = defaultdict[tuple[str, str, str], int](int)
    for pod in facts:
        for resource, amount in pod.resources.items() if leases is not None or not pod.attempt else ():
            unleased[pod.attempt, pod.node, resource] += amount
    names = {node["metadata"]["labels"].get(HOSTNAME_LABEL, ""): node["metadata"]["name"] for node in nodes}
    unplaced = set[str]()
    for lease in leases or ():
        attempt, gpus = name_attempt(lease.request), lease.request.gpus_per_member
        if not lease.nodes:
            unplaced.add(attempt)  # its pods may be on each node
        for host in lease.nodes:
            unleased[attempt, names.get(host, ""), lease.request.resource] -= gpus
    foreign = defaultdict[str, Counter[str]](Counter)
    for (attempt, name, resource), amount in unleased.items():
        if amount > 0 and attempt not in unplaced:
            foreign[name][resource] += amount
    return foreign


UNKNOWN_GPU_TYPE = "unknown"
"""Type of GPUs whose node has no type label: they serve requests without a type."""


@dataclass(frozen=True)
class ObservedNode:
    """One observed node. ``node`` counts as cordoned if it is unschedulable, or its verdict is not healthy."""

    node: GpuNode
    object_name: str
    """Name of the Node object, as in the pods' ``spec.nodeName``; ``node`` is named by its host name label."""
    unschedulable: bool
    verdict: NodeHealthVerdict
    unreadable_memory: str = ""
    """Value of its memory label, if that is no number of MB; the memory then counts as enough."""
    uncounted: tuple[str, ...] = ()
    """Resources of GPUs that it offers and that no flavor of it counts."""


def relevant_node_fields(node: Object) -> Object:
    """The fields of a Node object that the inventory uses; heartbeats and images are dropped."""
    metadata, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}
    conditions = status.get("conditions") or ()
    taints = spec.get("taints") or ()
    return {
        "metadata": {"name": metadata["name"], "labels": metadata.get("labels") or {}},
        "spec": {
            "unschedulable": bool(spec.get("unschedulable")),
            "taints": [{"key": taint["key"], "value": taint.get("value") or ""} for taint in taints],
        },
        "status": {
            "conditions": [
                {key: condition.get(key) or "" for key in ("type", "status", "message")} for condition in conditions
            ],
            "offered": extended_resources(status.get("allocatable")),
            "installed": extended_resources(status.get("capacity")),
        },
    }


def parse_node(
    node: Object,
    settings: ClusterNodes,
    foreign: Mapping[str, int],
    hints: Sequence[NodeEvidence],
    now: datetime,
    flavors: FlavorSet = NO_FLAVORS,
) -> ObservedNode | None:
    """Parse the result of `relevant_node_fields`; None if ``settings`` does not select the node, or it has no GPUs.

    A node serves one flavor: the first whose labels and resource it has. ``foreign`` are the resources of other pods.
    Of its labels, only those of flavors are kept, because other labels may change every minute.
    """
    labels, installed = node["metadata"]["labels"], node["status"]["installed"]
    selected = all(labels.get(key) == value for key, value in settings.selector.items())
    host = labels.get(HOSTNAME_LABEL)
    flavor = flavors.find_offered(labels, installed)
    gpu_resources = sorted(filter(is_gpu_resource, installed), key=lambda name: (name != GPU_RESOURCE, name))
    resource = flavor.resource if flavor is not None else next(iter(gpu_resources), "")
    if not selected or not host or not resource:
        return None
    gpu_type = flavor.gpu_type if flavor is not None else labels.get(GPU_TYPE_LABEL) or UNKNOWN_GPU_TYPE
    others = (declared for declared in flavors.by_gpu_type.get(gpu_type, ()) if declared.resource != resource)
    is_counted = flavor is not None or (resource == GPU_RESOURCE and not any(others))
    offered = node["status"]["offered"][resource]
    verdict = judge_node_health(
        (*health_evidence(node, settings), *_missing_gpu_evidence(installed[resource], offered), *hints),
        now,
        timedelta(hours=settings.suspect_hours),
    )
    # The label is that of a whole GPU, also where a node offers parts of it.
    memory = labels.get(settings.memory_label, "") if resource == GPU_RESOURCE else ""
    memory_mb = int(memory) if memory.isdecimal() and int(memory) else None
    gpu_node = GpuNode(
        name=host,
        gpu_type=gpu_type,
        gpus=offered if is_counted else 0,
        memory_mb=memory_mb,
        block=labels.get(settings.block_label, ""),
        rack=labels.get(settings.rack_label, ""),
        nvlink_domain=labels.get(settings.nvlink_label, ""),
        labels={key: value for key, value in labels.items() if key in flavors.label_keys},
        cordoned=node["spec"]["unschedulable"] or verdict.state is not NodeHealth.HEALTHY,
        foreign_gpus=foreign.get(resource, 0) if is_counted else 0,
    )
    unreadable_memory = memory if memory_mb is None else ""
    uncounted = tuple(name for name in gpu_resources if name != resource or not is_counted)
    is_unschedulable = node["spec"]["unschedulable"]
    return ObservedNode(gpu_node, node["metadata"]["name"], is_unschedulable, verdict, unreadable_memory, uncounted)


def deduplicate_hosts(nodes: Iterable[ObservedNode]) -> list[ObservedNode]:
    """Sort nodes by host name. If two Node objects have the same host name, only the first one counts.

    Pods are bound to nodes by host name, so pods of a grant on one of them could run on the other.
    """
    by_host: dict[str, ObservedNode] = {}
    for observed in sorted(nodes, key=lambda node: (node.node.name, node.object_name)):
        by_host.setdefault(observed.node.name, observed)
    return list(by_host.values())


def hints_by_node(facts: Iterable[PodFacts]) -> dict[str, tuple[NodeEvidence, ...]]:
    """Hints of failed pods, by Node object."""
    hints: dict[str, tuple[NodeEvidence, ...]] = {}
    for pod in facts:
        if pod.hint is not None:
            hints[pod.node] = (*hints.get(pod.node, ()), pod.hint)
    return hints


def _missing_gpu_evidence(installed: int, offered: int) -> Iterable[NodeEvidence]:
    """Evidence of GPUs that the device plugin has withdrawn, as it does after an Xid; the other GPUs keep working."""
    lost = installed - offered
    if lost > 0:
        message = f"{lost} of {installed} GPUs are not offered by the device plugin"
        yield NodeEvidence("allocatable GPUs", message, "hint")
