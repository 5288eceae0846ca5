"""The controller's calls over real HTTP: who is let in, what is refused, and that nothing changes then.

| request | answer |
|---|---|
| no token, a wrong one, another scheme | 401, logged |
| the token as Bearer, or as the password of Basic | let in |
| the token cannot be read | 503 |
| no JSON, no payload | 400, with a sentence |
| more than 2 MiB, announced or not | 413 |
| too many calls | 429 |
| an alert | 202, once it is in storage; 503 if it cannot be |
| a notification about objects | 200, once their runs are made; 503 if storage does not answer; 404 without triggers |
| the token of storage events, where there is one | opens these and nothing else; that of the API does not open them |
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from support.servers import http
from support.stories.triggers import TriggerWorld, template, version
from tiphys_controller.alerts.webhook import AlertInbox
from tiphys_controller.server.access import MAX_BODY_BYTES, AccessControl
from tiphys_controller.server.app import create_controller_app
from tiphys_controller.server.routes import create_alerts_route, create_storage_events_route
from tiphys_controller.submit.triggers.worker import TriggerWorker

from tiphys.errors import StoreError
from tiphys.service.http_server import AppServer
from tiphys.store import DirectoryStore

TOKEN = "a-secret-token"
ALERT = {"status": "firing", "labels": {"alertname": "RunFailed", "tiphys_run": "digits-1"}, "fingerprint": "ab12"}
DELIVERY = {"version": "4", "alerts": [{**ALERT, "startsAt": "2026-05-04T11:00:00Z"}]}


class Place:
    """A controller's calls, served."""

    def __init__(
        self,
        folder: Path,
        namespaces: tuple[str, ...] | None = ("ml",),
        triggers: TriggerWorker | None = None,
        events_token: str = TOKEN,
    ) -> None:
        self.token = folder / "token"
        self.token.write_text(f"{TOKEN}\n")
        self.store = DirectoryStore(folder / "store")
        self.counted: list[tuple[str, int]] = []
        self.down = False
        self.now = 0.0
        inbox = AlertInbox(self._open, namespaces)
        (folder / "events-token").write_text(f"{events_token}\n")
        door, events_door = (
            AccessControl(file, lambda call, status, _: self.counted.append((call, status)), lambda: self.now, 20)
            for file in (self.token, folder / "events-token")
        )
        calls = [create_alerts_route(inbox, door), create_storage_events_route(triggers, events_door)]
        self.server = AppServer(create_controller_app(lambda: None, lambda: b"metrics", calls))

    def _open(self, _: str) -> DirectoryStore:
        if self.down:
            raise StoreError("the store does not answer")
        return self.store

    def post(self, path: str, body: Any = b"", token: str | None = TOKEN, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Authorization": f"Bearer {token}"} if token is not None else {}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return http.post(f"{self.server.url}{path}", content=content, headers={**given, **named}, timeout=60)

    def keys(self) -> list[str]:
        return [info.key for info in self.store.list("")]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    with made.server:
        yield made


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        f"Bearer {TOKEN}x",
        "Bearer",
        f"Basic {TOKEN}",
        "Basic !!",
        f"Digest {TOKEN}",
        f"Bearer {TOKEN} {TOKEN}",
    ],
)
def test_without_the_token_nothing_is_done_and_that_is_logged(place: Place, authorization: str | None) -> None:
    given = {} if authorization is None else {"Authorization": authorization}
    with structlog.testing.capture_logs() as log:
        answer = http.post(f"{place.server.url}/v1/alerts", json=DELIVERY, headers=given, timeout=60)
    assert answer.status_code == 401
    assert "Bearer" in answer.headers["WWW-Authenticate"]
    assert place.keys() == []
    [line] = [one for one in log if one["event"] == "call.refused"]
    assert (line["call"], line["status"]) == ("alerts", 401)
    assert TOKEN not in json.dumps(log)


def test_alertmanagers_two_ways_to_send_a_token_are_both_let_in(place: Place) -> None:
    assert place.post("/v1/alerts", DELIVERY).json() == {"accepted": 1, "unmatched": 0}
    basic = base64.b64encode(f"alertmanager:{TOKEN}".encode()).decode()
    assert place.post("/v1/alerts", DELIVERY, None, Authorization=f"Basic {basic}").status_code == 202
    assert len(place.keys()) == 1
    assert place.counted == [("alerts", 202)] * 2


def test_a_changed_token_holds_at_once_and_a_removed_one_admits_no_caller(place: Place) -> None:
    place.token.write_text("another")
    assert place.post("/v1/alerts", DELIVERY).status_code == 401
    assert place.post("/v1/alerts", DELIVERY, "another").status_code == 202
    place.token.write_text("")
    assert place.post("/v1/alerts", DELIVERY, None).status_code == 503
    place.token.unlink()
    assert place.post("/v1/alerts", DELIVERY).status_code == 503


