"""Starts a program that died again in its pod: the same attempt, its next *incarnation*.

Three quarters of all faults need only a new process; a new pod costs its scheduling, its image and its mounts as
well. A restart keeps the pod, its GPUs and its files. It takes place only where it is sure to be as good as a new
attempt (`choose_restart_cause`): the cause is not one of the node or its memory, the step's retry budget for the
cause allows a retry, and the incarnation has committed a checkpoint, which refunds that budget. A program that
dies before it has committed anything ends its attempt, so that the service can count its failures and look for the
checkpoint that causes them. The members of a gang are started again together (`tiphys.launch.gang_restart`).

No process of an incarnation is left when the next one starts (`ChildProcess`), a stopped one neither: what it had
not committed then, it can never commit.
"""

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from tiphys.launch.processes import FORWARDED, NOT_EXECUTABLE, NOT_FOUND, ChildProcess, SignalQueue, log_line
from tiphys.launch.spare import SpareKeeper
from tiphys.protocol import environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tiphys.launch.gang_restart import GangMember, RequestWatch

_MEMORY_EVENTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""Where version 2 and version 1 of control groups count the processes that the kernel killed for the pod's memory."""
_SIGKILL = 137
_USER_ERROR = "user_error"
_SPARE_SECONDS = 1.0
"""Time between two looks at whether a spare process is due, or needs too much memory."""
_CAUSES = {_SIGKILL: "infrastructure", environment.EX_HANG: "hang"}
"""As `tiphys.failures.classify` has it; every other exit code is an error of the program."""
FINAL_CODES = frozenset(
    {0, NOT_FOUND, NOT_EXECUTABLE, 143, environment.EX_TEMPFAIL, environment.EX_UNAVAILABLE, environment.EX_FENCED}
)
"""Exit codes after which no process of this pod can go on."""


