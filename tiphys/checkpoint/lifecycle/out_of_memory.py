"""Lets a session end after the program ran out of memory, and advises smaller batches after a GPU did.

Recording the error takes memory, and so does the save that is running. So
`MemoryReserve` reserves address space early, which takes no memory until it is
touched. If even that does not help, such as in a library that waits for a thread
that died, `OutOfMemoryGuard` has the kernel end the program.

`batch_scale` returns the share of its usual batch that a program should use.
"""

import contextlib
import mmap
import os
import traceback
from collections.abc import Mapping
from types import TracebackType

from tiphys.checkpoint.lifecycle.hang_watchdog import CrashLog, KernelAlarm
from tiphys.checkpoint.settings import CheckpointSettings
from tiphys.checkpoint.telemetry.events import log_message
from tiphys.errors import StoreError, UsageError
from tiphys.protocol.environment import BATCH_SCALE, EX_UNAVAILABLE
from tiphys.records import AttemptClaim
from tiphys.store import RunLayout, find_record, open_store

RESERVE_BYTES = 64 << 20
"""Enough for the stacks of some threads and for a few requests to storage."""
DRAIN_TIMEOUT_SECONDS = 300.0
"""How long the last save may go without storing a shard."""
_OUT_OF_MEMORY_MESSAGE = b"MemoryError: the program ran out of memory\n"


class MemoryReserve:
    """Reserved address space, for limits of a process (``ulimit -v``) and for machines without overcommit."""

    def __init__(self) -> None:
        self._reserve: mmap.mmap | None = None

    def allocate(self) -> None:
        """Reserve the address space; does nothing if there is none."""
        with contextlib.suppress(OSError, MemoryError):
            self._reserve = mmap.mmap(-1, RESERVE_BYTES)

    def release(self) -> None:
        """Free the address space for the end of the session."""
        if self._reserve is not None:
            self._reserve.close()
            self._reserve = None


class OutOfMemoryGuard:
    """Context manager for the end of a session: after a `MemoryError` the kernel ends a process that hangs in it.

    It first frees the local variables of the frames that the error left. A
    program that catches the error outside of its session continues.
    """

    def __init__(self, error: BaseException | None, crash_log: CrashLog, alarm: KernelAlarm | None = None) -> None:
        self._error = error
        self._crash_log = crash_log
        self._alarm = alarm or KernelAlarm()

    @property
    def is_out_of_memory(self) -> bool:
        return isinstance(self._error, MemoryError)

    def __enter__(self) -> "OutOfMemoryGuard":
        if self.is_out_of_memory and self._error:
            traceback.clear_frames(self._error.__traceback__)
            self._crash_log.append(_OUT_OF_MEMORY_MESSAGE)
            self._alarm.install()
            self.extend_deadline()
        return self

    def extend_deadline(self) -> None:
        """Restart the time limit."""
        self._alarm.arm(2 * DRAIN_TIMEOUT_SECONDS)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._alarm.uninstall()


def batch_scale(environ: Mapping[str, str] = os.environ) -> float:
    """Return the share of its usual batch that the program should use on each GPU.

    It is 1.0 by default and outside of Tiphys; 0.5, then 0.25 in the attempts
    after a GPU ran out of memory. A program that takes ``int(batch *
    batch_scale())`` samples at once, and accumulates gradients over
    correspondingly more micro-batches, trains as before. All ranks of an attempt
    get the same value. Costs one read from storage in all attempts except the first.

    Args:
        environ: Environment with the ``TIPHYS_*`` variables.

    Raises:
        UsageError: ``TIPHYS_BATCH_SCALE`` is not a number above 0 and at most 1.
        SystemExit: with code 69 if storage is out of reach; the attempt is retried.
    """
    if text := environ.get(BATCH_SCALE):
        return _parse_scale(text)
    settings = CheckpointSettings.from_environment(environ)
    if settings is None or settings.attempt == 1:
        return 1.0
    # The pods of a training on several nodes do not get the variable, so the claim has the value.
    key = RunLayout(settings.run).attempt(settings.step, settings.attempt)
    try:
        claim = find_record(open_store(settings.store, must_exist=True), key, AttemptClaim)
    except StoreError as error:
        log_message(str(error))
        raise SystemExit(EX_UNAVAILABLE) from error
    return claim.escalation.batch_scale if claim is not None and claim.escalation is not None else 1.0


def _parse_scale(text: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0 < scale <= 1:
        raise UsageError(
            f"{BATCH_SCALE}={text!r} is not valid: set a share above 0 and at most 1, or remove the variable"
        )
    return scale
