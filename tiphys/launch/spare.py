"""A warm spare: a process that has imported what the program imports, and takes its place when it dies.

Most of a restart is imports: about a second for PyTorch. A spare takes them out of it. It is prepared once the program
has committed a checkpoint, because no earlier end is followed by a restart, with the modules that the program had
imported then. It costs the memory of these modules, so by default a pod has one only where its limit leaves room, and
gives it up when the room is needed. Only ``python SCRIPT``, ``python -m MODULE`` and ``python -c CODE`` have one:
another program does not say what it imports.
"""

import contextlib
import fcntl
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from tiphys.launch.process_table import read_children
from tiphys.launch.processes import log_line, start_process
from tiphys.launch.session_registry import ProgramImports
from tiphys.launch.spare_process import END
from tiphys.protocol import environment

_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "spare_process.py")
_PLAIN_OPTIONS = "bBdEIOPqsSuv"
_F_SETPIPE_SZ, _PIPE_BYTES = 1031, 1 << 20
"""See fcntl(2). What is sent fits into the pipe, so that a spare that does not read holds up no signal."""
_DEFAULT_AFTER_SECONDS = 60.0
"""A training that is over sooner needs no spare."""
_LEAST_FREE_BYTES = 1 << 30
_FREE_TO_START, _FREE_TO_KEEP = 0.4, 0.15
"""Share of the pod's memory that must be free for a spare to be started, and to be kept."""
_SLICE_SECONDS = 0.05
_READY_SECONDS, _TAKE_OVER_SECONDS = 10.0, 2.0
"""Longest wait for imports that another process would have to begin with, and for the process to become the program."""


