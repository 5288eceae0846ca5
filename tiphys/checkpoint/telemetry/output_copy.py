"""Stores a copy of what the training program prints, so that it can be read once its pod is gone.

A pod that is evicted or whose node dies takes its log with it, before Argo can
archive it. The copy is made at the stream, in the background, at most every ten
seconds; it never delays or fails the program, and gives up output where storage
does not keep up. `tiphys.store.program_output` describes what is stored.

The copy has what passes through ``sys.stdout`` and ``sys.stderr`` of Python, or
under ``tiphys-exec`` through the pipes of the program. Secrets of the environment are
masked (`tiphys.checkpoint.telemetry.secret_mask`).
"""

import _thread
import atexit
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from tiphys.checkpoint.telemetry.secret_mask import StreamMask, find_secrets
from tiphys.errors import ObjectExistsError, TiphysError
from tiphys.protocol import environment
from tiphys.store import RunLayout, Store
from tiphys.store.program_output import chunk_key, list_output_chunks
from tiphys.threads import BackgroundThread, start_background_thread

CHUNK_BYTES = 64 << 10
MAX_PENDING_BYTES = 1 << 20
"""Output that waits for storage; the oldest beyond is given up."""
HEAD_CHUNKS = 16
"""Chunks from the begin of the output that are always kept."""
MAX_CHUNKS = 256
"""Chunks that are kept of an attempt, together 16 MiB: the head, and the newest others."""
_FIRST_SECONDS = 1.0
_INTERVAL_SECONDS = 10.0
_POLL_SECONDS = 0.05
_EXIT_SECONDS = 3.0
_HURRIED_EXIT_SECONDS = 0.4
"""After SIGTERM, when a part of the second that is left of the grace period has to do."""


