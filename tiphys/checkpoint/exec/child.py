"""The program as a child: it gets every signal that we get, and we pass on how it ended.

It stays in our process group, as a shell's child does, so that whoever ends the
group ends both. Signals are not handled but waited for: none is lost between
two looks, and no handler runs while bytes travel.
"""

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from types import TracebackType

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes of a shell for a program that it cannot start."""

FORWARDED = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT}
)
_WAITED_FOR = FORWARDED | {signal.SIGCHLD}
# Python ignores these, and what is ignored would stay so in the program.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


class Signals:
    """Within the block, signals wait until they are asked for. Open it before any thread is started."""

    def __enter__(self) -> "Signals":
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self.next(0.0) is not None:
            pass  # nobody is left to whom it could matter
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

    def next(self, seconds: float) -> int | None:
        """The next signal; None if none comes within ``seconds``."""
        found = signal.sigtimedwait(_WAITED_FOR, max(0.0, seconds))
        return found.si_signo if found else None

    @property
    def told_to_stop(self) -> bool:
        """Whether SIGTERM waits; any thread may ask."""
        return signal.SIGTERM in signal.sigpending()


class Child:
    """A started program. ``code`` is its exit code as a shell has it, None while it runs."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Raises OSError if there is no such program."""
        self.code: int | None = None
        self.signalled = False
        """Whether a signal ended it, so that it may have been in the middle of anything."""
        self._pid = os.posix_spawnp(
            command[0], list(command), environ, setsigmask=(), setsigdef=(*_WAITED_FOR, *_IGNORED_BY_PYTHON)
        )

    def send(self, number: int) -> None:
        """Pass a signal on, unless the program has ended."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    def reap(self) -> None:
        """Take note of children that have ended; as process 1 also of those that others left behind."""
        anyone = os.getpid() == 1
        while self.code is None or anyone:
            try:
                pid, status = os.waitpid(-1 if anyone else self._pid, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                self._note(status)

    def _note(self, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        self.signalled = code < 0
        self.code = 128 - code if code < 0 else code
