"""HTTP server of the plugin and the controller.

uvicorn runs in a thread, so that the main thread of a service keeps its own
loop and tests can start the service as a context manager. `read_body` limits
the size of a request, so that a caller cannot exhaust the memory of a service.
With a `ServerCertificate` the server speaks TLS, and only TLS.
"""

import argparse
import asyncio
import errno
import socket
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request

from tiphys.errors import ConflictError, StoreError, UsageError
from tiphys.service.connections import MAX_HEADER_BYTES, LimitedConnection, LimitedListener, TlsEventLoop

CLOSE_CONNECTION = {"Connection": "close"}
"""Header of a response to a caller whose body is not read."""
_DRAIN_SECONDS = 25
"""Time to answer open calls at shutdown. Argo ends a call after 30 s."""
_START_SECONDS = 60.0
_RENEWAL_CHECK_SECONDS = 30
_log = structlog.get_logger()


class ServerCertificate:
    """Certificate and key of a server, read again when the files change: a renewal needs no restart.

    Args:
        certificate: PEM file with the certificate, followed by those of intermediate authorities.
        key: PEM file with its private key, not encrypted.

    Raises:
        UsageError: a file cannot be read, or the key is not that of the certificate.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate = certificate
        self._key = key
        self._content = b""
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.reload()

    def reload(self) -> None:
        """Use the files as they are now, for new connections. Raises `UsageError`, and keeps the pair of before."""
        try:
            content = self._certificate.read_bytes() + self._key.read_bytes()
            if content == self._content:
                return
            # A pair that does not match must not replace one that does. The empty password prevents a prompt.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._certificate, self._key, "")
            self.context.load_cert_chain(self._certificate, self._key, "")
        except (OSError, ValueError) as error:
            raise UsageError(
                f"the certificate {self._certificate} with the key {self._key} cannot be used: {error}; give PEM files "
                "of one pair: --tls-cert, --tls-key"
            ) from error
        self._content = content

    async def follow_renewals(self) -> None:
        """Reload; a pair that cannot be used is logged."""
        try:
            self.reload()
        except UsageError as error:
            _log.error("certificate.unusable", error=str(error))


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--tls-cert`` and ``--tls-key``; `read_tls_options` reads them."""
    parser.add_argument(
        "--tls-cert",
        type=Path,
        metavar="FILE",
        help="PEM file of the certificate; the server then speaks HTTPS only, and takes up a renewed certificate "
        "without a restart (default: plain HTTP)",
    )
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM file of the private key of --tls-cert")


def read_tls_options(options: argparse.Namespace) -> ServerCertificate | None:
    """The certificate that the options name; None for plain HTTP.

    Raises:
        UsageError: only one of the two is given, or the files cannot be used.
    """
    if not options.tls_cert and not options.tls_key:
        return None
    if not options.tls_cert or not options.tls_key:
        raise UsageError("--tls-cert and --tls-key belong together; give both, or none for plain HTTP")
    return ServerCertificate(options.tls_cert, options.tls_key)


