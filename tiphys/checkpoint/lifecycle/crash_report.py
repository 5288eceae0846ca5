"""What ended the program, left in storage by the program itself, because nobody else can know it.

The plugin sees an exit code. That two attempts loaded one checkpoint and died
of the same error a few steps later is what makes that checkpoint a suspect, so
the error is written down on the way out, in a form that is equal for equal
errors. Writing it never fails: the error that is on its way must arrive.
"""

import contextlib
import re
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tiphys.checkpoint.lifecycle.hang_watchdog import Stuck
from tiphys.checkpoint.settings import Settings
from tiphys.checkpoint.telemetry.events import tell
from tiphys.errors import FencedError, StoreError, TiphysError
from tiphys.protocol import environment
from tiphys.protocol.environment import EX_FENCED, EX_TEMPFAIL, EX_UNAVAILABLE
from tiphys.records import CheckpointRef, CrashRecord
from tiphys.store import RunLayout, Store, claim
from tiphys.threads import in_background

LONGEST_SECONDS = 10.0
"""How long a dying program may wait for storage."""

_LONGEST_ERROR = 500
_NOT_CRASHES = (None, 0, EX_TEMPFAIL, EX_UNAVAILABLE, EX_FENCED)
_VARYING = (
    (re.compile(r"0x[0-9a-fA-F]+"), "<address>"),
    (re.compile(r"(?:[A-Za-z]:)?(?:[\\/][\w.+@-]+){2,}[\\/]?"), "<path>"),
    (re.compile(r"[-+]?(?:\d[\d_,]*)?\.?\d+(?:[eE][-+]?\d+)?|\b(?i:nan|inf)\b"), "<number>"),
)
"""What differs between two errors of one kind."""
_FOREIGN = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
)
"""Folders of code that is not the user's: the interpreter, installed packages, and Tiphys."""


def record_crash(
    run_store: Store,
    settings: Settings,
    error: BaseException | None,
    last_step: int | None,
    restored: CheckpointRef | None,
    timeout_seconds: float = LONGEST_SECONDS,
) -> None:
    """Leave a `CrashRecord` if ``error`` is a crash of the program; return in any case, after ``timeout_seconds``.

    ``last_step`` is the newest completed step this process told of, None before
    the first; ``restored`` what it restored, or was restoring when it failed.
    The first process of an attempt that crashes is the one that is believed.
    """
    if error is None or not is_crash(error):
        return
    with contextlib.suppress(MemoryError):  # which is the error then, or takes its place
        record = CrashRecord(
            run=settings.run,
            step=settings.step,
            attempt=settings.attempt,
            error=in_one_line(error),
            fingerprint=fingerprint(error),
            global_step=last_step,
            restored=restored,
        )
        _leave(run_store, record, timeout_seconds)


def record_hang(
    run_store: Store,
    settings: Settings,
    stuck: Stuck,
    last_step: int | None,
    restored: CheckpointRef | None,
    timeout_seconds: float = LONGEST_SECONDS,
) -> None:
    """The same of a program that is ended because it is stuck; no checkpoint is to blame for that."""
    record = CrashRecord(
        run=settings.run,
        step=settings.step,
        attempt=settings.attempt,
        error=stuck.words if last_step is None else f"{stuck.words}, after step {last_step}",
        global_step=last_step,
        restored=restored,
        stuck_seconds=stuck.seconds,
        stacks=stuck.stacks,
    )
    _leave(run_store, record, timeout_seconds)


def _leave(run_store: Store, record: CrashRecord, timeout_seconds: float) -> None:
    key = RunLayout(record.run).attempt_crash(record.step, record.attempt)

    def write() -> None:
        try:
            claim(run_store, key, record)
        except Exception as failure:  # noqa: BLE001  whatever storage does must not take the place of the error
            tell(f"what ended the program could not be stored: {failure}")

    # A thread that the interpreter does not wait for: storage that hangs may not keep a dead program alive.
    if writer := in_background(write):
        writer.join(timeout_seconds)
    else:
        write()


def ends_the_attempt(environ: Mapping[str, str]) -> bool:
    """Whether an error of this process ends its attempt.

    An elastic training is started again by torchrun, and most often it only was another rank that was lost.
    """
    left = int(environ.get("TORCHELASTIC_MAX_RESTARTS") or 0) - int(environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    return environment.ELASTIC not in environ or left <= 0


def is_crash(error: BaseException) -> bool:
    """False for a program that ends well, was interrupted, lost its storage, or ends as Tiphys told it to."""
    if isinstance(error, SystemExit):
        return error.code not in _NOT_CRASHES
    return not isinstance(error, KeyboardInterrupt | GeneratorExit | StoreError | FencedError)


def fingerprint(error: BaseException) -> str:
    """Equal for errors of one kind at one place; empty for those that no checkpoint is to blame for.

    Those are Tiphys' own, which say what to do, and a lack of memory.
    """
    if isinstance(error, TiphysError | MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return ""
    code = f"({error.code})" if isinstance(error, SystemExit) and isinstance(error.code, int) else ""
    message = "" if code else f": {normalised(str(error))}"
    return f"{_kind(error)}{code}{message[:_LONGEST_ERROR]} at {place(error.__traceback__)}"


def normalised(message: str) -> str:
    """A message without numbers, addresses and paths, in one line."""
    for pattern, word in _VARYING:
        message = pattern.sub(word, message)
    return " ".join(message.split())


def in_one_line(error: BaseException) -> str:
    """The exception as the last line of a trace shows it, cut where it is very long."""
    message = " ".join(str(error).split())
    return f"{_kind(error)}: {message}"[:_LONGEST_ERROR].removesuffix(": ")


def place(trace: TracebackType | None) -> str:
    """Innermost frame of the user's own code, ``train.py:load``; of any code where none is the user's."""
    innermost, own = "nowhere", ""
    while trace is not None:
        code = trace.tb_frame.f_code
        innermost = f"{Path(code.co_filename).name}:{code.co_qualname}"
        if not code.co_filename.startswith((*_FOREIGN, "<frozen")):
            own = innermost
        trace = trace.tb_next
    return own or innermost


def _kind(error: BaseException) -> str:
    cls = type(error)
    module = "" if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}."
    return f"{module}{cls.__qualname__}"
