"""The init process of a local container: it ends with its engine and with its program.

A trainer that continues after its engine was killed holds GPUs and writes
unexpected checkpoints. So the kernel signals this process when the engine dies
(``PR_SET_PDEATHSIG``), and it kills all that is below it. The engine sends the same
signal, SIGHUP, when the grace period is over. When the program ends, its remaining
descendants are killed too. These include daemons in sessions of their own, because
this process is their subreaper (``PR_SET_CHILD_SUBREAPER``), as process 1 of a
container would be.

Runs as a file in a bare interpreter, without Tiphys imports, to start fast:
``init_process.py <pid of the engine> <plan of mounts or empty> <command> [arguments]``.
The exit code is the program's, 128+n after signal n, and 127 or 126 if the program
cannot be started.
"""

import ctypes
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


def main(engine_pid: int, plan: str, command: list[str]) -> int:
    """Run ``command`` to its end and return its exit code."""
    # A signal that comes before the program is there is handed on to it.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    for number in _STOP_SIGNALS:
        signal.signal(number, _ignore_signal)
    signal.signal(signal.SIGHUP, _end_group)
    _set_parent_death_signal(signal.SIGHUP)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != engine_pid:  # the engine died before the kernel was asked for its death signal
        return 128 + signal.SIGKILL
    program = os.fork()
    if program == 0:
        if plan:
            _enter_namespace(plan)
        _exec_program(command)
    for number in signal.sigpending() & _STOP_SIGNALS:
        os.kill(program, number)  # it came before the program was there
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    ended, status = os.wait()
    while ended != program:
        ended, status = os.wait()
    _end_descendants()
    return _container_exit_code(os.waitstatus_to_exitcode(status))


def _enter_namespace(plan: str) -> None:
    sys.path.append(os.path.dirname(__file__))  # noqa: PTH120
    try:
        __import__("mount_namespace").enter_mount_namespace(plan)
    except OSError as error:
        sys.stderr.write(
            f"the paths of the step cannot be mounted: {error}; set TIPHYS_LOCAL_NAMESPACE=off, and they are replaced "
            "in the command\n"
        )
        sys.stderr.flush()
        os._exit(_NOT_EXECUTABLE)


def _exec_program(command: list[str]) -> NoReturn:
    _set_parent_death_signal(signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    try:
        os.execvp(command[0], command)  # noqa: S606  this process exists to start the program
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]!r}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)


def _container_exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _ignore_signal(_number: int, _frame: FrameType | None) -> None:
    """Ignore the signal: the engine sends it to the whole process group, so the program receives it itself."""


def _end_group(_number: int, _frame: FrameType | None) -> None:
    _end_descendants()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _end_descendants() -> None:
    """Kill all children until none is left; orphans of a killed child become children of this process."""
    while children := _children():
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listing:  # noqa: PTH123  pathlib is slow to import
            return [int(child) for child in listing.read().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN: only the process group is killed
        return []


def _set_parent_death_signal(number: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