def parse_python(command: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Split a command of Python into interpreter with options, and kind, target and arguments; None for another. Pure.

    The kind is ``script``, ``-m`` or ``-c``. An option that this does not know makes it another command.
    """
    name = os.path.basename(command[0]) if command else ""
    if not name.startswith("python") or name.strip("python.0123456789"):
        return None
    position = 1
    while position < len(command):
        word = command[position]
        if word[:1] != "-":
            return ([*command[:position]], ["script", *command[position:]]) if word else None
        for index, letter in enumerate(word[1:], 1):  # options of one letter may stand together, the last with a value
            value = [word[index + 1 :]] if word[index + 1 :] else command[position + 1 : position + 2]
            if letter in "mc":
                rest = command[position + 1 if word[index + 1 :] else position + 2 :]
                kept = [word[:index]] if index > 1 else []
                return ([*command[:position], *kept], [f"-{letter}", *value, *rest]) if value else None
            if letter in "WX":
                position += 0 if word[index + 1 :] else 1
                break
            if letter not in _PLAIN_OPTIONS:
                return None
        if word == "-":
            return None
        position += 1
    return None


class Spare:
    """One waiting process. It leads a group, as the program will; processes that its imports start are in it."""

    def __init__(self, interpreter: Sequence[str], target: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start it; raises OSError if that fails."""
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        self._environ, self._has_ended = environ, False
        command = [*interpreter, _PROGRAM, str(commands), str(answers), "--", *target]
        for end in (commands, answers):
            os.set_inheritable(end, True)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._commands, _F_SETPIPE_SZ, _PIPE_BYTES)
        os.set_blocking(self._commands, False)
        try:
            self.pid = start_process(command, environ)
        except OSError:
            self._close_pipes()
            raise
        finally:
            os.close(commands)
            os.close(answers)

    def prepare(self, modules: Sequence[str]) -> bool:
        """Let it import ``modules``; return whether it was told."""
        return self._send(modules)

    def take_over(self, environ: Mapping[str, str]) -> int | None:
        """Let it become the program with the variables ``environ``; its process id, or None if it does not answer.

        What its imports have added to its variables stays, as in a program that imports.
        """
        given = [f"{name}={value}" for name, value in environ.items() if self._environ.get(name) != value]
        removed = [name for name in self._environ if name not in environ]
        if self._receive(_READY_SECONDS) != b"r" or not self._send([*given, *removed]):
            return None
        return self.pid if self._receive(_TAKE_OVER_SECONDS) == b"b" else None

    def has_ended(self) -> bool:
        """Whether it has ended, as by a signal."""
        if not self._has_ended:
            with contextlib.suppress(ChildProcessError):
                self._has_ended = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        return self._has_ended

    def close(self, *, ends: bool) -> None:
        """Close the pipes, and end the process if it ``ends``, with those that its imports have started."""
        if ends and not self.has_ended():
            # The pipes are still open: a spare that reads their end exits, and its children would live on as orphans.
            os.kill(self.pid, signal.SIGSTOP)
            children = [process for child in read_children(self.pid) for process in (child, *child.descendants())]
            for pid in (self.pid, *(process.pid for process in children)):
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)  # with the spare gone, they are children of the launcher
            self._has_ended = True
        self._close_pipes()

    def _close_pipes(self) -> None:
        os.close(self._commands)
        os.close(self._answers)

    def _send(self, texts: Sequence[str]) -> bool:
        data = b"\0".join(os.fsencode(text) for text in texts) + END
        try:
            return os.write(self._commands, data) == len(data)
        except OSError:  # it has ended, or does not read
            return False

    def _receive(self, seconds: float) -> bytes:
        """The next byte; empty after ``seconds``, or once SIGTERM waits to be handled."""
        deadline = time.monotonic() + seconds
        while not select.select([self._answers], [], [], _SLICE_SECONDS)[0]:
            if time.monotonic() >= deadline or signal.SIGTERM in signal.sigpending():
                return b""
        return os.read(self._answers, 1)


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

    def find_group(self) -> int | None:
        """The group of the waiting processes, which are no part of the program; None if there are none."""
        return self.spare.pid if self.spare else None

    def look(self, find_imports: Callable[[], ProgramImports | None]) -> None:
        """Start the spare when it is due, or give it up for its memory; ``find_imports`` finds none before a commit."""
        if self._parsed is None:
            return
        if self.spare is not None:
            if self.spare.has_ended():
                self._give_up("it has ended")
            elif not self._is_asked and not _has_memory(_FREE_TO_KEEP):
                self._give_up("the pod needs its memory")
        elif time.monotonic() >= self._due_at and (program := find_imports()) is not None:
            if self._is_asked or _has_memory(_FREE_TO_START):
                self._start(program)
            else:
                self._parsed = None

    def take_over(self, environ: Mapping[str, str]) -> int | None:
        """Let the spare become the program; its process id, or None if there is none that is ready."""
        spare, self.spare = self.spare, None
        if spare is None:
            return None
        pid = None if spare.has_ended() else spare.take_over(environ)
        spare.close(ends=pid is None)
        if pid is not None:
            log_line("a spare process takes its place, which has the imports behind it")
        else:
            log_line("the spare process does not answer, so the program is started anew")
        return pid

    def close(self) -> None:
        """End the spare."""
        if self.spare is not None:
            self.spare.close(ends=True)
            self.spare = None

    def _start(self, program: ProgramImports) -> None:
        assert self._parsed is not None
        interpreter, (kind, target, *rest) = self._parsed
        if kind == "script" and not _is_source(target):
            self._give_up(f"{target} is no file with a program of Python")
            return
        try:
            # With the variables that the program has set before it imported: libraries read some of them then.
            self.spare = Spare(interpreter, [kind, target, *rest], program.apply_to(self._environ))
        except OSError as error:
            self._give_up(str(error.strerror))
            return
        if not self.spare.prepare(program.modules):
            self._give_up("it does not take the names of its modules")

    def _give_up(self, why: str) -> None:
        self.close()
        self._parsed = None
        log_line(f"the spare process is given up: {why}")


def _is_source(path: str) -> bool:
    """Whether Python would read the file as text: neither a folder, nor an archive, nor compiled."""
    try:
        with open(path, "rb") as file:
            return b"\0" not in file.read(1024)
    except OSError:
        return False


def _has_memory(share: float) -> bool:
    """Whether that share of the pod's memory is free; without a limit, that of the machine."""
    from tiphys.launch.pod_memory import read_pod_memory  # no restart needs it

    memory = read_pod_memory()
    return memory.free_bytes >= max(_LEAST_FREE_BYTES, share * memory.limit_bytes)
