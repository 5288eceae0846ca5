"""Gaps between writes, without which the quickest of several services keeps the others out.

Each decides on what it has read and loses if somebody else writes meanwhile. One
that writes without a pause makes every other lose that takes as long as itself,
again and again. It cannot know of them, for it never meets a write of theirs. So
whoever writes once more right after a write leaves a gap first. Little is lost
by it: those who come in the meantime share the next write.
"""

import random
import time
from collections.abc import Callable


class Gaps:
    """One service's gaps, each up to as long as its last round of reading, deciding and writing took.

    Args:
        pause: Waits for so many seconds.
        clock: Seconds since any fixed moment.
    """

    def __init__(self, pause: Callable[[float], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._pause = pause
        self._clock = clock
        self._ended_at = float("-inf")
        self._took = 0.0

    def leave(self) -> None:
        """Wait, unless nothing was written for that long anyway."""
        idle = self._clock() - self._ended_at
        if (gap := random.uniform(0, self._took) - idle) > 0:  # noqa: S311  two services must not keep step
            self._pause(gap)

    def wrote(self, took_seconds: float) -> None:
        """A round is over, and its write was in time."""
        self._ended_at = self._clock()
        self._took = took_seconds
