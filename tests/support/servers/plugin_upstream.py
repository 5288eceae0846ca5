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
    service = Upstream()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            service.tokens.append(self.headers.get("Authorization", ""))
            service.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            service.arrived.release()
            service.go.wait(60)
            try:
                self.send_response(service.status)
                self.send_header("Content-Length", str(len(service.body)))
                self.send_header("Location", "/elsewhere")
                self.end_headers()
                self.wfile.write(service.body)
            except OSError:
                pass  # the sidecar went away meanwhile

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 64  # whoever finds the queue full tries again after a second

    http = Server(("127.0.0.1", 0), Handler)
    service.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield service
    finally:
        service.go.set()
        http.shutdown()
        thread.join()
        http.server_close()
