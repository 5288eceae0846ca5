"""Turns an exception into one line on stderr and an exit code.

An expected failure is one sentence that says what to do; ``--verbose`` adds the
traceback. Any other exception is reported as a bug in Tiphys.
"""

import errno
import traceback

import typer

from hera_pipelines.cli import INTERRUPTED_EXIT_CODE
from hera_pipelines.cli.screen import Screen
from tiphys.errors import SettingsError, StoreError, TiphysError

# A full, forbidden or read-only file system is a condition of the machine, not a bug in Tiphys.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)
EXIT_CODES = {
    0: "done",
    1: "a step or a check failed, or Tiphys has a bug",
    2: "the command line, a file or a manifest is invalid",
    3: "the run, step or object does not exist",
    4: "conflict: another owner holds it, or quota denies it",
    5: "bytes in storage do not match their record",
    6: "nothing is broken, and not everything could be tried",
    75: "storage or a service is unavailable; try again",
    78: "credentials, permissions or an address are wrong; change them",
    INTERRUPTED_EXIT_CODE: "interrupted",
}


class RunFailedError(TiphysError):
    """The run ended and at least one of its steps failed."""


class RunInterruptedError(TiphysError):
    """A person stopped the run; its finished steps and checkpoints are kept."""

    exit_code = INTERRUPTED_EXIT_CODE


def report_error(error: BaseException, screen: Screen) -> int:
    """Print ``error`` on stderr and return the exit code for it."""
    if screen.verbose:
        screen.error("".join(traceback.format_exception(error)))
    if isinstance(error, typer.TyperException) and error.format_message().startswith("Usage: "):
        screen.error(error.format_message())  # a group without a command: the message is its help
        return error.exit_code
    line, code = _describe_error(error)
    screen.error(f"tiphys: {line}")
    return code


def _describe_error(error: BaseException) -> tuple[str, int]:
    if isinstance(error, TiphysError):
        return _one_line("; ".join([str(error), *getattr(error, "__notes__", ())])), error.exit_code
    if isinstance(error, typer.TyperException):
        return _describe_wrong_call(error), error.exit_code
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "interrupted", INTERRUPTED_EXIT_CODE
    if isinstance(error, OSError) and error.errno in (*_FULL, *_NO_ACCESS):
        where = f"{error.filename}: " if error.filename else ""
        if error.errno in _FULL:
            return f"{where}{error.strerror}; free space, and try again", StoreError.exit_code
        return f"{where}{error.strerror}; grant access, or name another folder", SettingsError.exit_code
    kind = type(error).__name__
    return f"this is a bug in Tiphys: {kind}: {_one_line(str(error))}; repeat with --verbose for the traceback", 1


_PARAMETERS_STAY = (
    "a resume keeps the parameters of its run, and `tiphys fork RUN -p NAME=VALUE` starts one with others"
)
_HINTS = {(command, option): _PARAMETERS_STAY for command in ("plan", "resume") for option in ("-p", "--parameter")}
"""What to do in the place of an option that a command does not have, by command and option."""


def _describe_wrong_call(error: typer.TyperException) -> str:
    # The checks of values are pydantic's, which names the exception that a check raised.
    message = _one_line(error.format_message()).replace(": Value error, ", ": ").rstrip(".")
    context = getattr(error, "ctx", None)
    if context is None:
        return f"{message}; see `tiphys --help`"
    if hint := _HINTS.get((context.info_name, getattr(error, "option_name", ""))):
        message += f"; {hint}"
    return f"{message}; see `{context.command_path} --help`"


def _one_line(message: str) -> str:
    return " ".join(message.split())
