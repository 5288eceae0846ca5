"""SIGTERM and the grace period: noticing it, choosing what to save before SIGKILL, and reporting the outcome.

Argo and Kubernetes announce the end of a pod by SIGTERM and kill it after the
grace period. The handler of `StopSignal` only sets a flag: a save inside the
handler could meet a state that is half updated. The flag also makes a second
SIGTERM, which Argo sends, harmless. Then it calls the handler that the program
had before, whose exit would lose the save and is therefore held back.

A save that is not committed in time is worthless, and may also cost the save
before it that is still uploading. So `choose_preemption_save` starts only what
can be committed at the measured bandwidth; while the bandwidth is unknown, it
saves the newest state.
"""

import math
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import FrameType
from typing import Any, NamedTuple

from tiphys.checkpoint.lifecycle.fork import keep_in_children, undo_in_children
from tiphys.checkpoint.telemetry.events import log_message
from tiphys.launch.session_registry import note_open_session
from tiphys.protocol.quantities import format_duration
from tiphys.records import CheckpointRef

_EXIT_MARGIN_SECONDS = 1.0
_EXIT_MARGIN_SHARE = 0.1
"""Time reserved at the end of the grace period for the exit of the program: seconds, or this share if that is less."""


class StopSignal:
    """Whether SIGTERM arrived since `install`, when by ``clock``, and what is left of ``grace_seconds``."""

    def __init__(self, clock: Callable[[], float], grace_seconds: float | None = None) -> None:
        self._clock = clock
        self._grace_seconds = grace_seconds
        self.exit_margin_seconds = min(_EXIT_MARGIN_SECONDS, _EXIT_MARGIN_SHARE * (grace_seconds or math.inf))
        self.requested_at: float | None = None
        self.held_back: BaseException | None = None
        """What the program's own handler raised, such as `SystemExit`."""
        self._installed = False
        self._is_replacement_logged = False

    @property
    def is_requested(self) -> bool:
        return self.requested_at is not None

    @property
    def is_installed(self) -> bool:
        return self._installed

    def install(self) -> bool:
        """Handle SIGTERM; outside of the main thread, where Python allows no handler, say so and return False."""
        if threading.current_thread() is not threading.main_thread():
            log_message(
                "the session was not opened in the main thread, so SIGTERM will not save a checkpoint; open it there"
            )
            return False
        self._installed = True
        signal.signal(signal.SIGTERM, _SigtermHandler(self, signal.getsignal(signal.SIGTERM)))
        undo_in_children(self, StopSignal.uninstall)
        note_open_session(os.environ)
        return True

    def reinstall(self) -> None:
        """Handle SIGTERM again if other code, such as a library, has replaced the handler; logs that once."""
        if not self._installed or isinstance(found := signal.getsignal(signal.SIGTERM), _SigtermHandler):
            return
        if threading.current_thread() is not threading.main_thread():
            return
        self.install()
        if not self._is_replacement_logged:
            self._is_replacement_logged = True
            name = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', found)}".lstrip(".")
            name = found.name if isinstance(found, signal.Handlers) else name  # SIG_IGN
            log_message(
                f"{name} has replaced the session's handler of SIGTERM; from now on a SIGTERM reaches the session "
                f"first, then {name}. One that came before was lost to the session: install other handlers before "
                "the session opens"
            )

    def request(self) -> None:
        """Record the time of the request; later calls do nothing."""
        if self.requested_at is None:
            self.requested_at = self._clock()

    def seconds_since_request(self) -> float:
        return self._clock() - (self.requested_at or 0.0)

    def seconds_left(self) -> float | None:
        """Seconds until the program must begin to exit; None before SIGTERM, or if the grace period is unknown."""
        if not self.is_requested or self._grace_seconds is None:
            return None
        return max(0.0, self._grace_seconds - self.exit_margin_seconds - self.seconds_since_request())

    def uninstall(self) -> None:
        """Restore the handler that was there before, unless other code has replaced it since."""
        if self._installed:
            self._installed = False
            keep_in_children(self)
            found = signal.getsignal(signal.SIGTERM)
            if isinstance(found, _SigtermHandler) and found.stop_signal is self:
                signal.signal(signal.SIGTERM, found.previous)


class _SigtermHandler:
    """Sets the flag of ``stop_signal``, then calls ``previous``, the handler that was installed before."""

    _is_held_back = False
    """Whether the handler of an open session runs, below which one of an earlier session must not end the process."""

    def __init__(self, stop_signal: StopSignal, previous: Any) -> None:
        self.stop_signal = stop_signal
        # None stands for a handler that Python did not install, and cannot restore.
        self.previous = signal.SIG_DFL if previous is None else previous
        self._process = os.getpid()
        self._is_running = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._is_running:  # the previous handler calls the one that it replaced, which is this one
            return
        self._is_running = True
        try:
            if self.stop_signal.is_installed and os.getpid() == self._process:
                self.stop_signal.request()
                self._call_held_back(number, frame)
            elif callable(self.previous):  # other code still calls this handler after the session or in a child
                self.previous(number, frame)
            elif self.previous is signal.SIG_DFL and not _SigtermHandler._is_held_back:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        finally:
            self._is_running = False

    def _call_held_back(self, number: int, frame: FrameType | None) -> None:
        _SigtermHandler._is_held_back = True
        try:
            if callable(self.previous):
                self.previous(number, frame)
        except BaseException as error:  # noqa: BLE001  the next step saves first, and ends the program
            self.stop_signal.held_back = error
        finally:
            _SigtermHandler._is_held_back = False


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
