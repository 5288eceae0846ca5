"""The pages behind a real nginx that asks an OpenID Connect proxy who a visitor is, by the lines of docs/ui.md.

| visitor                                            | who acts                              |
|----------------------------------------------------|---------------------------------------|
| signed in at the proxy                             | the person that the proxy names       |
| signed in, and sends the header with another name  | the person that the proxy names       |
| not signed in                                      | nobody: nginx refuses                 |
| past nginx, with the header, from another address  | nobody: the pages refuse              |
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from support.processes.polling import until
from support.stories import small_pipeline
from support.stories.pages import form_fields

from .conftest import begin, invoke
from .test_detach import started

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not shutil.which("nginx"), reason="nginx is not installed"),
]

PAGE = Path(__file__).parents[3] / "docs" / "ui.md"
PERSON = "ada@example.org"
CONFIGURATION = """\
daemon off;
pid {folder}/nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location = /oauth2/auth {{ internal; proxy_pass http://127.0.0.1:{provider}; proxy_pass_request_body off; }}
        {documented}
    }}
}}
"""


class Provider(BaseHTTPRequestHandler):
    """The answer of an oauth2-proxy: who is signed in, by the cookie."""

    def do_GET(self) -> None:
        is_signed_in = "login=ada" in self.headers.get("Cookie", "")
        self.send_response(202 if is_signed_in else 401)
        if is_signed_in:
            self.send_header("X-Auth-Request-Email", PERSON)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing: the log of a test is its failure."""


@contextmanager
def provider() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Provider)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def free_port() -> int:
    """A port below those of which the kernel gives one to a server that asks for any, as those of other tests do."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError


@contextmanager
def nginx(folder: Path, port: int, pages: str, provider_port: int) -> Iterator[None]:
    [documented] = re.findall(r"```nginx\n(.*?)```", PAGE.read_text(), re.DOTALL)
    documented = documented.replace("http://10.0.0.8:8321", pages.rstrip("/"))
    assert pages.rstrip("/") in documented
    configuration = folder / "nginx.conf"
    configuration.write_text(
        CONFIGURATION.format(folder=folder, port=port, provider=provider_port, documented=documented)
    )
    process = subprocess.Popen(["nginx", "-c", configuration, "-p", folder], stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: process.poll() is not None or _listens(port), 120.0)
        assert process.poll() is None, process.communicate()[1]
        yield
    finally:
        process.terminate()
        process.communicate(timeout=120)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_only_the_person_named_by_the_proxy_may_act(tmp_path: Path) -> None:
    code = started(tmp_path)
    port = free_port()
    options = ["--actions", "--trusted-proxy", "127.0.0.1", "--identity-header", "X-Auth-Request-Email"]
    with begin(["ui", "--port", "0", *options], tmp_path) as process, provider() as provider_port:
        assert process.stdout is not None
        pages = process.stdout.readline().strip()
        site = f"http://127.0.0.1:{port}"
        with (
            nginx(tmp_path, port, pages, provider_port),
            httpx.Client(base_url=site, headers={"Origin": site}, timeout=120, trust_env=False) as client,
        ):
            assert client.get("/runs/r").status_code == 401
            client.cookies.set("login", "ada")
            spoofed = {"X-Auth-Request-Email": "eve@example.org"}
            plan = client.get("/runs/r/stop", headers=spoofed)
            stopped = client.post("/runs/r/stop", data=form_fields(plan.text), headers=spoofed)
            foreign = client.post(
                "/runs/r/stop", data=form_fields(plan.text), headers={"Origin": "http://evil.example"}
            )
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    small_pipeline.let_go(code)

    assert stopped.status_code == 303, stopped.text
    assert foreign.status_code == 403
    events = invoke(["events", "r"], tmp_path).out
    assert f"stop requested on a web page by {PERSON} (by proxy 127.0.0.1)" in events
    assert "eve" not in events


def test_the_header_of_an_address_that_is_not_listed_counts_for_nothing(tmp_path: Path) -> None:
    code = started(tmp_path)
    options = ["--actions", "--trusted-proxy", "10.255.255.1", "--identity-header", "X-Auth-Request-Email"]
    with begin(["ui", "--port", "0", *options], tmp_path) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with httpx.Client(
            base_url=url, headers={"X-Auth-Request-Email": PERSON}, timeout=120, trust_env=False
        ) as client:
            page = client.get("/runs/r/stop", headers={"Origin": url.rstrip("/")})
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    small_pipeline.let_go(code)
    invoke(["stop", "r"], tmp_path)
    assert PERSON not in page.text
    assert page.status_code == 403
