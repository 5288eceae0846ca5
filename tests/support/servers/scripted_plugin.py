"""A plugin that answers as a test tells it to, over real HTTP."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from hera_pipelines.local.plugin_client import PluginEndpoint

TOKEN = "the-token"
Body = dict[str, Any]
Answer = dict[str, Any] | int | bytes
"""A reply; a bare number is an HTTP status, bytes are sent as they are."""


class ScriptedPlugin:
    """Listens on loopback; ``answer`` gets the plugin's body of each call."""

    def __init__(self, answer: Callable[[Body], Answer] | None = None) -> None:
        self._answer = answer or (lambda _body: succeeded())
        self.calls: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def endpoint(self) -> PluginEndpoint:
        return PluginEndpoint(f"http://127.0.0.1:{self._server.server_port}", TOKEN)

    @property
    def bodies(self) -> list[Body]:
        return [call["template"]["plugin"]["tiphys"] for call in self.calls]

    def __enter__(self) -> "ScriptedPlugin":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        plugin = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                """Say nothing."""

            def do_POST(self) -> None:
                call = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with plugin._lock:
                    plugin.calls.append(call)
                    plugin.tokens.append(self.headers["authorization"])
                    answer = plugin._answer(call["template"]["plugin"]["tiphys"])
                status = answer if isinstance(answer, int) else 200
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        return Handler


def succeeded(**parameters: str) -> Body:
    """The plugin's Succeeded with output parameters; ``_`` in a name stands for ``-``."""
    listed = [{"name": name.replace("_", "-"), "value": value} for name, value in parameters.items()]
    return {"node": {"phase": "Succeeded", "outputs": {"parameters": listed}}}


def failed(message: str) -> Body:
    return {"node": {"phase": "Failed", "message": message}}


def pending(message: str, requeue: str = "10ms") -> Body:
    return {"node": {"phase": "Pending", "message": message}, "requeue": requeue}
