"""An Argo server that remembers what it is sent, for tests of submission."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, NamedTuple


class Call(NamedTuple):
    method: str
    path: str
    token: str
    body: dict[str, Any]


class ArgoServer:
    """Answers each call with the object it was sent, under a name of its own; or with ``refusal``."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.objects: dict[str, dict[str, Any]] = {}
        """What a GET answers, by path."""
        self.refusal: tuple[int, str] | None = None
        self.url = ""

    def answer(self, call: Call) -> tuple[int, dict[str, Any]]:
        self.calls.append(call)
        if self.refusal is not None:
            return self.refusal[0], {"message": self.refusal[1]}
        if call.method == "GET":
            found = self.objects.get(call.path)
            return (200, found) if found else (404, {"message": "not found"})
        sent = next(iter(call.body.values()))
        metadata = {"name": "made-by-server", **sent["metadata"]}
        return 200, {**sent, "metadata": metadata}


@contextmanager
def serving() -> Iterator[ArgoServer]:
    """A server on a free port of the loopback device."""
    server = ArgoServer()
    http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(server))
    server.url = f"http://127.0.0.1:{http.server_port}"
    thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def _handler(server: ArgoServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._reply()

        def do_POST(self) -> None:
            self._reply()

        def do_PUT(self) -> None:
            self._reply()

        def _reply(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            token = self.headers.get("Authorization", "")
            status, document = server.answer(Call(self.command, self.path, token, body))
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler
