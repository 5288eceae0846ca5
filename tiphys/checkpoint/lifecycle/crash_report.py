"""Records in storage which error ended the program, because the plugin only sees an exit code.

If two attempts restore one checkpoint and fail with the same error a few steps
later, the checkpoint becomes a suspect. So the program stores the error before
it exits, with a fingerprint that is equal for equal errors. Recording never
raises: the original error must reach its handler.
"""

import contextlib
import os
import re
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tiphys.checkpoint.lifecycle.hang_watchdog import HangReport
from tiphys.checkpoint.settings import CheckpointSettings
from tiphys.checkpoint.telemetry.events import log_message
from tiphys.checkpoint.telemetry.secret_mask import mask_secrets
from tiphys.errors import FencedError, StoreError, TiphysError
from tiphys.failures.classify import BETWEEN_RANKS, match_error_signature
from tiphys.launch.session_registry import NEEDS_NEW_POD, note_failure
from tiphys.protocol import environment
from tiphys.protocol.environment import EX_FENCED, EX_TEMPFAIL, EX_UNAVAILABLE
from tiphys.records import Cause, CheckpointRef, CrashRecord
from tiphys.store import RunLayout, Store, claim_record
from tiphys.store.incarnations import crash_key
from tiphys.threads import start_background_thread

STORE_TIMEOUT_SECONDS = 10.0
"""How long a failing program waits for storage."""

_MAX_ERROR_CHARACTERS = 500
_EXPECTED_EXIT_CODES = (None, 0, EX_TEMPFAIL, EX_UNAVAILABLE, EX_FENCED)
_BROKEN_CONNECTION = re.compile(r"Connection reset by peer|Broken pipe|Connection was likely closed")
"""In errors of other types, as PyTorch raises them."""
_VARYING_PATTERNS = (
    (re.compile(r"0x[0-9a-fA-F]+"), "<address>"),
    (re.compile(r"(?:[A-Za-z]:)?(?:[\\/][\w.+@-]+){2,}[\\/]?"), "<path>"),
    (re.compile(r"[-+]?(?:\d(?:[\d_,]*\d)?(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?|\b(?i:nan|inf)\b"), "<number>"),
)
"""Parts of a message that differ between two errors of one kind."""
_LIBRARY_FOLDERS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
)
"""Folders of code that the user did not write: the interpreter, installed packages and Tiphys."""


def record_crash(
    run_store: Store,
    settings: CheckpointSettings,
    error: BaseException | None,
    last_step: int | None,
    restored: CheckpointRef | None,
    timeout_seconds: float = STORE_TIMEOUT_SECONDS,
) -> None:
    """Store a `CrashRecord` if ``error`` is a crash of the program. Never raises.

    Of several processes of an incarnation that crash, the first record is kept.

    ``restored`` is the checkpoint that the process restored, or was restoring when it failed.
    """
    if error is None or not is_crash(error):
        return
    with contextlib.suppress(MemoryError):  # without memory the original error is raised unrecorded
        message = describe_error(error, is_rank=os.environ.get("WORLD_SIZE", "1") != "1")
        note_failure(os.environ, judge_restart(message))
        record = _make_record(settings, message, last_step, restored, fingerprint=error_fingerprint(error))
        _store_crash_record(run_store, record, timeout_seconds)


def record_hang(
    run_store: Store,
    settings: CheckpointSettings,
    hang: HangReport,
    last_step: int | None,
    restored: CheckpointRef | None,
) -> None:
    """Store a `CrashRecord` of a hang as `record_crash` does, without a fingerprint: no checkpoint causes a hang."""
    note_failure(os.environ, Cause.HANG)
    message = mask_secrets(hang.message) + ("" if last_step is None else f", after step {last_step}")
    stuck = {"stuck_seconds": hang.seconds, "stacks": mask_secrets(hang.stacks)}
    _store_crash_record(run_store, _make_record(settings, message, last_step, restored, **stuck), STORE_TIMEOUT_SECONDS)


