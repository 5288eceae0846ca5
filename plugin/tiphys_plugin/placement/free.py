"""What is free of an inventory at one instant, now or later."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from tiphys_plugin.placement.hole import Hole, empty, less, more
from tiphys_plugin.placement.inventory import Inventory
from tiphys_plugin.placement.node import Node
from tiphys_plugin.placement.request import Placement


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
