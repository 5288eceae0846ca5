"""Ends a training that completes no step any more, so that another attempt can.

A rank that waits for a lost peer, or a reader for a dead mount, waits for ever,
and holds its GPUs while it does. Only the program's own past can say what is
too long for a step. Saving and restoring are not counted, for they have limits
of their own; neither is what comes before the first step, such as compiling.

A thread looks, because it can tell storage what has happened. Behind it stands
the kernel (`tiphys.checkpoint.lifecycle.hang_watchdog`): it rings if the thread has put it off no
more, because no thread runs.

Where a program that dies of what it does leaves the signal that it dies of.

Argo's executor tells every signal as exit code 137, the one of SIGKILL. So
faulthandler's dump of a crash goes to the file from which kubelet takes the
termination message, which whoever judges the end reads: its first line names
the signal.

The last resort against a program so stuck that not even a thread of it runs: the kernel's alarm.

C code that never returns and holds Python's global lock stops every Python
thread, the one that watches included. SIGALRM needs none: faulthandler's
handler, in C, writes the stacks of all threads, and the default action of the
signal, which it hands on to, ends the process. The stacks go where kubelet
takes the termination message from, so that whoever judges the end finds them.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tiphys.checkpoint.telemetry.events import tell
from tiphys.threads import in_background

TERMINATION_LOG = Path("/dev/termination-log")
"""Where a container leaves its last words, by default (Kubernetes, ``terminationMessagePath``)."""


def open_log(path: Path = TERMINATION_LOG) -> int | None:
    """A file descriptor to add to the log; None where there is no such file, as outside of a container."""
    with contextlib.suppress(OSError):
        return os.open(path, os.O_WRONLY | os.O_APPEND)
    return None


class LastWords:
    """Does nothing outside of a container, or where the program uses faulthandler for its own ends."""

    def __init__(self, path: Path = TERMINATION_LOG) -> None:
        self._path = path
        self._descriptor: int | None = None

    def open(self) -> None:
        """From now on, a crash is noted."""
        if faulthandler.is_enabled():
            return
        self._descriptor = open_log(self._path)
        if self._descriptor is not None:
            faulthandler.enable(self._descriptor, all_threads=False)

    def note(self, words: bytes) -> None:
        """Add ``words`` to what a crash would leave."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.write(self._descriptor, words)

    def close(self) -> None:
        """No more."""
        if self._descriptor is not None:
            faulthandler.disable()
            os.close(self._descriptor)
            self._descriptor = None


class Alarm:
    """Set again before it is due, it never rings."""

    def __init__(self, termination_log: Path = TERMINATION_LOG) -> None:
        self._log = termination_log
        self._descriptor: int | None = None
        self._installed = False

    def install(self) -> bool:
        """Take SIGALRM; False if that is impossible outside of the main thread, or the program uses it itself."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL or signal.getitimer(signal.ITIMER_REAL)[0]:
            return False
        self._descriptor = open_log(self._log)
        try:
            where = sys.__stderr__ if self._descriptor is None else self._descriptor
            faulthandler.register(signal.SIGALRM, file=where, all_threads=True, chain=True)  # type: ignore[arg-type]
        except (OSError, ValueError, RuntimeError, AttributeError):  # a standard error that is no file, as in notebooks
            self._close()
            return False
        self._installed = True
        return True

    def ring_in(self, seconds: float) -> None:
        """End the process after ``seconds``, unless it is set again; 0: not at all."""
        if self._installed:
            signal.setitimer(signal.ITIMER_REAL, seconds)

    def uninstall(self) -> None:
        """Give SIGALRM back."""
        if self._installed:
            self._installed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.unregister(signal.SIGALRM)
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


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
