"""A warm spare: a process that has imported what the program imports, and takes its place when it dies.

Most of a restart is imports: about a second for PyTorch. A spare takes them out of it. It is prepared once the program
has committed a checkpoint, because no earlier end is followed by a restart, with the modules that the program had
imported then. It costs the memory of these modules, so by default a pod has one only where its limit leaves room, and
gives it up when the room is needed. Only ``python SCRIPT``, ``python -m MODULE`` and ``python -c CODE`` have one:
another program does not say what it imports.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence

from tiphys.launch.pod_memory import read_pod_memory
from tiphys.launch.processes import log_line, start_process
from tiphys.launch.spare_process import END
from tiphys.protocol import environment

_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "spare_process.py")
_DEFAULT_AFTER_SECONDS = 60.0
"""A training that is over sooner needs no spare."""
_LEAST_FREE_BYTES = 1 << 30
_FREE_TO_START, _FREE_TO_KEEP = 0.4, 0.15
"""Share of the pod's memory that must be free for a spare to be started, and to be kept."""
_READY_SECONDS, _TAKE_OVER_SECONDS = 10.0, 2.0
"""Longest wait for imports that another process would have to begin with, and for the process to become the program."""


def parse_python(command: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Split a command of Python into interpreter with options, and kind, target and arguments; None for another. Pure.

    The kind is ``script``, ``-m`` or ``-c``.
    """
    name = os.path.basename(command[0]) if command else ""
    if not name.startswith("python") or name.strip("python.0123456789"):
        return None
    position = 1
    while position < len(command):
        word = command[position]
        if word in ("", "-", "--"):
            return None
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            position += 2
            continue
        if word[-1] in "mc" and word[0] == "-" and word[1] not in "-WX":  # options of one letter may stand together
            kept = [word[:-1]] if len(word) > 2 else []
            rest = command[position + 1 :]
            return ([*command[:position], *kept], [f"-{word[-1]}", *rest]) if rest else None
        if not word.startswith("-"):
            return [*command[:position]], ["script", *command[position:]]
        position += 1
    return None


class Spare:
    """One waiting process. Its group is that of the launcher until it takes over: it is no part of the program."""

    def __init__(self, interpreter: Sequence[str], target: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start it; raises OSError if that fails."""
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        command = [*interpreter, _PROGRAM, str(commands), str(answers), "--", *target]
        for end in (commands, answers):
            os.set_inheritable(end, True)
        try:
            self.pid = start_process(command, environ, own_group=False)
        finally:
            os.close(commands)
            os.close(answers)

    def prepare(self, modules: Sequence[str]) -> None:
        """Let it import ``modules``."""
        self._send(modules)

    def take_over(self, environ: Mapping[str, str]) -> int | None:
        """Let it become the program with the variables ``environ``; its process id, or None if it does not answer."""
        if self._receive(_READY_SECONDS) != b"r":
            return None
        self._send([f"{name}={value}" for name, value in environ.items()])
        return self.pid if self._receive(_TAKE_OVER_SECONDS) == b"b" else None

    def has_ended(self) -> bool:
        """Whether it has ended, as by a signal to the whole group."""
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        except ChildProcessError:
            return True

    def close(self, *, ends: bool) -> None:
        """Close the pipes, and end the process if it ``ends``."""
        os.close(self._commands)
        os.close(self._answers)
        if ends:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)

    def _send(self, texts: Sequence[str]) -> None:
        data = b"\0".join(os.fsencode(text) for text in texts) + END
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(self._commands, data) :]

    def _receive(self, seconds: float) -> bytes:
        readable, _, _ = select.select([self._answers], [], [], seconds)
        return os.read(self._answers, 1) if readable else b""


class SpareKeeper:
    """Has a spare ready for the program of one pod, where that is wanted.

    Args:
        command: The command of the program.
        environ: Its variables.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._environ = environ
        wish = environ.get(environment.SPARE, "")
        self._parsed = None if wish == "off" else parse_python(command)
        self._is_asked = wish == "on"
        if self._is_asked and self._parsed is None:
            log_line(f"no spare: {command[0]} is not python with a script or a module, so its imports are not known")
        self._due_at = time.monotonic() + (0.0 if self._is_asked else _DEFAULT_AFTER_SECONDS)
        self.spare: Spare | None = None
        """The spare that waits; None if there is none yet, or no more."""

    @property
    def is_watchful(self) -> bool:
        """Whether `look` wants to be called each second."""
        return self._parsed is not None

    def look(self, modules: Sequence[str]) -> None:
        """Start the spare when it is due, or give it up for its memory; ``modules`` are empty before a commit."""
        if self._parsed is None:
            return
        if self.spare is not None:
            if not self.spare.has_ended() and (self._is_asked or _has_memory(_FREE_TO_KEEP)):
                return
            self._give_up("the pod needs its memory" if not self._is_asked else "it has ended")
        elif modules and time.monotonic() >= self._due_at:
            if not self._is_asked and not _has_memory(_FREE_TO_START):
                self._parsed = None
                return
            self._start(modules)

    def take_over(self, environ: Mapping[str, str]) -> int | None:
        """Let the spare become the program; its process id, or None if there is none that is ready."""
        spare, self.spare = self.spare, None
        if spare is None:
            return None
        pid = None if spare.has_ended() else spare.take_over(environ)
        spare.close(ends=pid is None)
        if pid is not None:
            log_line("a spare process takes its place, which has the imports behind it")
        return pid

    def close(self) -> None:
        """End the spare."""
        if self.spare is not None:
            self.spare.close(ends=True)
            self.spare = None

    def _start(self, modules: Sequence[str]) -> None:
        assert self._parsed is not None
        try:
            self.spare = Spare(*self._parsed, self._environ)
        except OSError as error:
            self._parsed = None
            log_line(f"no spare: {error.strerror}")
            return
        self.spare.prepare(modules)

    def _give_up(self, why: str) -> None:
        self.close()
        self._parsed = None
        log_line(f"the spare process is given up: {why}")


def _has_memory(share: float) -> bool:
    """Whether that share of the pod's memory is free; without a limit, that of the machine."""
    memory = read_pod_memory()
    return memory.free_bytes >= max(_LEAST_FREE_BYTES, share * memory.limit_bytes)
