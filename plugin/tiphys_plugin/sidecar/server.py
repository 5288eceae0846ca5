"""The sidecar's HTTP side: who may call, which calls are handed on, and how it ends.

One thread for each call, and a bound on them; what is more waits to be
accepted. It has to end within two seconds of SIGTERM, because Argo's agent pod
waits for it, and still answers the calls under way: those that the service has
not answered by then are told to come again.
"""

import hmac
import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tiphys.errors import UsageError
from tiphys_plugin.sidecar.forwarding import EXECUTE_PATH, Answer, Service, failed
from tiphys_plugin.sidecar.settings import Settings, log

PLUGIN = "tiphys"
LARGEST_BODY_BYTES = 2 << 20
_MOST_SKIPPED_BYTES = 4 * LARGEST_BODY_BYTES
_MOST_CALLS = 32
_PATIENCE_SECONDS = (1.0, 5.0)
"""For the service to answer what is under way, and then for the answers to be written, which takes no time at all."""
_NOT_HERE = failed(404, f"nothing is here; Argo posts to {EXECUTE_PATH}")


def is_foreign(document: dict[str, Any]) -> bool:
    """Whether the template is of another plugin; the service would say the same."""
    template = document.get("template")
    body = template.get("plugin") if isinstance(template, dict) else None
    return not isinstance(body, dict) or PLUGIN not in body


class SidecarServer(socketserver.ThreadingTCPServer):
    """Listens as soon as it is made; `serve_forever` accepts calls, `drain` ends it.

    Raises:
        UsageError: it cannot listen there.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.service = Service(settings)
        self._slots = threading.BoundedSemaphore(_MOST_CALLS)
        self._under_way = 0
        self._changed = threading.Condition()
        self._ending = False
        host = settings.host or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0")  # noqa: S104  Argo calls localhost
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, settings.port), _Handler)
        except OSError as error:
            raise UsageError(
                f"the sidecar cannot listen on {host} port {settings.port}: {error.strerror}; two plugins of one pod "
                "need different ports"
            ) from error

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    @property
    def port(self) -> int:
        return int(self.socket.getsockname()[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        while not self._slots.acquire(timeout=0.2):
            if self._ending:
                self.shutdown_request(request)
                return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """A caller that went away; whoever it was asks again."""
        log("warning", "call.broken_off")

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A call that `drain` waits for."""
        with self._changed:
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def drain(self) -> None:
        """Accept nothing any more, and see the calls under way answered."""
        self._ending = True
        self.shutdown()
        self.server_close()
        for patience in _PATIENCE_SECONDS:
            with self._changed:
                if self._changed.wait_for(lambda: self._under_way == 0, patience):
                    return
            self.service.abort()


class _Handler(BaseHTTPRequestHandler):
    server: SidecarServer
    timeout = 30  # for a caller that connects and sends nothing

    def do_POST(self) -> None:
        with self.server.answering():
            self._send(self._answer())

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002
        pass

    def _answer(self) -> Answer:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            return failed(400, "the body has no Content-Length")
        refusal = self._refuse_caller() if self.path == EXECUTE_PATH else _NOT_HERE
        if refusal is None and int(length) > LARGEST_BODY_BYTES:
            refusal = failed(413, f"the body is larger than {LARGEST_BODY_BYTES} bytes")
        if refusal is not None:
            self._skip(int(length))
            return refusal
        return self._hand_on(self.rfile.read(int(length)))

    def _hand_on(self, body: bytes) -> Answer:
        try:
            document = json.loads(body)
        except ValueError as error:
            return failed(400, f"the body is not JSON: {error}")
        if not isinstance(document, dict):
            return failed(400, "the body is not a JSON object")
        return Answer(200, b"{}") if is_foreign(document) else self.server.service.ask(body)

    def _skip(self, length: int) -> None:
        """Read what nobody wants: a connection that is closed before loses the answer on its way."""
        left = min(length, _MOST_SKIPPED_BYTES)
        while left and (read := len(self.rfile.read(min(left, 64 << 10)))):
            left -= read

    def _refuse_caller(self) -> Answer | None:
        path = self.server.settings.token_file
        try:
            token = path.read_bytes().strip()
        except OSError as error:
            return failed(
                503,
                f"the sidecar cannot read Argo's token {path}: {error.strerror}; its container must not set runAsUser",
            )
        given = self.headers.get("Authorization", "").encode()
        if not token or not hmac.compare_digest(given, b"Bearer " + token):
            return failed(403, "the bearer token is not the one that Argo made for this pod")
        return None

    def _send(self, answer: Answer) -> None:
        if answer.failure:
            log(
                "error" if answer.status == 503 else "warning",
                "call.failed",
                status=answer.status,
                error=answer.failure,
            )
        self.send_response(answer.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)
