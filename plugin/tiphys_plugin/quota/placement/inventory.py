"""All nodes, in the order of GPU type and topology, so that what is near is a range of numbers.

NVLink domains, racks and blocks are then ranges of the list, and how much fits
into each of them follows from running sums over it.

What is free of an inventory at one instant, now or later.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from typing import NamedTuple

from tiphys_plugin.quota.placement.model import Hole, Node, Placement, empty, less, more


class Domain(NamedTuple):
    """Nodes from number ``start`` to before ``stop``. ``known`` if they were declared to be in one domain."""

    start: int
    stop: int
    known: bool = True


@dataclass(frozen=True)
class Level:
    """The domains of one level of the topology, side by side: NVLink domains, racks or blocks."""

    domains: tuple[Domain, ...]

    def within(self, home: Domain) -> Sequence[Domain]:
        """Those of a domain of a higher level."""
        first, beyond = (bisect_left(self.domains, (edge,)) for edge in (home.start, home.stop))
        return self.domains[first:beyond]


@dataclass(frozen=True)
class Fleet:
    """The nodes of one GPU type."""

    gpu_type: str
    memory_mb: float
    """The largest memory of a GPU among them; infinite where one is not declared."""
    whole: Domain
    links: Level
    """NVLink domains; a node of which none is known is one by itself."""
    levels: tuple[Level, ...]
    """From the smallest domains to the largest."""


class Inventory:
    """The nodes of a cluster, which do not change. What is free of them is a `Free`.

    Raises:
        ValueError: two nodes have the same name.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = tuple(sorted(nodes, key=lambda node: (_type(node), *_path(node), node.name)))
        self.number = {node.name: number for number, node in enumerate(self.nodes)}
        if len(self.number) < len(self.nodes):
            names = sorted(node.name for node in self.nodes)
            twice = next(name for name, following in pairwise(names) if name == following)
            raise ValueError(f"node {twice!r} is declared twice")
        self.cordoned = frozenset(number for number, node in enumerate(self.nodes) if node.cordoned)
        everything = Domain(0, len(self.nodes))
        fleets = (self._fleet(one) for one in self._domains(everything, lambda node: (_type(node),)))
        self.fleets = {fleet.gpu_type: fleet for fleet in fleets if fleet.gpu_type}

    def _fleet(self, whole: Domain) -> Fleet:
        levels = (
            Level(self._domains(whole, _path)),
            Level(self._domains(whole, lambda node: _path(node)[:2])),
            Level(self._domains(whole, lambda node: _path(node)[:1])),
        )
        members = self.nodes[whole.start : whole.stop]
        return Fleet(
            _type(members[0]),
            max(math.inf if node.memory_mb is None else node.memory_mb for node in members),
            whole,
            Level(self._domains(whole, lambda node: (*_path(node), "" if node.nvlink_domain else node.name))),
            levels,
        )

    def _domains(self, within: Domain, key: Callable[[Node], tuple[str, ...]]) -> tuple[Domain, ...]:
        """Neighbours that have the same key; the last part of it is the name of their domain."""
        found: list[Domain] = []
        start = within.start
        for value, nodes in groupby(self.nodes[within.start : within.stop], key):
            stop = start + sum(1 for _ in nodes)
            found.append(Domain(start, stop, value[-1] != ""))
            start = stop
        return tuple(found)


def _type(node: Node) -> str:
    """Nodes without GPUs are of no type."""
    return node.gpu_type if node.gpus else ""


def _path(node: Node) -> tuple[str, str, str]:
    """Where it stands, from the largest domain to the smallest. A name counts within the domain above it."""
    return node.block, node.rack, node.nvlink_domain


class Free:
    """Holes, and the nodes that have them.

    Nodes that are cordoned keep their books and offer nothing, and GPUs that
    others use are not free, unless ``cordoned_too`` asks what the cluster could
    do with all its nodes to itself. Nodes that are not of the inventory are
    passed over: what ran there is no longer of its GPUs.
    """

    def __init__(self, inventory: Inventory, *, cordoned_too: bool = False) -> None:
        self.inventory = inventory
        self.withheld = frozenset() if cordoned_too else inventory.cordoned
        """Numbers of the nodes that offer nothing."""
        self.holes = [empty(node) if cordoned_too else _open(node) for node in inventory.nodes]
        """By number of the node, those of cordoned nodes included."""
        self._at: dict[str, dict[Hole, list[int]]] = {}
        for number, hole in enumerate(self.holes):
            if number not in self.withheld:
                self._at.setdefault(hole.gpu_type, {}).setdefault(hole, []).append(number)

    def offered(self, gpu_type: str | None = None) -> Iterable[Hole]:
        """The different holes of nodes with GPUs of a type; those of all nodes if it does not matter."""
        if gpu_type is not None:
            return self._at.get(gpu_type, {}).keys()
        return chain.from_iterable(self._at.values())

    def nodes_with(self, hole: Hole) -> Sequence[int]:
        """Numbers of the nodes that offer ``hole``, from the lowest."""
        return self._at[hole.gpu_type][hole]

    def copy(self) -> "Free":
        """The same, to be changed without changing this; it costs some microseconds for each thousand nodes."""
        twin = Free.__new__(Free)
        twin.inventory, twin.withheld, twin.holes = self.inventory, self.withheld, self.holes.copy()
        twin._at = {kind: {hole: at.copy() for hole, at in of_kind.items()} for kind, of_kind in self._at.items()}
        return twin

    def take(self, placement: Placement) -> None:
        """Count its GPUs as used, whether or not they were free."""
        for number in self._numbers(placement):
            self._change(number, less(self.holes[number], placement.gang.member, placement.device_milli))

    def give_back(self, placement: Placement) -> None:
        """The opposite of `take`.

        Raises:
            ValueError: it holds a share of a GPU; of which one is not kept.
        """
        for number in self._numbers(placement):
            self._change(number, more(self.holes[number], placement.gang.member))

    def _numbers(self, placement: Placement) -> Iterator[int]:
        known = self.inventory.number
        return (known[name] for name in placement.nodes if name in known)

    def _change(self, number: int, hole: Hole) -> None:
        before, self.holes[number] = self.holes[number], hole
        if number in self.withheld:
            return
        of_kind = self._at[hole.gpu_type]
        numbers = of_kind[before]
        del numbers[bisect_left(numbers, number)]
        if not numbers:
            del of_kind[before]
        insort(of_kind.setdefault(hole, []), number)


def _open(node: Node) -> Hole:
    """The hole of a node that nobody uses but others."""
    hole = empty(node)
    return hole._replace(whole=hole.whole - node.foreign_gpus) if node.foreign_gpus else hole
