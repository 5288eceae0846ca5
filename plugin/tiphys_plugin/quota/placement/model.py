"""What is free on a node. Nodes of one kind with the same free are all the same to a request.

A cluster of thousands of nodes has a few dozen different holes, so what is
worked out for a hole is worked out once, and a placement looks at holes and
not at nodes.

What is asked of nodes: so much for one pod, for so many pods at once.

A node with GPUs as somebody declared it: what it has, and where it stands.

The words of the topology are those of Kueue's topology-aware scheduling (block,
rack, host) and of NVIDIA's multi-node NVLink (domain). What is not known is
left empty, and no two nodes are taken to be near each other because of it.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

WHOLE_GPU = 1000
"""A GPU is counted in thousandths, so that a share of one can be asked for."""


@dataclass(frozen=True)
class Ask:
    """What one pod needs on its node.

    The service asks for whole GPUs, with a type or a least memory of each. A
    share of one GPU (``gpu_milli`` below a thousand) and what is needed of the
    host exist to rehearse clusters that share GPUs.
    """

    gpus: int
    gpu_type: str | None = None
    """None: of any type."""
    min_gpu_memory_mb: int | None = None
    gpu_milli: int = WHOLE_GPU
    cpu_milli: int = 0
    host_memory_mb: int = 0

    def __post_init__(self) -> None:
        if self.gpus < 0 or self.cpu_milli < 0 or self.host_memory_mb < 0:
            raise ValueError(f"less than nothing is asked for: {self}")
        if not 0 < self.gpu_milli <= WHOLE_GPU or (self.gpu_milli < WHOLE_GPU and self.gpus != 1):
            raise ValueError(f"a share is a part of one GPU: {self.gpus} × {self.gpu_milli}/{WHOLE_GPU} is not")

    @property
    def is_share(self) -> bool:
        return self.gpu_milli < WHOLE_GPU

    def times(self, pods: int) -> "Ask":
        """As much as so many pods need on one node; shares of GPUs do not add up."""
        if pods == 1:
            return self
        return replace(
            self, gpus=pods * self.gpus, cpu_milli=pods * self.cpu_milli, host_memory_mb=pods * self.host_memory_mb
        )


@dataclass(frozen=True)
class Gang:
    """Pods that start together or not at all; a plain request is a gang of one.

    A member never spans nodes. All members get GPUs of one type. ``tensor_parallel``
    members after one another form a group that stays in one NVLink domain.
    """

    member: Ask
    members: int = 1
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        if self.members < 1 or self.tensor_parallel < 1 or self.members % self.tensor_parallel:
            raise ValueError(f"{self.members} members cannot form groups of {self.tensor_parallel}")
        if self.members > 1 and (self.member.is_share or not self.member.gpus):
            raise ValueError("each member of a gang gets whole GPUs, at least one")

    @property
    def gpus(self) -> int:
        return self.members * self.member.gpus

    @property
    def groups(self) -> int:
        return self.members // self.tensor_parallel


@dataclass(frozen=True)
class Placement:
    """The node of each member, in the order of their ranks."""

    gang: Gang
    nodes: tuple[str, ...]
    device_milli: int = WHOLE_GPU
    """What was free of the GPU that a share is taken from."""


_MOST_GPUS = 1024


class Node(BaseModel):
    """One host. ``memory_mb`` is the memory of each of its GPUs; None if not declared, and then taken as enough.

    ``cordoned`` nodes keep what runs on them and get nothing new. ``cpu_milli``
    and ``host_memory_mb`` limit only requests that say how much they need.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(min_length=1)]
    gpu_type: str = ""
    gpus: Annotated[int, Field(ge=0, le=_MOST_GPUS)]
    memory_mb: PositiveInt | None = None
    block: str = ""
    rack: str = ""
    nvlink_domain: str = ""
    """Nodes whose GPUs reach each other over NVLink; empty: no further than those of one node."""
    labels: dict[str, str] = {}
    """Labels of the node by which flavors are told apart."""
    cordoned: bool = False
    foreign_gpus: NonNegativeInt = 0
    """GPUs that are used by what Tiphys did not start."""
    cpu_milli: NonNegativeInt | None = None
    host_memory_mb: NonNegativeInt | None = None

    @model_validator(mode="after")
    def _gpus_have_a_type(self) -> "Node":
        if self.gpus and not self.gpu_type:
            raise ValueError(f"node {self.name!r} has GPUs of no type; add `gpu_type: NAME`")
        return self