class AppServer:
    """Serves an ASGI application on `url` between ``__enter__`` and ``__exit__``.

    Args:
        port: Port to listen on; 0 for a free one.
        certificate: Certificate for TLS; None for plain HTTP.

    Raises:
        ConflictError: the port is in use.
        UsageError: the server cannot listen on this host.
        StoreError: the server did not start in time.
    """

    def __init__(
        self, app: Starlette, host: str = "127.0.0.1", port: int = 0, certificate: ServerCertificate | None = None
    ) -> None:
        self._host = host
        self._port = port
        self._scheme = "http" if certificate is None else "https"
        config = uvicorn.Config(
            app,
            http=LimitedConnection,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            log_config=None,
            access_log=False,
            server_header=False,
            # A caller on this machine could otherwise choose the address that it seems to call from.
            proxy_headers=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=_DRAIN_SECONDS,
        )
        if certificate is not None:
            context = certificate.context
            config.ssl_context_factory = lambda *_: context
            config.loop = f"{TlsEventLoop.__module__}:{TlsEventLoop.__name__}"
            config.callback_notify = certificate.follow_renewals
            config.timeout_notify = _RENEWAL_CHECK_SECONDS
        self._server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None

    @property
    def url(self) -> str:
        """Address of the service, such as ``http://127.0.0.1:7243``, without a final slash."""
        if self._socket is None:
            raise UsageError("the server has not been started; use it as a context manager")
        host, port = self._socket.getsockname()[:2]
        return f"{self._scheme}://[{host}]:{port}" if ":" in host else f"{self._scheme}://{host}:{port}"

    def __enter__(self) -> Self:
        self._socket = _listen(self._host, self._port)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="tiphys-http", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + _START_SECONDS
        while not self._server.started:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise StoreError(f"the server at {self.url} did not start; see its log")
            time.sleep(0.005)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()
        if self._socket is not None:
            self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = LimitedListener(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConflictError(
                f"port {port} of {host} is in use by another program; choose another, or 0 for a free one: --port, or "
                "--plugin-port 0 beside a local engine"
            ) from error
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; check the host and the port") from error
    return listener


class BodyTooLargeError(UsageError):
    """The body of a request exceeds the limit."""


class BodyLengthError(UsageError):
    """The request does not say how long its body is."""


class BodyIncompleteError(UsageError):
    """The caller went away, or was ended by a deadline, before its body was complete."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read the body of a request of at most ``max_bytes`` bytes.

    Raises:
        BodyTooLargeError: the body is larger, as its Content-Length says; it is not read.
        BodyLengthError: the body has no Content-Length: a body in chunks of one byte costs seconds to parse.
        BodyIncompleteError: the connection ended before the body did, so no response can be sent.
    """
    if body_length(request) > max_bytes:
        raise BodyTooLargeError(f"the body is larger than {max_bytes} bytes")
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
    except ClientDisconnect as error:
        raise BodyIncompleteError("the connection ended before the body did") from error
    return bytes(body)


def body_length(request: Request) -> int:
    """Length of the body of a request in bytes. Raises `BodyLengthError`."""
    if "transfer-encoding" in request.headers:
        raise BodyLengthError("the body is sent in chunks; send it with a Content-Length")
    # The server has refused a length of more than 20 digits, or of any but ASCII digits (h11, `_headers.py`).
    return int(request.headers.get("content-length", "0"))


_BUDGET_WAIT_SECONDS, _MAX_BUDGET_WAITERS = 10.0, 32
_BUSY = "too many bytes of calls are being answered; call again"


class _WaitingCall(NamedTuple):
    length: int
    granted: asyncio.Future[None]
    """Done once the length is counted, cancelled once the call has gone away."""


class BodyBudget:
    """Memory for the bodies of calls in flight: a share of each tenant, and a sum. It belongs to one event loop."""

    def __init__(self, max_body_bytes: int, max_tenant_bytes: int, max_bytes: int) -> None:
        self._max_body_bytes, self._max_tenant_bytes, self._max_bytes = max_body_bytes, max_tenant_bytes, max_bytes
        self._in_flight: Counter[str] = Counter()
        self._waiting: dict[str, deque[_WaitingCall]] = {}

    @asynccontextmanager
    async def read_body(self, request: Request, tenant: str) -> AsyncIterator[bytes]:
        """Read a body once there is room for it; it counts until the context ends.

        An empty tenant stands for all callers of a service that does not tell them apart: it has no share.

        Raises:
            StoreError: there was no room in time; the caller should repeat the call.
            UsageError: as `read_body`.
        """
        length = body_length(request)
        counted = length if length <= self._max_body_bytes else 0  # a larger one is refused unread
        if counted:
            await self._reserve(tenant, counted)
        try:
            yield await read_body(request, self._max_body_bytes)
        finally:
            self._release(tenant, counted)

    async def _reserve(self, tenant: str, length: int) -> None:
        """Wait for the turn of a call. Calls of a tenant go in their order: small ones do not overtake a large one."""
        if tenant not in self._waiting and self._has_room(tenant, length):
            self._in_flight[tenant] += length
            return
        queue = self._waiting.setdefault(tenant, deque())
        if len(queue) >= _MAX_BUDGET_WAITERS:
            raise StoreError(_BUSY)
        call = _WaitingCall(length, asyncio.get_running_loop().create_future())
        queue.append(call)
        try:
            async with asyncio.timeout(_BUDGET_WAIT_SECONDS):
                await call.granted
        except BaseException as error:
            # A call that goes away in the moment of its grant returns the room; another one lets the next one forward.
            self._release(tenant, length if call.granted.done() and not call.granted.cancelled() else 0)
            if isinstance(error, TimeoutError):
                raise StoreError(_BUSY) from error
            raise

    def _has_room(self, tenant: str, length: int) -> bool:
        is_within_share = not tenant or self._in_flight[tenant] + length <= self._max_tenant_bytes
        return is_within_share and self._in_flight.total() + length <= self._max_bytes

    def _release(self, tenant: str, length: int) -> None:
        self._in_flight[tenant] -= length
        self._in_flight += Counter()  # drops tenants without a call
        for name, queue in list(self._waiting.items()):
            while queue and (queue[0].granted.done() or self._has_room(name, queue[0].length)):
                call = queue.popleft()
                if not call.granted.done():
                    self._in_flight[name] += call.length
                    call.granted.set_result(None)
            if not queue:
                del self._waiting[name]
