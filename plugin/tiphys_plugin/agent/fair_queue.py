"""Fair queue: serves the task set with the fewest pending calls, so one large workflow cannot delay others.

A small workflow continues at once, and a large one loses little time by that.
Among task sets of equal length, one is finished before the next is started:
steps of one workflow cost less if they are answered together, and a workflow
gains more from all its answers than from some. Every fourth turn serves the task
set that has waited longest, so that a stream of small ones cannot starve it.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


_OLDEST_FIRST_INTERVAL = 4


class ConcurrencyLimit(NamedTuple, Generic[Key]):
    """At most ``max_in_flight`` items whose keys have the same ``group`` are in flight at a time."""

    group: Callable[[Key], Hashable]
    max_in_flight: int


class FairQueue(Generic[Key, Item]):
    """A queue per key; serves the shortest one, and regularly the next in rotation, within the concurrency limits.

    The length is bounded by its use: the agent adds each open node at most once,
    and the API server limits the size of a task set.
    """

    def __init__(self, *limits: ConcurrencyLimit[Key]) -> None:
        self._limits = limits
        self._queues: OrderedDict[Key, deque[Item]] = OrderedDict()
        """Ordered by the time of the last service: the key that was served last comes last."""
        self._in_flight: Counter[Hashable] = Counter()
        self._taken_count = 0

    def add(self, key: Key, item: Item) -> None:
        self._queues.setdefault(key, deque()).append(item)

    def take(self) -> tuple[Key, Item] | None:
        """Take the next item; None if no item may be taken now. Call `release` when its work is done."""
        keys = list(filter(self._has_capacity, self._queues))
        if not keys:
            return None
        self._taken_count += 1
        key = (
            min(keys, key=lambda candidate: len(self._queues[candidate]))
            if self._taken_count % _OLDEST_FIRST_INTERVAL
            else keys[0]
        )
        queue = self._queues[key]
        item = queue.popleft()
        self._in_flight.update(self._groups(key))
        self._queues.move_to_end(key)
        if not queue:
            del self._queues[key]
        return key, item

    def release(self, key: Key) -> None:
        """End the work on an item of ``key``, which frees its place in the limits."""
        for group in self._groups(key):
            self._in_flight[group] -= 1
            if not self._in_flight[group]:
                del self._in_flight[group]

    def drop(self, key: Key) -> None:
        """Remove all waiting items of ``key``."""
        self._queues.pop(key, None)

    def count_ready(self, limit: int) -> int:
        """Number of items that may be taken now, up to ``limit``; may be too high, but never too low."""
        count = 0
        for key, queue in self._queues.items():
            free_places = (
                concurrency.max_in_flight - self._in_flight[group]
                for group, concurrency in zip(self._groups(key), self._limits, strict=True)
            )
            count += max(0, min(len(queue), *free_places))
            if count >= limit:
                return limit
        return count

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def _groups(self, key: Key) -> list[tuple[int, Hashable]]:
        return [(number, concurrency.group(key)) for number, concurrency in enumerate(self._limits)]

    def _has_capacity(self, key: Key) -> bool:
        limits = (concurrency.max_in_flight for concurrency in self._limits)
        return all(self._in_flight[group] < limit for group, limit in zip(self._groups(key), limits, strict=True))
