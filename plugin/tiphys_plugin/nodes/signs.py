"""What a Node object says of the node's health: a table of conditions, labels and taints.

They are those of kubelet, node-problem-detector, NVIDIA's NVSentinel, and of the
monitors and termination handlers of clouds. Each is set by somebody who looked
at the hardware, or knows what will happen to the machine.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Literal

from tiphys.kube import Object
from tiphys_plugin.nodes.health import Evidence
from tiphys_plugin.nodes.settings import ClusterNodes, Sign

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
