"""Moves the rest of a command into the background, for ``--detach`` on this machine.

The command forks before it opens anything, because threads and locks do not
survive a fork. The first process waits until the second one runs the workflow,
so that a refusal still reaches the terminal and its exit code.
"""

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Detachment:
    """The end of a pipe for which the process in the terminal waits."""

    _pipe: int

    def continue_in_background(self, log: Path) -> None:
        """End the process in the terminal with success; the output of this process goes to ``log`` from now on.

        Raises:
            OSError: ``log`` cannot be written.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        with Path(os.devnull).open("rb") as nothing, log.open("ab") as output:
            for stream, number in ((nothing, 0), (output, 1), (output, 2)):
                os.dup2(stream.fileno(), number)
        os.write(self._pipe, b"1")
        os.close(self._pipe)


def detach() -> Detachment:
    """Fork; only the new process, in a session of its own, returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        os.setsid()
        return Detachment(write_end)
    os.close(write_end)
    os._exit(_wait_for_background(child, read_end))


def _wait_for_background(child: int, read_end: int) -> int:
    """Exit code of the process in the terminal: 0 once ``child`` is in the background, else that of ``child``."""
    while True:
        try:
            if os.read(read_end, 1):
                return 0
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:
            os.kill(child, signal.SIGINT)
