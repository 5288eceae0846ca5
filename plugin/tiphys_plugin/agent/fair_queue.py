"""Who is asked next: the task set that has the fewest questions waiting, so that a thousand of one hold up nobody else.

A small workflow goes on at once, and a big one loses little by it. Of equals
one is finished before the next is begun: the steps of one workflow cost less
when they come together, and each is helped more by all its answers than by some.
In every fourth turn whoever has waited longest goes first, so that a stream of
small ones starves nobody.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


_ROTATION = 4


class Share(NamedTuple, Generic[Key]):
    """At most ``most`` items whose keys have the same ``group`` are out at a time."""

    group: Callable[[Key], Hashable]
    most: int


class Turns(Generic[Key, Item]):
    """A queue for each key, the shortest first and at times the next in rotation, as far as its shares allow.

    Its length is bounded by what is put in: the agent puts each open node in at
    most once, and the API server bounds the nodes of a task set.
    """

    def __init__(self, *shares: Share[Key]) -> None:
        self._shares = shares
        self._queues: OrderedDict[Key, deque[Item]] = OrderedDict()
        """The key that was served last is the last one."""
        self._out: Counter[Hashable] = Counter()
        self._taken = 0

    def add(self, key: Key, item: Item) -> None:
        self._queues.setdefault(key, deque()).append(item)

    def take(self) -> tuple[Key, Item] | None:
        """The next item; None if there is none that may go out. Say `done` when it is back."""
        keys = list(filter(self._may_go, self._queues))
        if not keys:
            return None
        self._taken += 1
        key = min(keys, key=lambda one: len(self._queues[one])) if self._taken % _ROTATION else keys[0]
        queue = self._queues[key]
        item = queue.popleft()
        self._out.update(self._groups(key))
        self._queues.move_to_end(key)
        if not queue:
            del self._queues[key]
        return key, item

    def done(self, key: Key) -> None:
        """An item of ``key`` is back."""
        for group in self._groups(key):
            self._out[group] -= 1
            if not self._out[group]:
                del self._out[group]

    def drop(self, key: Key) -> None:
        """Forget what waits under ``key``."""
        self._queues.pop(key, None)

    def ready(self, most: int) -> int:
        """How many items may go out now, as far as it matters to a caller that can take ``most``; never too few."""
        count = 0
        for key, queue in self._queues.items():
            room = (share.most - self._out[group] for group, share in zip(self._groups(key), self._shares, strict=True))
            count += max(0, min(len(queue), *room))
            if count >= most:
                return most
        return count

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def _groups(self, key: Key) -> list[tuple[int, Hashable]]:
        return [(number, share.group(key)) for number, share in enumerate(self._shares)]

    def _may_go(self, key: Key) -> bool:
        limits = (share.most for share in self._shares)
        return all(self._out[group] < most for group, most in zip(self._groups(key), limits, strict=True))
