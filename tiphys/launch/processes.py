"""The processes of a program: the signals that they get, and their end as a shell reports it.

Argo and the local engine send SIGTERM to the process *group* of a step. Workers of
data loaders, shells and ``tee`` die of it at once, and the training that needs them
dies before it has saved. So `ChildProcess` starts the program in a group of its
own, becomes the parent of what the program leaves behind, and signals by these
rules (`choose_receivers`):

| process | SIGTERM |
|---|---|
| the program, and each process that it leaves behind when it ends | once, at once |
| what a signalled process has started | not while that process lives: workers serve it |
| children of a shell that lives 2 s later | then: bash runs a trap only after its foreground command |
| a launcher of ranks | when its sessions, which get it at once, have ended; if it handles SIGTERM, when the first has |
| a process that reads a pipe, as ``tee`` | none: it ends at the end of its input |
| all others | shortly before the grace period is over |

SIGKILL follows for all that is left, so that no process outlives the program for
long: at the end of the grace period, or two seconds after a program that ended
itself. The standard library alone, and little of it: this code starts with each
training, and stays in memory beside it.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from tiphys.protocol import environment

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes milliseconds to import
    from types import TracebackType
    from typing import Self

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes of a shell for a program that it cannot start."""

FORWARDED = frozenset(
    {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT}
)
_HANDLED_SIGNALS = FORWARDED | {signal.SIGCHLD}
# Python ignores these signals, and an ignored signal stays ignored in a child process.
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

_NEVER = float("inf")
DEFAULT_GRACE_SECONDS = 30.0
_PATIENCE_SECONDS = 2.0
"""Time for a signalled shell or launcher to hand the signal on, and for what is left of a program that has ended."""
_LONGEST_RESERVE_SECONDS, _LONGEST_MARGIN_SECONDS = 2.0, 0.2
"""Time before SIGKILL for processes that had no SIGTERM, and from SIGKILL to the end of the grace period, at most."""
_EXECUTOR_SECONDS = 1.5
"""Time from SIGKILL to the end of the grace period once the training has saved. Argo's executor looks once a second for
the end of its program, and an exit code that it has not seen when the kubelet kills it is lost: 137 takes its place."""
_LOOK_SECONDS, _QUIET_SECONDS = 0.05, 60.0
_LOOK_SHARE = 0.1
"""Largest share of time to spend on reading /proc, which is long on a machine with thousands of processes."""
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "ksh", "zsh", "busybox"})
_REGISTRY_NAME = "tiphys-sessions"
_PREEMPTED = "preempted"
_ENDED_BY_SIGTERM = 128 + signal.SIGTERM
_UNCAUGHT_EXCEPTION = 1
"""Exit code of Python. torchrun raises one at SIGTERM, as do libraries whose workers died."""


def log_line(message: str) -> None:
    """Write one line to standard error, which is the log of the pod."""
    sys.stderr.write(f"{environment.LOG_PREFIX}{message}\n")
    sys.stderr.flush()


class SignalQueue:
    """Context manager that blocks signals until `wait_next` takes them. Enter it before any thread is started."""

    stopped_at: float | None = None
    """When the first SIGTERM was taken, in seconds of the monotonic clock."""

    def __enter__(self) -> "Self":
        self._previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        while self.wait_next(0.0) is not None:
            pass  # the program has ended, so the remaining signals have no receiver
        signal.pthread_sigmask(signal.SIG_SETMASK, self._previous_mask)

    def wait_next(self, seconds: float) -> int | None:
        """Return the number of the next signal; None if none arrives within ``seconds``."""
        info = signal.sigtimedwait(_HANDLED_SIGNALS, max(0.0, seconds))
        if info and info.si_signo == signal.SIGTERM and self.stopped_at is None:
            self.stopped_at = time.monotonic()
        return info.si_signo if info else None

    @property
    def is_stop_requested(self) -> bool:
        """Whether SIGTERM is pending; any thread may read it."""
        return signal.SIGTERM in signal.sigpending()


class Process:
    """A running process below this one, as ``/proc`` describes it.

    Args:
        pid: Its number.
        name: The name of the file that it executes; for a script that of its interpreter.
        started: When it was started, in ticks of the system clock. Another process may have its number later.
        handles_sigterm: Whether it has a handler of SIGTERM.
        reads_pipe: Whether its standard input is a pipe, and not that of this process.
        children: The processes that it has started.
    """

    def __init__(
        self,
        pid: int,
        name: str = "",
        *,
        started: int = 0,
        handles_sigterm: bool = False,
        reads_pipe: bool = False,
        children: Sequence["Process"] = (),
    ) -> None:
        self.pid, self.name, self.identity = pid, name, (pid, started)
        self.handles_sigterm, self.reads_pipe, self.children = handles_sigterm, reads_pipe, children

    def descendants(self) -> Iterator["Process"]:
        """All processes below it."""
        for child in self.children:
            yield child
            yield from child.descendants()


