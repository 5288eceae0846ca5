"""Ends a training that completes no step any more, so that another attempt can.

A rank that waits for a lost peer, or a reader for a dead mount, waits for ever,
and holds its GPUs while it does. Only the program's own past can say what is
too long for a step. Saving and restoring are not counted, for they have limits
of their own; neither is what comes before the first step, such as compiling.

A thread looks, because it can tell storage what has happened. Behind it stands
the kernel (`tiphys.checkpoint.alarm`): it rings if the thread has put it off no
more, because no thread runs.
"""

import contextlib
import faulthandler
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tiphys.checkpoint.alarm import Alarm
from tiphys.checkpoint.journal import tell
from tiphys.threads import in_background

FACTOR = 10.0
"""So many times its own longest step a step may take."""
RECENT = 100
"""As many steps count; what was slow long ago, such as the first ones, is forgotten."""
_LOOKS = 20
"""How often within the limit it is looked."""
_LONGEST_LOOK_SECONDS = 5.0
_STACK_CHARACTERS = 20_000


class Stuck(NamedTuple):
    """No step was completed for ``seconds``, and the longest before took ``longest_seconds``."""

    seconds: float
    longest_seconds: float
    stacks: str
    """Where its threads are."""

    @property
    def words(self) -> str:
        before = f", and the longest before took {self.longest_seconds:.1f} s" if self.longest_seconds else ""
        return f"it completed no step in {self.seconds:.0f} s{before}"


def limit_seconds(least_seconds: float, longest_seconds: float) -> float:
    """How long a step may take."""
    return max(least_seconds, FACTOR * longest_seconds)


class NoWatch:
    """Lets a training take as long as it likes."""

    def open(self) -> None:
        """Begin to look."""

    def stepped(self) -> None:
        """A step is complete."""

    @contextlib.contextmanager
    def not_counted(self) -> Iterator[None]:
        """What happens in here is no part of a step."""
        yield

    def close(self) -> None:
        """Look no more."""


class Watch(NoWatch):
    """Calls ``end`` if no step is completed for too long.

    While ``excused`` says so, as for a save that is under way, it does not. The
    thread counts the time in which it could look, so that a machine with too
    much to do is not taken for a training that is stuck.
    """

    def __init__(
        self,
        least_seconds: float,
        end: Callable[[Stuck], None],
        *,
        clock: Callable[[], float],
        excused: Callable[[], bool],
        alarm: Alarm | None = None,
    ) -> None:
        self._least = least_seconds
        self._end = end
        self._clock = clock
        self._excused = excused
        self._alarm = alarm or Alarm()
        self._gaps: deque[float] = deque(maxlen=RECENT)
        self._depth = 0
        self._steps = 0
        self._left_at = clock()
        self._limit = least_seconds
        self._seen_steps = 0
        self._idle = 0.0
        self._over = threading.Event()

    def open(self) -> None:
        if in_background(self._run):
            self._alarm.install()
        else:
            tell("no thread could be started, so nobody looks whether the training completes steps")

    def stepped(self) -> None:
        if self._steps:
            self._gaps.append(self._clock() - self._left_at)
        self._steps += 1

    @contextlib.contextmanager
    def not_counted(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._left_at = self._clock()
            if self._steps:
                self._alarm.ring_in(2 * self._limit)  # the thread may never get to look

    def close(self) -> None:
        self._over.set()
        self._alarm.uninstall()

    def look(self, elapsed_seconds: float) -> None:
        """Judge the ``elapsed_seconds`` since the last look."""
        steps, longest = self._steps, max(tuple(self._gaps), default=0.0)
        self._limit = limit_seconds(self._least, longest)
        if not steps or self._depth or self._excused():
            self._alarm.ring_in(0)
            self._idle = 0.0
            return
        self._alarm.ring_in(2 * self._limit)
        self._idle = self._idle + elapsed_seconds if steps == self._seen_steps else 0.0
        self._seen_steps = steps
        if self._idle >= self._limit:
            self._over.set()
            self._alarm.ring_in(0)
            self._end(Stuck(self._idle, longest, stacks()))

    def _run(self) -> None:
        pause = min(self._least / _LOOKS, _LONGEST_LOOK_SECONDS)
        looked_at = self._clock()
        while not self._over.is_set():
            try:
                if not self._over.wait(pause):
                    now = self._clock()
                    self.look(min(now - looked_at, 2 * pause))
                    looked_at = now
            except MemoryError:  # who survives it is looked after as before
                time.sleep(pause)


def stacks() -> str:
    """Where every thread of this process is, the newest call first."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return file.read(_STACK_CHARACTERS)
