"""The report card of a SIGTERM: what was tried in the time that was left, and what came of it. Pure.

SIGTERM as a flag.

Argo and Kubernetes announce the end of a pod by SIGTERM and kill it after the
grace period. The handler only takes note: saving from inside it could meet a
state that is half updated. It also outlasts a second SIGTERM, which Argo sends.

What to do with the seconds between SIGTERM and SIGKILL. Pure.

A save that does not land is worth nothing, and may cost the one before it that
was still on its way. So what is tried is what the measured bandwidth says will
arrive; where nobody has measured yet, the newest state is tried.
"""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from tiphys.records import CheckpointRef

_SHELLS = ("sh", "bash", "dash", "ash", "ksh", "zsh", "busybox")


class StopSignal:
    """Whether and when SIGTERM has arrived since `install`, by ``clock``."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.requested_at: float | None = None
        self._previous: Any = None
        self._installed = False

    @property
    def requested(self) -> bool:
        return self.requested_at is not None

    def install(self) -> bool:
        """Listen, unless this is not the main thread, where Python allows no handler; answer whether it does."""
        if threading.current_thread() is not threading.main_thread():
            return False
        self._previous = signal.signal(signal.SIGTERM, self._note)
        self._installed = True
        return True

    def request(self) -> None:
        """Take note as if SIGTERM had arrived, unless it has."""
        if self.requested_at is None:
            self.requested_at = self._clock()

    def uninstall(self) -> None:
        """Give SIGTERM back to whoever had it before."""
        if self._installed:
            self._installed = False
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  given by the interpreter
        self.request()


def shell_above() -> str | None:
    """Name of the shell that started this program and still waits for it; None if there is none, or nobody knows.

    Argo sends SIGTERM to all processes of a container. A shell with more to do
    dies of it at once, and the container, with what it has not saved, after it.
    """
    try:
        name = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    except OSError:
        return None
    return name if name in _SHELLS else None


_CAUTION = 1.25
"""Bandwidth is shared, and a node that empties itself is busy."""
_HOPELESS = 3
"""A save under way is given up only if it would take so many times what is left: to wait for it costs nothing else."""
_COMMIT_SECONDS = 0.5
"""The fence, the manifest, and what the program does until it is gone."""


class Choice(StrEnum):
    """What is done after SIGTERM."""

    SAVE = "save"
    """Let the save under way finish, then save the newest state."""
    REPLACE = "replace"
    """Give up the save under way; the newest state lands, both would not."""
    FINISH = "finish"
    """Let the save under way finish, and no more."""
    LEAVE = "leave"
    """Nothing would land: leave at once with what is committed."""


class Approach(NamedTuple):
    """What is known when the choice is made. None means unknown."""

    seconds_left: float | None
    bytes_per_second: float | None
    state_bytes: int
    running_bytes: int
    """What the save under way has still to send; 0 if there is none."""


def land(seen: Approach) -> Choice:
    """The most that is expected to be committed in time."""
    if seen.seconds_left is None or not seen.bytes_per_second:
        return Choice.SAVE
    both = _seconds(seen.running_bytes + seen.state_bytes, seen.bytes_per_second)
    newest = _seconds(seen.state_bytes, seen.bytes_per_second)
    running = _seconds(seen.running_bytes, seen.bytes_per_second)
    if both <= seen.seconds_left:
        return Choice.SAVE
    if newest <= seen.seconds_left:
        return Choice.REPLACE
    if seen.running_bytes:
        return Choice.FINISH if running <= _HOPELESS * seen.seconds_left else Choice.LEAVE
    # Estimates err; what has a chance is tried, since there is nothing to lose.
    return Choice.SAVE if newest <= _CAUTION * seen.seconds_left else Choice.LEAVE


def _seconds(size_bytes: int, bytes_per_second: float) -> float:
    return _CAUTION * size_bytes / bytes_per_second + _COMMIT_SECONDS


@dataclass(frozen=True)
class ReportCard:
    """What happened between SIGTERM and the end of the program."""

    choice: Choice
    global_step: int
    """The step that the training had completed when it came by."""
    state_bytes: int
    grace_seconds: float | None
    noticed_seconds: float
    """From SIGTERM until the training came by."""
    staged_seconds: float
    """From SIGTERM until the newest state was on its way, or was given up."""
    ended_seconds: float
    """From SIGTERM until the commit, or until there was no more time to wait for it."""
    bytes_per_second: float | None
    committed: CheckpointRef | None
    """What was committed since SIGTERM."""
    newest_step: int
    """Step of the newest checkpoint there is; 0 if there is none."""

    @property
    def steps_lost(self) -> int:
        """Steps that are trained again."""
        return self.global_step - self.newest_step

    @property
    def spare_seconds(self) -> float | None:
        """Between the end and the kill; None when nobody said how long the grace period is."""
        return None if self.grace_seconds is None else self.grace_seconds - self.ended_seconds

    def message(self) -> str:
        """For a person who reads the log or the lineage."""
        again = f"{self.steps_lost} {'step is' if self.steps_lost == 1 else 'steps are'} trained again"
        if not self.steps_lost:
            spare = "" if self.spare_seconds is None else f", {self.spare_seconds:.1f} s before the kill"
            outcome = f"it was committed {self.ended_seconds:.1f} s after SIGTERM{spare}"
        elif self.choice is Choice.LEAVE:
            outcome = f"there was no time to save its {self.state_bytes:,} bytes; {again}"
        elif self.committed:
            outcome = f"there was time for the save under way, of step {self.newest_step}; {again}"
        else:
            outcome = f"nothing was committed within {self.ended_seconds:.1f} s; {again}"
        return f"told to stop at step {self.global_step}: {outcome}"

    def data(self) -> dict[str, Any]:
        """For a program; seconds count from SIGTERM."""
        return {
            "choice": self.choice.value,
            "global_step": self.global_step,
            "state_bytes": self.state_bytes,
            "grace_seconds": self.grace_seconds,
            "noticed_seconds": round(self.noticed_seconds, 3),
            "staged_seconds": round(self.staged_seconds, 3),
            "ended_seconds": round(self.ended_seconds, 3),
            "spare_seconds": None if self.spare_seconds is None else round(self.spare_seconds, 3),
            "bytes_per_second": self.bytes_per_second and round(self.bytes_per_second),
            "committed": str(self.committed) if self.committed else None,
            "steps_lost": self.steps_lost,
        }
