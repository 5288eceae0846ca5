"""Why a request finds no place, with numbers: what is free, and how it is scattered."""

from dataclasses import dataclass
from enum import StrEnum

from tiphys_plugin.placement.free import Free
from tiphys_plugin.placement.gangs import Room, members_in_all
from tiphys_plugin.placement.hole import Hole, suits
from tiphys_plugin.placement.inventory import Fleet
from tiphys_plugin.placement.request import Gang


class Shortage(StrEnum):
    """The words are those that a deferred request is told."""

    NO_MATCHING_GPU_TYPE = "NoMatchingGpuType"
    GPU_MEMORY_TOO_SMALL = "GpuMemoryTooSmall"
    WAITING_FOR_INVENTORY = "WaitingForInventory"
    GANG_FRAGMENTED = "GangFragmented"
    TOPOLOGY_PLACEMENT_FAILED = "TopologyPlacementFailed"


@dataclass(frozen=True)
class Unplaceable:
    """No place now. The numbers are of the GPU type that comes nearest."""

    reason: Shortage
    message: str
    gpu_type: str = ""
    free: int = 0
    """GPUs that nobody uses, on nodes that offer them."""
    largest_node: int = 0
    """The most of them on one node."""
    room: int = 0
    """Members that would find room, each by itself."""
    groups: int = 0
    """Groups that would find room, each in its NVLink domain."""


def shortage(free: Free, gang: Gang) -> Unplaceable:
    """What ``gang`` lacks; it has no place."""
    ask = gang.member
    if ask.gpus == 0:
        return Unplaceable(Shortage.WAITING_FOR_INVENTORY, "no node has the CPUs and the memory free")
    if (never := _unsuitable(free, gang)) is not None:
        return never
    if ask.is_share:
        what = f"no GPU{_of(ask.gpu_type)} has {ask.gpu_milli}/1000 free{_host(gang)}"
        return Unplaceable(Shortage.GANG_FRAGMENTED, what)
    return max((_of_fleet(free, gang, fleet) for fleet in _fleets(free, gang)), key=lambda it: (it.room, it.free))


def _unsuitable(free: Free, gang: Gang) -> Unplaceable | None:
    ask = gang.member
    fleets = free.inventory.fleets
    if ask.gpu_type not in (None, *fleets):
        known = ", ".join(sorted(fleets)) or "no GPU"
        return Unplaceable(Shortage.NO_MATCHING_GPU_TYPE, f"the nodes have no {ask.gpu_type}; they have: {known}")
    if not fleets:
        return Unplaceable(Shortage.NO_MATCHING_GPU_TYPE, "no node has a GPU")
    if not _fleets(free, gang):
        why = f"no GPU{_of(ask.gpu_type)} has {ask.min_gpu_memory_mb} MB"
        return Unplaceable(Shortage.GPU_MEMORY_TOO_SMALL, f"{why}; ask for less memory or another type")
    return None


def _fleets(free: Free, gang: Gang) -> list[Fleet]:
    """Nodes of one type each that have what is wanted, free or not."""
    kind, memory = gang.member.gpu_type, gang.member.min_gpu_memory_mb or 0
    fleets = free.inventory.fleets.values()
    return [fleet for fleet in fleets if kind in (None, fleet.gpu_type) and fleet.memory_mb >= memory]


def _of_fleet(free: Free, gang: Gang, fleet: Fleet) -> Unplaceable:
    offered = {hole: len(free.nodes_with(hole)) for hole in free.offered(fleet.gpu_type) if _serves(hole, gang)}
    total = sum(max(0, hole.whole) * nodes for hole, nodes in offered.items())
    largest = max((max(0, hole.whole) for hole in offered), default=0)
    room = members_in_all(free, fleet, gang.member)
    groups = 0
    each = gang.member.gpus
    if total < gang.gpus:
        reason, but = Shortage.WAITING_FOR_INVENTORY, f"and {gang.gpus} {_are(gang.gpus)} needed"
    elif room < gang.members:
        pods = f"; {room} of {gang.members} pods find room" if gang.members > 1 else ""
        reason, but = Shortage.GANG_FRAGMENTED, f"but at most {largest} on one node, and {each} are needed on one{pods}"
    else:
        groups = Room(free, fleet, gang).groups
        found = f"{groups} of the {gang.groups} groups of {gang.tensor_parallel * each} that must not leave one"
        reason, but = Shortage.TOPOLOGY_PLACEMENT_FAILED, f"but NVLink domains hold {found}"
    are = f"{total} {fleet.gpu_type} {_are(total)} free{_host(gang)}"
    return Unplaceable(reason, f"{are}, {but}{_withheld(free, fleet)}", fleet.gpu_type, total, largest, room, groups)


def _serves(hole: Hole, gang: Gang) -> bool:
    """Whether its GPUs are of use to a member, as far as some are free."""
    ask = gang.member
    return suits(hole, ask) and hole.cpu_milli >= ask.cpu_milli and hole.host_memory_mb >= ask.host_memory_mb


def _withheld(free: Free, fleet: Fleet) -> str:
    """What cordoned nodes would add."""
    whole = fleet.whole
    numbers = (number for number in free.withheld if whole.start <= number < whole.stop)
    gpus = sum(max(0, free.holes[number].whole) for number in numbers)
    return f"; {gpus} more {_are(gpus)} free on cordoned nodes" if gpus else ""


def _host(gang: Gang) -> str:
    """A reminder that GPUs without the CPUs and the memory for them do not count."""
    needs_host = gang.member.cpu_milli or gang.member.host_memory_mb
    return " beside enough CPUs and memory" if needs_host else ""


def _of(gpu_type: str | None) -> str:
    return f" of type {gpu_type}" if gpu_type else ""


def _are(gpus: int) -> str:
    return "is" if gpus == 1 else "are"