class ProgramEnd:
    """How one incarnation of a program ended.

    Args:
        code: Its exit code, as a shell reports it.
        failures: What its sessions said about their ends: causes, or another word where a new process does not help.
        has_committed: Whether it has committed a checkpoint.
        was_ended: Whether the launcher ended it, because another member of its gang asked for that.
        first_rank: As of `ChildProcess`.
        environ: With which variables it was started.
    """

    def __init__(
        self,
        code: int,
        failures: Collection[str] = (),
        *,
        has_committed: bool = False,
        was_ended: bool = False,
        first_rank: int | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.code, self.failures, self.has_committed, self.was_ended = code, failures, has_committed, was_ended
        self.first_rank, self.environ = first_rank, environ or {}


def run_program(command: Sequence[str], environ: Mapping[str, str], signals: SignalQueue) -> ProgramEnd:
    """Run ``command`` to its end, again where that helps, and return its last end, with the exit code of the pod."""
    is_restarted = bool(environ.get(environment.RESTART_CAUSES))
    keeper = SpareKeeper(command, environ) if is_restarted else None
    # An elastic gang restarts after the loss of its host, whatever else it restarts after.
    is_gang = environment.MEMBERS in environ and (is_restarted or environment.ELASTIC in environ)
    gang = _open_gang(environ, signals) if is_gang else None
    if gang:
        environ = {**environ, **gang.join()}
    last_end = ProgramEnd(0)

    def run_once(environ: Mapping[str, str]) -> ProgramEnd:
        nonlocal last_end
        try:
            child = ChildProcess(
                command,
                environ,
                take_over=keeper.take_over if keeper else None,
                find_helpers=keeper.find_group if keeper else None,
            )
        except OSError as error:
            log_line(f"{command[0]} cannot be started: {error.strerror}; check the command of the step and its image")
            return ProgramEnd(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)
        watch = gang.watch(_read_incarnation(environ) + 1) if gang else None
        try:
            code = _wait_for_end(child, signals, keeper, watch)
        finally:
            if watch:
                watch.close()
        has_older = bool(environ.get(environment.RESUME_FROM))  # then the program has opened one, and died before it
        if code and environ.get(environment.LINEAGE) and not (child.had_session or has_older):
            log_line(
                f"the program ended with {code}, and no session has saved anything in this attempt; open "
                "tiphys.checkpoint.session() in its main thread, or run it under tiphys-exec"
            )
        was_ended = watch is not None and watch.has_ended_program
        last_end = ProgramEnd(
            code,
            child.failures,
            has_committed=child.has_committed,
            was_ended=was_ended,
            first_rank=child.first_rank,
            environ=environ,
        )
        return last_end

    try:
        code = restart_while_useful(run_once, environ, signals, gang.decide if gang else None)
        return ProgramEnd(code, first_rank=last_end.first_rank, environ=last_end.environ)
    finally:
        if keeper:
            keeper.close()


def _open_gang(environ: Mapping[str, str], signals: SignalQueue) -> "GangMember":
    from tiphys.launch.gang_restart import GangMember  # it needs the store, and the launcher of a single pod does not

    return GangMember(environ, signals)


def restart_while_useful(
    run_once: Callable[[Mapping[str, str]], ProgramEnd],
    environ: Mapping[str, str],
    signals: SignalQueue,
    decide: "Callable[..., int | tuple[str, dict[str, str]]] | None" = None,
) -> int:
    """Call ``run_once`` with the variables of the program until a restart is no use; return the last exit code.

    ``decide`` is called as `decide_alone` would be, but for the signals.
    """
    allowed = (environ.get(environment.RESTART_CAUSES) or "").split(",")
    decide = decide or functools.partial(decide_alone, signals)
    while True:
        memory_kills, incarnation = count_memory_kills(), _read_incarnation(environ)
        end = run_once(environ)
        lacked_memory = count_memory_kills() > memory_kills
        answer = decide(end, allowed, incarnation, lacked_memory=lacked_memory)
        if isinstance(answer, int):
            return answer
        how, variables = answer
        log_line(f"{how}; {environment.RESTARTED.format(incarnation + 1)}")
        environ = {**environ, environment.INCARNATION: str(incarnation + 1), **variables}
        _clear_termination_log()


def decide_alone(
    signals: SignalQueue, end: ProgramEnd, allowed: Collection[str], incarnation: int, *, lacked_memory: bool
) -> int | tuple[str, dict[str, str]]:
    """The exit code of the launcher; or how the program ended, and the variables with which it is started again."""
    cause = choose_restart_cause(end, allowed, lacked_memory=lacked_memory)
    if signals.is_stop_requested:
        return end.code
    if not cause:
        return choose_exit_code(end, allowed, incarnation=incarnation, lacked_memory=lacked_memory)
    how = f"the program ended with {end.code} ({cause.replace('_', ' ')})"
    return how, {environment.RESTARTED_AFTER: f"{cause} {end.code} {time.time():.3f}"}


def choose_restart_cause(end: ProgramEnd, allowed: Collection[str], *, lacked_memory: bool) -> str:
    """The cause for which the program is started again in its pod; empty if it is not. Pure.

    Args:
        end: How its last incarnation ended.
        allowed: Causes that the step's retry policy retries.
        lacked_memory: Whether the kernel has killed a process for the pod's memory.
    """
    if end.code in FINAL_CODES or not end.has_committed or lacked_memory:
        return ""
    causes = _find_causes(end)
    return causes[0] if set(causes) <= set(allowed) else ""


def choose_exit_code(end: ProgramEnd, allowed: Collection[str], *, incarnation: int, lacked_memory: bool) -> int:
    """The exit code of a program that is not started again: its own, unless a new pod may cure what ended it. Pure.

    A program that was started again finds what the process before left in the pod, such as a folder that it makes
    itself. So an error of its own is not held against it before it has saved anything.
    """
    is_own_error = end.code not in FINAL_CODES and _find_causes(end) == [_USER_ERROR] and not lacked_memory
    needs_new_pod = incarnation > 1 and is_own_error and not end.has_committed and _USER_ERROR not in allowed
    if needs_new_pod:
        return environment.EX_NEW_POD
    return 1 if end.code == environment.EX_NEW_POD else end.code  # the program's own 80 must not say this


def _find_causes(end: ProgramEnd) -> list[str]:
    return sorted(end.failures) or [_CAUSES.get(end.code, _USER_ERROR)]


def _wait_for_end(
    child: ChildProcess, signals: SignalQueue, keeper: SpareKeeper | None, watch: "RequestWatch | None"
) -> int:
    """Forward ``signals`` until all processes of ``child`` have ended; return its exit code as a shell reports it."""
    while child.exit_code is None:
        longest = _SPARE_SECONDS if keeper and keeper.is_watchful else child.look_seconds
        number = signals.wait_next(min(longest, child.look_seconds, watch.look_seconds if watch else longest))
        if keeper and signals.stopped_at is None:
            keeper.look(child.find_imports)
        if number in FORWARDED:
            child.send_signal(number)
        if watch and signals.stopped_at is None and watch.wants_end(has_failed=child.has_failed):
            child.send_signal(signal.SIGKILL)  # it is to begin again at the last checkpoint, so it has nothing to save
        child.reap()
    if child.exit_code == 0 and signals.stopped_at is not None and not child.had_session:
        log_line("the program ended with 0 after SIGTERM, and no session says that it is complete; exit code 75")
        return environment.EX_TEMPFAIL
    return child.exit_code


def _read_incarnation(environ: Mapping[str, str]) -> int:
    return int(environ.get(environment.INCARNATION) or 1)


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
