"""What is free of an inventory at one instant, now or later."""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping

from tiphys_plugin.placement.hole import Hole, empty, less, more
from tiphys_plugin.placement.inventory import Inventory
from tiphys_plugin.placement.request import Placement


class Free:
    """Holes, and the nodes that have them.

    Nodes that are cordoned keep their books and offer nothing, unless
    ``cordoned_too`` asks what the cluster could do with all its nodes. Nodes
    that are not of the inventory are passed over: what ran there is no longer
    of its GPUs.
    """

    def __init__(self, inventory: Inventory, *, cordoned_too: bool = False) -> None:
        self.inventory = inventory
        self.withheld = frozenset() if cordoned_too else inventory.cordoned
        """Numbers of the nodes that offer nothing."""
        self.holes = [empty(node) for node in inventory.nodes]
        """By number of the node, those of cordoned nodes included."""
        self._at: dict[Hole, list[int]] = defaultdict(list)
        for number, hole in enumerate(self.holes):
            if number not in self.withheld:
                self._at[hole].append(number)

    @property
    def at(self) -> Mapping[Hole, list[int]]:
        """Numbers of the nodes that offer each hole, from the lowest; never empty."""
        return self._at

    def copy(self) -> "Free":
        """The same, to be changed without changing this; it costs some microseconds for each thousand nodes."""
        twin = Free.__new__(Free)
        twin.inventory, twin.withheld, twin.holes = self.inventory, self.withheld, self.holes.copy()
        twin._at = defaultdict(list, {hole: numbers.copy() for hole, numbers in self._at.items()})
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
        numbers = self._at[before]
        del numbers[bisect_left(numbers, number)]
        if not numbers:
            del self._at[before]
        insort(self._at[hole], number)
