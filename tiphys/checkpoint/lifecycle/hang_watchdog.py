"""Ends a training that completes no more steps, so that a retry can start, and records signals that crash it.

A rank that waits for a lost peer, or a reader of a dead mount, waits for ever
and holds its GPUs. How long a step may take follows from the program's own
steps. Saves and restores are excluded, because they have limits of their own;
so is the time before the first step, such as compiling.

`HangWatchdog` checks on a thread, which can report to storage. `KernelAlarm` is
the last resort: C code that never returns and holds Python's global lock stops
every Python thread, the watchdog included. The thread postpones the alarm while
it runs; if it stops, SIGALRM arrives. faulthandler's handler, in C, writes the
stacks of all threads, and the default action of SIGALRM ends the process.

Argo's executor reports every signal as exit code 137, that of SIGKILL. So
`CrashLog` writes faulthandler's dump to the file of the termination message,
whose first line names the signal; the plugin reads it to classify the failure.
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

from tiphys.checkpoint.lifecycle.fork import keep_in_children, undo_in_children
from tiphys.checkpoint.telemetry.events import log_message
from tiphys.protocol.environment import TERMINATION_LOG
from tiphys.threads import start_background_thread


def open_termination_log(path: Path = Path(TERMINATION_LOG)) -> int | None:
    """Open the log for appending and return the file descriptor; None if there is no log, as outside of a container."""
    with contextlib.suppress(OSError):
        return os.open(path, os.O_WRONLY | os.O_APPEND)
    return None


class CrashLog:
    """Writes fatal signals to the termination log; does nothing outside of a container.

    A program that has enabled faulthandler itself keeps its own settings.
    """

    def __init__(self, path: Path = Path(TERMINATION_LOG)) -> None:
        self._path = path
        self._descriptor: int | None = None

    def open(self) -> None:
        """Enable faulthandler for the termination log."""
        if faulthandler.is_enabled():
            return
        self._descriptor = open_termination_log(self._path)
        if self._descriptor is not None:
            faulthandler.enable(self._descriptor, all_threads=False)
            undo_in_children(self, CrashLog.close)  # a worker's crash is not that of the training

    def append(self, data: bytes) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.write(self._descriptor, data)

    def close(self) -> None:
        """Disable faulthandler, if `open` enabled it."""
        if self._descriptor is not None:
            keep_in_children(self)
            faulthandler.disable()
            os.close(self._descriptor)
            self._descriptor = None


class KernelAlarm:
    """Ends the process by SIGALRM unless it is armed again in time."""

    def __init__(self, termination_log: Path = Path(TERMINATION_LOG)) -> None:
        self._termination_log = termination_log
        self._descriptor: int | None = None
        self._installed = False

    def install(self) -> bool:
        """Handle SIGALRM; return False outside of the main thread, or if the program uses SIGALRM itself."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL or signal.getitimer(signal.ITIMER_REAL)[0]:
            return False
        self._descriptor = open_termination_log(self._termination_log)
        try:
            target = sys.__stderr__ if self._descriptor is None else self._descriptor
            faulthandler.register(signal.SIGALRM, file=target, all_threads=True, chain=True)  # type: ignore[arg-type]
        except (OSError, ValueError, RuntimeError, AttributeError):  # standard error is not a file, as in notebooks
            self._close()
            return False
        self._installed = True
        undo_in_children(self, KernelAlarm.uninstall)
        return True

    def arm(self, seconds: float) -> None:
        """End the process after ``seconds`` unless this is called again before; 0 disarms the alarm."""
        if self._installed:
            signal.setitimer(signal.ITIMER_REAL, seconds)

    def uninstall(self) -> None:
        """Disarm the alarm and restore the default action of SIGALRM."""
        if self._installed:
            self._installed = False
            keep_in_children(self)
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.unregister(signal.SIGALRM)
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


LIMIT_FACTOR = 10.0
"""A step may take this many times the longest recent step."""
REMEMBERED_STEPS = 100
"""Number of recent steps that count, so that slow first steps are forgotten."""
_CHECKS_PER_LIMIT = 20
"""Checks within the time limit of a step."""
_MAX_CHECK_SECONDS = 5.0
_STACK_CHARACTERS = 20_000


