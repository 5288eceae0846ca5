"""Tells open pages that a run has changed, by server-sent events.

Objects of a store are created and deleted, and never written again, so a listing
of keys shows every change. A run is listed for all its pages together. A page that
gets no stream asks again every few seconds, so a stream may be refused.

Streams do not wait for listings: a store that does not answer would silence them,
and each page that is loaded again would begin another listing. So each run has at
most one listing at a time, which all its streams share, and a stream only checks
whether that listing has ended.

Source: HTML Living Standard, "Server-sent events".
"""

import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import anyio

from tiphys.errors import TiphysError
from tiphys.store import LineageLayout, ObjectInfo, RunLayout, Store

MAX_STREAMS = 100
"""Most streams at once."""
_CHECK_SECONDS = 2.0
_CHECK_SHARE = 0.1
"""A run is listed for at most this share of the time, however large it is and however slow its store."""
_TICK_SECONDS = 0.25
"""How soon a stream notices that a listing has ended, or that the server ends."""
_QUIET_SECONDS = 15.0
"""Then a comment is sent: proxies end a silent connection, nginx after 60 s."""
_SLOW_SECONDS = 15.0
"""A listing that takes longer is reported to the page, in the place of comments."""
_STREAM_SECONDS = 600.0
"""Then a stream ends, and a page that is still open asks for another."""
_READERS = 4
"""Threads that list runs. The pages have others, so that they do not wait for a slow listing."""
_MAX_LINEAGES = 8
_NEWEST = 50
"""Most keys of a lineage that are compared. They count down, so that the newest are listed first."""
_CHANGED = b"event: changed\ndata:\n\n"
_SLOW = b"event: slow\ndata:\n\n"
_COMMENT = b":\n\n"


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
    """What is known of a run, for all its streams. Times are seconds of the clock."""

    signature: str | None = None
    """The newest; None before the first listing has ended, empty while the store has not answered yet."""
    listing: "Future[tuple[str | None, float]] | None" = None
    """The listing in work or in the queue; it returns the signature, or None, and how long it took."""
    began_at: float = 0.0
    due_at: float = 0.0
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
        self._pool = ThreadPoolExecutor(_READERS, "run_changes")
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
        """Events as bytes.

        ``changed`` after the first listing, because the page is older than the stream, and at each change; ``slow``
        while a listing takes long, and ``changed`` once it has ended.
        """
        check = self._checks.setdefault(run, _Check())
        check.streams += 1
        try:
            now = sent_at = self._clock()
            ends_at, known, is_told_slow = now + _STREAM_SECONDS, None, False
            while not self._is_closed and now < ends_at:
                self._look(run, check, now)
                is_slow = check.listing is not None and now - check.began_at >= _SLOW_SECONDS
                if check.signature != known or (is_told_slow and not is_slow):
                    yield _CHANGED
                    known, sent_at, is_told_slow = check.signature, now, False
                elif now - sent_at >= _QUIET_SECONDS:
                    yield _SLOW if is_slow else _COMMENT
                    sent_at, is_told_slow = now, is_slow
                await anyio.sleep(_TICK_SECONDS)
                now = self._clock()
        finally:
            check.streams -= 1
            if not check.streams and check.listing is not None:
                check.listing.cancel()  # one in work goes on, and is that of the next reader of the run
            self._forget_idle()

    def _look(self, run: str, check: _Check, now: float) -> None:
        """Take up the result of a listing that has ended, and begin the next one when it is due."""
        if check.listing is not None and check.listing.done():
            listing, check.listing = check.listing, None
            signature, seconds = listing.result()
            # While the store does not answer, that of before holds: the page itself says it.
            check.signature = (check.signature or "") if signature is None else signature
            check.due_at = now + max(_CHECK_SECONDS, seconds / _CHECK_SHARE)
        if check.listing is None and now >= check.due_at:
            check.listing, check.began_at = self._pool.submit(self._list, run), now

    def _list(self, run: str) -> tuple[str | None, float]:
        began_at, signature = self._clock(), None
        with contextlib.suppress(TiphysError):
            signature = compute_run_signature(self._store, run)
        return signature, self._clock() - began_at

    def _forget_idle(self) -> None:
        """Forget runs without a reader, but for those whose listing is in work."""
        self._checks = {
            run: check
            for run, check in self._checks.items()
            if check.streams or (check.listing is not None and not check.listing.done())
        }