class OutputCopy:
    """Stores the output of one attempt. Every method returns at once and never raises, but `close` waits a moment.

    Args:
        secrets: Secrets to mask, in all forms.
        interval_seconds: Longest time between two writes to storage; the first ones follow sooner, for programs that
            die soon.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        step: str,
        attempt: int,
        secrets: tuple[str, ...] = (),
        interval_seconds: float = _INTERVAL_SECONDS,
    ) -> None:
        self._store = store
        self._layout, self._step, self._attempt = RunLayout(run), step, attempt
        self._mask = StreamMask(secrets)
        self._longest_seconds = interval_seconds
        self._interval_seconds = min(_FIRST_SECONDS, interval_seconds)
        self._pending: deque[str] = deque()
        self._pending_bytes = 0
        self._left_out_bytes = 0
        self._chunk = bytearray()
        self._process = os.getpid()
        self._number, self._version = -1, 0
        """Chunk and version of the newest write; a negative chunk stands for none yet."""
        self._stored_key = ""
        self._full_keys: deque[str] = deque()
        self._writer: BackgroundThread | None = None
        self._starting = _thread.allocate_lock()
        self._is_closing = False

    def write(self, text: str) -> None:
        if not text or self._is_closing or os.getpid() != self._process:  # a forked process has no thread of this one
            return
        self._pending.append(text)  # atomic, as are the deque's other operations, so no lock can stop the program
        self._pending_bytes += len(text)
        while self._pending_bytes > MAX_PENDING_BYTES and self._pending:
            self._left_out_bytes += self._take()[1]
        if self._starting.acquire(blocking=False):  # else another thread of the program is starting the writer
            try:
                if not self._is_closing and (self._writer is None or not self._writer.is_alive()):
                    self._writer = start_background_thread(self._store_later)
            finally:
                self._starting.release()

    def close(self, timeout_seconds: float = _EXIT_SECONDS) -> None:
        """Store the rest, if storage accepts it within ``timeout_seconds``; not in a forked process."""
        if os.getpid() != self._process:
            return
        deadline = time.monotonic() + timeout_seconds
        self._is_closing = True
        with self._starting:
            writer = self._writer
        if writer is not None and not writer.join(timeout_seconds):
            return
        is_left = self._pending or self._mask.is_holding
        if is_left and (last := start_background_thread(self._store_pending)) is not None:
            last.join(max(0.0, deadline - time.monotonic()))

    def close_for_exit(self, *, hurried: bool) -> None:
        """`close` at the end of the process; ``hurried`` if SIGTERM asked for that."""
        self.close(_HURRIED_EXIT_SECONDS if hurried else _EXIT_SECONDS)

    def _take(self) -> tuple[str, int]:
        try:
            text = self._pending.popleft()
        except IndexError:  # the other thread took it
            return "", 0
        self._pending_bytes -= len(text)
        return text, len(text)

    def _store_later(self) -> None:
        due_at = time.monotonic() + self._interval_seconds
        self._interval_seconds = min(2 * self._interval_seconds, self._longest_seconds)
        while not self._is_closing and time.monotonic() < due_at:
            time.sleep(_POLL_SECONDS)
        self._store_pending()

    def _store_pending(self) -> None:
        text = "".join([self._take()[0] for _ in range(len(self._pending))])
        if self._left_out_bytes:
            text, self._left_out_bytes = f"… {self._left_out_bytes} bytes were not stored in time …\n{text}", 0
        # What may be the begin of a secret waits for the next part, and at the end for nothing.
        text = self._mask.add(text) + (self._mask.end() if self._is_closing else "")
        self._chunk += text.encode(errors="replace")
        try:
            if self._number < 0:  # another process of the attempt may have stored some, such as before a restart
                before = list_output_chunks(self._store, self._layout, self._step, self._attempt)
                self._number = before[-1].number + 1 if before else 0
            while len(self._chunk) >= CHUNK_BYTES:
                end = self._chunk.rfind(b"\n", 0, CHUNK_BYTES) + 1 or CHUNK_BYTES
                self._store_version(bytes(self._chunk[:end]))
                del self._chunk[:end]
                self._begin_next_chunk()
            if self._chunk:
                self._store_version(bytes(self._chunk))
        except TiphysError:  # kept for the next time, within bounds
            del self._chunk[:-MAX_PENDING_BYTES]

    def _store_version(self, data: bytes) -> None:
        self._version += 1
        key = chunk_key(self._layout, self._step, self._attempt, self._number, self._version)
        with contextlib.suppress(ObjectExistsError):  # the reply of an earlier try was lost
            self._store.create(key, data)
        before, self._stored_key = self._stored_key, key
        if before and not self._is_closing:  # readers take the newest version, and time is short
            self._store.delete(before)

    def _begin_next_chunk(self) -> None:
        if self._number >= HEAD_CHUNKS:
            self._full_keys.append(self._stored_key)
        self._number, self._version, self._stored_key = self._number + 1, 0, ""
        if len(self._full_keys) > MAX_CHUNKS - HEAD_CHUNKS:
            self._store.delete(self._full_keys.popleft())


_opened: list[OutputCopy] = []
"""The copy of this process, which has one output however many sessions it opens."""


def copy_output(
    store: Store,
    run: str,
    step: str,
    attempt: int,
    environ: Mapping[str, str],
    is_hurried: Callable[[], bool] = lambda: False,
) -> None:
    """Copy what this process prints until it exits, unless `environment.OUTPUT_COPY` is ``off``.

    ``environ`` must be the environment of this process: with another one, the output is not that of the attempt.
    ``is_hurried`` says whether SIGTERM has asked the process to end.
    """
    if _opened or environ is not os.environ or environ.get(environment.OUTPUT_COPY) == "off":
        return
    copy = OutputCopy(store, run, step, attempt, find_secrets(environ))
    _opened.append(copy)
    for stream in (sys.stdout, sys.stderr):
        tee_stream(copy, stream)
    # After the traceback of an error was printed.
    atexit.register(lambda: copy.close_for_exit(hurried=is_hurried()))


def tee_stream(copy: OutputCopy, stream: Any) -> None:
    """Have all text that is written to ``stream`` also written to ``copy``.

    The stream stays the same object, because handlers of `logging` hold it. A stream that takes no attribute, such as
    None in a process without output, is left alone.
    """
    original = getattr(stream, "write", None)
    if original is None:
        return

    def write(text: str) -> int:
        written: int = original(text)
        copy.write(text)
        return written

    with contextlib.suppress(AttributeError):
        stream.write = write
