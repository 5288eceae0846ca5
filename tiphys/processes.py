"""The program as a child process: its signals, and its end as a shell reports it.

`SignalQueue` blocks signals and waits for them instead of handling them: no
signal is lost between two looks, and no handler runs during an upload.
`ChildProcess` stays in the process group of its parent, as a shell's child does,
so that a signal to the group reaches both.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from tiphys.protocol import environment

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes of a shell for a program that it cannot start."""

FORWARDED = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT}
)
_HANDLED_SIGNALS = FORWARDED | {signal.SIGCHLD}
# Python ignores these signals, and an ignored signal stays ignored in a child process.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class SignalQueue:
    """Context manager that blocks signals until `wait_next` takes them. Enter it before any thread is started."""

    def __enter__(self) -> Self:
        self._previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self.wait_next(0.0) is not None:
            pass  # the program has ended, so the remaining signals have no receiver
        signal.pthread_sigmask(signal.SIG_SETMASK, self._previous_mask)

    def wait_next(self, seconds: float) -> int | None:
        """Return the number of the next signal; None if none arrives within ``seconds``."""
        info = signal.sigtimedwait(_HANDLED_SIGNALS, max(0.0, seconds))
        return info.si_signo if info else None

    @property
    def is_stop_requested(self) -> bool:
        """Whether SIGTERM is pending; any thread may read it."""
        return signal.SIGTERM in signal.sigpending()


class ChildProcess:
    """A started program. ``exit_code`` is its exit code as a shell reports it, None while it runs."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], file_actions: Sequence[tuple[int, int, int]] = ()
    ) -> None:
        """Start ``command``, with ``file_actions`` for `os.posix_spawn`; raises OSError if it cannot be executed."""
        self.exit_code: int | None = None
        self.was_signalled = False
        """Whether a signal ended the program, so that its last checkpoint may be incomplete."""
        self._pid = os.posix_spawnp(
            command[0],
            list(command),
            environ,
            file_actions=file_actions,
            setsigmask=(),
            setsigdef=(*_HANDLED_SIGNALS, *_IGNORED_BY_PYTHON),
        )

    def send_signal(self, number: int) -> None:
        """Forward a signal, unless the program has ended."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def reap(self) -> None:
        """Collect the exit status of the program; as process 1 also those of orphans, which would stay zombies."""
        is_init = os.getpid() == 1
        while self.exit_code is None or is_init:
            try:
                pid, status = os.waitpid(-1 if is_init else self._pid, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                self._record_exit(status)

    def _record_exit(self, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        self.was_signalled = code < 0
        self.exit_code = 128 - code if code < 0 else code


_WAIT_SECONDS = 1.0


def log_line(message: str) -> None:
    """Write one line to standard error, which is the log of the pod."""
    sys.stderr.write(f"{environment.LOG_PREFIX}{message}\n")
    sys.stderr.flush()


def run_child(command: Sequence[str], environ: Mapping[str, str], signals: SignalQueue) -> int:
    """Run ``command`` to its end, forward ``signals`` to it, and return its exit code as a shell reports it."""
    try:
        child = ChildProcess(command, environ)
    except OSError as error:
        log_line(f"{command[0]} cannot be started: {error.strerror}; check the command of the step and its image")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    while child.exit_code is None:
        number = signals.wait_next(_WAIT_SECONDS)
        if number in FORWARDED:
            child.send_signal(number)
        child.reap()
    return child.exit_code
