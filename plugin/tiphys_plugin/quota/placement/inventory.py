"""The nodes of a cluster, sorted by GPU type and topology, and their free capacity at one instant.

In this order NVLink domains, racks and blocks are ranges of node numbers, so prefix
sums over the list give the room in each domain. `ClusterFreeCapacity` groups the
nodes by equal free capacity.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from typing import NamedTuple

from tiphys_plugin.quota.placement.model import (
    GpuNode,
    NodeFreeCapacity,
    Placement,
    add_back_pod,
    empty_node_capacity,
    subtract_pod,
)


class TopologyDomain(NamedTuple):
    """Nodes from number ``start`` to before ``stop``. ``is_declared`` if the nodes name this domain."""

    start: int
    stop: int
    is_declared: bool = True


TopologyLevel = tuple[TopologyDomain, ...]
"""The domains of one level of the topology, side by side: NVLink domains, racks or blocks."""


def domains_within(level: TopologyLevel, domain: TopologyDomain) -> TopologyLevel:
    """The domains of a level within a domain of a higher level."""
    first, beyond = (bisect_left(level, (edge,)) for edge in (domain.start, domain.stop))
    return level[first:beyond]


@dataclass(frozen=True)
class GpuTypeInventory:
    """The nodes of one GPU type."""

    gpu_type: str
    memory_mb: float
    """Largest memory of a GPU of these nodes; infinite if a node does not declare it."""
    all_nodes: TopologyDomain
    nvlink_level: TopologyLevel
    """NVLink domains; a node without a declared domain is a domain by itself."""
    topology_levels: tuple[TopologyLevel, ...]
    """From the smallest domains to the largest."""


class NodeInventory:
    """The nodes of a cluster, immutable; `ClusterFreeCapacity` has their free capacity.

    Raises:
        ValueError: two nodes have the same name.
    """

    def __init__(self, nodes: Iterable[GpuNode]) -> None:
        self.nodes = tuple(sorted(nodes, key=lambda node: (_gpu_type_of(node), *_topology_path(node), node.name)))
        self.node_numbers = {node.name: number for number, node in enumerate(self.nodes)}
        if len(self.node_numbers) < len(self.nodes):
            names = sorted(node.name for node in self.nodes)
            duplicate = next(name for name, following in pairwise(names) if name == following)
            raise ValueError(f"node {duplicate!r} is declared twice")
        self.cordoned = frozenset(number for number, node in enumerate(self.nodes) if node.cordoned)
        all_nodes = TopologyDomain(0, len(self.nodes))
        inventories = (
            self._build_type_inventory(domain)
            for domain in self._find_domains(all_nodes, lambda node: (_gpu_type_of(node),))
        )
        self.by_gpu_type = {inventory.gpu_type: inventory for inventory in inventories if inventory.gpu_type}

    def _build_type_inventory(self, whole: TopologyDomain) -> GpuTypeInventory:
        levels = (
            self._find_domains(whole, _topology_path),
            self._find_domains(whole, lambda node: _topology_path(node)[:2]),
            self._find_domains(whole, lambda node: _topology_path(node)[:1]),
        )
        members = self.nodes[whole.start : whole.stop]
        return GpuTypeInventory(
            _gpu_type_of(members[0]),
            max(math.inf if node.memory_mb is None else node.memory_mb for node in members),
            whole,
            self._find_domains(whole, lambda node: (*_topology_path(node), "" if node.nvlink_domain else node.name)),
            levels,
        )

    def _find_domains(self, within: TopologyDomain, key: Callable[[GpuNode], tuple[str, ...]]) -> TopologyLevel:
        """Ranges of nodes with the same key; the last part of the key is the name of the domain."""
        domains: list[TopologyDomain] = []
        start = within.start
        for value, nodes in groupby(self.nodes[within.start : within.stop], key):
            stop = start + sum(1 for _ in nodes)
            domains.append(TopologyDomain(start, stop, value[-1] != ""))
            start = stop
        return tuple(domains)


def _gpu_type_of(node: GpuNode) -> str:
    """GPU type of a node; empty for a node without GPUs."""
    return node.gpu_type if node.gpus else ""


def _topology_path(node: GpuNode) -> tuple[str, str, str]:
    """Block, rack and NVLink domain of a node. A name is unique only within the domain above it."""
    return node.block, node.rack, node.nvlink_domain


class ClusterFreeCapacity:
    """Free capacities of the nodes, and for each distinct free capacity the nodes that have it.

    Leases on cordoned nodes are counted, but these nodes offer nothing, and GPUs of
    foreign pods are not free. ``include_cordoned`` ignores cordons and foreign pods,
    to find what the empty cluster could hold. Placements on nodes outside the
    inventory are ignored, because their GPUs are not part of it any more.
    """

    def __init__(self, inventory: NodeInventory, *, include_cordoned: bool = False) -> None:
        self.inventory = inventory
        self.unschedulable = frozenset() if include_cordoned else inventory.cordoned
        """Numbers of the nodes that offer no GPUs."""
        self.node_capacities = [
            empty_node_capacity(node) if include_cordoned else _schedulable_capacity(node) for node in inventory.nodes
        ]
        """By node number, cordoned nodes included."""
        self._nodes_by_capacity: dict[str, dict[NodeFreeCapacity, list[int]]] = {}
        for number, capacity in enumerate(self.node_capacities):
            if number not in self.unschedulable:
                self._nodes_by_capacity.setdefault(capacity.gpu_type, {}).setdefault(capacity, []).append(number)

    def distinct_capacities(self, gpu_type: str | None = None) -> Iterable[NodeFreeCapacity]:
        """Distinct free capacities of the nodes with a GPU type; None: of all nodes."""
        if gpu_type is not None:
            return self._nodes_by_capacity.get(gpu_type, {}).keys()
        return chain.from_iterable(self._nodes_by_capacity.values())

    def nodes_with_capacity(self, capacity: NodeFreeCapacity) -> Sequence[int]:
        """Numbers of the nodes with this free capacity, in rising order."""
        return self._nodes_by_capacity[capacity.gpu_type][capacity]

    def free_gpus_on(self, node: str) -> int:
        """Free whole GPUs of a node; 0 for one that is not in the inventory."""
        number = self.inventory.node_numbers.get(node)
        return 0 if number is None else self.node_capacities[number].free_gpus

    def copy(self) -> "ClusterFreeCapacity":
        """An independent copy; takes some microseconds per thousand nodes."""
        twin = ClusterFreeCapacity.__new__(ClusterFreeCapacity)
        twin.inventory, twin.unschedulable, twin.node_capacities = (
            self.inventory,
            self.unschedulable,
            self.node_capacities.copy(),
        )
        twin._nodes_by_capacity = {
            gpu_type: {capacity: numbers.copy() for capacity, numbers in nodes_by_capacity.items()}
            for gpu_type, nodes_by_capacity in self._nodes_by_capacity.items()
        }
        return twin

    def without_nodes(self, names: Iterable[str]) -> "ClusterFreeCapacity":
        """A copy in which these nodes offer no GPUs, as if they were cordoned."""
        twin = self.copy()
        numbers = {self.inventory.node_numbers[name] for name in names if name in self.inventory.node_numbers}
        for number in numbers - self.unschedulable:
            twin._withdraw(number)
        twin.unschedulable = self.unschedulable | numbers
        return twin

    def allocate(self, placement: Placement) -> None:
        """Count the GPUs of ``placement`` as used, even if they are not free."""
        for number in self._numbers(placement):
            self._set_capacity(
                number, subtract_pod(self.node_capacities[number], placement.gang.pod, placement.device_free_milli)
            )

    def release(self, placement: Placement) -> None:
        """Undo `allocate`.

        Raises:
            ValueError: the placement is a share of a GPU, whose device is not recorded.
        """
        for number in self._numbers(placement):
            self._set_capacity(number, add_back_pod(self.node_capacities[number], placement.gang.pod))

    def _numbers(self, placement: Placement) -> Iterator[int]:
        node_numbers = self.inventory.node_numbers
        return (node_numbers[name] for name in placement.nodes if name in node_numbers)

    def _set_capacity(self, number: int, capacity: NodeFreeCapacity) -> None:
        before, self.node_capacities[number] = self.node_capacities[number], capacity
        if number in self.unschedulable:
            return
        self._withdraw(number, before)
        insort(self._nodes_by_capacity[capacity.gpu_type].setdefault(capacity, []), number)

    def _withdraw(self, number: int, capacity: NodeFreeCapacity | None = None) -> None:
        """Take a node from those with this free capacity; None: with its present one."""
        capacity = capacity or self.node_capacities[number]
        nodes_by_capacity = self._nodes_by_capacity[capacity.gpu_type]
        numbers = nodes_by_capacity[capacity]
        del numbers[bisect_left(numbers, number)]
        if not numbers:
            del nodes_by_capacity[capacity]


def _schedulable_capacity(node: GpuNode) -> NodeFreeCapacity:
    """Free capacity of a node without leases: all GPUs but those of foreign pods."""
    capacity = empty_node_capacity(node)
    return capacity._replace(free_gpus=capacity.free_gpus - node.foreign_gpus) if node.foreign_gpus else capacity
