"""What helps a session whose program has run out of memory: room to end in, and an end in any case.

Telling storage what has happened takes memory, and so does the save that is
under way. So address space is put aside while there is some, which costs no
memory as long as nobody touches it. Where even that does not help, such as in a
library that waits for a thread that died, the kernel ends the program.
"""

import contextlib
import mmap
import traceback
from types import TracebackType

from tiphys.checkpoint.alarm import Alarm
from tiphys.checkpoint.last_words import LastWords

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
