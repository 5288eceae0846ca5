"""HTTP requests to an API server: JSON in and out, and errors as `TiphysError`.

The module uses urllib3 directly, for reasons that were measured
(docs/decisions/api-client.md). It never repeats a request: a write with a lost
reply may have happened, and only the caller can find out.
"""

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from pydantic_core import from_json, to_json
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
from tiphys.protocol.json_documents import CUT, CUT_DEPTH, cut_deep_values

Object = dict[str, Any]
"""A Kubernetes object as parsed from JSON."""

Body = Object | list[Object]
"""Body of a request: an object, or the operations of a JSON patch."""

TOO_DEEP = f"is nested more than {CUT_DEPTH} levels deep, so Tiphys does not read it; simplify or delete it"
_CONNECT_SECONDS = 5.0
_LOG_SILENCE_SECONDS = 24 * 3600.0
_RESPONSE_SECONDS = 25.0


class ExpiredError(NotFoundError):
    """The API server no longer has this resource version (410); list again."""


@dataclass(frozen=True)
class RemoteServer:
    """Kind of server: its name in messages, its errors, and remedies for failed connections."""

    name: str
    error_for_status: Callable[[int, str, str, str], TiphysError]
    """Maps status, body, URL of the server and path to an error."""
    web_page_remedy: str
    """Remedy if the reply is a web page."""
    tls_remedy: str = ""
    """Remedy if the TLS connection fails."""


class Transport:
    """Requests to one server. Thread-safe.

    Args:
        authorization: Returns the header ``Authorization``; called for each request, because tokens expire. Empty for
            none.
        remote: Kind of server; None for the API server of Kubernetes.
    """

    def __init__(
        self,
        server: str,
        pool: PoolManager,
        authorization: Callable[[], str] = lambda: "",
        remote: RemoteServer | None = None,
    ) -> None:
        self.server = server.rstrip("/")
        self._pool = pool
        self._authorization = authorization
        self._remote = remote or _API_SERVER
        self._name = f"{self._remote.name} {self.server}"

    def request_json(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Body | None = None,
        media_type: str = "application/json",
        accept: str = "application/json",
    ) -> Object:
        """Send a request and return the object in the reply; ``accept`` is the wanted form of the object."""
        response = self._send(method, path, query or {}, body, media_type, accept=accept)
        if response.headers.get("Content-Type", "").startswith("text/html"):
            response.drain_conn()
            raise UsageError(f"{self._name} answered {method} {path} with a web page; {self._remote.web_page_remedy}")
        try:
            reply = decode_objects(response.read())
        except (HTTPError, ValueError) as error:
            raise StoreError(f"{self._name} sent an incomplete reply to {method} {path}: {error}") from error
        if not isinstance(reply, dict):
            raise StoreError(
                f"{self._name} answered {method} {path} with JSON that is no object; check the server's URL"
            )
        if CUT in reply:
            raise UsageError(f"the object {path} of {self._name} {TOO_DEEP}")
        return reply

    def get_text(self, path: str) -> tuple[int, str]:
        """Status and body of a GET. No status raises an error: the reply may come from behind a proxy of the server."""
        response = self._send("GET", path, {}, raise_for_status=False)
        try:
            return response.status, response.read().decode(errors="replace")
        except HTTPError as error:
            raise StoreError(f"{self._name} sent an incomplete reply to GET {path}: {error}") from error

    def stream_lines(self, path: str, query: Mapping[str, str]) -> Iterator[str]:
        """Open a stream of text immediately; yield its lines until the server ends it. It may be silent for hours."""
        return self._parse_text(self._send("GET", path, query, silence_seconds=_LOG_SILENCE_SECONDS), path)

    def _parse_text(self, response: BaseHTTPResponse, path: str) -> Iterator[str]:
        rest = b""
        try:
            for chunk in response.stream(64 << 10, decode_content=False):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (f"{line.decode(errors='replace')}\n" for line in lines)
            if rest:
                yield rest.decode(errors="replace")
        except HTTPError as error:
            raise StoreError(f"{self._name} ended its reply to GET {path} early: {error}") from error
        finally:
            response.close()

    def watch_events(
        self, path: str, query: Mapping[str, str], silence_seconds: float
    ) -> Generator[Object, None, None]:
        """Open a watch immediately; yield its events until the server ends it or is silent for ``silence_seconds``."""
        return self._parse_events(self._send("GET", path, query, silence_seconds=silence_seconds), path)

    def stream_objects(
        self, path: str, query: Mapping[str, str], silence_seconds: float
    ) -> Generator[Object, None, None]:
        """Open a stream with one object per line immediately; it ends like `watch_events`."""
        response = self._send("GET", path, query, silence_seconds=silence_seconds)
        return self._parse_lines(response, path, decode_objects)

    def close(self) -> None:
        """Close idle connections."""
        self._pool.clear()

    def _parse_events(self, response: BaseHTTPResponse, path: str) -> Generator[Object, None, None]:
        return self._parse_lines(response, path, lambda line: self._parse_event(line, path))

    def _parse_lines(
        self, response: BaseHTTPResponse, path: str, parse: Callable[[bytes], Object]
    ) -> Generator[Object, None, None]:
        try:
            for line in _lines(response):
                yield parse(line)
        except (HTTPError, ValueError, LookupError, TypeError) as error:
            raise StoreError(f"the watch of {path} at {self.server} was interrupted: {error!r}") from error
        finally:
            response.close()

    def _parse_event(self, line: bytes, path: str) -> Object:
        event: Object = decode_objects(line)
        if event["type"] == "ERROR":
            status = int(event["object"].get("code") or 500)
            raise self._remote.error_for_status(status, json.dumps(event["object"]), self.server, path)
        if not isinstance(event["object"]["metadata"]["resourceVersion"], str):
            raise TypeError("an event without a resource version")
        return event

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Body | None = None,
        media_type: str = "application/json",
        silence_seconds: float = _RESPONSE_SECONDS,
        raise_for_status: bool = True,
        accept: str = "application/json",
    ) -> BaseHTTPResponse:
        query_string = urlencode({key: value for key, value in query.items() if value})
        headers = {"Accept": accept, "Content-Type": media_type, "User-Agent": "tiphys"}
        if credentials := self._authorization():
            headers["Authorization"] = credentials
        try:
            response = self._pool.request(
                method,
                f"{self.server}{path}" + (f"?{query_string}" if query_string else ""),
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=Timeout(connect=_CONNECT_SECONDS, read=silence_seconds),
                preload_content=False,
                redirect=False,
                retries=False,
            )
            is_error = raise_for_status and response.status >= 300
            error_body = response.read().decode(errors="replace") if is_error else None
        except (HTTPError, ValueError) as error:
            remedy = self._remote.tls_remedy if isinstance(error, SSLError) else ""
            message = f"{self._name} did not answer {method} {path}: {error}"
            raise StoreError(f"{message}; {remedy}" if remedy else message) from error
        if error_body is not None:
            raise self._remote.error_for_status(response.status, error_body, self.server, path)
        return response


