"""Finds the nodes of a gang, all or nothing, or explains why there are none.

Placement is a pure function of the free capacity. The gang goes to the smallest
topology domain that holds all of it; of equally small domains to the one with the
least room to spare. Within the domain it uses as few domains of the next level as
possible, and so on down to the hosts. Source of the rule: Kueue, "Topology Aware
Scheduling". `explain_placement_failure` gives the numbers of free GPUs and of
their fragmentation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from typing import get_args

from tiphys.protocol.step_spec import Proximity
from tiphys_plugin.quota.placement.inventory import (
    ClusterFreeCapacity,
    GpuTypeInventory,
    TopologyDomain,
    TopologyLevel,
    domains_within,
)
from tiphys_plugin.quota.placement.model import (
    GangRequest,
    NodeFreeCapacity,
    Placement,
    PodRequest,
    count_fitting_pods,
    has_matching_gpus,
)
from tiphys_plugin.quota.placement.scoring import PlacementPolicy


def spread_over_topology(
    free_capacity: ClusterFreeCapacity, gang: GangRequest, policy: PlacementPolicy
) -> tuple[int, ...] | None:
    """Node number of each member, in topology order; None if the gang does not fit."""
    by_type = free_capacity.inventory.by_gpu_type
    inventories = [inventory for gpu_type, inventory in by_type.items() if gang.pod.accepts_type(gpu_type)]
    candidates = [
        GangCapacity(free_capacity, inventory, gang)
        for inventory in inventories
        if count_fitting_pods_of_type(free_capacity, inventory, gang.pod) >= gang.members
    ]
    fitting = [candidate for candidate in candidates if candidate.placeable_groups >= gang.group_count]
    if not fitting:
        return None
    return tuple(sorted(min(fitting, key=lambda draft: draft.sort_key).assign_nodes(policy)))


def count_fitting_pods_of_type(
    free_capacity: ClusterFreeCapacity, type_inventory: GpuTypeInventory, pod: PodRequest
) -> int:
    """Number of pods that fit on the nodes of ``type_inventory``, regardless of topology."""
    return sum(
        count_fitting_pods(capacity, pod) * len(free_capacity.nodes_with_capacity(capacity))
        for capacity in free_capacity.distinct_capacities(type_inventory.gpu_type)
    )


class GangCapacity:
    """Members of a gang that fit on each node of a GPU type, and groups of members that fit in each domain."""

    def __init__(self, free_capacity: ClusterFreeCapacity, type_inventory: GpuTypeInventory, gang: GangRequest) -> None:
        self._free_capacity = free_capacity
        self._type_inventory = type_inventory
        self._gang = gang
        self._start = type_inventory.all_nodes.start
        self._members_by_node = self._count_members()
        self._prefix_sums = list(accumulate(self._members_by_node, initial=0))
        if gang.tensor_parallel > 1:
            self._prefix_sums = list(accumulate(self._count_groups(), initial=0))

    @property
    def placeable_groups(self) -> int:
        """Most groups that can start together: on all nodes, or in one domain that the gang must not leave."""
        if self._gang.within is None:
            return self._prefix_sums[-1]
        domains = (domain for level in self._allowed_levels for domain in level if domain.is_declared)
        return max(map(self._groups_in, domains), default=0)

    @property
    def _allowed_levels(self) -> Sequence[TopologyLevel]:
        """Levels of the domains that may hold the gang, the smallest first."""
        levels = self._type_inventory.topology_levels
        within = self._gang.within
        return levels if within is None else levels[: get_args(Proximity).index(within) + 1]

    @property
    def sort_key(self) -> tuple[int, float, int, str]:
        """Order of GPU types for the gang: smallest topology level, least GPU memory, least room."""
        level, home = self._smallest_domain()
        return level, self._type_inventory.memory_mb, self._groups_in(home), self._type_inventory.gpu_type

    def assign_nodes(self, policy: PlacementPolicy) -> Iterator[int]:
        """Node number of each member; the gang must fit."""
        level, home = self._smallest_domain()
        return self._fill_domain(level, home, self._gang.group_count, policy)

    def _count_members(self) -> list[int]:
        members_by_node = [0] * (self._type_inventory.all_nodes.stop - self._start)
        for capacity in self._free_capacity.distinct_capacities(self._type_inventory.gpu_type):
            if members := count_fitting_pods(capacity, self._gang.pod):
                for number in self._free_capacity.nodes_with_capacity(capacity):
                    members_by_node[number - self._start] = members
        return members_by_node

    def _count_groups(self) -> list[int]:
        """Groups in each NVLink domain, counted at its first node."""
        groups_by_node = [0] * len(self._members_by_node)
        for domain in self._type_inventory.nvlink_level:
            groups_by_node[domain.start - self._start] = self._groups_in(domain) // self._gang.tensor_parallel
        return groups_by_node

    def _groups_in(self, domain: TopologyDomain) -> int:
        return self._prefix_sums[domain.stop - self._start] - self._prefix_sums[domain.start - self._start]

    def _smallest_domain(self) -> tuple[int, TopologyDomain]:
        """The smallest domain that holds the gang, and its level; the last level is all nodes of the GPU type."""
        for level, topology_level in enumerate(self._allowed_levels):
            declared = [(self._groups_in(domain), domain) for domain in topology_level if domain.is_declared]
            if large_enough := [pair for pair in declared if pair[0] >= self._gang.group_count]:
                return level, min(large_enough)[1]
        return len(self._type_inventory.topology_levels), self._type_inventory.all_nodes

    def _fill_domain(self, level: int, home: TopologyDomain, groups: int, policy: PlacementPolicy) -> Iterator[int]:
        if level > 0:
            domains = domains_within(self._type_inventory.topology_levels[level - 1], home)
            for domain, part in self._fill_fewest_domains(domains, groups):
                yield from self._fill_domain(level - 1, domain, part, policy)
        elif self._gang.tensor_parallel > 1:
            nvlink_domains = domains_within(self._type_inventory.nvlink_level, home)
            for domain, part in self._fill_fewest_domains(nvlink_domains, groups):
                yield from self._fill_hosts(domain, part * self._gang.tensor_parallel, policy)
        else:
            yield from self._fill_hosts(home, groups, policy)

    def _fill_fewest_domains(
        self, domains: Sequence[TopologyDomain], groups: int
    ) -> Iterator[tuple[TopologyDomain, int]]:
        """Domains and the groups in each: the largest domains first, the rest in the one with the least room."""
        by_room = [(room, domain) for domain in domains if (room := self._groups_in(domain))]
        by_room.sort(key=lambda pair: (-pair[0], pair[1]))
        for index, (room, domain) in enumerate(by_room):
            if room >= groups:
                yield min(pair for pair in by_room[index:] if pair[0] >= groups)[1], groups
                return
            yield domain, room
            groups -= room

    def _fill_hosts(self, domain: TopologyDomain, members: int, policy: PlacementPolicy) -> Iterator[int]:
        """Node numbers of the members: the largest hosts first, the rest on a host that the policy chooses."""
        numbers = [number for number in range(domain.start, domain.stop) if self._members_by_node[number - self._start]]
        numbers.sort(key=lambda number: -self._members_by_node[number - self._start])
        for position, number in enumerate(numbers):
            if (room := self._members_by_node[number - self._start]) < members:
                yield from [number] * room
                members -= room
                continue
            capacities = self._free_capacity.node_capacities
            node_by_capacity = {capacities[node]: node for node in reversed(numbers[position:])}
            choice = policy.choose_capacity(node_by_capacity, self._gang.pod.multiplied_by(members))
            assert choice is not None  # the host ``number`` has room for all remaining members
            yield from [node_by_capacity[choice.capacity]] * members
            return


class UnschedulableReason(StrEnum):
    """Why a gang cannot be placed. The values are those of `tiphys_plugin.quota.lease.AdmissionReason`."""

    NO_MATCHING_GPU_TYPE = "NoMatchingGpuType"
    GPU_MEMORY_TOO_SMALL = "GpuMemoryTooSmall"
    WAITING_FOR_INVENTORY = "WaitingForInventory"
    GANG_FRAGMENTED = "GangFragmented"
    TOPOLOGY_PLACEMENT_FAILED = "TopologyPlacementFailed"


@dataclass(frozen=True)
class PlacementFailure:
    """The gang has no placement. The numbers are those of the GPU type that comes nearest to fitting it."""

    reason: UnschedulableReason
    message: str
    gpu_type: str = ""
    free_gpus: int = 0
    """Free GPUs on schedulable nodes."""
    largest_node_gpus: int = 0
    """Most free GPUs on one node."""
    placeable_members: int = 0
    """Members that fit, regardless of topology."""
    placeable_groups: int = 0
    """Groups that fit, each within one NVLink domain."""


def explain_placement_failure(free_capacity: ClusterFreeCapacity, gang: GangRequest) -> PlacementFailure:
    """Explain why ``gang``, for which `find_placement` finds no nodes, has no placement."""
    pod = gang.pod
    if pod.gpus == 0:
        return PlacementFailure(UnschedulableReason.WAITING_FOR_INVENTORY, "no node has the CPUs and the memory free")
    if (mismatch := _find_mismatch(free_capacity, gang)) is not None:
        return mismatch
    if pod.is_fractional:
        message = f"no GPU{_gpu_type_text(pod)} has {pod.gpu_milli}/1000 free{_host_resources_text(gang)}"
        return PlacementFailure(UnschedulableReason.GANG_FRAGMENTED, message)
    return max(
        (_explain_for_type(free_capacity, gang, inventory) for inventory in _matching_inventories(free_capacity, gang)),
        key=lambda failure: (failure.placeable_members, failure.free_gpus),
    )


def _find_mismatch(free_capacity: ClusterFreeCapacity, gang: GangRequest) -> PlacementFailure | None:
    pod = gang.pod
    inventories = free_capacity.inventory.by_gpu_type
    if not inventories and pod.gpu_type is None:
        return PlacementFailure(UnschedulableReason.NO_MATCHING_GPU_TYPE, "no node has a GPU")
    if not any(map(pod.accepts_type, inventories)):
        gpu_types, wanted = ", ".join(sorted(inventories)) or "no GPU", pod.gpu_type or " or ".join(pod.gpu_types)
        return PlacementFailure(
            UnschedulableReason.NO_MATCHING_GPU_TYPE, f"the nodes have no {wanted}; they have: {gpu_types}"
        )
    if not _matching_inventories(free_capacity, gang):
        message = f"no GPU{_gpu_type_text(pod)} has {pod.min_gpu_memory_mb} MB"
        return PlacementFailure(
            UnschedulableReason.GPU_MEMORY_TOO_SMALL, f"{message}; ask for less memory or another type"
        )
    return None


def _matching_inventories(free_capacity: ClusterFreeCapacity, gang: GangRequest) -> list[GpuTypeInventory]:
    """Inventories of the GPU types that the gang can use, free or not."""
    memory_mb, inventories = gang.pod.min_gpu_memory_mb or 0, free_capacity.inventory.by_gpu_type.values()
    return [
        inventory
        for inventory in inventories
        if gang.pod.accepts_type(inventory.gpu_type) and inventory.memory_mb >= memory_mb
    ]


def _explain_for_type(
    free_capacity: ClusterFreeCapacity, gang: GangRequest, type_inventory: GpuTypeInventory
) -> PlacementFailure:
    nodes_by_capacity = {
        capacity: len(free_capacity.nodes_with_capacity(capacity))
        for capacity in free_capacity.distinct_capacities(type_inventory.gpu_type)
        if _has_usable_gpus(capacity, gang)
    }
    free_gpus = sum(max(0, capacity.free_gpus) * nodes for capacity, nodes in nodes_by_capacity.items())
    largest = max((max(0, capacity.free_gpus) for capacity in nodes_by_capacity), default=0)
    members = count_fitting_pods_of_type(free_capacity, type_inventory, gang.pod)
    groups = 0
    gpus_per_member = gang.pod.gpus
    if free_gpus < gang.gpus:
        reason, shortage = UnschedulableReason.WAITING_FOR_INVENTORY, f"and {gang.gpus} {_is_or_are(gang.gpus)} needed"
    elif members < gang.members:
        fitting = f"; {members} of {gang.members} pods find room" if gang.members > 1 else ""
        reason, shortage = (
            UnschedulableReason.GANG_FRAGMENTED,
            f"but at most {largest} on one node, and {gpus_per_member} are needed on one{fitting}",
        )
    else:
        groups = GangCapacity(free_capacity, type_inventory, replace(gang, within=None)).placeable_groups
        reason, shortage = UnschedulableReason.TOPOLOGY_PLACEMENT_FAILED, _explain_topology(gang, groups)
        if groups >= gang.group_count:
            groups = GangCapacity(free_capacity, type_inventory, gang).placeable_groups
            shortage = _explain_proximity(type_inventory, gang, groups)
    available = f"{free_gpus} {type_inventory.gpu_type} {_is_or_are(free_gpus)} free{_host_resources_text(gang)}"
    return PlacementFailure(
        reason,
        f"{available}, {shortage}{_cordoned_text(free_capacity, type_inventory)}",
        type_inventory.gpu_type,
        free_gpus,
        largest,
        members,
        groups,
    )


def _explain_topology(gang: GangRequest, groups: int) -> str:
    group_gpus = gang.tensor_parallel * gang.pod.gpus
    return f"but NVLink domains hold {groups} of the {gang.group_count} groups of {group_gpus} that must not leave one"


_DOMAIN_NAMES: dict[Proximity | None, str] = {"nvlink": "NVLink domain", "rack": "rack", "block": "block"}


def _explain_proximity(type_inventory: GpuTypeInventory, gang: GangRequest, groups: int) -> str:
    """Why the gang does not fit where all of it must be; ``groups`` fit in the domain with the most room."""
    name = _DOMAIN_NAMES[gang.within]
    levels = type_inventory.topology_levels[: get_args(Proximity).index(gang.within) + 1]
    if not any(domain.is_declared for level in levels for domain in level):
        return f"but no node of the type names its {name}, and all {gang.members} pods must share one"
    fitting = groups * gang.tensor_parallel
    return f"but one {name} has room for at most {fitting} of the {gang.members} pods that must share one"


def _has_usable_gpus(capacity: NodeFreeCapacity, gang: GangRequest) -> bool:
    """Whether a member could use free GPUs of the node: they match, and CPUs and memory suffice."""
    pod = gang.pod
    return (
        has_matching_gpus(capacity, pod)
        and capacity.cpu_milli >= pod.cpu_milli
        and capacity.host_memory_mb >= pod.host_memory_mb
    )


def _cordoned_text(free_capacity: ClusterFreeCapacity, type_inventory: GpuTypeInventory) -> str:
    """Text with the free GPUs of cordoned nodes; empty if there are none."""
    all_nodes = type_inventory.all_nodes
    numbers = (number for number in free_capacity.unschedulable if all_nodes.start <= number < all_nodes.stop)
    gpus = sum(max(0, free_capacity.node_capacities[number].free_gpus) for number in numbers)
    return f"; {gpus} more {_is_or_are(gpus)} free on cordoned nodes" if gpus else ""


def _host_resources_text(gang: GangRequest) -> str:
    """Text that free GPUs count only with enough CPUs and memory, for a gang that requests these."""
    needs_host = gang.pod.cpu_milli or gang.pod.host_memory_mb
    return " beside enough CPUs and memory" if needs_host else ""


def _gpu_type_text(pod: PodRequest) -> str:
    wanted = pod.gpu_type or " or ".join(pod.gpu_types)
    return f" of type {wanted}" if wanted else ""


def _is_or_are(gpus: int) -> str:
    return "is" if gpus == 1 else "are"


def find_placement(
    free_capacity: ClusterFreeCapacity, gang: GangRequest, policy: PlacementPolicy
) -> Placement | PlacementFailure:
    """Find a node for each member, or explain why there is none. Does not change ``free_capacity``.

    If nodes have room for the whole gang, the policy chooses one of them. Otherwise the members go to nodes that are
    near each other. Nodes that the gang avoids are used only if it does not fit on the others.
    """
    if gang.avoided_nodes:
        elsewhere = _find_placement(free_capacity.without_nodes(gang.avoided_nodes), gang, policy)
        if isinstance(elsewhere, Placement):
            return elsewhere
    return _find_placement(free_capacity, gang, policy)


def find_placement_by_preference(
    free_capacity: ClusterFreeCapacity, gang: GangRequest, policy: PlacementPolicy
) -> Placement | PlacementFailure:
    """As `find_placement`, for a gang with ``gpu_types``: on the first of its types that has room.

    Another of them is taken if the gang fits on the first one only with nodes that it avoids.
    """
    of_one_type = (replace(gang.pod, gpu_type=gpu_type, gpu_types=()) for gpu_type in gang.pod.gpu_types)
    found = [find_placement(free_capacity, replace(gang, pod=pod), policy) for pod in of_one_type]
    placements = [outcome for outcome in found if isinstance(outcome, Placement)]
    if not placements:
        return find_placement(free_capacity, gang, policy)
    return min(placements, key=lambda placement: not set(gang.avoided_nodes).isdisjoint(placement.nodes))


def has_placement(free_capacity: ClusterFreeCapacity, gang: GangRequest, policy: PlacementPolicy) -> bool:
    """Whether `find_placement` finds nodes; cheaper if it does not, since nothing is explained."""
    return _choose_nodes(free_capacity, gang, policy) is not None


def _find_placement(
    free_capacity: ClusterFreeCapacity, gang: GangRequest, policy: PlacementPolicy
) -> Placement | PlacementFailure:
    return _choose_nodes(free_capacity, gang, policy) or explain_placement_failure(free_capacity, gang)


def _choose_nodes(free_capacity: ClusterFreeCapacity, gang: GangRequest, policy: PlacementPolicy) -> Placement | None:
    nodes = free_capacity.inventory.nodes
    choice = policy.choose_capacity(
        free_capacity.distinct_capacities(gang.pod.gpu_type if gang.pod.gpus else None),
        gang.pod.multiplied_by(gang.members),
    )
    if choice is not None:
        name = nodes[free_capacity.nodes_with_capacity(choice.capacity)[0]].name
        return Placement(gang, (name,) * gang.members, choice.device_free_milli)
    if gang.members > 1 and (numbers := spread_over_topology(free_capacity, gang, policy)) is not None:
        return Placement(gang, tuple(nodes[number].name for number in numbers))
    return None
