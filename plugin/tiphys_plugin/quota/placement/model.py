"""Records of placement: nodes, their free capacity, and the requests of pods and gangs.

A cluster of thousands of nodes has a few dozen distinct free capacities. Placement
scores each distinct `NodeFreeCapacity` once instead of each node.

The topology uses the terms of Kueue's topology-aware scheduling (block, rack, host)
and of NVIDIA's multi-node NVLink (domain). Unknown topology is empty, and nodes
with empty topology never count as near each other.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from tiphys.protocol.step_spec import Proximity


def _check_name(name: str) -> str:
    if not name.isprintable() or name != name.strip() or not 0 < len(name) <= 253:
        raise ValueError(f"{name!r} is no name; give 1 to 253 characters with no space around them")
    return name


Name = Annotated[str, AfterValidator(_check_name)]
LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")]
LabelKey = Annotated[
    str, Field(pattern=r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")
]
"""Key and value of a label that the API server takes: it refuses pods with another node selector."""
WHOLE_GPU = 1000
"""Thousandths of one GPU; GPU shares are requested in this unit."""


@dataclass(frozen=True)
class PodRequest:
    """Resources that one pod needs on its node.

    The service requests whole GPUs, optionally with a type or a minimum memory. A
    share of one GPU (``gpu_milli`` below 1000), CPUs and host memory exist for
    simulations of clusters that share GPUs.
    """

    gpus: int
    gpu_type: str | None = None
    """None: any type, or one of ``gpu_types``."""
    min_gpu_memory_mb: int | None = None
    gpu_milli: int = WHOLE_GPU
    cpu_milli: int = 0
    host_memory_mb: int = 0
    gpu_types: tuple[str, ...] = ()
    """Types of which any may serve a request without ``gpu_type``; empty: all."""

    def __post_init__(self) -> None:
        if self.gpus < 0 or self.cpu_milli < 0 or self.host_memory_mb < 0:
            raise ValueError(f"a pod request must not be negative: {self}")
        if not 0 < self.gpu_milli <= WHOLE_GPU or (self.gpu_milli < WHOLE_GPU and self.gpus != 1):
            raise ValueError(
                f"a GPU share must be a part of one GPU, but the request is {self.gpus} × {self.gpu_milli}/{WHOLE_GPU}"
            )

    @property
    def is_fractional(self) -> bool:
        return self.gpu_milli < WHOLE_GPU

    def accepts_type(self, gpu_type: str) -> bool:
        """Whether GPUs of this type may serve the request."""
        return self.gpu_type == gpu_type if self.gpu_type else not self.gpu_types or gpu_type in self.gpu_types

    def multiplied_by(self, pods: int) -> "PodRequest":
        """The resources of ``pods`` pods on one node; not for shares of GPUs."""
        if pods == 1:
            return self
        return replace(
            self, gpus=pods * self.gpus, cpu_milli=pods * self.cpu_milli, host_memory_mb=pods * self.host_memory_mb
        )


@dataclass(frozen=True)
class GangRequest:
    """Pods that start together or not at all; a single pod is a gang of one.

    A member never spans nodes. All members get GPUs of one type. Groups of
    ``tensor_parallel`` consecutive members stay within one NVLink domain.
    """

    pod: PodRequest
    members: int = 1
    tensor_parallel: int = 1
    within: Proximity | None = None
    """Domain that all members must share; one node satisfies each."""
    avoided_nodes: tuple[str, ...] = ()
    """Nodes to use only if no others have room for the gang."""

    def __post_init__(self) -> None:
        if self.members < 1 or self.tensor_parallel < 1 or self.members % self.tensor_parallel:
            raise ValueError(f"{self.members} members cannot form groups of {self.tensor_parallel}")
        if self.members > 1 and (self.pod.is_fractional or not self.pod.gpus):
            raise ValueError("each member of a gang gets whole GPUs, at least one")

    @property
    def gpus(self) -> int:
        return self.members * self.pod.gpus

    @property
    def group_count(self) -> int:
        return self.members // self.tensor_parallel


@dataclass(frozen=True)
class Placement:
    """The node of each member, in the order of their ranks."""

    gang: GangRequest
    nodes: tuple[str, ...]
    device_free_milli: int = WHOLE_GPU
    """Free thousandths of the GPU that a share is taken from, before the placement."""


_MAX_GPUS = 1024


class GpuNode(BaseModel):
    """A declared node. ``memory_mb`` is the memory of each of its GPUs; None: not declared, counts as enough.

    ``cordoned`` nodes keep their running pods and get no new ones. ``cpu_milli`` and
    ``host_memory_mb`` limit only requests that state these resources.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    gpu_type: str = ""
    gpus: Annotated[int, Field(ge=0, le=_MAX_GPUS)]
    memory_mb: PositiveInt | None = None
    block: str = ""
    rack: str = ""
    nvlink_domain: str = ""
    """Name shared by nodes whose GPUs are connected by NVLink; empty: NVLink stays within the node."""
    labels: dict[str, str] = {}
    """Node labels that select the flavor."""
    cordoned: bool = False
    foreign_gpus: NonNegativeInt = 0
    """GPUs of pods that Tiphys did not start."""
    cpu_milli: NonNegativeInt | None = None
    host_memory_mb: NonNegativeInt | None = None

    @model_validator(mode="after")
    def _gpus_have_a_type(self) -> "GpuNode":
        if self.gpus and not self.gpu_type:
            raise ValueError(f"node {self.name!r} has GPUs of no type; add `gpu_type: NAME`")
        return self


