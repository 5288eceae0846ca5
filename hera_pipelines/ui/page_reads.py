"""Reads what pages show: a few pages at once, and each only while its client waits for it.

A page may cost hundreds of storage requests in as many threads, and a client that hangs up pays nothing. So a page
whose client has gone is not begun, and one that was begun ends at its next storage request.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import anyio
from starlette.requests import Request
from starlette.responses import Response

from hera_pipelines.ui.record_cache import ReadOnlyStore
from tiphys.errors import StoreError
from tiphys.store import ObjectInfo, Store
from tiphys.store.layout import CONTROL

MAX_READS = 4
"""Most pages that are read at once. Each reads its records in up to 16 more threads."""
WAIT_SECONDS = 5.0
"""How long a page waits for its turn."""
_CHEAP_SECONDS, _CPU_SHARE = 0.1, 0.1
"""A view that took more CPU is kept until the process could have spent a tenth of the time on it."""
_CLIENT_CLOSED_REQUEST = 499
"""Status that no client receives, as in nginx."""
_CpuClock = Callable[[], float]
_Answer = TypeVar("_Answer")


class PagesBusyError(StoreError):
    """Too many pages are being read."""


class PageStore(ReadOnlyStore):
    """The store during one page: it lists each prefix of ``control/`` once, and refuses when the page is given up."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._listings: dict[str, list[ObjectInfo]] = {}
        self._is_abandoned = threading.Event()

    def abandon(self) -> None:
        """Let the page end at its next storage request."""
        self._is_abandoned.set()

    def read(self, key: str) -> bytes:
        self._check_wanted()
        return super().read(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if not prefix.startswith(CONTROL):
            yield from self._list_while_wanted(prefix)  # a page may need no more than the first keys
            return
        if prefix not in self._listings:
            self._listings[prefix] = [*self._list_while_wanted(prefix)]
        yield from self._listings[prefix]

    def _list_while_wanted(self, prefix: str) -> Iterator[ObjectInfo]:
        self._check_wanted()
        for info in super().list(prefix):
            yield info
            self._check_wanted()

    def _check_wanted(self) -> None:
        if self._is_abandoned.is_set():
            raise StoreError("the page is not read further, because its client has gone or its time is over")


class SharedViews(Generic[_Answer]):
    """Keeps what was costly to read for a time that grows with its cost, so that few runs cannot take all CPU."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, cpu: _CpuClock = time.thread_time) -> None:
        self._monotonic = monotonic
        self._cpu = cpu
        self._views: dict[Hashable, tuple[float, _Answer]] = {}

    def read(self, key: Hashable, read: Callable[[], _Answer]) -> _Answer:
        """What ``read`` returns, or returned lately for ``key``."""
        if (known := self._views.get(key)) is not None and self._monotonic() < known[0]:
            return known[1]
        began = self._cpu()
        view, cost, now = read(), self._cpu() - began, self._monotonic()
        self._views = {other: kept for other, kept in self._views.items() if now < kept[0]}
        if cost > _CHEAP_SECONDS:
            self._views[key] = now + cost / _CPU_SHARE, view
        return view


class PageReads:
    """The reads of a server: at most ``max_reads`` pages at once, of which each waits ``wait_seconds`` for its turn."""

    def __init__(self, store: Store, max_reads: int = MAX_READS, wait_seconds: float = WAIT_SECONDS) -> None:
        self._store = store
        self._wait_seconds = wait_seconds
        self._pool = ThreadPoolExecutor(max_reads, "page")

    async def read(self, read: Callable[[Store], _Answer]) -> _Answer:
        """What ``read`` returns, called in a thread with the store; not begun, or given up, when the page is cancelled.

        Raises:
            PagesBusyError: its turn did not come in time.
        """
        page = PageStore(self._store)
        # A read that was given up keeps its place until it ends; anyio would let the next one begin beside it.
        turn = self._pool.submit(read, page)
        answer = asyncio.wrap_future(turn)
        try:
            await asyncio.wait({answer}, timeout=self._wait_seconds)
            if turn.cancel():
                raise PagesBusyError(f"too many pages are being read; load again in {self._wait_seconds:g} s")
            return await answer
        finally:
            page.abandon()
            answer.cancel()


async def answer_while_connected(request: Request, answer: Callable[[], Awaitable[Response]]) -> Response:
    """The answer to a request without a body, which is cancelled if the client hangs up."""
    response = Response(status_code=_CLIENT_CLOSED_REQUEST)
    async with anyio.create_task_group() as tasks:

        async def cancel_without_client() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            tasks.cancel_scope.cancel()

        tasks.start_soon(cancel_without_client)
        response = await answer()
        tasks.cancel_scope.cancel()
    return response