def choose_receivers(
    orphans: Iterable[Process],
    sent: Mapping[int, float],
    sessions: Collection[int],
    now: float,
    *,
    has_session_ended: bool = False,
) -> list[int]:
    """Return the processes that get SIGTERM now. Pure.

    Args:
        orphans: The program, and what is left of it: the children of its launcher.
        sent: When each process got SIGTERM; processes that are absent had none.
        sessions: Processes with an open session.
        now: The time, on the clock of ``sent``.
        has_session_ended: Whether a session has ended since the first SIGTERM.
    """
    chosen: list[int] = []

    def visit(process: Process) -> None:
        below = [descendant.pid for descendant in process.descendants() if descendant.pid in sessions]
        is_shell = process.name in _SHELLS
        if process.pid not in sessions and below and not is_shell:
            # The death of a launcher may interrupt the ranks. A signalled torchrun gives them PET_SHUTDOWN_TIMEOUT,
            # which older versions do not know; otherwise it kills those that live 30 s after the first has ended.
            chosen.extend(below)
            if has_session_ended and process.handles_sigterm:
                chosen.append(process.pid)
        elif process.pid not in sent:
            if process.pid in sessions or below or not process.reads_pipe:
                chosen.append(process.pid)
        elif is_shell and now - sent[process.pid] >= _PATIENCE_SECONDS:
            for child in process.children:
                visit(child)

    for orphan in orphans:
        visit(orphan)
    return [pid for pid in dict.fromkeys(chosen) if pid not in sent]


class ChildProcess:
    """A started program, with all processes that it starts. A process has one at a time."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        file_actions: Sequence[tuple[int, int, int]] = (),
        on_left: Callable[[], None] | None = None,
    ) -> None:
        """Start ``command``, with ``file_actions`` as of `os.posix_spawn`; raises OSError if it cannot be executed.

        ``on_left`` is called once the program has ended, before what it left behind gets a signal.
        """
        self._on_left = on_left
        self.exit_code: int | None = None
        """Exit code as a shell reports it; None until all processes have ended. A stopped one has 75 if a session or a
        process that it left ended with 75, and 143 in the place of 1, which would say that it is at fault."""
        self.has_finished = False
        """Whether nothing interrupted a write: the program, or what a stopped shell waited for, ended with 0 or 75."""
        self.has_killed = False
        """Whether a signal ended a process that the program left behind, maybe while it wrote a file."""
        self.had_session = False
        """Whether a session was open in it, or may have been."""
        self.look_seconds = _QUIET_SECONDS
        """How long the caller may wait for a signal before it calls `reap` again."""
        self._grace_seconds = float(environ.get(environment.GRACE_SECONDS) or DEFAULT_GRACE_SECONDS)
        self._code: int | None = None
        self._stopped_at: float | None = None
        self._late_at = self._kill_at = _NEVER
        self._changed_at = 0.0
        self._sent: dict[int, float] = {}
        self._is_shell = self._is_preempted = self._has_session_ended = False
        self._left_codes: list[int] = []
        self._at_stop: set[tuple[int, int]] = set()
        self._sessions: set[int] = set()
        # An elastic torchrun alone can tell the other nodes that its ranks leave.
        self._registry = _SessionRegistry(is_offered=environment.ELASTIC not in environ)
        self._others = {process.identity for process in _read_children()} if _has_children() else set()
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._pid = _start(command, {**environ, **self._registry.variables}, file_actions, prctl)

    def send_signal(self, number: int) -> None:
        """Send a signal to the program, unless it has ended; the first SIGTERM, and SIGKILL, also to what it left."""
        if number == signal.SIGTERM and self._stopped_at is None:
            self._stopped_at = time.monotonic()
            self._registry.forget_preempted()
            self._end_with_grace(min(_LONGEST_MARGIN_SECONDS, 0.01 * self._grace_seconds))
            self.reap()
        elif number == signal.SIGKILL:
            self._end_by(0.0)
            self.reap()
        elif number != signal.SIGTERM and self._code is None:
            _send([self._pid], number)

    def reap(self) -> None:
        """Collect what has ended, and send the signals that are due."""
        if self.exit_code is not None or (self._kill_at == _NEVER and not _has_ended_children()):
            return
        began = time.monotonic()
        children = self._collect()
        if self._code is not None and not children and not self._collect():  # one look may miss a new process
            self._end()
        elif self._kill_at != _NEVER:
            if self._code is not None and self._on_left is not None:
                self._on_left()
                self._on_left = None
            self._signal_due(children, time.monotonic())
            self.look_seconds = max(_LOOK_SECONDS, (time.monotonic() - began) / _LOOK_SHARE)

    def _end_with_grace(self, margin: float) -> None:
        if self._stopped_at is not None:
            reserve = min(_LONGEST_RESERVE_SECONDS, 0.1 * self._grace_seconds)
            self._end_by(self._stopped_at + self._grace_seconds - margin, reserve)

    def _end_by(self, kill_at: float, late_seconds: float = 0.0) -> None:
        if kill_at < self._kill_at:
            self._kill_at, self._late_at = kill_at, kill_at - late_seconds

    def _collect(self) -> list[Process]:
        """Take the exit codes of ended children; return the others, with all processes below them."""
        children = [child for child in _read_children() if child.identity not in self._others]
        if self._code is None and all(child.pid != self._pid for child in children):
            children.append(Process(self._pid))  # without /proc the program alone is known
        return [child for child in children if not self._has_ended(child.pid)]

    def _has_ended(self, pid: int) -> bool:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            return False
        self._changed_at = time.monotonic()
        code = os.waitstatus_to_exitcode(status)
        if pid == self._pid:
            self._code = 128 - code if code < 0 else code
            if self._stopped_at is None:
                self._end_by(self._changed_at + _PATIENCE_SECONDS, _PATIENCE_SECONDS / 4)
        else:
            self.has_killed |= code < 0
            if self._code == _ENDED_BY_SIGTERM and self._is_shell:
                self._left_codes.append(code)
        self._is_preempted |= self._stopped_at is not None and code == environment.EX_TEMPFAIL
        return True

    def _signal_due(self, children: Sequence[Process], now: float) -> None:
        below = [process for child in children for process in (child, *child.descendants())]
        alive, registered = {process.pid for process in below}, self._registry.sessions()
        sessions = {process.pid for process in below if process.identity in registered}
        self._has_session_ended |= not self._sessions <= sessions
        self._sessions = sessions
        self._sent = {pid: at for pid, at in self._sent.items() if pid in alive}
        self._is_shell |= any(child.pid == self._pid and child.name in _SHELLS for child in children)
        self._at_stop = self._at_stop or {process.identity for process in below}
        # Others may still save: what had its SIGTERM before a process ended with 75, and what was started after it.
        are_workers = all(
            self._sent.get(child.pid, now) >= self._changed_at and child.identity in self._at_stop for child in children
        )
        if self._code is not None and self._is_preempted and are_workers and not sessions:
            self._end_by(self._changed_at + _PATIENCE_SECONDS, _PATIENCE_SECONDS / 4)
        if not sessions and self._registry.has_preempted():
            self._end_with_grace(min(_EXECUTOR_SECONDS, 0.1 * self._grace_seconds))
        if now >= self._kill_at:
            _send(alive, signal.SIGKILL)
            return
        only_readers = all(child.reads_pipe for child in children)
        if now >= self._late_at or (only_readers and now - self._changed_at >= _PATIENCE_SECONDS):
            receivers = [pid for pid in alive if pid not in self._sent]
        else:
            receivers = choose_receivers(children, self._sent, sessions, now, has_session_ended=self._has_session_ended)
        _send(receivers, signal.SIGTERM)
        self._sent |= dict.fromkeys(receivers, now)

    def _end(self) -> None:
        assert self._code is not None
        self.exit_code = self._code
        self.had_session = not self._registry.variables or bool(self._registry.sessions())
        self.has_finished = {*(self._left_codes or [self._code])} <= {0, environment.EX_TEMPFAIL}
        has_saved = self._is_preempted or self._registry.has_preempted()
        if self._stopped_at is not None and has_saved and self._code != environment.EX_FENCED:
            if self._code == 0:
                log_line("the program ended with 0 after SIGTERM, but its training is not complete; exit code 75")
            self.exit_code = environment.EX_TEMPFAIL
            self.has_finished |= self._code < 128  # no signal
        elif self._stopped_at is not None and self._code == _UNCAUGHT_EXCEPTION:
            self.exit_code = _ENDED_BY_SIGTERM
            log_line(f"the program ended with 1 after SIGTERM, as by an exception; exit code {self.exit_code}")
        self._registry.close()


class _SessionRegistry:
    """Processes with an open session, which a launcher of ranks may hide: a file in memory, to which each adds a line.

    The variable of the program names the file. A launcher closes inherited descriptors, but hands variables on.
    """

    def __init__(self, *, is_offered: bool) -> None:
        self.variables: dict[str, str] = {}
        self._forgotten = 0
        try:
            self._descriptor = os.memfd_create(_REGISTRY_NAME)
            if is_offered:
                self.variables[environment.LAUNCHER] = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        except OSError:  # a sandbox without this call: the program alone gets SIGTERM
            self._descriptor = os.open(os.devnull, os.O_RDONLY)

    def _lines(self) -> list[str]:
        return os.pread(self._descriptor, 1 << 20, 0).decode().splitlines()

    def sessions(self) -> set[tuple[int, int]]:
        """Identities of processes, also of those that have ended."""
        words = [line.split() for line in self._lines()]
        return {(int(pair[0]), int(pair[1])) for pair in words if len(pair) > 1 and "".join(pair[:2]).isdecimal()}

    def has_preempted(self) -> bool:
        return sum(_PREEMPTED in line for line in self._lines()) > self._forgotten

    def forget_preempted(self) -> None:
        self._forgotten = sum(_PREEMPTED in line for line in self._lines())

    def close(self) -> None:
        os.close(self._descriptor)


def register_session(environ: Mapping[str, str], *, has_preempted: bool = False) -> None:
    """Tell the launcher that this process has a session, or that the session ended preempted; never raises."""
    path = environ.get(environment.LAUNCHER, "")
    try:
        if _REGISTRY_NAME in os.readlink(path):  # in another namespace the path is that of another file
            stat = _Stat("self")
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
            try:
                words = (str(stat.pid), str(stat.started), *([_PREEMPTED] if has_preempted else []))
                os.write(descriptor, f"{' '.join(words)}\n".encode())
            finally:
                os.close(descriptor)
    except OSError:
        return  # no launcher, or one of another user


def _start(
    command: Sequence[str],
    environ: Mapping[str, str],
    file_actions: Sequence[tuple[int, int, int]],
    prctl: Callable[[int, int], int],
) -> int:
    """Start a program in a group of its own, which the kernel ends with this process; return its process id."""
    parent = os.getpid()
    report, failure = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(NOT_EXECUTABLE)
            for number in (*_HANDLED_SIGNALS, *_IGNORED_BY_PYTHON):
                signal.signal(number, signal.SIG_DFL)
            for _, source, target in file_actions:
                os.dup2(source, target)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.execvpe(command[0], list(command), environ)  # noqa: S606  this module exists to start the program
        except OSError as error:
            os.write(failure, str(error.errno).encode())
        finally:
            os._exit(NOT_EXECUTABLE)
    os.close(failure)
    with open(report, "rb") as pipe:
        error_number = pipe.read()
    if error_number:
        os.waitpid(pid, 0)
        raise OSError(int(error_number), os.strerror(int(error_number)))
    return pid


def _send(receivers: Iterable[int], number: int) -> None:
    for pid in receivers:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _has_ended_children() -> bool:
    return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class _Stat:
    """What ``/proc/<entry>/stat`` says of a process; raises OSError if it has ended (see proc_pid_stat(5))."""

    def __init__(self, entry: str) -> None:
        with open(f"/proc/{entry}/stat", errors="replace") as file:
            head, _, tail = file.read().rpartition(") ")
        pid, _, self.name = head.partition(" (")
        fields = tail.split()
        self.pid, self.state, self.parent, self.group = int(pid), fields[0], int(fields[1]), int(fields[2])
        self.started, handled = int(fields[19]), int(fields[31])
        self.handles_sigterm = bool(handled >> (signal.SIGTERM - 1) & 1)


def _read_children() -> list[Process]:
    """The children of this process with all that is below them, without those in its own group: helpers of its own."""
    own = os.getpid()
    found: dict[int, list[_Stat]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = _Stat(entry)
        except OSError:
            continue
        if stat.parent != own or stat.group != os.getpgrp():
            found.setdefault(stat.parent, []).append(stat)
    own_input = _read_link("/proc/self/fd/0")

    def build(parent: int) -> list[Process]:
        return [
            Process(
                stat.pid,
                # The name of a process is that of its script, and a shell may run that.
                _read_link(f"/proc/{stat.pid}/exe").rpartition("/")[2] or stat.name,
                started=stat.started,
                handles_sigterm=stat.handles_sigterm,
                reads_pipe=(standard_input := _read_link(f"/proc/{stat.pid}/fd/0")).startswith("pipe:")
                and standard_input != own_input,
                children=build(stat.pid),
            )
            for stat in found.get(parent, ())
            if stat.state not in "ZX" or parent == own
        ]

    return build(own)


def _read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def run_child(command: Sequence[str], environ: Mapping[str, str], signals: SignalQueue) -> int:
    """Run ``command`` to its end, forward ``signals`` to it, and return its exit code as a shell reports it."""
    try:
        child = ChildProcess(command, environ)
    except OSError as error:
        log_line(f"{command[0]} cannot be started: {error.strerror}; check the command of the step and its image")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    while child.exit_code is None:
        number = signals.wait_next(child.look_seconds)
        if number in FORWARDED:
            child.send_signal(number)
        child.reap()
    if child.exit_code == 0 and signals.stopped_at is not None and not child.had_session:
        log_line("the program ended with 0 after SIGTERM, and no session says that it is complete; exit code 75")
        return environment.EX_TEMPFAIL
    return child.exit_code
