"""From an exception to one line and an exit code.

Expected failures are one sentence that says what to do; the trace is for
``--verbose``. What Tiphys did not expect is its own fault and says so.
"""

import errno
import traceback

import typer

from hera_pipelines.cli.screen import Screen
from tiphys.errors import StoreError, TiphysError

INTERRUPTED = 130
# Full, forbidden or read-only: the machine's condition and nobody's bug.
_SURROUNDINGS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS)
EXIT_CODES = {
    0: "done",
    1: "it failed: a step, a promise, or Tiphys itself",
    2: "the call, the file or the manifest is wrong",
    3: "the run, step or object is not there",
    4: "somebody else holds it, or quota denies it",
    5: "bytes in storage do not match what was recorded",
    75: "storage or a service did not answer; try again",
    INTERRUPTED: "interrupted",
}


class RunFailedError(TiphysError):
    """The run was carried out and failed."""


class RunInterruptedError(TiphysError):
    """A person stopped the run; its finished steps and checkpoints stay."""

    exit_code = INTERRUPTED


def report(error: BaseException, screen: Screen) -> int:
    """Say on stderr what went wrong; return the exit code."""
    if screen.verbose:
        screen.err.file.write("".join(traceback.format_exception(error)))
    line, code = _verdict(error)
    screen.err.file.write(f"tiphys: {line}\n")
    return code


def _verdict(error: BaseException) -> tuple[str, int]:
    if isinstance(error, TiphysError):
        return _one_line(str(error)), error.exit_code
    if isinstance(error, typer.TyperException):
        return f"{_one_line(error.format_message()).rstrip('.')}; see `tiphys --help`", error.exit_code
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "interrupted", INTERRUPTED
    if isinstance(error, OSError) and error.errno in _SURROUNDINGS:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}; make room or access, and try again", StoreError.exit_code
    kind = type(error).__name__
    return f"this is a bug in Tiphys: {kind}: {_one_line(str(error))}; repeat with --verbose for the trace", 1


def _one_line(message: str) -> str:
    return " ".join(message.split())
