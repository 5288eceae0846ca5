"""A slow network before a fast server: bytes pass at the pace of a token bucket, and each turn costs a round trip.

What a checkpoint costs depends on the bandwidth that storage grants, and a server on the same machine grants any. So a
proxy shares a given bandwidth among all connections, as the uplink of a node does.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

_CHUNK_BYTES = 256 << 10
_BURST_SECONDS = 0.02
"""How much of a pause may be made up for afterwards."""


class TokenBucket:
    """Within any t seconds at most ``bytes_per_second`` · t bytes pass, and what may come in one burst. Pure.

    Source: the virtual scheduling form of the leaky bucket, ITU-T I.371, annex A.
    """

    def __init__(self, bytes_per_second: float, burst_seconds: float = _BURST_SECONDS) -> None:
        self.bytes_per_second = bytes_per_second
        self._burst_seconds = burst_seconds
        self._spent_until = float("-inf")

    def take(self, size_bytes: int, now: float) -> float:
        """How many seconds after ``now`` these bytes have passed; 0 while the burst lasts."""
        begin = max(self._spent_until, now - self._burst_seconds)
        self._spent_until = begin + size_bytes / self.bytes_per_second
        return max(0.0, self._spent_until - now)


@dataclass(frozen=True)
class Pace:
    """What a network grants; None for all there is. Latency is that of a turn from answer to next request."""

    up_bytes_per_second: float | None = None
    down_bytes_per_second: float | None = None
    latency_seconds: float = 0.0


class _Turn:
    """Whether the client speaks for the first time since the server did."""

    def __init__(self) -> None:
        self.pending = True


class ThrottledProxy:
    """Passes connections on to ``host:port`` at the given pace. ``clock`` and ``sleep`` go together."""

    def __init__(
        self,
        host: str,
        port: int,
        pace: Pace,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._upstream = (host, port)
        self._latency_seconds = pace.latency_seconds
        self._up = TokenBucket(pace.up_bytes_per_second) if pace.up_bytes_per_second else None
        self._down = TokenBucket(pace.down_bytes_per_second) if pace.down_bytes_per_second else None
        self._clock = clock
        self._sleep = sleep

    async def start(self) -> asyncio.Server:
        """Listen on a free port of loopback."""
        return await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=_CHUNK_BYTES)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._upstream, limit=_CHUNK_BYTES)
        except OSError:
            writer.close()
            return
        turn = _Turn()
        try:
            await asyncio.gather(
                self._pump(reader, far_writer, self._up, lambda: self._ask(turn)),
                self._pump(far_reader, writer, self._down, lambda: self._answer(turn)),
            )
        except OSError:
            pass  # one side went away, and with it the connection
        finally:
            for one in (writer, far_writer):
                one.close()
                with contextlib.suppress(OSError):
                    await one.wait_closed()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        bucket: TokenBucket | None,
        before: Callable[[], Awaitable[None]],
    ) -> None:
        while chunk := await reader.read(_CHUNK_BYTES):
            await before()
            if bucket and (seconds := bucket.take(len(chunk), self._clock())):
                await self._sleep(seconds)
            writer.write(chunk)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()

    async def _ask(self, turn: _Turn) -> None:
        if turn.pending:
            turn.pending = False
            if self._latency_seconds:
                await self._sleep(self._latency_seconds)

    async def _answer(self, turn: _Turn) -> None:
        turn.pending = True
