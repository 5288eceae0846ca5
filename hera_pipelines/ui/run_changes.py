"""Tells open pages that a run has changed, by server-sent events.

Objects of a store are created and deleted, and never written again, so a listing
of keys shows every change. A run is listed for all its pages together. A page that
gets no stream asks again every few seconds, so a stream may be refused.

Source: HTML Living Standard, "Server-sent events".
"""

import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import anyio
import anyio.to_thread

from tiphys.errors import TiphysError
from tiphys.store import LineageLayout, ObjectInfo, RunLayout, Store

MAX_STREAMS = 100
"""Most streams at once."""
_CHECK_SECONDS = 2.0
_CHECK_SHARE = 0.1
"""A run is listed for at most this share of the time, however large it is and however slow its store."""
_TICK_SECONDS = 0.5
"""How soon a stream ends when the server does."""
_QUIET_SECONDS = 15.0
"""Then a comment is sent: proxies end a silent connection, nginx after 60 s."""
_STREAM_SECONDS = 600.0
"""Then a stream ends, and a page that is still open asks for another."""
_READERS = 4
"""Threads that list runs. The pages have others, so that they do not wait for a slow listing."""
_MAX_LINEAGES = 8
_NEWEST = 50
"""Most keys of a lineage that are compared. They count down, so that the newest are listed first."""
_CHANGED = b"event: changed\ndata:\n\n"


def compute_run_signature(store: Store, run: str) -> str:
    """A digest that changes when records of ``run`` do. Raises `StoreError`."""
    digest = hashlib.sha256()
    for info in _list_records(store, run):
        digest.update(f"{info.key}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _list_records(store: Store, run: str) -> Iterator[ObjectInfo]:
    layout = RunLayout(run)
    yield from store.list(layout.control)
    yield from store.list(layout.program_events)
    for prefix in islice(store.prefixes(layout.lineages), _MAX_LINEAGES):
        lineage = LineageLayout(f"{run}/{prefix.removeprefix(layout.lineages).rstrip('/')}")
        for records in (lineage.manifests, lineage.training_progress):
            yield from islice(store.list(records), _NEWEST)


@dataclass
class _Check:
    """The newest signature of a run; empty before the first."""

    signature: str = ""
    due_at: float = 0.0
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    streams: int = 0


class RunChanges:
    """The streams of a server.

    Args:
        store: The store.
        clock: Monotonic clock in seconds.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._checks: dict[str, _Check] = {}
        self._limiter = anyio.CapacityLimiter(_READERS)
        self._is_closed = False

    @property
    def streams(self) -> int:
        """Number of open streams."""
        return sum(check.streams for check in self._checks.values())

    @property
    def has_room(self) -> bool:
        """Whether another stream may begin."""
        return self.streams < MAX_STREAMS and not self._is_closed

    def close(self) -> None:
        """End all streams within `_TICK_SECONDS`, so that the server need not wait for them."""
        self._is_closed = True

    async def stream(self, run: str) -> AsyncIterator[bytes]:
        """Events as bytes: ``changed`` at the begin, because the page is older than the stream, and at each change."""
        check = self._checks.setdefault(run, _Check())
        check.streams += 1
        try:
            ends_at, known = self._clock() + _STREAM_SECONDS, await self._read(run, check)
            yield _CHANGED
            sent_at = self._clock()
            while not self._is_closed and self._clock() < ends_at:
                await anyio.sleep(_TICK_SECONDS)
                signature = await self._read(run, check)
                if signature != known or self._clock() - sent_at >= _QUIET_SECONDS:
                    yield b":\n\n" if signature == known else _CHANGED
                    known, sent_at = signature, self._clock()
        finally:
            check.streams -= 1
            if not check.streams:
                self._checks.pop(run, None)

    async def _read(self, run: str, check: _Check) -> str:
        """The signature of a run; that of before while the store does not answer, which the page itself says."""
        async with check.lock:
            if self._clock() >= check.due_at:
                began_at = self._clock()
                with contextlib.suppress(TiphysError):
                    check.signature = await anyio.to_thread.run_sync(
                        lambda: compute_run_signature(self._store, run), limiter=self._limiter, abandon_on_cancel=True
                    )
                now = self._clock()
                check.due_at = now + max(_CHECK_SECONDS, (now - began_at) / _CHECK_SHARE)
        return check.signature
