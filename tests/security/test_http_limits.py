"""What one caller without a token can hold of a service: for a while a connection, and nothing of the others.

| the caller | what happens |
|---|---|
| sends half a header, or half a body | it is ended by a deadline |
| does not read its response | the same |
| opens more connections than are served | the oldest that waits for its caller is ended, so a request is answered |
| opens them to a TLS port, and says nothing | the handshake has the same deadline |
| has no token, or a wrong one | it is refused and closed before its body is read |
| sends more than is read | it gets the response, and the rest is dropped within a bound of bytes and time |
| floods the API of the controller | the rate limit of those with the token stays as it is |
"""

import json
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from support.builders.ledger import queues
from support.processes.polling import until
from support.servers import certificates, http
from support.servers.raw_http import (
    dial,
    drip_until_ended,
    is_open,
    read_to_end,
    request_head,
    send_until_reset,
    wait_for_hangup,
)
from support.stories.plugin import world
from tiphys_controller.alerts.webhook import AlertInbox
from tiphys_controller.server.access import AccessControl
from tiphys_controller.server.app import create_controller_app
from tiphys_controller.server.routes import create_alerts_route, create_storage_events_route
from tiphys_plugin import PluginServer

from tiphys.service import connections
from tiphys.service.http_server import CLOSE_CONNECTION, AppServer, BodyTooLargeError, ServerCertificate, read_body
from tiphys.store import DirectoryStore

TOKEN = "a-secret-token"
EXECUTE = "/api/v1/template.execute"
LONG = b"x" * (16 << 20)
"""More than the buffers of both ends hold."""


@pytest.fixture
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "RECEIVE_SECONDS", 0.3)


@pytest.fixture
def few_connections(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 10)
    return 10


def app() -> Starlette:
    async def small(_: Request) -> Response:
        return PlainTextResponse("ok")

    async def long(_: Request) -> Response:
        return Response(LONG)

    async def echo(request: Request) -> Response:
        return Response(await read_body(request, 1 << 20))

    async def refuse(request: Request) -> Response:
        try:
            return Response(await read_body(request, 1 << 20))
        except BodyTooLargeError as error:
            return PlainTextResponse(str(error), 413, CLOSE_CONNECTION)

    refusing = Route("/refuse", refuse, methods=["POST"])
    return Starlette(
        routes=[refusing, Route("/small", small), Route("/long", long), Route("/echo", echo, methods=["POST"])]
    )


@pytest.fixture
def server(short_deadline: None) -> Iterator[AppServer]:
    with AppServer(app()) as running:
        yield running


@pytest.fixture
def patient_server() -> Iterator[AppServer]:
    with AppServer(app()) as running:
        yield running


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /echo HT",
        b"POST /echo HTTP/1.1\r\nHost: test\r\nX-Long: ",
        request_head("/echo", "Content-Length: 100"),
        request_head("/echo", "Content-Length: 100") + b"x" * 99,
        request_head("/small", "Content-Length: 100", method="GET"),
        request_head("/nowhere", "Transfer-Encoding: chunked") + b"5\r\nhello\r\n",
    ],
    ids=["nothing", "half a line", "half a header", "no body", "a byte too few", "body of a GET", "endless chunks"],
)
def test_half_a_request_is_ended(server: AppServer, sent: bytes) -> None:
    with closing(dial(server.url)) as caller:
        caller.sendall(sent)
        assert wait_for_hangup(caller)


def test_bytes_now_and_then_do_not_move_the_deadline(server: AppServer) -> None:
    with closing(dial(server.url)) as caller:
        caller.sendall(b"POST /echo HTTP/1.1\r\n")
        drip_until_ended(caller)


def test_caller_that_does_not_read_is_ended(server: AppServer) -> None:
    with closing(dial(server.url, receive_buffer=4096)) as caller:
        caller.sendall(request_head("/long", method="GET"))
        assert caller.recv(1)
        until(lambda: not server._server.server_state.connections, seconds=120)
        assert len(read_to_end(caller)) < len(LONG)


