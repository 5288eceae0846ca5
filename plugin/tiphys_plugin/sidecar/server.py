"""The HTTP server of the sidecar: checks the caller, forwards calls of Tiphys, and drains on shutdown.

It listens on the loopback device, where only the containers of its own pod reach
it. Each call has a thread, up to a limit; further connections wait to be accepted.
A caller has ten seconds for a whole request, and without Argo's token its body is
not read.
The sidecar must end within two seconds of SIGTERM, because Argo's agent pod waits
for it. Until then it answers the calls in progress; a call that the service has
not answered by then gets 503, so that the next agent pod repeats it.
"""

import hmac
import io
import json
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tiphys.errors import UsageError
from tiphys_plugin.sidecar.forwarding import EXECUTE_PATH, MAX_BODY_BYTES, ServiceClient, SidecarReply, error_reply
from tiphys_plugin.sidecar.settings import SidecarSettings, log

PLUGIN_NAME = "tiphys"
_MAX_LENGTH_DIGITS = 15
_MAX_DISCARDED_BYTES = 4 * MAX_BODY_BYTES
_MAX_CONCURRENT_CALLS = 32
_RECEIVE_SECONDS = 10.0
"""Time for a whole request, and for writing its response. Argo's agent is in the same pod."""
_DRAIN_SECONDS = (1.0, 5.0)
"""First for the service to answer the calls in progress, then for writing the responses, which is quick."""
_NOT_FOUND = error_reply(404, f"this path does not exist; Argo posts to {EXECUTE_PATH}")


def is_foreign_template(document: dict[str, Any]) -> bool:
    """Whether the template is of another plugin; decided here to save a call, as the service would decide it."""
    template = document.get("template")
    body = template.get("plugin") if isinstance(template, dict) else None
    return not isinstance(body, dict) or PLUGIN_NAME not in body


class SidecarServer(socketserver.ThreadingTCPServer):
    """Listens from its construction on; `serve_forever` accepts calls, `drain` stops it.

    Raises:
        UsageError: host or port cannot be listened on.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, settings: SidecarSettings) -> None:
        self.settings = settings
        self.service = ServiceClient(settings)
        self._slots = threading.BoundedSemaphore(_MAX_CONCURRENT_CALLS)
        self._calls_in_progress = 0
        self._changed = threading.Condition()
        self._is_draining = False
        host = settings.host
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, settings.port), _Handler)
        except OSError as error:
            raise UsageError(
                f"the sidecar cannot listen on {host} port {settings.port}: {error.strerror}; two plugins of one pod "
                "need different ports"
            ) from error

    @property
    def port(self) -> int:
        return int(self.socket.getsockname()[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self._slots.acquire(timeout=0.2):
            if self._is_draining:
                self.shutdown_request(request)
                return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """Log a broken connection; the caller repeats its call."""
        log("warning", "call.broken_off")

    @contextmanager
    def call_in_progress(self) -> Iterator[None]:
        """Count a call as in progress, so that `drain` waits for it."""
        with self._changed:
            self._calls_in_progress += 1
        try:
            yield
        finally:
            with self._changed:
                self._calls_in_progress -= 1
                self._changed.notify_all()

    def drain(self) -> None:
        """Stop accepting calls, and wait until the calls in progress are answered."""
        self._is_draining = True
        self.shutdown()
        self.server_close()
        for timeout_seconds in _DRAIN_SECONDS:
            with self._changed:
                if self._changed.wait_for(lambda: self._calls_in_progress == 0, timeout_seconds):
                    return
            self.service.abort()


class _DeadlineReader(io.RawIOBase):
    """Reads a socket until a deadline, however many pieces arrive by then; after it, raises `TimeoutError`."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self._deadline = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the request did not arrive in time")
        self._connection.settimeout(remaining)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    server: SidecarServer

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(_DeadlineReader(self.connection, _RECEIVE_SECONDS))

    def do_POST(self) -> None:
        with self.server.call_in_progress():
            self._send(self._answer())

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        pass

    def _answer(self) -> SidecarReply:
        if self.path != EXECUTE_PATH:
            return _NOT_FOUND
        if (refusal := self._refuse_caller()) is not None:
            return refusal
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal() and len(length) <= _MAX_LENGTH_DIGITS):
            return error_reply(400, "the body has no Content-Length that can be read")
        if int(length) > MAX_BODY_BYTES:
            self._discard_body(int(length))
            return error_reply(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        return self._forward(self.rfile.read(int(length)))

    def _forward(self, body: bytes) -> SidecarReply:
        try:
            document = json.loads(body)
        except RecursionError:
            return error_reply(400, "the body is not JSON that can be read: it is nested too deeply")
        except ValueError as error:
            return error_reply(400, f"the body is not JSON: {error}")
        if not isinstance(document, dict):
            return error_reply(400, "the body is not a JSON object")
        return (
            SidecarReply(200, b"{}") if is_foreign_template(document) else self.server.service.forward(body, document)
        )

    def _discard_body(self, length: int) -> None:
        """Read and drop the body of Argo: closing the connection before that can lose the response."""
        remaining = min(length, _MAX_DISCARDED_BYTES)
        while remaining and (count := len(self.rfile.read(min(remaining, 64 << 10)))):
            remaining -= count

    def _refuse_caller(self) -> SidecarReply | None:
        path = self.server.settings.token_file
        try:
            token = path.read_bytes().strip()
        except OSError as error:
            return error_reply(
                503,
                f"the sidecar cannot read Argo's token {path}: {error.strerror}; its container must not set runAsUser",
            )
        authorization = self.headers.get("Authorization", "").encode()
        if not token or not hmac.compare_digest(authorization, b"Bearer " + token):
            return error_reply(403, "the bearer token is not the one that Argo created for this pod")
        return None

    def _send(self, answer: SidecarReply) -> None:
        if answer.error:
            log(
                "error" if answer.status in (200, 503) else "warning",
                "call.failed",
                status=answer.status,
                error=answer.error,
            )
        self.connection.settimeout(_RECEIVE_SECONDS)
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json" if answer.status == 200 else "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)
