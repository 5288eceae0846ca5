"""Limits of the connections of the HTTP server, against callers that open many, or that never finish a request.

uvicorn limits idle connections (``timeout_keep_alive``) and the size of a header (``h11_max_incomplete_event_size``).
It has no deadline for a request, and its ``limit_concurrency`` refuses all callers while the idle connections of one
caller exceed it. So this module adds a deadline, and at the limit it ends the oldest connection that waits for its
caller. A caller that sends its request at once is answered also during a flood.

A response may be complete before its request is: a caller without a token is refused before its body is read, and so
is a body that is too large. TCP resets a connection that is closed with unread data, and the caller may lose the
response (RFC 9112, section 9.6). So the rest of the request is discarded first, within a bound of bytes and of time.
"""

import asyncio
import resource
import socket
from collections.abc import Callable
from typing import Any, cast
from weakref import WeakSet

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

RECEIVE_SECONDS = 20.0
"""Time for a TLS handshake, for a whole request from its connection on, and for a client to take the response."""
LINGER_SECONDS = 5.0
LINGER_BYTES = 64 << 20
"""How long, and how much of, the rest of a request is discarded after its response."""
_SMALL_BYTES, _COLLECT_SECONDS = 1024, 0.02
"""After a piece of an incomplete request that is smaller than this, the next one is read after this time."""
_READ_BYTES = 16 << 10
"""Bytes that are parsed before the application can refuse a request: a body in chunks of a byte costs 10 µs for six."""
MAX_CONNECTIONS = 1000
"""HTTP connections at once. Where a process may open few files, a quarter of them."""
MAX_HEADER_BYTES = 32 << 10
"""Largest request line with headers. Tokens of service accounts have some 2 KiB."""


def connection_limit() -> int:
    """HTTP connections that this process serves at once; the other files are for storage and the API server."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else max(min(MAX_CONNECTIONS, files // 4), 1)


class LingeringTransport:
    """A transport whose `close` lets the caller finish its request first, if ``is_receiving`` says that it sends one.

    Everything else is that of the transport within.
    """

    def __init__(self, transport: asyncio.Transport, is_receiving: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_receiving = is_receiving
        self._timer: asyncio.TimerHandle | None = None
        self._bytes_left = LINGER_BYTES

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def is_lingering(self) -> bool:
        """Whether the response is complete, and the rest of the request is discarded."""
        return self._timer is not None

    def is_closing(self) -> bool:
        return self.is_lingering or self._transport.is_closing()

    def close(self) -> None:
        """End the connection, at once or when the rest of the request was discarded."""
        if self.is_lingering or self._transport.is_closing() or not self._is_receiving():
            self._end()
            return
        self._timer = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._end)
        if self._transport.can_write_eof():  # not with TLS; there the caller knows the end by the Content-Length
            self._transport.write_eof()
        self._transport.resume_reading()

    def discard(self, data: bytes) -> None:
        """Drop data of the request; ends the connection beyond the bound."""
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            self._end()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._transport.close()


class LimitedConnection(H11Protocol):
    """One connection. It is ended if its caller has neither sent its request nor taken its response in time."""

    _deadline: asyncio.TimerHandle | None = None
    _opened_at = 0.0
    _rest = b""
    """Received, and not parsed yet: a piece may have 256 KiB with TLS, for which ``max_size`` has no effect."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]  # of asyncio's selector transports
        self._lingering = LingeringTransport(transport, lambda: self.conn.their_state is h11.SEND_BODY)
        super().connection_made(cast("asyncio.Transport", self._lingering))
        self._opened_at = self.loop.time()
        self._follow_progress()
        if len(self.connections) > connection_limit():
            self._end_oldest_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingering.is_lingering:
            self._lingering.discard(data)
            return
        if self._rest:
            self._rest += data
            return
        piece, self._rest = data[:_READ_BYTES], data[_READ_BYTES:]
        super().data_received(piece)
        if self._rest:
            self.transport.pause_reading()
            self.loop.call_soon(self._parse_rest)  # the application has its turn before
        elif len(data) < _SMALL_BYTES and self._waits_for_caller and not self.transport.is_closing():
            # Each piece costs the loop as much as a large one, so the pieces of a caller that drips are collected.
            self.transport.pause_reading()
            self.loop.call_later(_COLLECT_SECONDS, self._resume_reading)

    def _parse_rest(self) -> None:
        data, self._rest = self._rest, b""
        if self._lingering.is_lingering or not self.transport.is_closing():
            self.data_received(data)
            if not self._rest:
                self._resume_reading()

    def _resume_reading(self) -> None:
        if not self.flow.read_paused:  # by uvicorn, because the application does not take the body
            self.transport.resume_reading()

    def handle_events(self) -> None:
        super().handle_events()
        self._follow_progress()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow_progress()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._follow_progress()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._follow_progress()

    @property
    def _waits_for_caller(self) -> bool:
        """Whether nothing happens until the caller sends more of its request, or takes more of its response."""
        if self.cycle is None or self.cycle.response_complete:
            return True
        return self.flow.write_paused or self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _follow_progress(self) -> None:
        if not self._waits_for_caller:
            self._stop_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(RECEIVE_SECONDS, self.transport.abort)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_oldest_waiting(self) -> None:
        connections = (connection for connection in self.connections if isinstance(connection, LimitedConnection))
        live = (connection for connection in connections if connection.transport is not None)
        waiting = [connection for connection in live if connection._waits_for_caller]
        oldest = min(waiting, key=lambda connection: connection._opened_at)
        oldest.transport.abort()
        # asyncio calls `connection_lost` later, and until then the next connection must not find this one again.
        self.connections.discard(oldest)


_MAX_PAUSES = 10


class LimitedListener(socket.socket):
    """A listening socket that refuses connections while twice the limit are open, as in a flood of TLS handshakes."""

    def __init__(self, family: socket.AddressFamily) -> None:
        # asyncio disables Nagle's algorithm only for sockets with an explicit protocol; without it each answer waits
        # about 40 ms for an acknowledgement.
        super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._open = WeakSet[socket.socket]()
        self._pauses = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if sum(open_socket.fileno() != -1 for open_socket in self._open) < 2 * connection_limit():
            self._pauses = 0
            connection, address = super().accept()
            self._open.add(connection)
            return connection, address
        # asyncio accepts many connections before it runs anything else. A few rounds of its loop end the oldest ones
        # that wait for their callers, so a burst is no reason to refuse a new one.
        if self._pauses < _MAX_PAUSES:
            self._pauses += 1
            raise BlockingIOError  # asyncio goes on with its loop
        self._pauses = 0
        super().accept()[0].close()
        raise ConnectionAbortedError  # the same


class TlsEventLoop(asyncio.SelectorEventLoop):
    """An event loop whose servers end a slow TLS handshake; uvicorn has no setting for it."""

    async def create_server(self, *args: Any, **settings: Any) -> asyncio.Server:
        return await super().create_server(*args, **settings, ssl_handshake_timeout=RECEIVE_SECONDS)
