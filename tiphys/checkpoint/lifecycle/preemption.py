"""SIGTERM and the grace period: noticing it, choosing what to save before SIGKILL, and reporting the outcome.

Argo and Kubernetes announce the end of a pod by SIGTERM and kill it after the
grace period. The handler of `StopSignal` only sets a flag: a save inside the
handler could meet a state that is half updated. The flag also makes a second
SIGTERM, which Argo sends, harmless.

A save that is not committed in time is worthless, and may also cost the save
before it that is still uploading. So `choose_preemption_save` starts only what
can be committed at the measured bandwidth; while the bandwidth is unknown, it
saves the newest state.
"""

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import FrameType
from typing import Any, NamedTuple

from tiphys.processes import register_session
from tiphys.protocol.quantities import format_duration
from tiphys.records import CheckpointRef


class StopSignal:
    """Whether SIGTERM arrived since `install`, and when by ``clock``."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.requested_at: float | None = None
        self._previous: Any = None
        self._installed = False

    @property
    def is_requested(self) -> bool:
        return self.requested_at is not None

    def install(self) -> bool:
        """Handle SIGTERM; return False outside of the main thread, where Python allows no handler."""
        if threading.current_thread() is not threading.main_thread():
            return False
        self._previous = signal.signal(signal.SIGTERM, self._handle)
        self._installed = True
        register_session(os.environ)
        return True

    def request(self) -> None:
        """Record the time of the request; later calls do nothing."""
        if self.requested_at is None:
            self.requested_at = self._clock()

    def uninstall(self) -> None:
        """Restore the previous handler of SIGTERM."""
        if self._installed:
            self._installed = False
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  signature of a signal handler
        self.request()


_SAFETY_FACTOR = 1.25
"""Bandwidth is shared, and a node that is being drained is busy."""
_WAIT_FACTOR = 3
"""A running save is abandoned only if it would take this many times the time left: waiting costs nothing else."""
_COMMIT_SECONDS = 0.5
"""Time for the fence, the manifest and the exit of the program."""


class PreemptionSaveChoice(StrEnum):
    """What to save after SIGTERM."""

    SAVE = "save"
    """Let the running save finish, then save the newest state."""
    REPLACE = "replace"
    """Abandon the running save: only the newest state can be committed in time, not both."""
    FINISH = "finish"
    """Let the running save finish, and start none."""
    LEAVE = "leave"
    """Exit at once: no save can be committed in time."""


class PreemptionSaveInputs(NamedTuple):
    """Inputs of `choose_preemption_save`. None means unknown."""

    seconds_left: float | None
    bytes_per_second: float | None
    state_bytes: int
    running_bytes: int
    """Bytes that the running save has not stored yet; 0 if there is none."""


def choose_preemption_save(inputs: PreemptionSaveInputs) -> PreemptionSaveChoice:
    """Return the choice that is expected to commit the most in time. Pure."""
    if inputs.seconds_left is None or not inputs.bytes_per_second:
        return PreemptionSaveChoice.SAVE
    both = _estimate_seconds(inputs.running_bytes + inputs.state_bytes, inputs.bytes_per_second)
    newest = _estimate_seconds(inputs.state_bytes, inputs.bytes_per_second)
    running = _estimate_seconds(inputs.running_bytes, inputs.bytes_per_second)
    if both <= inputs.seconds_left:
        return PreemptionSaveChoice.SAVE
    if newest <= inputs.seconds_left:
        return PreemptionSaveChoice.REPLACE
    if inputs.running_bytes:
        return (
            PreemptionSaveChoice.FINISH if running <= _WAIT_FACTOR * inputs.seconds_left else PreemptionSaveChoice.LEAVE
        )
    # Estimates err: a save that has a chance is tried, since there is nothing to lose.
    return PreemptionSaveChoice.SAVE if newest <= _SAFETY_FACTOR * inputs.seconds_left else PreemptionSaveChoice.LEAVE


def _estimate_seconds(size_bytes: int, bytes_per_second: float) -> float:
    return _SAFETY_FACTOR * size_bytes / bytes_per_second + _COMMIT_SECONDS


@dataclass(frozen=True)
class PreemptionReport:
    """What happened between SIGTERM and the end of the program."""

    choice: PreemptionSaveChoice
    global_step: int
    """The step that the training had completed when it noticed SIGTERM."""
    state_bytes: int
    grace_seconds: float | None
    noticed_seconds: float
    """From SIGTERM until the training noticed it."""
    staged_seconds: float
    """From SIGTERM until the save of the newest state started, or was ruled out."""
    ended_seconds: float
    """From SIGTERM until the commit, or until no time was left to wait for it."""
    bytes_per_second: float | None
    committed: CheckpointRef | None
    """The checkpoint that was committed after SIGTERM; None if there is none."""
    newest_step: int
    """Step of the newest checkpoint; 0 if there is none."""

    @property
    def steps_lost(self) -> int:
        """Steps that the next attempt trains again."""
        return self.global_step - self.newest_step

    @property
    def spare_seconds(self) -> float | None:
        """Seconds between the end and the kill; None if the grace period is unknown."""
        return None if self.grace_seconds is None else self.grace_seconds - self.ended_seconds

    def message(self) -> str:
        """Return a sentence for the log and the lineage."""
        again = f"{self.steps_lost} {'step is' if self.steps_lost == 1 else 'steps are'} trained again"
        if not self.steps_lost:
            spare = "" if self.spare_seconds is None else f", {format_duration(self.spare_seconds)} before the kill"
            outcome = f"it was committed {format_duration(self.ended_seconds)} after SIGTERM{spare}"
        elif self.choice is PreemptionSaveChoice.LEAVE:
            outcome = f"there was no time to save its {self.state_bytes:,} bytes; {again}"
        elif self.committed:
            outcome = f"there was time only for the running save, of step {self.newest_step}; {again}"
        else:
            outcome = f"nothing was committed within {format_duration(self.ended_seconds)}; {again}"
        return f"stopped by SIGTERM at step {self.global_step}: {outcome}"

    def data(self) -> dict[str, Any]:
        """Return the report as JSON values; seconds count from SIGTERM."""
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
