"""What reaches a sidecar, and what a caller without Argo's token can hold of it.

| the caller | what happens |
|---|---|
| is outside of the pod | the sidecar does not listen there |
| has no token, or a wrong one | 403, and closed before its body is read |
| sends a byte now and then | it is ended by one deadline for the whole request |
| does so on every connection that is served | Argo's call is answered after the deadline |
| sends JSON that is nested 100,000 deep, or a strange length | 400 and a sentence |
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import httpx
import pytest
from support.processes.polling import until
from support.processes.process import Process
from support.processes.sidecar import OURS, TOKEN, SidecarPod, post, sidecar_url
from support.servers import http
from support.servers.plugin_upstream import upstream
from support.servers.raw_http import dial, drip_until_ended, read_to_end, request_head, wait_for_hangup
from tiphys_plugin.sidecar import server
from tiphys_plugin.sidecar.forwarding import EXECUTE_PATH
from tiphys_plugin.sidecar.server import SidecarServer
from tiphys_plugin.sidecar.settings import SidecarSettings


@pytest.fixture
def pod(tmp_path: Path) -> SidecarPod:
    return SidecarPod(tmp_path)


@pytest.fixture
def sidecar(pod: SidecarPod) -> Iterator[Process]:
    with upstream() as service, pod.process(service.url) as running:
        yield running


@pytest.fixture
def impatient(pod: SidecarPod, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URL of a sidecar in this process with a short deadline."""
    monkeypatch.setattr(server, "_RECEIVE_SECONDS", 0.3)
    with upstream() as service:
        environment = {
            "TIPHYS_SERVICE_URL": service.url,
            "TIPHYS_TOKEN_FILE": str(pod.root / "token"),
            "TIPHYS_ACCOUNT_TOKEN_FILE": str(pod.root / "account"),
            "TIPHYS_SIDECAR_PORT": "0",
        }
        running = SidecarServer(SidecarSettings.from_environment(environment))
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{running.port}"
        running.drain()
        thread.join()


def test_only_the_loopback_device_is_listened_on(sidecar: Process) -> None:
    listening = Path(f"/proc/{sidecar.process.pid}/net/tcp6").read_text().splitlines()[1:]
    listening += Path(f"/proc/{sidecar.process.pid}/net/tcp").read_text().splitlines()[1:]
    port = f"{sidecar.started['port']:04X}"
    local = [line.split()[1] for line in listening if line.split()[3] == "0A"]
    assert [address for address in local if address.endswith(f":{port}")] == [f"0100007F:{port}"]


@pytest.mark.parametrize("authorization", [(), ("Authorization: Bearer wrong",)], ids=["no token", "a wrong token"])
def test_body_of_a_caller_without_the_token_is_not_read(sidecar: Process, authorization: tuple[str, ...]) -> None:
    with closing(dial(sidecar_url(sidecar))) as caller:
        caller.sendall(request_head(EXECUTE_PATH, "Content-Length: 1000000", *authorization))
        assert read_to_end(caller).startswith(b"HTTP/1.0 403 ")


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST ",
        request_head(EXECUTE_PATH, "Content-Length: 100", f"Authorization: Bearer {TOKEN}")[:-2],
        request_head(EXECUTE_PATH, "Content-Length: 100", f"Authorization: Bearer {TOKEN}") + b"{",
        request_head(EXECUTE_PATH, "Content-Length: 9000000", f"Authorization: Bearer {TOKEN}") + b"{",
    ],
    ids=["nothing", "half a line", "half a header", "half a body", "half of too large a body"],
)
def test_bytes_now_and_then_do_not_move_the_deadline(impatient: str, sent: bytes) -> None:
    with closing(dial(impatient)) as caller:
        caller.sendall(sent)
        drip_until_ended(caller)


def test_argos_call_is_answered_although_every_slot_was_taken(impatient: str) -> None:
    with ExitStack() as flood:
        callers = [flood.enter_context(closing(dial(impatient))) for _ in range(45)]
        headers = {"Authorization": f"Bearer {TOKEN}"}

        def is_answered() -> bool:
            with suppress(httpx.TransportError):  # Argo repeats its call, too
                return http.post(f"{impatient}{EXECUTE_PATH}", json=OURS, headers=headers).status_code == 200
            return False

        until(is_answered, seconds=120)
        assert all(wait_for_hangup(caller) for caller in callers)


def test_deep_json_is_a_bad_request(sidecar: Process) -> None:
    response = post(sidecar, b"[" * 100_000)
    assert (response.status_code, "nested too deeply" in response.text) == (400, True)


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "", "1e3"])
def test_strange_length_is_a_bad_request(sidecar: Process, length: str) -> None:
    with closing(dial(sidecar_url(sidecar))) as caller:
        caller.sendall(request_head(EXECUTE_PATH, f"Content-Length: {length}", f"Authorization: Bearer {TOKEN}"))
        caller.shutdown(socket.SHUT_WR)
        assert read_to_end(caller).startswith(b"HTTP/1.0 400 ")
