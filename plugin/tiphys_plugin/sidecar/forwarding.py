"""Forwards one call to the service, and converts the outcome to a reply for Argo's agent.

To the agent, 404 disables the plugin for the life of the pod, 503 fails the node after
some 15 seconds, and any other error fails it at once. So whatever is not a reply of the
plugin becomes one that waits and names the cause (`tiphys_plugin.sidecar.outages`).
Argo shows the body of an error on the node, so it is a sentence.

The server of the plugin imports path and size limit of a call from here, because
the sidecar may not import the server.
"""

import http.client
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from tiphys.errors import StoreError, UsageError
from tiphys_plugin.sidecar.account_token import AccountToken
from tiphys_plugin.sidecar.outages import OutageClock
from tiphys_plugin.sidecar.settings import SidecarSettings

EXECUTE_PATH = "/api/v1/template.execute"
"""Path of a plugin call, fixed by Argo."""
MAX_BODY_BYTES = 1 << 20
"""Largest body of a call: one template, with the values of its parameters. The tasks of a workflow that are open share
an object of about 1.5 MB with their answers."""
_CONNECT_SECONDS, _ANSWER_SECONDS = 5.0, 25.0
"""Timeouts of the connection, and of the whole call including it. Argo's own timeout is 30 s."""
_REFUSALS = (400, 413)
"""Statuses of the service for a body that it will not take, however often it is sent."""


class SidecarReply(NamedTuple):
    """The response to Argo; ``error`` is empty for a success."""

    status: int
    body: bytes
    error: str = ""


def error_reply(status: int, message: str) -> SidecarReply:
    """Build an error response; Argo shows its message on the node if the error persists."""
    return SidecarReply(status, message.encode(), message)


_SHUTTING_DOWN = error_reply(503, "the sidecar is shutting down, because its pod is deleted or stopped; call again")


class ServiceClient:
    """Client of the plugin's service. Thread-safe."""

    def __init__(self, settings: SidecarSettings) -> None:
        self._settings = settings
        self._token = AccountToken(settings)
        self._outages = OutageClock(settings.outage_limit_seconds)
        self.url = settings.service_url.geturl().rstrip("/")
        self._tls = _create_tls_context(settings) if settings.service_url.scheme == "https" else None
        self._waiting_calls: set[SimpleQueue[SidecarReply]] = set()
        self._aborted = False
        self._lock = threading.Lock()

    def forward(self, body: bytes, document: dict[str, Any]) -> SidecarReply:
        """Forward a call to the service, and return its reply, or one that waits.

        ``document`` is ``body``, parsed.
        """
        reply = self._call(body)
        if reply.status == 200:
            self._outages.end(document)
        elif reply is not _SHUTTING_DOWN:
            answer = (
                {"node": {"phase": "Failed", "message": f"Refused: {reply.error}"}}
                if reply.status in _REFUSALS
                else self._outages.answer(document, reply.error)
            )
            return SidecarReply(200, json.dumps(answer).encode(), reply.error)
        return reply

    def _call(self, body: bytes) -> SidecarReply:
        """The reply of the service, or an error after 25 s at the latest."""
        with self._waiting_call() as outcome:
            # In a thread of its own, because name resolution has no timeout if the name server is unreachable.
            threading.Thread(target=lambda: outcome.put(self._post(body)), daemon=True).start()
            try:
                return outcome.get(timeout=_ANSWER_SECONDS)
            except Empty:
                return error_reply(503, f"the plugin's service {self.url} did not answer within {_ANSWER_SECONDS:g} s")

    def abort(self) -> None:
        """Answer all waiting and all later calls with 503, because this pod is shutting down."""
        with self._lock:
            self._aborted = True
            for outcome in self._waiting_calls:
                outcome.put(_SHUTTING_DOWN)

    @contextmanager
    def _waiting_call(self) -> Iterator[SimpleQueue[SidecarReply]]:
        outcome: SimpleQueue[SidecarReply] = SimpleQueue()
        with self._lock:
            self._waiting_calls.add(outcome)
            if self._aborted:
                outcome.put(_SHUTTING_DOWN)
        try:
            yield outcome
        finally:
            with self._lock:
                self._waiting_calls.discard(outcome)

    def _post(self, body: bytes) -> SidecarReply:
        try:
            token = self._token.read()
        except StoreError as error:
            return error_reply(503, str(error))
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection = self._connection()
        try:
            connection.connect()
            connection.sock.settimeout(_ANSWER_SECONDS)
            connection.request("POST", f"{self._settings.service_url.path.rstrip('/')}{EXECUTE_PATH}", body, headers)
            response = connection.getresponse()
            return _reply_for_status(self.url, response.status, response.read())
        except (OSError, http.client.HTTPException) as error:
            return error_reply(
                503, f"the plugin's service {self.url} cannot be reached: {error or type(error).__name__}"
            )
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        service = self._settings.service_url
        assert service.hostname is not None
        if self._tls is None:
            return http.client.HTTPConnection(service.hostname, service.port, timeout=_CONNECT_SECONDS)
        return http.client.HTTPSConnection(service.hostname, service.port, timeout=_CONNECT_SECONDS, context=self._tls)


def _reply_for_status(url: str, status: int, body: bytes) -> SidecarReply:
    if status == 200:
        return SidecarReply(200, body)
    message = error_text(body)
    match status:
        case 503:
            return error_reply(503, message or f"the plugin's service {url} is not ready")
        case 400 | 411 | 413:
            return error_reply(status, f"the plugin's service {url} refused the call: {message}")
        case 401 | 403:
            return error_reply(503, f"the plugin's service {url} does not let this pod in: {message}")
        case 404:
            return error_reply(503, f"the server at {url} is not the plugin's service; check TIPHYS_SERVICE_URL")
    return error_reply(503, f"the plugin's service {url} answered {status}: {message}")


def error_text(body: bytes) -> str:
    """The sentence in the body of an error."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return " ".join(body.decode(errors="replace").split())[:300]


def _create_tls_context(settings: SidecarSettings) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=settings.ca_file, cadata=settings.ca_pem)
    except (OSError, ValueError) as error:
        name = f"TIPHYS_SERVICE_CA_FILE={settings.ca_file}" if settings.ca_file else "TIPHYS_SERVICE_CA"
        raise UsageError(f"{name} cannot be used: {error}; expected certificates as PEM") from error
