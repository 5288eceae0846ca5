"""TLS of service and controller, and the way of a sidecar to a service with a certificate of its own authority.

| certificate | what happens |
|---|---|
| given | HTTPS only |
| renewed in its files | new connections get it, without a restart |
| replaced by one that does not match its key | the one of before stays, and the log says why |
| only one of the two files, or files that are no pair | an error that names the options |
| signed by an authority that the sidecar does not know | 503 with a sentence; no token is sent |
"""

import argparse
import asyncio
import hashlib
import random
import shutil
import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from support.processes.controller import kubeconfig
from support.processes.polling import until
from support.processes.process import Process
from support.processes.sidecar import ACCOUNT, SidecarPod, post
from support.servers import certificates, http, kube_server
from support.servers.raw_http import dial, read_to_end, request_head
from tiphys_plugin.sidecar.forwarding import EXECUTE_PATH, ServiceClient
from tiphys_plugin.sidecar.settings import SidecarSettings
from uvicorn.protocols.http.h11_impl import H11Protocol

from tiphys.errors import UsageError
from tiphys.kube.resources import GPU_LEDGERS
from tiphys.service import http_server
from tiphys.service.http_server import AppServer, ServerCertificate, add_tls_options, read_tls_options


class Pair:
    """Certificate and key in a folder, and the authority that signed them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca, _ = certificates.authority(folder)
        self.certificate, self.key = folder / "server.crt", folder / "server.key"

    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca)

    def replace_by(self, other: "Pair", *names: str) -> None:
        for name in names:
            shutil.copy(other.folder / name, self.folder / name)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path / "pair")


@pytest.fixture
def renewed(tmp_path: Path) -> Pair:
    return Pair(tmp_path / "renewed")


class Service:
    """A service that notes the tokens of its callers."""

    def __init__(self, pair: Pair) -> None:
        self.tokens: list[str] = []
        self.certificate = ServerCertificate(pair.certificate, pair.key)
        app = Starlette(routes=[Route(EXECUTE_PATH, self._answer, methods=["GET", "POST"])])
        self.server = AppServer(app, certificate=self.certificate)

    async def _answer(self, request: Request) -> Response:
        self.tokens.append(request.headers.get("authorization", ""))
        body = await request.body()
        return PlainTextResponse(hashlib.sha256(body).hexdigest() if len(body) > 100_000 else "{}")

    @property
    def url(self) -> str:
        return self.server.url


@pytest.fixture
def service(pair: Pair) -> Iterator[Service]:
    made = Service(pair)
    with made.server:
        yield made


def test_large_pieces_are_parsed_in_small_ones(service: Service, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    original = H11Protocol.data_received

    def data_received(self: H11Protocol, data: bytes) -> None:
        parsed.append(len(data))
        original(self, data)

    monkeypatch.setattr(H11Protocol, "data_received", data_received)
    body = random.Random(1).randbytes(900_001)
    with httpx.Client(verify=pair.trust()) as client:
        for _ in range(3):  # on one connection
            assert client.post(f"{service.url}{EXECUTE_PATH}", content=body).text == hashlib.sha256(body).hexdigest()
    assert sum(parsed) > 2_700_000
    assert max(parsed) <= 16 << 10


def test_https_is_spoken_and_nothing_else(service: Service, pair: Pair) -> None:
    assert service.url.startswith("https://")
    assert http.get(f"{service.url}{EXECUTE_PATH}", verify=pair.trust()).text == "{}"
    with closing(dial(service.url)) as caller:
        caller.sendall(request_head(EXECUTE_PATH, method="GET"))
        assert b"HTTP" not in read_to_end(caller)


def test_old_versions_of_tls_are_refused(service: Service) -> None:
    assert service.certificate.context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_renewed_certificate_is_taken_up_without_a_restart(
    pair: Pair, renewed: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_RENEWAL_CHECK_SECONDS", 0)
    service = Service(pair)
    with service.server:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            http.get(f"{service.url}{EXECUTE_PATH}", verify=renewed.trust())
        pair.replace_by(renewed, "server.crt", "server.key")

        def is_renewed() -> bool:
            try:
                return http.get(f"{service.url}{EXECUTE_PATH}", verify=renewed.trust()).text == "{}"
            except httpx.ConnectError:
                return False

        until(is_renewed, seconds=120)


def test_half_a_renewal_leaves_the_certificate_of_before(service: Service, pair: Pair, renewed: Pair) -> None:
    trust = pair.trust()
    pair.replace_by(renewed, "server.crt")
    with structlog.testing.capture_logs() as log:
        asyncio.run(service.certificate.follow_renewals())
    assert [line["event"] for line in log] == ["certificate.unusable"]
    assert http.get(f"{service.url}{EXECUTE_PATH}", verify=trust).text == "{}"
    pair.replace_by(renewed, "server.key")
    asyncio.run(service.certificate.follow_renewals())
    assert http.get(f"{service.url}{EXECUTE_PATH}", verify=renewed.trust()).text == "{}"


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_tls_options(parser)
    return parser.parse_args(arguments)


def test_wrong_files_are_named(pair: Pair, renewed: Pair) -> None:
    assert read_tls_options(parsed()) is None
    for arguments in (("--tls-cert", str(pair.certificate)), ("--tls-key", str(pair.key))):
        with pytest.raises(UsageError, match="--tls-cert and --tls-key belong together"):
            read_tls_options(parsed(*arguments))
    for certificate, key in ((pair.certificate, renewed.key), (pair.folder / "none", pair.key), (pair.key, pair.key)):
        with pytest.raises(UsageError, match=f"{certificate} with the key {key} cannot be used"):
            read_tls_options(parsed("--tls-cert", str(certificate), "--tls-key", str(key)))


@pytest.mark.parametrize("command", ["tiphys_plugin serve", "tiphys_plugin agent", "tiphys_controller"])
def test_every_service_speaks_tls(command: str, pair: Pair, tmp_path: Path) -> None:
    module, *words = command.split()
    files = (f"--tls-cert={pair.certificate}", f"--tls-key={pair.key}")
    place = ("--host=127.0.0.1", "--port=0", f"--store=file://{tmp_path}/store", "--namespace=ml")
    with kube_server.serving() as server:
        server.add_namespace("ml")
        server.api("tiphys").create(GPU_LEDGERS, "tiphys", {"metadata": {"name": "default"}, "spec": {"queues": []}})
        environment = {"KUBECONFIG": str(kubeconfig(server, tmp_path))}
        with Process(module, *words, *place, *files, **environment) as process:
            url = process.started.get("url") or f"https://127.0.0.1:{process.started['port']}"
            assert http.get(f"{url}/healthz", verify=pair.trust()).text == "ok\n"
            process.stop()


def test_sidecar_reaches_a_service_whose_authority_it_knows(service: Service, pair: Pair, tmp_path: Path) -> None:
    pod = SidecarPod(tmp_path)
    with pod.process(service.url, TIPHYS_SERVICE_CA=pair.ca.read_text()) as running:
        assert post(running).status_code == 200
    with pod.process(service.url, TIPHYS_SERVICE_CA_FILE=str(pair.ca)) as running:
        assert post(running).status_code == 200
    assert service.tokens == [f"Bearer {ACCOUNT}"] * 2


def test_service_of_an_unknown_authority_gets_no_token(service: Service, renewed: Pair, tmp_path: Path) -> None:
    with SidecarPod(tmp_path).process(service.url, TIPHYS_SERVICE_CA=renewed.ca.read_text()) as running:
        response = post(running)
    assert response.json()["node"]["phase"] == "Pending"
    assert "CERTIFICATE_VERIFY_FAILED" in response.json()["node"]["message"]
    assert service.tokens == []


def test_authority_that_is_no_certificate_is_named() -> None:
    given = {"TIPHYS_SERVICE_URL": "https://service", "TIPHYS_SERVICE_CA": "no certificate"}
    with pytest.raises(UsageError, match="TIPHYS_SERVICE_CA cannot be used"):
        ServiceClient(SidecarSettings.from_environment(given))
