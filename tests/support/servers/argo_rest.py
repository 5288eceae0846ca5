"""An argo-server's REST over the fake API server, with its answers as the real one (v4.1.2) gives them.

    with kube_server.serving() as cluster, argo_rest.serving(cluster.api("ml")) as argo:
        submitter = ArgoServerSubmitter(argo_server(argo.url, {}))

`tests/argo/test_argo_server.py` meets a real one.
"""

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from tiphys.errors import ForbiddenError, NotFoundError, ObjectExistsError, StoreError, TiphysError, UsageError
from tiphys.kube import KubeApi, Object
from tiphys.kube.resources import WORKFLOWS

_CODES: list[tuple[type[TiphysError], int, int]] = [
    (ObjectExistsError, 409, 6),
    (NotFoundError, 404, 5),
    (UsageError, 400, 3),
    (ForbiddenError, 403, 7),
    (StoreError, 503, 14),
]
"""Errors of the API server behind it, with the status and gRPC's code that become of them."""


class Fault(NamedTuple):
    """``status`` 0: nobody answers, the connection is closed. With ``done``, after the request was carried out."""

    method: str
    status: int
    body: str
    done: bool


class ArgoRest:
    """The server as a test sees it."""

    def __init__(self, api: KubeApi) -> None:
        self.api = api
        self.url = ""
        self.token = ""
        """What ``Authorization`` must say; empty: anything."""
        self.base = ""
        """The path it lies behind, such as ``/argo``."""
        self.archived: dict[str, Object] = {}
        """By ``namespace/name``: answered where there is no such object."""
        self.requests: list[tuple[str, str]] = []
        self._faults: list[Fault] = []

    def fail_next(self, method: str, status: int, body: str = "", done: bool = False) -> None:
        """Answer the next request of this method so."""
        self._faults.append(Fault(method, status, body, done))

    def fault(self, method: str) -> Fault | None:
        """The fault that hits this request."""
        found = next((one for one in self._faults if one.method == method), None)
        if found:
            self._faults.remove(found)
        return found

    def answer(self, method: str, parts: list[str], body: Object) -> Object:
        """Carry out a request for ``workflows/<parts>``."""
        match method, parts:
            case "POST", [namespace]:
                return self.api.create(WORKFLOWS, namespace, body["workflow"])
            case "GET", [namespace, name]:
                return self._get(namespace, name)
            case "DELETE", [namespace, name]:
                self._get(namespace, name)
                self.api.delete(WORKFLOWS, namespace, name)
                return {}
            case "PUT", [namespace, name, ("stop" | "terminate") as how]:
                self._get(namespace, name)
                return self.api.patch(WORKFLOWS, namespace, name, {"spec": {"shutdown": how.capitalize()}})
        raise AssertionError(f"{method} {parts}: no test needed this before")

    def _get(self, namespace: str, name: str) -> Object:
        found = self.api.get(WORKFLOWS, namespace, name) or self.archived.get(f"{namespace}/{name}")
        if found is None:
            raise NotFoundError(f'workflows.argoproj.io "{name}" not found')
        return found


@contextmanager
def serving(api: KubeApi, tls: ssl.SSLContext | None = None) -> Iterator[ArgoRest]:
    """A server on a free port of the loopback device."""
    server = ArgoRest(api)
    http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"argo": server}))
    if tls:
        http.socket = tls.wrap_socket(http.socket, server_side=True, do_handshake_on_connect=False)
    server.url = f"{'https' if tls else 'http'}://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


class _Handler(BaseHTTPRequestHandler):
    argo: ArgoRest
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _serve(self) -> None:
        url = urlsplit(self.path)
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        self.argo.requests.append((self.command, url.path))
        fault = self.argo.fault(self.command)
        if fault and not fault.done:
            self._fail(fault)
        elif self.argo.token and self.headers.get("Authorization") != self.argo.token:
            self._send(401, {"code": 16, "message": "token not valid"})
        elif not url.path.startswith(f"{self.argo.base}/api/v1/"):
            self._send_text(200, "text/html; charset=utf-8", "<!doctype html>")
        else:
            self._carry_out(url.path.removeprefix(f"{self.argo.base}/api/v1/"), parse_qs(url.query), body, fault)

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def _carry_out(self, path: str, query: dict[str, list[str]], body: Object, fault: Fault | None) -> None:
        kind, *parts = [unquote(part) for part in path.split("/")]
        try:
            if kind == "workflow-events":
                self._watch(parts[0], {key: values[0] for key, values in query.items()})
                return
            answer = self.argo.answer(self.command, parts, body)
        except TiphysError as error:
            status, code = next((status, code) for kind_, status, code in _CODES if isinstance(error, kind_))
            self._send(status, {"code": code, "message": str(error)})
            return
        if fault:
            self._fail(fault)
        else:
            self._send(200, {key: value for key, value in answer.items() if key not in ("apiVersion", "kind")})

    def _watch(self, namespace: str, query: dict[str, str]) -> None:
        fields = query["listOptions.fieldSelector"]
        version = query.get("listOptions.resourceVersion", "")
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            with closing(self.argo.api.watch(WORKFLOWS, namespace, version, fields=fields)) as events:
                for event in events:
                    if event["type"] != "BOOKMARK":
                        self._send_chunk(json.dumps({"result": event}) + "\n")
        except (TiphysError, OSError):
            pass
        with suppress(OSError):
            self._send_chunk('{"error":{"grpc_code":8,"http_code":429,"message":"EOF"}}\n')
            self._send_chunk("")

    def _send_chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())

    def _fail(self, fault: Fault) -> None:
        self.close_connection = True
        if fault.status:
            self._send_text(fault.status, "text/plain", fault.body)

    def _send(self, status: int, document: Object) -> None:
        self._send_text(status, "application/json", json.dumps(document))

    def _send_text(self, status: int, media_type: str, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(text.encode())))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(text.encode())
