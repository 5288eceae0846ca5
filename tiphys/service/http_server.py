"""HTTP server of the plugin and the controller.

uvicorn runs in a thread, so that the main thread of a service keeps its own
loop and tests can start the service as a context manager. `read_body` limits
the size of a request, so that a caller cannot exhaust the memory of a service.
"""

import errno
import socket
import threading
import time
from types import TracebackType
from typing import Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request

from tiphys.errors import ConflictError, StoreError, UsageError

_DRAIN_SECONDS = 25
"""Time to answer open calls at shutdown. Argo ends a call after 30 s."""
_START_SECONDS = 60.0


class AppServer:
    """Serves an ASGI application on `url` between ``__enter__`` and ``__exit__``.

    Args:
        app: The application.
        host: Address to listen on.
        port: Port to listen on; 0 for a free one.

    Raises:
        ConflictError: the port is in use.
        UsageError: the server cannot listen on this host.
        StoreError: the server did not start in time.
    """

    def __init__(self, app: Starlette, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host = host
        self._port = port
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=_DRAIN_SECONDS,
        )
        self._server = uvicorn.Server(config)
        self._thread: threading.Thread | None = None
        self._socket: socket.socket | None = None

    @property
    def url(self) -> str:
        """Address of the service, such as ``http://127.0.0.1:7243``, without a final slash."""
        if self._socket is None:
            raise UsageError("the server has not been started; use it as a context manager")
        host, port = self._socket.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

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
    # asyncio disables Nagle's algorithm only for sockets with an explicit protocol; without it each answer waits about
    # 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read the body of a request of at most ``max_bytes`` bytes.

    Raises:
        BodyTooLargeError: the body is larger. If its Content-Length says so, the body is not read.
    """
    too_large = BodyTooLargeError(f"the body is larger than {max_bytes} bytes")
    content_length = request.headers.get("content-length", "")
    if content_length.isdecimal() and int(content_length) > max_bytes:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)
