"""One call to the service, and what its outcome means to Argo's agent.

The agent repeats a 503 and nothing else: 404 would switch the plugin off for
the life of the pod, and any other error fails the node. So all that is not an
answer of the plugin becomes 503, with a sentence that names the cause.
"""

import http.client
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import NamedTuple

from tiphys.errors import UsageError
from tiphys_plugin.sidecar.settings import Settings

EXECUTE_PATH = "/api/v1/template.execute"
_CONNECT_SECONDS, _ANSWER_SECONDS = 5.0, 25.0
"""The second includes the first. Argo gives up after 30 s."""


class Answer(NamedTuple):
    """What Argo gets. ``failure`` is empty if all is well."""

    status: int
    body: bytes
    failure: str = ""


def failed(status: int, sentence: str) -> Answer:
    """An error with a sentence, which Argo shows on the node if it lasts."""
    return Answer(status, json.dumps({"error": sentence}).encode(), sentence)


_ENDING = failed(503, "the sidecar ends, because its pod is deleted or stopped; ask again")


class Service:
    """The plugin's service, as this pod reaches it. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.url = settings.service.geturl().rstrip("/")
        self._tls = _tls(settings.ca_file) if settings.service.scheme == "https" else None
        self._waiting: set[SimpleQueue[Answer]] = set()
        self._ended = False
        self._lock = threading.Lock()

    def ask(self, body: bytes) -> Answer:
        """Hand a call on, and answer what the service says to it, after 25 s at the latest."""
        try:
            token = self._settings.account_token_file.read_text().strip()
        except OSError as error:
            return failed(
                503,
                f"the sidecar has no token of its service account ({error.filename}: {error.strerror}); create the "
                "ServiceAccount tiphys-executor-plugin and its token Secret in the workflow's namespace",
            )
        with self._outcome() as outcome:
            # In a thread of its own, because a name server that is away holds a call up for as long as it likes.
            threading.Thread(target=lambda: outcome.put(self._post(body, token)), daemon=True).start()
            try:
                return outcome.get(timeout=_ANSWER_SECONDS)
            except Empty:
                return failed(503, f"the plugin's service {self.url} did not answer within {_ANSWER_SECONDS:g} s")

    def abort(self) -> None:
        """Answer all calls that still wait, and all that come: this pod ends."""
        with self._lock:
            self._ended = True
            for outcome in self._waiting:
                outcome.put(_ENDING)

    @contextmanager
    def _outcome(self) -> Iterator[SimpleQueue[Answer]]:
        outcome: SimpleQueue[Answer] = SimpleQueue()
        with self._lock:
            self._waiting.add(outcome)
            if self._ended:
                outcome.put(_ENDING)
        try:
            yield outcome
        finally:
            with self._lock:
                self._waiting.discard(outcome)

    def _post(self, body: bytes, token: str) -> Answer:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection = self._connection()
        try:
            connection.connect()
            connection.sock.settimeout(_ANSWER_SECONDS)
            connection.request("POST", f"{self._settings.service.path.rstrip('/')}{EXECUTE_PATH}", body, headers)
            response = connection.getresponse()
            return _judge(self.url, response.status, response.read())
        except (OSError, http.client.HTTPException) as error:
            return failed(503, f"the plugin's service {self.url} cannot be reached: {error or type(error).__name__}")
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        service = self._settings.service
        assert service.hostname is not None
        if self._tls is None:
            return http.client.HTTPConnection(service.hostname, service.port, timeout=_CONNECT_SECONDS)
        return http.client.HTTPSConnection(service.hostname, service.port, timeout=_CONNECT_SECONDS, context=self._tls)


def _judge(url: str, status: int, body: bytes) -> Answer:
    if status == 200:
        return Answer(200, body)
    said = _sentence(body)
    match status:
        case 503:
            return failed(503, said or f"the plugin's service {url} is not ready")
        case 401 | 403:
            return failed(503, f"the plugin's service {url} does not let this pod in: {said}")
        case 404:
            return failed(503, f"what answers at {url} is not the plugin's service; see TIPHYS_SERVICE_URL")
    return failed(503, f"the plugin's service {url} answered {status}: {said}")


def _sentence(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return " ".join(body.decode(errors="replace").split())[:300]


def _tls(ca_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise UsageError(f"TIPHYS_SERVICE_CA_FILE={ca_file} cannot be used: {error}") from error
