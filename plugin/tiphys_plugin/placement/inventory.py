"""All nodes, in the order of GPU type and topology, so that what is near is a range of numbers.

NVLink domains, racks and blocks are then ranges of the list, and how much fits
into each of them follows from running sums over it.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from tiphys_plugin.placement.node import Node


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
