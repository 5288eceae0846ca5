"""Tokens of callers: what reviews of strange ones may cost, and for whom and how long a token is good.

| what arrives | what happens |
|---|---|
| many unknown tokens of one client | four are reviewed at a time; the others are put off |
| the same of many clients | 64 wait for a review; further ones are put off |
| many calls with one unknown token | one review for all |
| a token that was accepted before | it is reviewed beside the unknown ones, not behind them |
| more refused tokens than are remembered | accepted ones stay remembered |
| a token for another audience, or from an API server that knows none | refused |
| the account's token in a sidecar with an audience | only the API server sees it; the service sees a short-lived one |
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from support.processes.polling import until
from support.servers import certificates, kube_server
from support.servers.kube_server import KubeServer
from tiphys_plugin.server import token_review
from tiphys_plugin.server.authentication import UnauthenticatedError
from tiphys_plugin.server.token_review import TokenReviewAuthenticator
from tiphys_plugin.sidecar.account_token import AccountToken
from tiphys_plugin.sidecar.settings import SidecarSettings
from urllib3 import PoolManager

from tiphys.errors import StoreError, UsageError
from tiphys.kube import KubeApi

ACCOUNT = "system:serviceaccount:{}:tiphys-executor-plugin"


class SlowApi:
    """Reviews wait for `go`. A token ``ml-…`` is of the plugin's account of namespace ml; any other is refused."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.reviewed: list[str] = []
        self.audiences: list[str] | None = None

    def create(self, kind: Any, namespace: Any, body: dict[str, Any]) -> dict[str, Any]:
        token = body["spec"]["token"]
        self.reviewed.append(token)
        assert self.go.wait(120)
        name, is_account, _ = token.partition("-")
        status = {"authenticated": bool(is_account), "user": {"username": ACCOUNT.format(name)}}
        return {"status": {**status, **({"audiences": self.audiences} if self.audiences else {})}}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Gate:
    """An authenticator, and what it answered."""

    def __init__(self, audience: str = "") -> None:
        self.api = SlowApi()
        self.clock = Clock()
        self.registry = CollectorRegistry()
        self.tokens = TokenReviewAuthenticator(
            self.api,  # type: ignore[arg-type]
            lambda namespace: namespace in ("ml", "vision"),
            self.registry,
            audience,
            self.clock,
        )

    async def ask(self, token: str, client: str = "10.0.0.1") -> str:
        """The namespace, or the kind of the refusal."""
        try:
            return (await self.tokens.authenticate(token, client)).namespace or ""
        except (UnauthenticatedError, StoreError) as error:
            return type(error).__name__

    def put_off(self) -> float:
        return self.registry.get_sample_value("tiphys_reviews_total", {"result": "put_off"}) or 0.0


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.api.go.set()
    made.tokens.close()


async def all_started(gate: Gate, count: int) -> None:
    while len(gate.api.reviewed) < count:
        await asyncio.sleep(0.01)


def test_strange_tokens_of_one_client_do_not_delay_another(gate: Gate) -> None:
    async def story() -> None:
        gate.api.go.clear()
        flood = [asyncio.create_task(gate.ask(f"strange{number}", "10.0.0.9")) for number in range(300)]
        await all_started(gate, 4)
        other = asyncio.create_task(gate.ask("ml-new", "10.0.0.1"))
        await all_started(gate, 5)  # it is under review although none of the flood has been answered
        assert gate.put_off() == 296
        gate.api.go.set()
        assert await other == "ml"
        answers = await asyncio.gather(*flood)
        assert (answers.count("UnauthenticatedError"), answers.count("StoreError")) == (4, 296)

    asyncio.run(asyncio.wait_for(story(), 120))


def test_reviews_that_wait_are_limited_for_all_clients_together(gate: Gate) -> None:
    async def story() -> None:
        gate.api.go.clear()
        asked = [asyncio.create_task(gate.ask(f"strange{number}", f"10.0.0.{number}")) for number in range(100)]
        await all_started(gate, 6)
        assert gate.put_off() == 36
        gate.api.go.set()
        await asyncio.gather(*asked)
        assert await gate.ask("ml-later", "10.0.0.1") == "ml"

    asyncio.run(asyncio.wait_for(story(), 120))


def test_calls_with_one_token_share_a_review(gate: Gate) -> None:
    async def story() -> None:
        gate.api.go.clear()
        asked = [asyncio.create_task(gate.ask("ml-new")) for _ in range(16)]
        await all_started(gate, 1)
        gate.api.go.set()
        assert await asyncio.gather(*asked) == ["ml"] * 16

    asyncio.run(asyncio.wait_for(story(), 120))
    assert gate.api.reviewed == ["ml-new"]


def test_known_token_is_reviewed_again_beside_a_flood(gate: Gate) -> None:
    async def story() -> None:
        assert await gate.ask("ml-known") == "ml"
        gate.clock.now += 60
        gate.api.go.clear()
        flood = [asyncio.create_task(gate.ask(f"strange{number}", f"10.0.1.{number}")) for number in range(100)]
        await all_started(gate, 1 + 6)
        known = asyncio.create_task(gate.ask("ml-known"))
        await all_started(gate, 1 + 6 + 1)
        assert gate.api.reviewed[-1] == "ml-known"
        gate.api.go.set()
        assert await known == "ml"
        await asyncio.gather(*flood)

    asyncio.run(asyncio.wait_for(story(), 120))


