"""What helps a session whose program has run out of memory: room to end in, and an end in any case.

Telling storage what has happened takes memory, and so does the save that is
under way. So address space is put aside while there is some, which costs no
memory as long as nobody touches it. Where even that does not help, such as in a
library that waits for a thread that died, the kernel ends the program.

How much of its usual batch a program is advised to take, because a GPU was too small for it before.
"""

import contextlib
import mmap
import os
import traceback
from collections.abc import Mapping
from types import TracebackType

from tiphys.checkpoint.lifecycle.hang_watchdog import Alarm, LastWords
from tiphys.checkpoint.settings import Settings
from tiphys.checkpoint.telemetry.events import tell
from tiphys.errors import StoreError, UsageError
from tiphys.protocol.environment import BATCH_SCALE, EX_UNAVAILABLE
from tiphys.records import AttemptClaim
from tiphys.store import RunLayout, find_record, open_store

RESERVE_BYTES = 64 << 20
"""The stacks of some threads, a few requests, and what they need in between."""
PATIENCE_SECONDS = 300.0
"""How long a save that is under way at the end may go without any of its shards arriving."""
_LAST_WORDS = b"MemoryError: the program ran out of memory\n"


class Reserve:
    """Address space put aside, where a process is limited in it (``ulimit -v``), or the machine in what it promises."""

    def __init__(self) -> None:
        self._held: mmap.mmap | None = None

    def put_aside(self) -> None:
        """Take it; do without where there is none."""
        with contextlib.suppress(OSError, MemoryError):
            self._held = mmap.mmap(-1, RESERVE_BYTES)

    def give_back(self) -> None:
        """It is needed now."""
        if self._held is not None:
            self._held.close()
            self._held = None


class Ending:
    """Around the end of a session. After a `MemoryError` the kernel ends a process that stands still in here.

    What the program held on its way to the error is of no more use, and let go of
    first. A program that catches the error outside of its session goes on.
    """

    def __init__(self, error: BaseException | None, last_words: LastWords, alarm: Alarm | None = None) -> None:
        self._error = error
        self._last_words = last_words
        self._alarm = alarm or Alarm()

    @property
    def out_of_memory(self) -> bool:
        return isinstance(self._error, MemoryError)

    def __enter__(self) -> "Ending":
        if self.out_of_memory and self._error:
            traceback.clear_frames(self._error.__traceback__)
            self._last_words.note(_LAST_WORDS)
            self._alarm.install()
            self.put_off()
        return self

    def put_off(self) -> None:
        """It moves."""
        self._alarm.ring_in(2 * PATIENCE_SECONDS)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._alarm.uninstall()


def batch_scale(environ: Mapping[str, str] = os.environ) -> float:
    """1.0 as a rule, and outside of Tiphys; 0.5, then 0.25 in the attempts after a GPU ran out of memory.

    A program that takes ``int(batch * batch_scale())`` samples at once, and
    adds up gradients over as many more micro-batches, trains as before. Every
    rank of an attempt is told the same. Costs a read in all attempts but the first.

    Raises:
        UsageError: the variable was set by somebody else, to what is no such share.
        SystemExit: with code 69, storage is out of reach; the attempt is tried again.
    """
    if text := environ.get(BATCH_SCALE):
        return _share(text)
    settings = Settings.from_environment(environ)
    if settings is None or settings.attempt == 1:
        return 1.0
    # No variable reaches the pods of a training on several nodes.
    key = RunLayout(settings.run).attempt(settings.step, settings.attempt)
    try:
        claim = find_record(open_store(settings.store, must_exist=True), key, AttemptClaim)
    except StoreError as error:
        tell(str(error))
        raise SystemExit(EX_UNAVAILABLE) from error
    return claim.escalation.batch_scale if claim is not None and claim.escalation is not None else 1.0


def _share(text: str) -> float:
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0 < scale <= 1:
        raise UsageError(f"{BATCH_SCALE}={text!r} is not valid: it is a share of the batch, above 0 and at most 1")
    return scale