def decode_objects(data: bytes) -> Any:
    """Parse a reply or an event. An object in it that is nested too deeply is incomplete, and has the key `CUT`.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return from_json(data)
    except ValueError:
        document = from_json(cut_deep_values(data))
    if not isinstance(document, dict):
        return document
    for item in document.get("items") or [document.get("object") or document]:
        if isinstance(item, dict) and CUT.encode() in to_json(item):
            item[CUT] = True
    return document


def _lines(response: BaseHTTPResponse) -> Iterator[bytes]:
    incomplete = b""
    for chunk in response.stream(64 << 10, decode_content=False):
        *lines, incomplete = (incomplete + chunk).split(b"\n")
        yield from (line for line in lines if line.strip())


def _api_error(status: int, body: str, server: str, path: str) -> TiphysError:
    reason, message = _status_reason_and_message(body)
    match status:
        case 404 if not reason:
            return NotFoundError(
                f"the API server {server} does not serve {path}: {message}; if this is a custom kind of object, "
                "install its CustomResourceDefinition"
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
            # For a uid that does not match, custom kinds return 422 and built-in kinds 409.
            return ConflictError(message)
        case 400 | 405 | 413 | 415 | 422:
            return UsageError(f"the API server {server} refused the request: {message}")
        case 401:
            return ForbiddenError(
                f"the API server {server} does not accept these credentials: {message}; they may have expired: "
                "check them with `kubectl auth whoami`"
            )
        case 403:
            return ForbiddenError(f"the API server {server} refused: {message}")
    return StoreError(f"the API server {server} answered {status}: {message}")


def _status_reason_and_message(body: str) -> tuple[str, str]:
    """Reason and message of a Status; without a Status, an empty reason and the start of the body."""
    try:
        status = from_json(body)
        return str(status.get("reason", "")), str(status.get("message") or "no reason given")
    except (ValueError, AttributeError):
        return "", " ".join(body.split())[:300] or "no reason given"


_API_SERVER = RemoteServer("the API server", _api_error, "is it the API server of a Kubernetes cluster?")
