"""Documents that cost more to read than to send are refused with a sentence, and the log stays one of JSON lines.

| document | answer |
|---|---|
| JSON nested 40,000 deep, to plugin and controller | 400 |
| a storage event of 512 KiB, of 20,000 values, or deep, also in the text of an envelope | 413, 400 |
| YAML with a number of 5,000 digits, deep, or of wrong types as a queue file | UsageError |
| a token of other letters than ASCII | 401, 403; the right one is accepted |
| a `depends` condition with 500 brackets or negations | UsageError |
| a checkpoint in an event, with 5,000 digits | none |
| bytes that are no HTTP | 400, and a JSON line in the log |
"""

import base64
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.builders.ledger import queues
from support.processes.plugin import TOKEN, Service
from support.servers import http
from support.servers.raw_http import dial, read_to_end
from support.stories.plugin import world
from support.stories.triggers import TriggerWorld
from tiphys_controller.alerts.webhook import AlertInbox
from tiphys_controller.server.access import AccessControl
from tiphys_controller.server.app import create_controller_app
from tiphys_controller.server.routes import create_alerts_route, create_storage_events_route
from tiphys_plugin import PluginServer
from tiphys_plugin.quota.queues import load_queues

from tiphys.errors import UsageError
from tiphys.lineage.restored_starts import _parse_checkpoint
from tiphys.protocol.depends import parse_depends
from tiphys.service.http_server import AppServer
from tiphys.store import DirectoryStore

DEEP = b"[" * 40_000
KNOWN = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[AppServer]:
    (tmp_path / "api-token").write_text(TOKEN)
    store = DirectoryStore(tmp_path / "store")
    access = AccessControl(tmp_path / "api-token", lambda *_: None)
    triggers = TriggerWorld(tmp_path / "triggers", lambda _: store).worker
    inbox = AlertInbox(lambda _: store, ("ml",))
    calls = [create_alerts_route(inbox, access), create_storage_events_route(triggers, access)]
    with AppServer(create_controller_app(lambda: None, lambda: b"", calls)) as running:
        yield running


def test_deep_json_is_a_bad_request_and_the_log_stays_json(tmp_path: Path) -> None:
    with Service(tmp_path) as plugin:
        response = http.post(f"{plugin.url}/api/v1/template.execute", content=DEEP, headers=KNOWN)
        assert (response.status_code, "nested too deeply" in response.json()["error"]) == (400, True)
        with closing(dial(plugin.url)) as caller:
            caller.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
            assert read_to_end(caller).startswith(b"HTTP/1.1 400 ")
        code, log = plugin.terminate()
    assert code == 0
    lines = [json.loads(line) for line in log.splitlines()]
    assert [line["level"] for line in lines if line["event"] == "Invalid HTTP request received."] == ["warning"]


def test_deep_json_is_a_bad_request_for_the_controller(controller: AppServer) -> None:
    response = http.post(f"{controller.url}/v1/alerts", content=DEEP, headers=KNOWN)
    assert (response.status_code, "nested too deeply" in response.json()["error"]) == (400, True)


DEEP_LISTS = b"[" * 1500 + b"]" * 1500


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"Records": [' + b"[" * 150 + b"]" * 150 + b"," + DEEP_LISTS + b"]}", 400),
        (json.dumps({"Type": "Notification", "Message": DEEP_LISTS.decode()}).encode(), 400),
        (json.dumps({"Records": [{"eventSource": "aws:sqs", "body": DEEP_LISTS.decode()}]}).encode(), 400),
        (json.dumps({"Type": "Notification", "Message": "[" + "[]," * 30_000 + "[]]"}).encode(), 400),
        (b'{"Records": [' + b"[]," * 30_000 + b"[]]}", 400),
        (b'{"bucket": "raw", "key": "\\ud800"}', 400),
        (b'{"bucket": "raw", "key": ' + b"9" * 5000 + b"}", 400),
        (b'{"bucket": "raw", "key": "' + b"x" * (512 << 10) + b'"}', 413),
    ],
    ids=["deep", "deep in SNS", "deep in SQS", "wide in SNS", "wide", "surrogate", "digits", "large"],
)
def test_storage_event_that_costs_much_is_refused_in_a_sentence(
    controller: AppServer, body: bytes, status: int
) -> None:
    response = http.post(f"{controller.url}/v1/storage-events", content=body, headers=KNOWN)
    assert (response.status_code, bool(response.json()["error"])) == (status, True)