def test_refused_tokens_do_not_displace_accepted_ones(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_review, "_MAX_CACHED_REVIEWS", 3)

    async def story() -> None:
        assert await gate.ask("ml-known") == "ml"
        for number in range(10):
            assert await gate.ask(f"strange{number}") == "UnauthenticatedError"
        assert await gate.ask("ml-known") == "ml"

    asyncio.run(asyncio.wait_for(story(), 120))
    assert gate.api.reviewed.count("ml-known") == 1


@pytest.mark.parametrize(
    ("audiences", "answer"),
    [(["tiphys"], "ml"), (["https://kubernetes.default.svc"], "UnauthenticatedError"), (None, "UnauthenticatedError")],
    ids=["ours", "another", "none"],
)
def test_token_has_to_be_meant_for_the_audience(audiences: list[str] | None, answer: str) -> None:
    gate = Gate("tiphys")
    gate.api.audiences = audiences
    assert asyncio.run(gate.ask("ml-token")) == answer
    gate.tokens.close()


class Account:
    """The folder that Argo mounts into a sidecar, and an API server that knows the account's token."""

    def __init__(self, folder: Path, server: KubeServer, ca: Path) -> None:
        self.server = server
        self.folder = folder / "account"
        self.folder.mkdir()
        (self.folder / "namespace").write_text("ml")
        (self.folder / "token").write_text("never-expires\n")
        (self.folder / "ca.crt").write_bytes(ca.read_bytes())
        server.add_namespace("ml")
        server.authenticate = True
        server.tokens["never-expires"] = ACCOUNT.format("ml")
        self.clock = Clock()
        host, port = server.url.removeprefix("https://").split(":")
        environment = {
            "TIPHYS_SERVICE_URL": "http://service:7243",
            "TIPHYS_ACCOUNT_TOKEN_FILE": str(self.folder / "token"),
            "TIPHYS_TOKEN_AUDIENCE": "tiphys",
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT": port,
        }
        self.token = AccountToken(SidecarSettings.from_environment(environment), self.clock)

    def api(self) -> KubeApi:
        """A client of the service, which reviews tokens."""
        pool = PoolManager(ca_certs=str(self.folder / "ca.crt"))
        return KubeApi(self.server.url, pool, "tiphys", lambda: "Bearer never-expires")


@contextmanager
def account_of(folder: Path) -> Iterator[Account]:
    ca, context = certificates.authority(folder / "authority")
    with kube_server.serving(tls=context) as server:
        yield Account(folder, server, ca)


@pytest.fixture
def account(tmp_path: Path) -> Iterator[Account]:
    with account_of(tmp_path) as made:
        yield made


def test_sidecar_shows_the_service_a_token_for_the_service_only(account: Account) -> None:
    issued = account.token.read()
    assert account.server.audiences == {issued: "tiphys"}
    gate = TokenReviewAuthenticator(account.api(), lambda _: True, CollectorRegistry(), "tiphys")
    try:
        assert asyncio.run(gate.authenticate(issued, "")).namespace == "ml"
        with pytest.raises(UnauthenticatedError):
            asyncio.run(gate.authenticate("never-expires", ""))
    finally:
        gate.close()


def test_issued_token_is_used_until_it_has_to_be_renewed(account: Account) -> None:
    first = account.token.read()
    account.clock.now += 479
    assert account.token.read() == first
    account.clock.now += 1
    assert account.token.read() != first
    assert account.server.count("create", "serviceaccounts") == 2


def test_token_that_is_not_exchanged_says_what_to_do_and_is_asked_for_again(account: Account) -> None:
    account.server.authorize = lambda _: False
    with pytest.raises(StoreError, match=r"audience tiphys: .*; `helm upgrade` with ml among its namespaces"):
        account.token.read()
    account.server.authorize = lambda _: True
    assert account.token.read()
    account.server.fail_next(500, body=b"<html>", plural="serviceaccounts")
    account.clock.now += 600
    with pytest.raises(StoreError, match="did not exchange the token of tiphys-executor-plugin"):
        account.token.read()


def test_token_of_the_account_is_sent_to_the_api_server_alone(account: Account, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other, _ = certificates.authority(tmp_path / "other")
    (account.folder / "ca.crt").write_bytes(other.read_bytes())
    with pytest.raises(StoreError, match="CERTIFICATE_VERIFY_FAILED"):
        account.token.read()
    until(lambda: account.server.count() == 0, seconds=60)


def test_audience_without_an_api_server_is_named() -> None:
    given = {"TIPHYS_SERVICE_URL": "http://service:7243", "TIPHYS_TOKEN_AUDIENCE": "tiphys"}
    with pytest.raises(UsageError, match="KUBERNETES_SERVICE_HOST"):
        SidecarSettings.from_environment(given)
