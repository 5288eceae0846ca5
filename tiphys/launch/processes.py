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
| one whose sessions have all come to the end of their training | as all others: torchrun would end with 1 |
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
from collections.abc import Callable, Iterable, Mapping, Sequence

from tiphys.launch.process_table import PATIENCE_SECONDS, SHELLS, Process, choose_receivers, read_children
from tiphys.launch.session_registry import ProgramImports, SessionRegistry
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
_LONGEST_RESERVE_SECONDS, _LONGEST_MARGIN_SECONDS = 2.0, 0.2
"""Time before SIGKILL for processes that had no SIGTERM, and from SIGKILL to the end of the grace period, at most."""
_EXECUTOR_SECONDS = 1.5
"""Time from SIGKILL to the end of the grace period once the training has saved. Argo's executor looks once a second for
the end of its program, and an exit code that it has not seen when the kubelet kills it is lost: 137 takes its place."""
_LOOK_SECONDS, _QUIET_SECONDS = 0.05, 60.0
_LOOK_SHARE = 0.1
"""Largest share of time to spend on reading /proc, which is long on a machine with thousands of processes."""
_LOST_RANK, _HANG = "infrastructure", "hang"
"""Failures of a launcher of ranks that ends with 1 because one of them was killed, and of a program that the kernel's
alarm ended, which leaves stacks in the termination log; an alarm of the program itself leaves nothing there."""
_ENDED_BY_SIGTERM, _ENDED_BY_SIGALRM = 128 + signal.SIGTERM, 128 + signal.SIGALRM
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
        """Whether SIGTERM has arrived; any thread may read it."""
        return self.stopped_at is not None or signal.SIGTERM in signal.sigpending()