class NodeFreeCapacity(NamedTuple):
    """Free GPUs, CPUs and memory of a node; infinite where the node declares nothing."""

    gpu_type: str
    gpu_memory_mb: float
    free_gpus: int
    """GPUs without any user; negative if more GPUs are leased than exist."""
    shared_gpu_free_milli: tuple[int, ...]
    """Free thousandths of each shared GPU, in rising order."""
    cpu_milli: float
    host_memory_mb: float

    @property
    def free_gpu_milli(self) -> int:
        """Free thousandths of all GPUs."""
        return WHOLE_GPU * self.free_gpus + sum(self.shared_gpu_free_milli)


def empty_node_capacity(node: GpuNode) -> NodeFreeCapacity:
    """Free capacity of a node without pods."""
    return NodeFreeCapacity(
        node.gpu_type if node.gpus else "",
        _or_infinite(node.memory_mb),
        node.gpus,
        (),
        _or_infinite(node.cpu_milli),
        _or_infinite(node.host_memory_mb),
    )


def _or_infinite(amount: int | None) -> float:
    return math.inf if amount is None else amount


def has_matching_gpus(capacity: NodeFreeCapacity, pod: PodRequest) -> bool:
    """Whether the GPUs have the type and memory of the request, free or not; true for a pod without GPUs."""
    return pod.gpus == 0 or (
        pod.accepts_type(capacity.gpu_type) and capacity.gpu_memory_mb >= (pod.min_gpu_memory_mb or 0)
    )


def can_fit_pod(capacity: NodeFreeCapacity, pod: PodRequest) -> bool:
    """Whether the pod fits."""
    if (
        capacity.cpu_milli < pod.cpu_milli
        or capacity.host_memory_mb < pod.host_memory_mb
        or not has_matching_gpus(capacity, pod)
    ):
        return False
    return bool(list_shareable_devices(capacity, pod)) if pod.is_fractional else capacity.free_gpus >= pod.gpus


def list_shareable_devices(capacity: NodeFreeCapacity, pod: PodRequest) -> list[int]:
    """Free thousandths of each GPU that could provide the share, the fullest GPU first."""
    shared = sorted({part for part in capacity.shared_gpu_free_milli if part >= pod.gpu_milli})
    return [*shared, WHOLE_GPU] if capacity.free_gpus > 0 else shared


def subtract_pod(capacity: NodeFreeCapacity, pod: PodRequest, device_free_milli: int = WHOLE_GPU) -> NodeFreeCapacity:
    """Free capacity after the pod, even if negative; a share comes from a GPU with ``device_free_milli`` free."""
    kind, memory, free_gpus, shared, cpu, host_memory = capacity
    if pod.is_fractional:
        remaining = list(shared)
        if device_free_milli == WHOLE_GPU:
            free_gpus -= 1
        else:
            remaining.remove(device_free_milli)
        if device_free_milli > pod.gpu_milli:
            remaining.append(device_free_milli - pod.gpu_milli)
        shared = tuple(sorted(remaining))
    else:
        free_gpus -= pod.gpus
    return NodeFreeCapacity(kind, memory, free_gpus, shared, cpu - pod.cpu_milli, host_memory - pod.host_memory_mb)


def add_back_pod(capacity: NodeFreeCapacity, pod: PodRequest) -> NodeFreeCapacity:
    """Undo `subtract_pod`, for whole GPUs.

    Raises:
        ValueError: the pod holds a share of a GPU, whose device is not recorded.
    """
    if pod.is_fractional:
        raise ValueError("a GPU share cannot be released, because its device is not recorded")
    kind, memory, free_gpus, shared, cpu, host_memory = capacity
    return NodeFreeCapacity(
        kind, memory, free_gpus + pod.gpus, shared, cpu + pod.cpu_milli, host_memory + pod.host_memory_mb
    )


def count_fitting_pods(capacity: NodeFreeCapacity, pod: PodRequest) -> int:
    """Number of pods ``pod`` that fit; the pod must request whole GPUs, at least one."""
    if not has_matching_gpus(capacity, pod):
        return 0
    room: float = capacity.free_gpus // pod.gpus
    if pod.cpu_milli:
        room = min(room, capacity.cpu_milli // pod.cpu_milli)
    if pod.host_memory_mb:
        room = min(room, capacity.host_memory_mb // pod.host_memory_mb)
    return max(0, int(room))
