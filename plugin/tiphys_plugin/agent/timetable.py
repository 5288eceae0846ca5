"""What has to happen later, on a clock that the caller reads."""

import heapq
from itertools import count
from typing import Generic, TypeVar

Action = TypeVar("Action")


class Timetable(Generic[Action]):
    """Actions by the time at which they are due; those of the same time in the order in which they came."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def add(self, due: float, action: Action) -> None:
        heapq.heappush(self._heap, (due, next(self._numbers), action))

    def take(self, now: float) -> list[Action]:
        """What is due."""
        taken = []
        while self._heap and self._heap[0][0] <= now:
            taken.append(heapq.heappop(self._heap)[2])
        return taken

    def wait(self, now: float) -> float | None:
        """Seconds until something is due; None if nothing is."""
        return max(0.0, self._heap[0][0] - now) if self._heap else None