def test_caller_that_reads_gets_everything(patient_server: AppServer) -> None:
    assert http.get(f"{patient_server.url}/long").content == LONG
    assert http.post(f"{patient_server.url}/echo", content=b"x" * 100_000).content == b"x" * 100_000


def test_connection_is_used_again_after_a_response(patient_server: AppServer) -> None:
    with closing(dial(patient_server.url)) as caller:
        for _ in range(3):
            caller.sendall(request_head("/small", method="GET"))
            received = b""
            while not received.endswith(b"ok"):
                data = caller.recv(4096)
                assert data, "the connection was closed"
                received += data


def test_flood_of_half_sent_requests_leaves_room_for_a_request(
    few_connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "RECEIVE_SECONDS", 3600.0)
    with AppServer(app()) as server, ExitStack() as flood:
        callers = [flood.enter_context(closing(dial(server.url))) for _ in range(3 * few_connections)]
        for caller in callers:
            caller.sendall(b"POST /echo HTTP/1.1\r\n")
        assert http.get(f"{server.url}/small").text == "ok"
        assert all(wait_for_hangup(caller) for caller in callers[: 2 * few_connections])
        assert is_open(callers[-1])


def test_limit_follows_the_files_that_a_process_may_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (256, 1024))
    assert connections.connection_limit() == 64


def test_flood_of_tls_handshakes_is_ended(short_deadline: None, few_connections: int, tmp_path: Path) -> None:
    ca, _ = certificates.authority(tmp_path)
    certificate = ServerCertificate(tmp_path / "server.crt", tmp_path / "server.key")
    with AppServer(app(), certificate=certificate) as server, ExitStack() as flood:
        callers = [flood.enter_context(closing(dial(server.url))) for _ in range(3 * few_connections)]
        assert all(wait_for_hangup(caller) for caller in callers)
        context = ssl.create_default_context(cafile=ca)

        def is_answered() -> bool:
            with suppress(httpx.TransportError):  # the deadline of this test is short for a busy machine
                return http.get(f"{server.url}/small", verify=context).text == "ok"
            return False

        until(is_answered, seconds=120)


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[PluginServer]:
    here = world(tmp_path, queues(research={"A100": 8}))
    with PluginServer(here.core, TOKEN) as running:
        yield running


class Controller:
    """The API of a controller, with a clock that stands still."""

    def __init__(self, folder: Path) -> None:
        token = folder / "api-token"
        token.write_text(TOKEN)
        store = DirectoryStore(folder / "store")
        access = AccessControl(token, lambda *_: None, lambda: 0.0, 5)
        inbox = AlertInbox(lambda _: store, ("ml",))
        calls = [create_alerts_route(inbox, access), create_storage_events_route(None, access)]
        self.server = AppServer(create_controller_app(lambda: None, lambda: b"", calls))


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[AppServer]:
    with Controller(tmp_path).server as running:
        yield running


@pytest.mark.parametrize("authorization", [(), ("Authorization: Bearer wrong",)], ids=["no token", "a wrong token"])
@pytest.mark.parametrize(("service", "path", "status"), [("plugin", EXECUTE, 403), ("controller", "/v1/alerts", 401)])
def test_caller_without_the_token_is_closed_before_its_body(
    request: pytest.FixtureRequest, service: str, path: str, status: int, authorization: tuple[str, ...]
) -> None:
    """It waits for the word to go on with its body, which a server gives once it reads the body."""
    url = request.getfixturevalue(service).url
    with closing(dial(url)) as caller:
        caller.sendall(request_head(path, "Content-Length: 1000000", "Expect: 100-continue", *authorization))
        answer = read_to_end(caller)
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"connection: close" in answer.lower()


def test_flood_without_the_token_takes_nothing_of_the_rate_limit(controller: AppServer) -> None:
    delivery = json.dumps({"version": "4", "alerts": []}).encode()
    for _ in range(20):
        assert http.post(f"{controller.url}/v1/alerts", content=b"").status_code == 401
    known = {"Authorization": f"Bearer {TOKEN}"}
    answers = [http.post(f"{controller.url}/v1/alerts", content=delivery, headers=known) for _ in range(6)]
    assert [answer.status_code for answer in answers] == [202] * 5 + [429]


