"""Who is let in.

| token of                                             | answer              | asked again after |
|------------------------------------------------------|---------------------|-------------------|
| tiphys-executor-plugin of a served namespace         | its namespace       | 60 s              |
| the same of another namespace, another account, user | refused             | 5 s               |
| nobody                                               | refused             | 5 s               |
| unknown, because the API server is away              | ask again (503)     | at once           |
"""

import asyncio

import pytest
import structlog
from prometheus_client import CollectorRegistry
from tiphys_plugin.server import token_review
from tiphys_plugin.server.authentication import UnauthenticatedError
from tiphys_plugin.server.token_review import TokenReviewAuthenticator

from tiphys.errors import StoreError

ACCOUNT = "system:serviceaccount:{}:tiphys-executor-plugin"


class Seconds:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Gate:
    def __init__(self, server) -> None:
        self.clock = Seconds()
        self.registry = CollectorRegistry()
        api = server.api("tiphys")
        self.tokens = TokenReviewAuthenticator(
            api, lambda namespace: namespace in ("ml", "vision"), self.registry, monotonic=self.clock
        )

    def authenticate(self, token):
        return asyncio.run(self.tokens.authenticate(token, "10.0.0.1"))

    def reviews(self, result: str) -> float:
        return self.registry.get_sample_value("tiphys_reviews_total", {"result": result}) or 0.0


@pytest.fixture
def gate(server):
    server.tokens = {"good": ACCOUNT.format("ml"), "other": ACCOUNT.format("vision")}
    made = Gate(server)
    yield made
    made.tokens.close()


def test_account_speaks_for_its_own_namespace(gate):
    assert gate.authenticate("good").namespace == "ml"
    assert gate.authenticate("other").namespace == "vision"
    assert gate.reviews("accepted") == 2


@pytest.mark.parametrize(
    "user",
    [
        ACCOUNT.format("foreign"),
        "system:serviceaccount:ml:default",
        "system:serviceaccount:ml:tiphys-executor-plugin-2",
        "x:system:serviceaccount:ml:tiphys-executor-plugin",
        "system:serviceaccount:ml:x:tiphys-executor-plugin",
        "tiphys-executor-plugin",
        "system:admin",
        "",
    ],
)
def test_a_token_of_another_account_is_refused(server, gate, user):
    server.tokens["bad"] = user
    with pytest.raises(UnauthenticatedError, match="not that of a service account tiphys-executor-plugin"):
        gate.authenticate("bad")
    assert gate.reviews("refused") == 1


def test_missing_token_costs_no_review(server, gate):
    with pytest.raises(UnauthenticatedError):
        gate.authenticate("")
    assert server.count() == 0


def test_good_verdict_is_remembered_for_a_minute(server, gate):
    for _ in range(10):
        gate.authenticate("good")
    assert server.count("create", "tokenreviews") == 1
    del server.tokens["good"]
    gate.clock.now += 59
    assert gate.authenticate("good").namespace == "ml"
    gate.clock.now += 1
    with pytest.raises(UnauthenticatedError):
        gate.authenticate("good")


def test_bad_verdict_is_remembered_for_five_seconds(server, gate):
    for _ in range(10):
        with pytest.raises(UnauthenticatedError):
            gate.authenticate("new")
    assert server.count("create", "tokenreviews") == 1
    server.tokens["new"] = ACCOUNT.format("ml")
    gate.clock.now += 5
    assert gate.authenticate("new").namespace == "ml"


def test_api_server_that_is_away_is_no_verdict(server, gate):
    server.fail_next(503, plural="tokenreviews")
    with pytest.raises(StoreError):
        gate.authenticate("good")
    assert gate.authenticate("good").namespace == "ml"
    assert gate.reviews("unavailable") == 1


@pytest.fixture
def room_for_two(monkeypatch):
    monkeypatch.setattr(token_review, "_MAX_CACHED_REVIEWS", 2)


def test_memory_is_bounded_and_forgets_the_oldest(room_for_two, server, gate):
    server.tokens["third"] = ACCOUNT.format("ml")
    for token in ("good", "other", "third"):
        gate.authenticate(token)
    gate.authenticate("other")
    assert server.count("create", "tokenreviews") == 3
    gate.authenticate("good")
    assert server.count("create", "tokenreviews") == 4


def test_no_token_is_ever_logged_or_kept(server, gate):
    with structlog.testing.capture_logs() as logs, pytest.raises(UnauthenticatedError) as refused:
        gate.authenticate("a-secret-token")
    assert [log["event"] for log in logs] == ["token.refused"]
    assert "a-secret-token" not in f"{logs} {refused.value} {vars(gate.tokens)}"