class HangReport(NamedTuple):
    """A training that completes no more steps."""

    seconds: float
    """Time without a completed step."""
    longest_seconds: float
    """Longest recent step; 0 if none was measured."""
    stacks: str
    """Stacks of all threads."""

    @property
    def message(self) -> str:
        before = f", and the longest before took {self.longest_seconds:.1f} s" if self.longest_seconds else ""
        return f"it completed no step in {self.seconds:.0f} s{before}"


def step_limit_seconds(min_seconds: float, longest_seconds: float) -> float:
    """Return how long a step may take: `LIMIT_FACTOR` times the longest recent one, at least ``min_seconds``."""
    return max(min_seconds, LIMIT_FACTOR * longest_seconds)


class NoHangWatchdog:
    """Watches nothing, for a training without a limit."""

    def open(self) -> None:
        """Start watching."""

    def record_step(self) -> None:
        """Record that a step is complete."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block, such as a save, from the time of the step."""
        yield

    def close(self) -> None:
        """Stop watching."""


class HangWatchdog(NoHangWatchdog):
    """Calls ``on_hang`` if no step is completed for too long.

    The thread counts only the time in which it could run, so that an overloaded
    machine is not mistaken for a training that is stuck.

    Args:
        on_hang: Called once, on the watchdog's thread; expected to end the process.
        is_excused: Returns True while the training may stand still, such as during a save.
    """

    def __init__(
        self,
        min_limit_seconds: float,
        on_hang: Callable[[HangReport], None],
        *,
        clock: Callable[[], float],
        is_excused: Callable[[], bool],
        alarm: KernelAlarm | None = None,
    ) -> None:
        self._min_limit_seconds = min_limit_seconds
        self._on_hang = on_hang
        self._clock = clock
        self._is_excused = is_excused
        self._alarm = alarm or KernelAlarm()
        self._step_seconds: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._pause_depth = 0
        self._steps = 0
        self._counted_from = clock()
        self._limit_seconds = min_limit_seconds
        self._checked_steps = 0
        self._idle_seconds = 0.0
        self._closed = threading.Event()

    def open(self) -> None:
        if start_background_thread(self._run):
            self._alarm.install()
        else:
            log_message("no thread could be started, so a training that hangs is not detected")

    def record_step(self) -> None:
        if self._steps:
            self._step_seconds.append(self._clock() - self._counted_from)
        self._steps += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._pause_depth += 1
        try:
            yield
        finally:
            self._pause_depth -= 1
            self._counted_from = self._clock()
            if self._steps:
                self._alarm.arm(2 * self._limit_seconds)  # the watchdog's thread may never run again

    def close(self) -> None:
        self._closed.set()
        self._alarm.uninstall()

    def check(self, elapsed_seconds: float) -> None:
        """Check for a hang, ``elapsed_seconds`` after the last check."""
        steps, longest = self._steps, max(tuple(self._step_seconds), default=0.0)
        self._limit_seconds = step_limit_seconds(self._min_limit_seconds, longest)
        if not steps or self._pause_depth or self._is_excused():
            self._alarm.arm(0)
            self._idle_seconds = 0.0
            return
        self._alarm.arm(2 * self._limit_seconds)
        self._idle_seconds = self._idle_seconds + elapsed_seconds if steps == self._checked_steps else 0.0
        self._checked_steps = steps
        if self._idle_seconds >= self._limit_seconds:
            self._closed.set()
            self._alarm.arm(0)
            self._on_hang(HangReport(self._idle_seconds, longest, dump_stacks()))

    def _run(self) -> None:
        pause = min(self._min_limit_seconds / _CHECKS_PER_LIMIT, _MAX_CHECK_SECONDS)
        checked_at = self._clock()
        while not self._closed.is_set():
            try:
                if not self._closed.wait(pause):
                    now = self._clock()
                    self.check(min(now - checked_at, 2 * pause))
                    checked_at = now
            except MemoryError:  # a program that survives it stays watched
                time.sleep(pause)


def dump_stacks() -> str:
    """Return the stacks of all threads of this process, the newest call first."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return file.read(_STACK_CHARACTERS)
