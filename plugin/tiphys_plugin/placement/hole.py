"""What is free on a node. Nodes of one kind with the same free are all the same to a request.

A cluster of thousands of nodes has a few dozen different holes, so what is
worked out for a hole is worked out once, and a placement looks at holes and
not at nodes.
"""

import math
from typing import NamedTuple

from tiphys_plugin.placement.node import Node
from tiphys_plugin.placement.request import WHOLE_GPU, Ask


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
