"""Where a program that dies of what it does leaves the signal that it dies of.

Argo's executor tells every signal as exit code 137, the one of SIGKILL. So
faulthandler's dump of a crash goes to the file from which kubelet takes the
termination message, which whoever judges the end reads: its first line names
the signal.
"""

import contextlib
import faulthandler
import os
from pathlib import Path

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