STRANGE_YAML = {
    "digits": b"spec: " + b"9" * 5000,
    "deep": b"spec: " + b"[" * 3000,
    "deep map": b"{a: " * 3000,
    "month": b"spec: 2026-99-99",
    "no time": b"spec: !!timestamp x",
    "no number": b'spec: !!int ""',
    "no truth": b"spec: !!bool x",
    "alias of nothing": b"spec: *x",
    "bytes": b"spec: \xff\xfe",
}


@pytest.mark.parametrize("document", STRANGE_YAML.values(), ids=STRANGE_YAML)
def test_strange_yaml_is_a_sentence_about_a_queue_file(tmp_path: Path, document: bytes) -> None:
    file = tmp_path / "queues.über.yaml"
    file.write_bytes(document)
    with pytest.raises(UsageError, match=r"queue file .*queues"):
        load_queues(file)


@pytest.mark.parametrize("token", ["ü", "a-sécret-tokén", "\u20ac"])
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_token_of_other_letters_is_refused_in_a_sentence(controller: AppServer, token: str, encoding: str) -> None:
    credential = token.encode(encoding, errors="replace")
    for header in (
        b"Bearer " + credential,
        b"Basic " + base64.b64encode(b"user:" + credential),
        b"Basic " + credential,
    ):
        answer = http.post(f"{controller.url}/v1/alerts", headers={"Authorization": header})
        assert (answer.status_code, "the token is missing or wrong" in answer.json()["error"]) == (401, True)


def test_token_of_other_letters_opens_the_api(controller: AppServer, tmp_path: Path) -> None:
    (tmp_path / "api-token").write_text("pässwört-€", encoding="utf-8")
    header = "Bearer pässwört-€".encode()
    answer = http.post(f"{controller.url}/v1/alerts", headers={"Authorization": header})
    assert (answer.status_code, "not JSON" in answer.text) == (400, True)


@pytest.mark.parametrize("header", ["Bearer ü".encode(), "Bearer ü".encode("latin-1"), b"Bearer \xff"])
def test_token_of_other_letters_is_refused_by_the_plugin(tmp_path: Path, header: bytes) -> None:
    with PluginServer(world(tmp_path, queues(research={"A100": 8})).core, TOKEN) as plugin:
        answer = http.post(f"{plugin.url}/api/v1/template.execute", content=b"{}", headers={"Authorization": header})
    assert (answer.status_code, "token is missing or wrong" in answer.json()["error"]) == (403, True)


@pytest.mark.parametrize(
    "condition", ["(" * 500 + "fit" + ")" * 500, "!" * 100_000 + "fit", "!(" * 300 + "fit" + ")" * 300]
)
def test_deep_condition_is_refused(condition: str) -> None:
    with pytest.raises(UsageError, match="more than 50 brackets and negations are inside each other") as refused:
        parse_depends(condition)
    assert len(str(refused.value)) < 1000


def test_condition_as_deep_as_the_limit_is_read() -> None:
    assert str(parse_depends("(" * 50 + "fit.Succeeded" + ")" * 50)) == "fit.Succeeded"


def test_long_condition_is_read() -> None:
    """100,000 tasks, which took a time that grows with the square of their number."""
    assert str(parse_depends(" && ".join(["fit"] * 100_000))).count("fit") == 100_000


@pytest.mark.parametrize("checkpoint", ["9" * 5000 + "-1", "1-" + "9" * 5000, "\uff11-1", "1", ""])
def test_checkpoint_of_a_program_that_is_none_is_ignored(checkpoint: str) -> None:
    assert _parse_checkpoint(checkpoint, "l") is None
