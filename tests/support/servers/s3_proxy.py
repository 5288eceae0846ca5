"""A proxy before an S3 server, which does to requests and replies what networks and bad servers do."""

import base64
import hashlib
import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import urlsplit

_PATIENCE_SECONDS = 120.0


class Request(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes

    def without(self, header: str) -> "Request":
        return self._replace(headers={name: value for name, value in self.headers.items() if name != header})


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes
    sent_bytes: int | None = None
    """Close the connection after that much of the body."""


Forward = Callable[[Request], Reply]
Behaviour = Callable[[Request, Forward], Reply | None]
"""What to answer; None closes the connection without an answer."""


def honest(request: Request, forward: Forward) -> Reply:
    return forward(request)


def ignores_conditions(request: Request, forward: Forward) -> Reply:
    """As garage, nanio and ``rclone serve s3``: a conditional write overwrites."""
    return forward(request.without("if-none-match"))


class LetsRacersWin:
    """As s3s-fs: looks whether the key is free, and writes a little later, here once all writers of a race have looked.

    Writes of keys without ``/race/`` are honest.
    """

    def __init__(self, racers: int) -> None:
        self._together = threading.Barrier(racers)

    def __call__(self, request: Request, forward: Forward) -> Reply:
        if request.method != "PUT" or "if-none-match" not in request.headers or "/race/" not in request.path:
            return forward(request)
        look = request.without("content-length")._replace(method="HEAD", body=b"")
        if forward(look).status == 200:
            return forward(request)
        self._together.wait(_PATIENCE_SECONDS)
        return forward(request.without("if-none-match"))


@dataclass
class Times:
    """Behave badly for the first ``count`` requests that match, then honestly."""

    count: int
    matches: Callable[[Request], bool]
    bad: Behaviour
    happened: int = field(default=0, init=False)

    def __call__(self, request: Request, forward: Forward) -> Reply | None:
        if self.happened < self.count and self.matches(request):
            self.happened += 1
            return self.bad(request, forward)
        return forward(request)


def loses_reply(request: Request, forward: Forward) -> None:
    """Apply the request and drop the answer."""
    forward(request)


def drops_connection(request: Request, forward: Forward) -> None:
    """Drop the request."""


def refuses(status: int, code: str) -> Behaviour:
    """Answer with an error of S3."""
    body = f"<Error><Code>{code}</Code><Message>told to</Message></Error>".encode()
    return lambda request, forward: Reply(status, {"content-type": "application/xml"}, body)


def breaks_off(sent_bytes: int) -> Behaviour:
    """Send the beginning of the answer's body."""
    return lambda request, forward: forward(request)._replace(sent_bytes=sent_bytes)


def damages(request: Request, forward: Forward) -> Reply:
    """Turn one bit of the answer's body. As S3, and unlike moto, tell what its checksum was."""
    reply = forward(request)
    if request.headers.get("x-amz-checksum-mode") == "ENABLED":
        reply.headers["x-amz-checksum-sha256"] = base64.b64encode(hashlib.sha256(reply.body).digest()).decode()
    return reply._replace(body=bytes([reply.body[0] ^ 1]) + reply.body[1:])


def is_write(request: Request) -> bool:
    return request.method == "PUT"


def is_read(request: Request) -> bool:
    return request.method == "GET" and "list-type" not in request.path


def is_listing(request: Request) -> bool:
    return request.method == "GET" and "list-type" in request.path


def is_completion(request: Request) -> bool:
    return request.method == "POST" and "uploadId=" in request.path


class S3Proxy:
    """Listens on loopback in front of ``endpoint``; ``behaviour`` may be exchanged at any time."""

    def __init__(self, endpoint: str, behaviour: Behaviour = honest) -> None:
        self._upstream = urlsplit(endpoint)
        self.behaviour = behaviour
        self.requests: list[Request] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def forward(self, request: Request) -> Reply:
        connection = http.client.HTTPConnection(self._upstream.hostname or "", self._upstream.port)
        try:
            connection.request(request.method, request.path, request.body, request.headers)
            reply = connection.getresponse()
            headers = {name.lower(): value for name, value in reply.getheaders()}
            return Reply(reply.status, headers, reply.read())
        finally:
            connection.close()

    def answer(self, request: Request) -> Reply | None:
        self.requests.append(request)
        return self.behaviour(request, self.forward)

    def serve(self) -> None:
        self._server.serve_forever(poll_interval=0.02)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Head and body are two writes, of which the second would wait 40 ms for an acknowledgement of the first.
            disable_nagle_algorithm = True

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {k.lower(): v for k, v in self.headers.items() if k.lower() not in ("expect", "connection")}
                reply = proxy.answer(Request(self.command, self.path, headers, body))
                if reply is None:
                    self.close_connection = True
                else:
                    self.send(reply)

            def send(self, reply: Reply) -> None:
                self.send_response_only(reply.status)
                for name, value in reply.headers.items():
                    if name not in ("content-length", "connection", "transfer-encoding"):
                        self.send_header(name, value)
                length = reply.headers.get("content-length") if self.command == "HEAD" else len(reply.body)
                self.send_header("content-length", str(length or 0))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(reply.body[: reply.sent_bytes])
                self.close_connection = reply.sent_bytes is not None

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
                pass

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any  # noqa: N815  the base class's names

        return Handler


@contextmanager
def s3_proxy(endpoint: str, behaviour: Behaviour = honest) -> Iterator[S3Proxy]:
    """Run a proxy."""
    proxy = S3Proxy(endpoint, behaviour)
    thread = threading.Thread(target=proxy.serve)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.stop()
        thread.join()