@pytest.mark.parametrize(
    ("path", "body", "status", "sentence"),
    [
        ("/v1/alerts", b"{", 400, "the body is not JSON"),
        ("/v1/alerts", b"[" * 100_000, 400, "the body is not JSON"),
        ("/v1/alerts", {"version": "2"}, 400, "version '2'"),
        ("/v1/runs", {}, 404, "there are /healthz"),
    ],
)
def test_an_invalid_request_is_refused_with_a_sentence(
    place: Place, path: str, body: Any, status: int, sentence: str
) -> None:
    answer = place.post(path, body)
    assert (answer.status_code, sentence in answer.text) == (status, True), answer.text
    assert place.keys() == []


def test_a_giant_is_turned_away_announced_or_not(place: Place) -> None:
    giant = b" " * (MAX_BODY_BYTES + 1)
    assert place.post("/v1/alerts", giant).status_code == 413

    def pieces() -> Iterator[bytes]:
        yield from (giant[start : start + 65536] for start in range(0, len(giant), 65536))

    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = http.post(f"{place.server.url}/v1/alerts", content=pieces(), headers=headers, timeout=60)
    assert (answer.status_code, "Content-Length" in answer.text) == (411, True)
    assert place.keys() == []


def test_too_many_calls_are_put_off(place: Place) -> None:
    answers = [place.post("/v1/alerts", DELIVERY).status_code for _ in range(22)]
    assert answers == [202] * 20 + [429] * 2
    place.now = 1.0
    assert place.post("/v1/alerts", DELIVERY).status_code == 202


def test_an_alert_that_cannot_be_stored_is_sent_again(place: Place) -> None:
    place.down = True
    assert place.post("/v1/alerts", DELIVERY).status_code == 503
    place.down = False
    assert place.post("/v1/alerts", DELIVERY).status_code == 202


def test_a_notification_is_answered_once_its_runs_are_made(tmp_path: Path) -> None:
    world = TriggerWorld(tmp_path, lambda _: DirectoryStore(tmp_path / "store"), template(objects="s3://raw/ml/"))
    place = Place(tmp_path, triggers=world.worker)
    world.buckets.put(version("ml/a"))
    with place.server:
        world.buckets.is_down = True
        assert place.post("/v1/storage-events", {"bucket": "raw", "key": "ml/a"}).status_code == 503
        assert world.submitter.names() == []
        world.buckets.is_down = False
        answers = [place.post("/v1/storage-events", {"bucket": "raw", "key": "ml/a"}) for _ in range(2)]
        basic = base64.b64encode(f"versitygw:{TOKEN}".encode()).decode()
        test = {"Service": "S3", "Event": "s3:TestEvent"}
        assert place.post("/v1/storage-events", test, None, Authorization=f"Basic {basic}").status_code == 200
        assert place.post("/v1/storage-events", test, "wrong").status_code == 401
    assert [one.status_code for one in answers] == [200, 200]
    assert [one.json()["started"] for one in answers] == [1, 0]
    assert answers[1].json()["repeated"] == 1
    assert len(world.submitter.names()) == 1


def test_without_triggers_a_notification_is_refused(place: Place) -> None:
    answer = place.post("/v1/storage-events", {"bucket": "raw", "key": "ml/a"})
    assert (answer.status_code, "triggers.sources" in answer.text) == (404, True)


def test_the_token_of_storage_events_opens_nothing_else(tmp_path: Path) -> None:
    world = TriggerWorld(tmp_path, lambda _: DirectoryStore(tmp_path / "store"), template(objects="s3://raw/ml/"))
    place = Place(tmp_path, triggers=world.worker, events_token="of-senders")
    world.buckets.put(version("ml/a"))
    event = {"bucket": "raw", "key": "ml/a"}
    with place.server:
        assert place.post("/v1/storage-events", event).status_code == 401, "the token of the API"
        assert world.submitter.names() == []
        assert place.post("/v1/storage-events", event, "of-senders").json()["started"] == 1
        assert place.post("/v1/alerts", DELIVERY, "of-senders").status_code == 401
    assert len(world.submitter.names()) == 1
    assert not any("alerts" in key for key in place.keys())  # noqa: SIM118  no mapping


def test_health_and_metrics_need_no_token_and_unknown_paths_list_the_calls(place: Place) -> None:
    assert http.get(f"{place.server.url}/healthz", timeout=60).text == "ok\n"
    assert http.get(f"{place.server.url}/metrics", timeout=60).content == b"metrics"
    answer = http.get(f"{place.server.url}/nothing", timeout=60)
    assert (answer.status_code, "/v1/alerts" in answer.text) == (404, True)
