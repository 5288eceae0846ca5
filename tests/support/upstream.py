"""The plugin's service as a sidecar meets it: answers whatever a test tells it to, and remembers who asked."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Upstream:
    """``status`` and ``body`` are answered; with `hold`, only once it is set again."""

    def __init__(self) -> None:
        self.url = ""
        self.status, self.body = 200, b"{}"
        self.tokens: list[str] = []
        self.bodies: list[bytes] = []
        self.arrived = threading.Semaphore(0)
        self.go = threading.Event()
        self.go.set()

    def answers(self, status: int, body: bytes = b"{}") -> None:
        self.status, self.body = status, body


@contextmanager
def upstream() -> Iterator[Upstream]:
    told = Upstream()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.tokens.append(self.headers.get("Authorization", ""))
            told.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            told.arrived.release()
            told.go.wait(60)
            try:
                self.send_response(told.status)
                self.send_header("Content-Length", str(len(told.body)))
                self.send_header("Location", "/elsewhere")
                self.end_headers()
                self.wfile.write(told.body)
            except OSError:
                pass  # the sidecar went away meanwhile

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    told.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield told
    finally:
        told.go.set()
        http.shutdown()
        thread.join()
        http.server_close()