class ChildProcess:
    """A started program, with all processes that it starts. A process has one at a time."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        file_actions: Sequence[tuple[int, int, int]] = (),
        on_left: Callable[[], None] | None = None,
        take_over: Callable[[Mapping[str, str]], int | None] | None = None,
        find_helpers: Callable[[], int | None] | None = None,
    ) -> None:
        """Start ``command``, with ``file_actions`` as of `os.posix_spawn`; raises OSError if it cannot be executed.

        ``on_left`` is called once the program has ended, before what it left behind gets a signal. ``take_over`` may
        let a process that waits for this become the program, and return its process id. ``find_helpers`` returns the
        group of processes that are no part of the program.
        """
        self._on_left, self._find_helpers = on_left, find_helpers
        self.exit_code: int | None = None
        """Exit code as a shell reports it; None until all processes have ended. A stopped one has 75 if a session or a
        process that it left ended with 75, and 143 in the place of 1, which would say that it is at fault."""
        self.has_finished = False
        """Whether nothing interrupted a write: the program, or what a stopped shell waited for, ended with 0 or 75."""
        self.has_killed = False
        """Whether a signal ended a process that the program left behind, maybe while it wrote a file."""
        self.had_session = False
        """Whether a session was open in it, or may have been."""
        self.has_committed = False
        """Whether one of its sessions has committed a checkpoint."""
        self.failures: frozenset[str] = frozenset()
        """What its sessions said about their failures."""
        self.first_rank: int | None = None
        """Rank of its first process when this was started last, as its session said; None if none was opened."""
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
        self._launchers: set[int] = set()
        self._registry = SessionRegistry(tells_sessions=environment.ELASTIC not in environ)
        self._others = {child.identity for child in self._read_children()} if _has_children() else set()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        environ = {**environ, **self._registry.variables}
        pid = take_over(environ) if take_over else None
        self._pid = start_process(command, environ, file_actions) if pid is None else pid

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

    @property
    def has_failed(self) -> bool:
        """Whether a session of the running program has failed."""
        return self._code is None and bool(self._registry.failures())

    def find_imports(self) -> ProgramImports | None:
        """What the program had imported at its first commit; None before, and once it has ended."""
        return self._registry.imports() if self._code is None else None

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
        if self._code is None:
            self._has_ended(self._pid)
        if not _has_children():
            return []  # without a look at /proc, which is long on a machine with thousands of processes
        children = [child for child in self._read_children() if child.identity not in self._others]
        if self._code is None and all(child.pid != self._pid for child in children):
            children.append(Process(self._pid))  # without /proc the program alone is known
        return [child for child in children if not self._has_ended(child.pid)]

    def _read_children(self) -> list[Process]:
        return read_children(helpers=self._find_helpers() if self._find_helpers else None)

    def _has_ended(self, pid: int) -> bool:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            return False
        self._changed_at = time.monotonic()
        code = os.waitstatus_to_exitcode(status)
        if pid == self._pid:
            self._code = 128 - code if code < 0 else code
            if self._stopped_at is None:
                self._end_by(self._changed_at + PATIENCE_SECONDS, PATIENCE_SECONDS / 4)
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
        complete = {pid for pid, _ in self._registry.complete_sessions()}
        self._has_session_ended |= not self._sessions <= sessions | complete
        self._sessions = sessions
        launchers = {process.pid for process in below if process.is_launcher(sessions)}
        self._launchers |= launchers
        self._sent = {pid: at for pid, at in self._sent.items() if pid in alive}
        self._is_shell |= any(child.pid == self._pid and child.name in SHELLS for child in children)
        self._at_stop = self._at_stop or {process.identity for process in below}
        # Others may still save: what had its SIGTERM before a process ended with 75, and what was started after it.
        are_workers = all(
            self._sent.get(child.pid, now) >= self._changed_at and child.identity in self._at_stop for child in children
        )
        if self._code is not None and self._is_preempted and are_workers and not sessions:
            self._end_by(self._changed_at + PATIENCE_SECONDS, PATIENCE_SECONDS / 4)
        if not sessions and self._registry.has_preempted():
            self._end_with_grace(min(_EXECUTOR_SECONDS, 0.1 * self._grace_seconds))
        if now >= self._kill_at:
            _send(alive, signal.SIGKILL)
            return
        only_readers = all(child.reads_pipe for child in children)
        if now >= self._late_at or (only_readers and now - self._changed_at >= PATIENCE_SECONDS):
            receivers = [pid for pid in alive if pid not in self._sent]
        else:
            done = set() if self._has_session_ended else self._launchers - launchers
            has_had = {**dict.fromkeys(done, now), **self._sent}
            receivers = choose_receivers(children, has_had, sessions, now, has_session_ended=self._has_session_ended)
        _send(receivers, signal.SIGTERM)
        self._sent |= dict.fromkeys(receivers, now)

    def _end(self) -> None:
        assert self._code is not None
        self.exit_code = self._code
        registry = self._registry
        self.had_session = not (registry.variables and registry.tells_sessions) or bool(registry.sessions())
        self.has_committed, self.failures = registry.has_committed(), registry.failures()
        self.first_rank = registry.first_rank()
        lost_ranks = {pid for pid, _ in registry.lost_sessions()} - {self._pid}
        if not self.failures and lost_ranks and self._code == _UNCAUGHT_EXCEPTION and not _has_words():
            self.failures = frozenset({_LOST_RANK})
        elif not self.failures and self._code == _ENDED_BY_SIGALRM and _has_words():
            self.failures = frozenset({_HANG})
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


def start_process(
    command: Sequence[str], environ: Mapping[str, str], file_actions: Sequence[tuple[int, int, int]] = ()
) -> int:
    """Start a program in a group of its own, which the kernel ends with this process; return its process id.

    Raises:
        OSError: it cannot be executed.
    """
    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl
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


def _has_words(path: str = environment.TERMINATION_LOG) -> bool:
    """Whether the program has written to the termination log, as a session does whose process crashes."""
    try:
        return os.stat(path).st_size > 0
    except OSError:
        return False


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _has_ended_children() -> bool:
    return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
