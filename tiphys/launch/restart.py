"""Starts a program that died again in its pod: the same attempt, its next *incarnation*.

Three quarters of all faults need only a new process; a new pod costs its scheduling, its image and its mounts as
well. A restart keeps the pod, its GPUs and its files. It takes place only where it is sure to be as good as a new
attempt (`choose_restart_cause`): the cause is not one of the node or its memory, the step's retry budget for the
cause allows a retry, and the incarnation has committed a checkpoint, which refunds that budget. A program that
dies before it has committed anything ends its attempt, so that the service can count its failures and look for the
checkpoint that causes them.

No process of an incarnation is left when the next one starts (`ChildProcess`), a stopped one neither: what it had
not committed then, it can never commit.
"""

import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from tiphys.launch.processes import FORWARDED, NOT_EXECUTABLE, NOT_FOUND, ChildProcess, SignalQueue, log_line
from tiphys.launch.spare import SpareKeeper
from tiphys.protocol import environment

_MEMORY_EVENTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""Where version 2 and version 1 of control groups count the processes that the kernel killed for the pod's memory."""
_SIGKILL, _SIGALRM = 137, 142
_USER_ERROR = "user_error"
_SPARE_SECONDS = 1.0
"""Time between two looks at whether a spare process is due, or needs too much memory."""
_CAUSES = {_SIGKILL: "infrastructure", environment.EX_HANG: "hang", _SIGALRM: "hang"}
"""As `tiphys.failures.classify` has it; every other exit code is an error of the program."""
_FINAL_CODES = frozenset(
    {0, NOT_FOUND, NOT_EXECUTABLE, 143, environment.EX_TEMPFAIL, environment.EX_UNAVAILABLE, environment.EX_FENCED}
)
"""Exit codes after which no process of this pod can go on."""


class ProgramEnd:
    """How one incarnation of a program ended.

    Args:
        code: Its exit code, as a shell reports it.
        failures: What its sessions said about their ends: causes, or another word where a new process does not help.
        has_committed: Whether it has committed a checkpoint.
    """

    def __init__(self, code: int, failures: Collection[str] = (), *, has_committed: bool = False) -> None:
        self.code, self.failures, self.has_committed = code, failures, has_committed


def run_program(command: Sequence[str], environ: Mapping[str, str], signals: SignalQueue) -> int:
    """Run ``command`` to its end, again where that helps, and return its last exit code as a shell reports it."""
    keeper = SpareKeeper(command, environ) if environ.get(environment.RESTART_CAUSES) else None

    def run_once(environ: Mapping[str, str]) -> ProgramEnd:
        try:
            child = ChildProcess(command, environ, take_over=keeper.take_over if keeper else None)
        except OSError as error:
            log_line(f"{command[0]} cannot be started: {error.strerror}; check the command of the step and its image")
            return ProgramEnd(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)
        code = _wait_for_end(child, signals, keeper)
        return ProgramEnd(code, child.failures, has_committed=child.has_committed)

    try:
        return restart_while_useful(run_once, environ, signals)
    finally:
        if keeper:
            keeper.close()


def restart_while_useful(
    run_once: Callable[[Mapping[str, str]], ProgramEnd], environ: Mapping[str, str], signals: SignalQueue
) -> int:
    """Call ``run_once`` with the variables of the program until a restart is no use; return the last exit code."""
    allowed = (environ.get(environment.RESTART_CAUSES) or "").split(",")
    incarnation = 1
    while True:
        memory_kills = count_memory_kills()
        end = run_once(environ)
        lacked_memory = count_memory_kills() > memory_kills
        cause = choose_restart_cause(end, allowed, lacked_memory=lacked_memory)
        if signals.stopped_at is not None or signals.is_stop_requested:
            return end.code
        if not cause:
            return choose_exit_code(end, allowed, incarnation=incarnation, lacked_memory=lacked_memory)
        incarnation += 1
        how = f"the program ended with {end.code} ({cause.replace('_', ' ')})"
        log_line(f"{how}; {environment.RESTARTED.format(incarnation)}")
        environ = {**environ, **_restart_variables(incarnation, end.code, cause)}
        _clear_termination_log()


def choose_restart_cause(end: ProgramEnd, allowed: Collection[str], *, lacked_memory: bool) -> str:
    """The cause for which the program is started again in its pod; empty if it is not. Pure.

    Args:
        end: How its last incarnation ended.
        allowed: Causes that the step's retry policy retries.
        lacked_memory: Whether the kernel has killed a process for the pod's memory.
    """
    if end.code in _FINAL_CODES or not end.has_committed or lacked_memory:
        return ""
    causes = _find_causes(end)
    return causes[0] if set(causes) <= set(allowed) else ""


def choose_exit_code(end: ProgramEnd, allowed: Collection[str], *, incarnation: int, lacked_memory: bool) -> int:
    """The exit code of a program that is not started again: its own, unless a new pod may cure what ended it. Pure.

    A program that was started again finds what the process before left in the pod, such as a folder that it makes
    itself. So an error of its own is not held against it before it has saved anything.
    """
    is_own_error = end.code not in _FINAL_CODES and _find_causes(end) == [_USER_ERROR] and not lacked_memory
    needs_new_pod = incarnation > 1 and is_own_error and not end.has_committed and _USER_ERROR not in allowed
    if needs_new_pod:
        return environment.EX_NEW_POD
    return 1 if end.code == environment.EX_NEW_POD else end.code  # the program's own 80 must not say this


def _find_causes(end: ProgramEnd) -> list[str]:
    return sorted(end.failures) or [_CAUSES.get(end.code, _USER_ERROR)]


def _wait_for_end(child: ChildProcess, signals: SignalQueue, keeper: SpareKeeper | None) -> int:
    """Forward ``signals`` until all processes of ``child`` have ended; return its exit code as a shell reports it."""
    while child.exit_code is None:
        longest = _SPARE_SECONDS if keeper and keeper.is_watchful else child.look_seconds
        number = signals.wait_next(min(longest, child.look_seconds))
        if keeper and signals.stopped_at is None:
            keeper.look(child.find_imports)
        if number in FORWARDED:
            child.send_signal(number)
        child.reap()
    if child.exit_code == 0 and signals.stopped_at is not None and not child.had_session:
        log_line("the program ended with 0 after SIGTERM, and no session says that it is complete; exit code 75")
        return environment.EX_TEMPFAIL
    return child.exit_code


def _restart_variables(incarnation: int, code: int, cause: str) -> dict[str, str]:
    """The variables that tell a program which incarnation it is, and how and when the one before it ended."""
    return {
        environment.INCARNATION: str(incarnation),
        environment.RESTARTED_AFTER: f"{cause} {code} {time.time():.3f}",
    }


def _clear_termination_log(path: str = environment.TERMINATION_LOG) -> None:
    """Forget the last words of the program before: they are no reason for the end of the next."""
    with contextlib.suppress(OSError):
        os.truncate(path, 0)


def count_memory_kills(paths: Sequence[str] = _MEMORY_EVENTS) -> int:
    """How many processes of this pod the kernel has killed for its memory; 0 where that is not counted."""
    for path in paths:
        with contextlib.suppress(OSError), open(path) as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    return 0
