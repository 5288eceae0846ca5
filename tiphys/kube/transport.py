"""One request to an API server and its answer: JSON in and out, and our own errors.

Straight on urllib3, because the client library costs 25 MiB and a second of
start-up in each process, repeats requests on its own, and changes with each
release how it encodes a patch. Nothing is repeated here: a write whose answer
was lost may have happened, and only its caller can find out.
"""

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from urllib3 import BaseHTTPResponse, PoolManager, Timeout
from urllib3.exceptions import HTTPError, SSLError

from tiphys.errors import (
    ConflictError,
    ForbiddenError,
    NotFoundError,
    ObjectExistsError,
    StoreError,
    TiphysError,
    UsageError,
)

Object = dict[str, Any]
"""A Kubernetes object as parsed from JSON."""

Body = Object | list[Object]
"""What is sent: an object, or the operations of a JSON patch."""

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 25.0


class ExpiredError(NotFoundError):
    """The API server has forgotten this resource version (410); list again."""


@dataclass(frozen=True)
class Peer:
    """Who is asked: its name in a sentence, and what a person can do if it is not found where it was looked for."""

    name: str
    refusal: Callable[[int, str, str, str], TiphysError]
    """The error that a status means, from that, the body, the server's URL and the path."""
    remedy_of_page: str
    """What to do where a web page answers."""
    remedy_of_tls: str = ""
    """What to do where no trusted connection comes about."""


class Transport:
    """Requests to one server. Thread-safe.

    Args:
        server: Its URL.
        pool: Connections, which know whom to trust and the client's certificate.
        authorization: Value of the header, asked for each request because tokens expire; empty for none.
        peer: Who is asked; None: the API server of Kubernetes.
    """

    def __init__(
        self,
        server: str,
        pool: PoolManager,
        authorization: Callable[[], str] = lambda: "",
        peer: Peer | None = None,
    ) -> None:
        self.server = server.rstrip("/")
        self._pool = pool
        self._authorization = authorization
        self._peer = peer or _API_SERVER
        self._name = f"{self._peer.name} {self.server}"

    def json(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Body | None = None,
        media_type: str = "application/json",
    ) -> Object:
        """Send it and return the object of the answer."""
        response = self._send(method, path, query or {}, body, media_type)
        if response.headers.get("Content-Type", "").startswith("text/html"):
            response.drain_conn()
            raise UsageError(f"{self._name} answered {method} {path} with a web page; {self._peer.remedy_of_page}")
        try:
            answer = json.loads(response.read())
        except (HTTPError, ValueError) as error:
            raise StoreError(f"{self._name} broke off its answer to {method} {path}: {error}") from error
        if not isinstance(answer, dict):
            raise StoreError(f"{self._name} answered {method} {path} with no object; is it one?")
        return answer

    def text(self, path: str) -> tuple[int, str]:
        """Status and body of a GET, whatever they say: for what the server only passes on."""
        response = self._send("GET", path, {}, refuse=False)
        try:
            return response.status, response.read().decode(errors="replace")
        except HTTPError as error:
            raise StoreError(f"{self._name} broke off its answer to GET {path}: {error}") from error

    def events(self, path: str, query: Mapping[str, str], silence_seconds: float) -> Generator[Object, None, None]:
        """Open a watch at once; then its events, until the server ends it or says nothing for ``silence_seconds``."""
        return self._events(self._send("GET", path, query, silence_seconds=silence_seconds), path)

    def stream(self, path: str, query: Mapping[str, str], silence_seconds: float) -> Generator[Object, None, None]:
        """Open a stream of objects at once; then these, one of each line, ended like `events`."""
        response = self._send("GET", path, query, silence_seconds=silence_seconds)
        return self._parsed(response, path, json.loads)

    def close(self) -> None:
        """Close the connections that are not in use."""
        self._pool.clear()

    def _events(self, response: BaseHTTPResponse, path: str) -> Generator[Object, None, None]:
        return self._parsed(response, path, lambda line: self._event(line, path))

    def _parsed(
        self, response: BaseHTTPResponse, path: str, parse: Callable[[bytes], Object]
    ) -> Generator[Object, None, None]:
        try:
            for line in _lines(response):
                yield parse(line)
        except (HTTPError, ValueError, LookupError, TypeError) as error:
            raise StoreError(f"the watch of {path} at {self.server} broke off: {error!r}") from error
        finally:
            response.close()

    def _event(self, line: bytes, path: str) -> Object:
        event: Object = json.loads(line)
        if event["type"] == "ERROR":
            status = int(event["object"].get("code") or 500)
            raise self._peer.refusal(status, json.dumps(event["object"]), self.server, path)
        if not isinstance(event["object"]["metadata"]["resourceVersion"], str):
            raise TypeError("an event without a version")
        return event

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Body | None = None,
        media_type: str = "application/json",
        silence_seconds: float = _ANSWER_SECONDS,
        refuse: bool = True,
    ) -> BaseHTTPResponse:
        asked = urlencode({key: value for key, value in query.items() if value})
        headers = {"Accept": "application/json", "Content-Type": media_type, "User-Agent": "tiphys"}
        if credentials := self._authorization():
            headers["Authorization"] = credentials
        try:
            response = self._pool.request(
                method,
                f"{self.server}{path}" + (f"?{asked}" if asked else ""),
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=Timeout(connect=_CONNECT_SECONDS, read=silence_seconds),
                preload_content=False,
                redirect=False,
                retries=False,
            )
            refused = response.read().decode(errors="replace") if refuse and response.status >= 300 else None
        except (HTTPError, ValueError) as error:
            remedy = self._peer.remedy_of_tls if isinstance(error, SSLError) else ""
            told = f"{self._name} did not answer {method} {path}: {error}"
            raise StoreError(f"{told}; {remedy}" if remedy else told) from error
        if refused is not None:
            raise self._peer.refusal(response.status, refused, self.server, path)
        return response


def _lines(response: BaseHTTPResponse) -> Iterator[bytes]:
    rest = b""
    for piece in response.stream(64 << 10, decode_content=False):
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line for line in whole if line.strip())


def _refusal(status: int, body: str, server: str, path: str) -> TiphysError:
    reason, message = _words(body)
    match status:
        case 404 if not reason:
            return NotFoundError(
                f"the API server {server} does not serve {path}: {message}; where it is a kind of object, install its "
                "CustomResourceDefinition"
            )
        case 404:
            return NotFoundError(f"the API server {server} says: {message}")
        case 409 if reason == "AlreadyExists":
            return ObjectExistsError(message)
        case 409:
            return ConflictError(message)
        case 410:
            return ExpiredError(message)
        case 422 if "metadata.uid" in message and "immutable" in message:
            # What a custom kind answers where a built-in one says 409: the object of this name is another one.
            return ConflictError(message)
        case 400 | 405 | 413 | 415 | 422:
            return UsageError(f"the API server {server} refused the request: {message}")
        case 401:
            return ForbiddenError(
                f"the API server {server} does not accept these credentials: {message}; they may have expired: "
                "see whether `kubectl auth whoami` works"
            )
        case 403:
            return ForbiddenError(f"the API server {server} refused: {message}")
    return StoreError(f"the API server {server} answered {status}: {message}")


def _words(body: str) -> tuple[str, str]:
    """Reason and message of a Status, or the beginning of whatever it is."""
    try:
        answer = json.loads(body)
        return str(answer.get("reason", "")), str(answer.get("message") or "no reason given")
    except (ValueError, AttributeError):
        return "", " ".join(body.split())[:300] or "no reason given"


_API_SERVER = Peer("the API server", _refusal, "is it the API server of a Kubernetes cluster?")
