"""Who is asked next: the task sets take turns, so that one with a thousand open nodes holds up nobody else."""

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class Turns(Generic[Key, Item]):
    """A queue for each key, served round robin; at most ``most_at_once`` items of one key are out at a time.

    Its length is bounded by what is put in: the agent puts each open node in at
    most once, and the API server bounds the nodes of a task set.
    """

    def __init__(self, most_at_once: int) -> None:
        self._most = most_at_once
        self._queues: OrderedDict[Key, deque[Item]] = OrderedDict()
        self._out: Counter[Key] = Counter()

    def add(self, key: Key, item: Item) -> None:
        self._queues.setdefault(key, deque()).append(item)

    def take(self) -> tuple[Key, Item] | None:
        """The next item; None if there is none that may go out. Say `done` when it is back."""
        key = next((key for key in self._queues if self._out[key] < self._most), None)
        if key is None:
            return None
        queue = self._queues[key]
        item = queue.popleft()
        self._out[key] += 1
        self._queues.move_to_end(key)
        if not queue:
            del self._queues[key]
        return key, item

    def done(self, key: Key) -> None:
        """An item of ``key`` is back."""
        self._out[key] -= 1
        if not self._out[key]:
            del self._out[key]

    def drop(self, key: Key) -> None:
        """Forget what waits under ``key``."""
        self._queues.pop(key, None)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))