class Hole(NamedTuple):
    """Free GPUs of a node, and of its host what was declared (else infinite)."""

    gpu_type: str
    gpu_memory_mb: float
    whole: int
    """GPUs that nobody uses; negative where more was handed out than there is."""
    parts: tuple[int, ...]
    """What is free of each GPU that is shared, in thousandths, in order."""
    cpu_milli: float
    host_memory_mb: float

    @property
    def milli(self) -> int:
        """All that is free of GPUs, in thousandths."""
        return WHOLE_GPU * self.whole + sum(self.parts)


def empty(node: Node) -> Hole:
    """The hole of a node that nobody uses."""
    return Hole(
        node.gpu_type if node.gpus else "",
        _or_infinite(node.memory_mb),
        node.gpus,
        (),
        _or_infinite(node.cpu_milli),
        _or_infinite(node.host_memory_mb),
    )


def _or_infinite(amount: int | None) -> float:
    return math.inf if amount is None else amount


def suits(hole: Hole, ask: Ask) -> bool:
    """Whether the GPUs are of the wanted kind, free or not; a pod without GPUs may run anywhere."""
    return ask.gpus == 0 or (
        ask.gpu_type in (None, hole.gpu_type) and hole.gpu_memory_mb >= (ask.min_gpu_memory_mb or 0)
    )


def fits(hole: Hole, ask: Ask) -> bool:
    """Whether one pod finds room."""
    if hole.cpu_milli < ask.cpu_milli or hole.host_memory_mb < ask.host_memory_mb or not suits(hole, ask):
        return False
    return bool(devices(hole, ask)) if ask.is_share else hole.whole >= ask.gpus


def devices(hole: Hole, ask: Ask) -> list[int]:
    """What is free of each GPU that a share could come from, the fullest first."""
    shared = sorted({part for part in hole.parts if part >= ask.gpu_milli})
    return [*shared, WHOLE_GPU] if hole.whole > 0 else shared


def less(hole: Hole, ask: Ask, device_milli: int = WHOLE_GPU) -> Hole:
    """The hole after it was asked, whether or not it was large enough; a share comes from a GPU of ``device_milli``."""
    kind, memory, whole, parts, cpu, host_memory = hole
    if ask.is_share:
        left = list(parts)
        if device_milli == WHOLE_GPU:
            whole -= 1
        else:
            left.remove(device_milli)
        if device_milli > ask.gpu_milli:
            left.append(device_milli - ask.gpu_milli)
        parts = tuple(sorted(left))
    else:
        whole -= ask.gpus
    return Hole(kind, memory, whole, parts, cpu - ask.cpu_milli, host_memory - ask.host_memory_mb)


def more(hole: Hole, ask: Ask) -> Hole:
    """The opposite of `less`, for whole GPUs."""
    if ask.is_share:
        raise ValueError("a share cannot be given back: of which GPU it was is not kept")
    kind, memory, whole, parts, cpu, host_memory = hole
    return Hole(kind, memory, whole + ask.gpus, parts, cpu + ask.cpu_milli, host_memory + ask.host_memory_mb)


def members_in(hole: Hole, ask: Ask) -> int:
    """How many pods of ``ask``, which wants whole GPUs and at least one, find room in the hole."""
    if not suits(hole, ask):
        return 0
    room: float = hole.whole // ask.gpus
    if ask.cpu_milli:
        room = min(room, hole.cpu_milli // ask.cpu_milli)
    if ask.host_memory_mb:
        room = min(room, hole.host_memory_mb // ask.host_memory_mb)
    return max(0, int(room))