def _make_record(
    settings: CheckpointSettings, message: str, last_step: int | None, restored: CheckpointRef | None, **details: Any
) -> CrashRecord:
    return CrashRecord(
        run=settings.run,
        step=settings.step,
        attempt=settings.attempt,
        incarnation=settings.incarnation,
        error=message,
        global_step=last_step,
        restored=restored,
        **details,
    )


def _store_crash_record(run_store: Store, record: CrashRecord, timeout_seconds: float) -> None:
    key = crash_key(RunLayout(record.run), record.step, record.attempt, record.incarnation)

    def write() -> None:
        try:
            claim_record(run_store, key, record)
        except Exception as failure:  # noqa: BLE001  a failure of storage must not replace the original error
            log_message(f"the error that ended the program could not be stored: {failure}")

    # A daemon thread: storage that hangs must not keep a failed program alive.
    if writer := start_background_thread(write):
        writer.join(timeout_seconds)
    else:
        write()


def is_attempt_end(environ: Mapping[str, str]) -> bool:
    """Return whether an error of this process ends its attempt.

    torchrun restarts an elastic training, and most errors only follow from the loss of another rank.
    """
    restarts_left = int(environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) - int(
        environ.get("TORCHELASTIC_RESTART_COUNT") or 0
    )
    return environment.ELASTIC not in environ or restarts_left <= 0


def is_crash(error: BaseException) -> bool:
    """Return False for a program that ends well, is interrupted, lost its storage, or is ended by Tiphys."""
    if isinstance(error, SystemExit):
        return error.code not in _EXPECTED_EXIT_CODES
    return not isinstance(error, KeyboardInterrupt | GeneratorExit | StoreError | FencedError)


def describe_error(error: BaseException, *, is_rank: bool) -> str:
    """`format_error`, and whether it is the loss of another rank, whatever library the broken connection belongs to."""
    text = format_error(error)
    is_lost = is_rank and (isinstance(error, ConnectionError) or _BROKEN_CONNECTION.search(text))
    return f"{text} {BETWEEN_RANKS}" if is_lost else text


def judge_restart(message: str) -> str:
    """What the launcher is told about an error: its cause, or that a new process in this pod would not help."""
    match = match_error_signature(message)
    if match is None:
        return Cause.USER_ERROR
    return NEEDS_NEW_POD if match.signature.blames_node else match.signature.cause


def error_fingerprint(error: BaseException) -> str:
    """Return a text that is equal for errors of one kind at one place.

    Empty for errors that no checkpoint causes: those of Tiphys, and a lack of memory.
    """
    if isinstance(error, TiphysError | MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return ""
    code = f"({error.code})" if isinstance(error, SystemExit) and isinstance(error.code, int) else ""
    message = "" if code else f": {normalize_message(mask_secrets(str(error)))}"
    return f"{_error_type_name(error)}{code}{message[:_MAX_ERROR_CHARACTERS]} at {user_frame(error.__traceback__)}"


def normalize_message(message: str) -> str:
    """Replace numbers, addresses and paths in a message, and join its lines."""
    for pattern, placeholder in _VARYING_PATTERNS:
        message = pattern.sub(placeholder, message)
    return " ".join(message.split())


def format_error(error: BaseException) -> str:
    """Format the exception as in the last line of a traceback, cut to a limit."""
    message = " ".join(mask_secrets(str(error)).split())
    return f"{_error_type_name(error)}: {message}"[:_MAX_ERROR_CHARACTERS].removesuffix(": ")


def user_frame(trace: TracebackType | None) -> str:
    """Return the innermost frame of the user's code, such as ``train.py:load``; of any code if there is none."""
    innermost, user_code = "nowhere", ""
    while trace is not None:
        code = trace.tb_frame.f_code
        innermost = f"{Path(code.co_filename).name}:{code.co_qualname}"
        if not code.co_filename.startswith((*_LIBRARY_FOLDERS, "<frozen")):
            user_code = innermost
        trace = trace.tb_next
    return user_code or innermost


def _error_type_name(error: BaseException) -> str:
    cls = type(error)
    module = "" if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}."
    return f"{module}{cls.__qualname__}"
