"""Process 1 of a container, in miniature; it outlives neither its engine nor its program.

A trainer that goes on after its engine was killed holds GPUs and writes
checkpoints that nobody asked for. So the kernel tells this process when the
engine dies, and it takes the whole process group with it, data loaders
included. When the program ends, what it left behind is ended too, daemons that
made a session of their own included: they are handed to this process when
their parent ends, as to process 1 of a container.

Run as a file by a bare interpreter (no Tiphys import, to start fast):
``launch.py <pid of the engine> <command> [arguments]``. Exit code: the
program's, 128+n if signal n ended it, 127 or 126 if it could not be started.
"""

import ctypes
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126


def main(engine: int, command: list[str]) -> int:
    """Run ``command`` to its end."""
    signal.signal(signal.SIGTERM, _leave_to_program)
    signal.signal(signal.SIGINT, _leave_to_program)
    signal.signal(signal.SIGHUP, _end_group)
    _when_parent_dies(signal.SIGHUP)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != engine:  # it died before we asked to be told
        return 128 + signal.SIGKILL
    program = os.fork()
    if program == 0:
        _become(command)
    ended, status = os.wait()
    while ended != program:
        ended, status = os.wait()
    _end_descendants()
    return _reported(os.waitstatus_to_exitcode(status))


def _become(command: list[str]) -> NoReturn:
    _when_parent_dies(signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)  # noqa: S606  starting the program is what this is for
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]!r}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)


def _reported(code: int) -> int:
    return code if code >= 0 else 128 - code


def _leave_to_program(_number: int, _frame: FrameType | None) -> None:
    """The engine signals the whole group, so the program has got the signal itself."""


def _end_group(_number: int, _frame: FrameType | None) -> None:
    _end_descendants()
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _end_descendants() -> None:
    """End the children of this process; whoever they leave behind becomes a child of it, and is next."""
    while children := _children():
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listing:  # noqa: PTH123  pathlib is slow to import
            return [int(child) for child in listing.read().split()]
    except FileNotFoundError:  # a kernel built without it: only the group is ended
        return []


def _when_parent_dies(number: signal.Signals) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
