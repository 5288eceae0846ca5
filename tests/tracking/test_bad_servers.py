"""Servers that are not what they should be, through MLflow's own client.

| server | error |
|---|---|
| none listens, or it never answers | `StoreError`: tried again later, within seconds |
| 401, 403 | `ForbiddenError`: names the variables for credentials |
| MLflow 2 | `UsageError`: names the version |
| another web server | `UsageError`: asks for the URL of MLflow |
| errors of 1 MiB, HTML or escapes | one short line without control characters |
| another scheme, credentials in the URL | `UsageError`, before any connection |
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tiphys.errors import ForbiddenError, StoreError, UsageError
from tiphys.tracking import server as mlflow_server
from tiphys.tracking.server import connect

pytest.importorskip("mlflow.server", reason="MLflow is not installed here: make test-mlflow")


@contextmanager
def answering(status: int, body: bytes, version: bytes = b"3.4.0", kind: str = "text/html") -> Iterator[str]:
    """A web server that answers every request alike, but tells ``version`` at MLflow's path for it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/version" and version
            self.send_response(200 if known else status)
            self.send_header("Content-Type", kind)
            text = version if known else body
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_POST = do_GET  # noqa: N815  the name that http.server calls

        def log_message(self, *arguments: object) -> None:
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{web.server_port}"
    finally:
        web.shutdown()
        thread.join(60)
        web.server_close()


def call(uri: str) -> None:
    connect({"MLFLOW_TRACKING_URI": uri}).experiment("digits")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")


def test_no_server_at_that_address() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(StoreError, match="tried again later") as caught:
            call(f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert not isinstance(caught.value, ForbiddenError)


def test_a_server_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(StoreError, match="tried again later"):
            call(f"http://127.0.0.1:{silent.getsockname()[1]}")


@pytest.mark.parametrize("status", [401, 403])
def test_credentials_that_are_refused(status: int) -> None:
    with (
        answering(status, b"You are not authenticated.") as uri,
        pytest.raises(ForbiddenError, match="MLFLOW_TRACKING_USERNAME"),
    ):
        call(uri)


@pytest.mark.parametrize("version", [b"2.22.1", b"1.30.0\n"])
def test_an_older_mlflow(version: bytes) -> None:
    with answering(200, b"{}", version) as uri, pytest.raises(UsageError, match="needs MLflow 3"):
        call(uri)


def test_a_web_server_that_is_not_mlflow_is_named_as_such() -> None:
    with (
        answering(404, b"<html>no such page</html>", version=b"") as uri,
        pytest.raises(UsageError, match="is this the URL of an MLflow 3 server"),
    ):
        call(uri)


def test_an_error_page_becomes_one_short_line() -> None:
    page = b"<script>alert(1)</script>\x1b[2J\r\n" * 40_000
    with answering(500, page) as uri, pytest.raises(StoreError) as caught:
        call(uri)
    message = str(caught.value)
    assert len(message) < 600
    assert message.isprintable()


@pytest.mark.parametrize(
    "uri", ["", "mlflow", "sqlite:///mlruns.db", "file:///mlruns", "ftp://host/", "http://", "http://user:word@host"]
)
def test_a_url_that_names_no_server(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_server.importlib, "import_module", pytest.fail)  # type: ignore[attr-defined]
    with pytest.raises(UsageError) as caught:
        call(uri)
    assert "word" not in str(caught.value)
