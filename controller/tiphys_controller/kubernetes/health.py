"""``/healthz``, ``/readyz`` and ``/metrics`` over HTTP, for Kubernetes, Prometheus and `tiphys doctor`."""

import errno
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tiphys.errors import ConflictError, TiphysError, UsageError
from tiphys_controller.kubernetes.controller import Controller

_TEXT = "text/plain; charset=utf-8"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"


class HealthServer:
    """Answers between ``__enter__`` and ``__exit__``. ``port`` 0 takes a free one.

    Raises:
        ConflictError: the port is in use.
        UsageError: the host cannot be listened on.
    """

    def __init__(self, controller: Controller, host: str, port: int) -> None:
        self._server = _listening(controller, host, port)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="health", daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def __enter__(self) -> "HealthServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, controller: Controller, address: tuple[str, int]) -> None:
        self.controller = controller
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10

    def do_GET(self) -> None:
        match self.path.partition("?")[0]:
            case "/healthz":
                self._answer(200, b"ok\n", _TEXT)
            case "/readyz":
                self._ready()
            case "/metrics":
                self._answer(200, self.server.controller.metrics.render(), _METRICS)
            case _:
                self._answer(404, b"there are /healthz, /readyz and /metrics\n", _TEXT)

    def log_message(self, *_: Any) -> None:
        """Probes come every few seconds and are no news."""

    def _ready(self) -> None:
        try:
            self.server.controller.check()
        except TiphysError as error:
            self._answer(503, json.dumps({"error": str(error)}).encode(), "application/json")
        else:
            self._answer(200, b"ok\n", _TEXT)

    def _answer(self, status: int, body: bytes, media_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _listening(controller: Controller, host: str, port: int) -> _Server:
    try:
        return _Server(controller, (host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConflictError(f"port {port} of {host} is in use by another program; choose another") from error
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; check the host and the port") from error
