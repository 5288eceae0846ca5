"""SIGTERM as a flag.

Argo and Kubernetes announce the end of a pod by SIGTERM and kill it after the
grace period. The handler only takes note: saving from inside it could meet a
state that is half updated. It also outlasts a second SIGTERM, which Argo sends.
"""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

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