def test_storage_events_take_nothing_of_the_rate_of_alerts(controller: AppServer) -> None:
    known = {"Authorization": f"Bearer {TOKEN}"}
    events = [http.post(f"{controller.url}/v1/storage-events", content=b"{}", headers=known) for _ in range(6)]
    assert events[-1].status_code == 429
    delivery = json.dumps({"version": "4", "alerts": []}).encode()
    assert http.post(f"{controller.url}/v1/alerts", content=delivery, headers=known).status_code == 202


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "1e3", "\uff11"])
def test_strange_length_is_a_bad_request(plugin: PluginServer, length: str) -> None:
    with closing(dial(plugin.url)) as caller:
        caller.sendall(request_head(EXECUTE, f"Content-Length: {length}", f"Authorization: Bearer {TOKEN}"))
        assert read_to_end(caller).startswith(b"HTTP/1.1 400 ")


def test_caller_that_goes_away_in_its_body_is_no_crash(plugin: PluginServer, caplog: pytest.LogCaptureFixture) -> None:
    with closing(dial(plugin.url)) as caller:
        caller.sendall(request_head(EXECUTE, "Content-Length: 100", f"Authorization: Bearer {TOKEN}") + b"{")
        caller.shutdown(socket.SHUT_RDWR)
    until(lambda: http.get(f"{plugin.url}/healthz").status_code == 200, seconds=120)
    assert not [record for record in caplog.records if record.exc_info]


class TestBodiesThatAreNotRead:
    """A response whose caller is still sending its request."""

    @pytest.fixture
    def chatty(self, patient_server: AppServer) -> Iterator[socket.socket]:
        """A caller that has sent the head of a request with a body beyond the limit."""
        with closing(dial(patient_server.url)) as connection:
            connection.sendall(request_head("/refuse", f"Content-Length: {10 << 20}"))
            yield connection

    def test_a_caller_that_sends_all_of_a_large_body_first_gets_the_response(self, chatty: socket.socket) -> None:
        chatty.sendall(b"x" * (10 << 20))

        assert read_to_end(chatty).startswith(b"HTTP/1.1 413")

    def test_a_library_that_sends_all_first_gets_the_response(self, patient_server: AppServer) -> None:
        request = urllib.request.Request(f"{patient_server.url}/refuse", data=b"x" * (10 << 20), method="POST")

        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=60)

        refused.value.close()
        assert refused.value.code == 413

    def test_a_caller_that_sends_for_ever_is_ended_after_a_time(
        self, monkeypatch: pytest.MonkeyPatch, chatty: socket.socket
    ) -> None:
        monkeypatch.setattr(connections, "LINGER_SECONDS", 0.3)
        send_until_reset(chatty, b"x")

    def test_a_caller_that_sends_too_much_is_ended_at_once(
        self, monkeypatch: pytest.MonkeyPatch, patient_server: AppServer
    ) -> None:
        monkeypatch.setattr(connections, "LINGER_BYTES", 1 << 20)
        monkeypatch.setattr(connections, "LINGER_SECONDS", 3600.0)
        with closing(dial(patient_server.url)) as connection:
            connection.sendall(request_head("/refuse", f"Content-Length: {1 << 40}"))

            send_until_reset(connection, b"x" * (1 << 16))


@pytest.mark.parametrize("name", ["X-Forwarded-For", "Forwarded", "X-Real-IP"])
def test_no_caller_chooses_the_address_that_it_seems_to_call_from(name: str) -> None:
    async def read_address(request: Request) -> Response:
        return PlainTextResponse(request.client.host if request.client else "")

    with AppServer(Starlette(routes=[Route("/", read_address)])) as server:
        answer = http.get(server.url, headers={name: "for=10.0.0.7" if name == "Forwarded" else "10.0.0.7"})
    assert answer.text == "127.0.0.1"
