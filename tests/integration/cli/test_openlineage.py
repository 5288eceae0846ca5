"""What `tiphys openlineage` sends to a server, and what it does without one.

Each event is held against the JSON schemas of OpenLineage 2-0-2, which are in
``openlineage_spec`` as that project publishes them (Apache License 2.0).

| situation                                | result                                             |
|------------------------------------------|----------------------------------------------------|
| a run that failed, and was resumed       | events of the run and of each attempt, in order    |
| the same again                           | the same bytes                                     |
| a run that goes on, `--follow`           | new events until it has ended                      |
| no server, a failing one, a disabled one | says so; nothing is lost                           |
"""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from referencing import Registry, Resource
from support.lineage import RUN, claim_of, write_run

from hera_pipelines import run_histories
from tiphys.records import AttemptEndOutcome, DataVersion, SubmissionClaim, SubmissionEnd, SubmissionKind
from tiphys.store import DirectoryStore, RunLayout, read_all_attempts

from .conftest import Command
from .test_data_versions import OLD, write_lock, write_pipeline

SPEC = [json.loads(path.read_text()) for path in (Path(__file__).parent / "openlineage_spec").glob("*.json")]
REGISTRY: Registry[Any] = Registry().with_resources([(one["$id"], Resource.from_contents(one)) for one in SPEC])


class Server:
    """Receives events; ``status`` is what it answers, and ``fail_after`` the number of events after which it fails."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.status = 201
        self.fail_after: int | None = None
        self.received = threading.Event()

    def take(self, path: str, body: bytes) -> int:
        assert path == "/api/v1/lineage"
        if self.fail_after is not None and len(self.events) >= self.fail_after:
            return 503
        if self.status < 300:
            self.events.append(json.loads(body))
            self.received.set()
        return self.status

    def of(self, job: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["job"]["name"] == job]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(state.take(self.path, body))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    # The client copies some variables into others, so the environment is put back as a whole.
    with monkeypatch.context() as patch:
        settings = {"url": f"http://ada:hidden@127.0.0.1:{http.server_address[1]}", "retry": {"total": 0}}
        patch.setenv("OPENLINEAGE__TRANSPORT", json.dumps({"type": "http", **settings}))
        for name in ("OPENLINEAGE_URL", "OPENLINEAGE_DISABLED", "OPENLINEAGE_CONFIG", "OPENLINEAGE_NAMESPACE"):
            patch.delenv(name, raising=False)
        yield state
    http.shutdown()
    thread.join()
    http.server_close()


def validate(event: dict[str, Any]) -> None:
    """Hold an event, and each of its facets, against the schema that it names."""
    _check(event["schemaURL"], event)
    parts = [event["run"], event["job"], *event["inputs"], *event["outputs"]]
    facets = [
        (name, facet)
        for part in parts
        for kind in ("facets", "outputFacets")
        for name, facet in part.get(kind, {}).items()
    ]
    assert {facet["_producer"] for name, facet in facets if name != "tags"} == {event["producer"]}
    for name, facet in facets:
        base, _, place = facet["_schemaURL"].partition("#")
        schema = REGISTRY.contents(base)
        _check(f"{base}#{place}", facet)
        assert name in schema["properties"], name  # facets are known by these names


def _check(reference: str, document: Any) -> None:
    jsonschema.Draft202012Validator(
        {"$ref": reference}, registry=REGISTRY, format_checker=jsonschema.FormatChecker()
    ).validate(document)


def states(events: list[dict[str, Any]]) -> list[str]:
    return [event["eventType"] for event in events]


def dataset(event: dict[str, Any], side: str, name: str) -> tuple[str, str]:
    """Namespace and version of one input or output."""
    [found] = [one for one in event[side] if one["name"] == name]
    return found["namespace"], found["facets"]["version"]["datasetVersion"]


def test_a_run_that_failed_and_was_resumed(tiphys: Command, tmp_path: Path, server: Server) -> None:
    write_lock(tmp_path, OLD)
    file = write_pipeline(tmp_path / "code")
    assert tiphys("run", file, "--run", "tiny-1", "-p", "fail=yes").code == 1

    answer = tiphys("openlineage", "tiny-1")

    assert (answer.code, answer.out) == (0, "")
    assert f"sent {len(server.events)} events" in answer.err
    for event in server.events:
        validate(event)
    assert [event["eventTime"] for event in server.events] == sorted(event["eventTime"] for event in server.events)
    run = server.of("tiny")
    assert states(run) == ["START", "FAIL"]
    assert "report" in run[1]["run"]["facets"]["errorMessage"]["message"]
    prepare, fit, report = (server.of(f"tiny.{step}") for step in ("prepare", "fit", "report"))
    assert states(prepare) == ["START", "COMPLETE"]
    assert states(fit) == ["START", "RUNNING", "RUNNING", "RUNNING", "RUNNING", "COMPLETE"]
    assert states(report) == ["START", "FAIL"]
    assert report[1]["run"]["facets"]["errorMessage"]["message"].startswith("user error: ")
    for event in (*prepare, *fit, *report):
        parent = event["run"]["facets"]["parent"]
        for one in (parent, parent["root"]):
            assert one["run"]["runId"] == run[0]["run"]["runId"]
            assert (one["job"]["namespace"], one["job"]["name"]) == ("tiphys", "tiny")
    assert len({event["run"]["runId"] for event in server.events}) == 4

    # What was read and written is one graph: the model that fit wrote is the model that report read.
    assert dataset(fit[0], "inputs", "data/train") == ("dvc", OLD)
    written = dataset(fit[-1], "outputs", "tiny/fit/model")
    assert dataset(report[0], "inputs", "tiny/fit/model") == written
    [attempt] = read_all_attempts(DirectoryStore(tmp_path / ".tiphys" / "store"), "tiny-1")["fit"]
    assert attempt.end
    assert written[1] == attempt.end.outputs[0].objects[0].sha256
    statistics = fit[-1]["outputs"][0]["outputFacets"]["outputStatistics"]
    assert (statistics["size"], statistics["fileCount"]) == (40_000, 1)
    assert [dataset(event, "outputs", "tiny/fit/checkpoints")[1] for event in fit[1:-1]] == [
        f"tiny-1/1-{step}" for step in (5, 10, 15, 20)
    ]

    # Again: the same bytes, so that a server merges them.
    first = list(server.events)
    assert tiphys("openlineage", "tiny-1").code == 0
    assert server.events == [*first, *first]

    server.events.clear()
    file.write_text(file.read_text().replace('"fail": "no"', '"fail": "nope"'))
    assert tiphys("resume", "tiny-1", "--from", "fit").code == 1
    assert tiphys("openlineage", "tiny-1", "--namespace", "ml").code == 0
    assert states(server.of("tiny")) == ["START", "FAIL", "RUNNING", "FAIL"]
    assert {event["job"]["namespace"] for event in server.events} == {"ml"}
    assert len({event["run"]["runId"] for event in server.of("tiny.fit")}) == 2


def stored_run(folder: Path) -> DirectoryStore:
    """A run with one open attempt, in the store of the desk."""
    store = DirectoryStore(folder / ".tiphys" / "store")
    write_run(store)
    claim = SubmissionClaim(
        run=RUN, submission=1, kind=SubmissionKind.ORIGINAL, workflow_name=RUN, namespace="", cluster="local:desk"
    )
    store.create(RunLayout(RUN).submission(1), claim.to_bytes())
    data = DataVersion(
        name="lakefs://datasets/main/a/b/", algorithm="commit", digest="c1", uri="lakefs://datasets/c1/a/b/"
    )
    store.create(RunLayout(RUN).attempt("fit", 1), claim_of(1).model_copy(update={"data": (data,)}).to_bytes())
    return store


def test_the_events_are_printed_in_the_place_of_a_server(tiphys: Command, tmp_path: Path) -> None:
    stored_run(tmp_path)
    answer = tiphys("openlineage", "-o", "json")
    events = [json.loads(line) for line in answer.out.splitlines()]
    for event in events:
        validate(event)
    assert states(events) == ["START", "START"]
    assert dataset(events[1], "inputs", "a/b") == ("lakefs://datasets", "c1")
    assert tiphys("openlineage", "-o", "yaml").out.count("---") == 2
    assert tiphys("openlineage", "--since", "1s", "-o", "json").code == 0


def test_an_event_of_another_time_is_left_out(tiphys: Command, tmp_path: Path, server: Server) -> None:
    stored_run(tmp_path)
    assert tiphys("openlineage", "--since", "900d").code == 0
    recent = len(server.events)
    assert recent > 0
    assert "sent 0 events" in tiphys("openlineage", "--since", "0.001s").err
    assert len(server.events) == recent


def test_a_server_that_fails_half_way_loses_nothing(tiphys: Command, tmp_path: Path, server: Server) -> None:
    stored_run(tmp_path)
    server.fail_after = 1
    answer = tiphys("openlineage", RUN)
    assert answer.code == 75
    assert "the OpenLineage server took 1 events and then failed (" in answer.error
    assert "hidden" not in answer.err
    server.fail_after = None
    assert tiphys("openlineage", RUN).code == 0
    assert states(server.events) == ["START", "START", "START"]
    assert server.events[0] == server.events[1]


def test_a_server_that_refuses_is_named(tiphys: Command, tmp_path: Path, server: Server) -> None:
    stored_run(tmp_path)
    server.status = 401
    answer = tiphys("openlineage", RUN)
    assert (answer.code, "(HTTPError 401)" in answer.error) == (75, True)


def test_following_ends_with_the_run_and_survives_an_outage(
    tiphys: Command, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stored_run(tmp_path)
    server.status = 500
    polls: list[float] = []

    def pause(seconds: float) -> None:
        """Between polls the server comes back, and then the run ends."""
        polls.append(seconds)
        if len(polls) == 1:
            server.status = 201
        elif len(polls) == 2:
            end = SubmissionEnd(run=RUN, submission=1, status="Succeeded")
            store.create(RunLayout(RUN).submission_end(1), end.to_bytes())

    monkeypatch.setattr(run_histories.time, "sleep", pause)
    answer = tiphys("openlineage", RUN, "--follow")

    assert answer.code == 0
    assert "it is tried again" in answer.err
    assert states(server.events) == ["START", "START", "COMPLETE"]
    assert polls == [run_histories.POLL_SECONDS] * 2


def test_without_settings_nothing_is_sent(tiphys: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored_run(tmp_path)
    for name in ("OPENLINEAGE_URL", "OPENLINEAGE__TRANSPORT", "OPENLINEAGE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    none = tiphys("openlineage", RUN)
    assert (none.code, "set OPENLINEAGE_URL" in none.error) == (78, True)
    monkeypatch.setenv("OPENLINEAGE_DISABLED", "true")
    disabled = tiphys("openlineage", RUN)
    assert (disabled.code, "OpenLineage is disabled" in disabled.error) == (78, True)
    monkeypatch.delenv("OPENLINEAGE_DISABLED")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT", '{"type": "http"}')
    wrong = tiphys("openlineage", RUN)
    assert (wrong.code, "the settings of OpenLineage are not valid" in wrong.error) == (78, True)


def test_without_the_client_its_extra_is_named(
    tiphys: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored_run(tmp_path)
    monkeypatch.setitem(sys.modules, "openlineage.client", None)
    answer = tiphys("openlineage", RUN, "-o", "json")
    assert (answer.code, "pip install 'tiphys[openlineage]'" in answer.error) == (2, True)


def test_a_run_that_cannot_be_read_does_not_hide_the_others(tiphys: Command, tmp_path: Path, server: Server) -> None:
    store = stored_run(tmp_path)
    store.create(RunLayout("broken").run_record, b"{}")
    answer = tiphys("openlineage")
    assert answer.code == 0
    assert "run broken cannot be read, and is left out" in answer.err
    assert states(server.events) == ["START", "START"]
    assert tiphys("openlineage", "broken").code == 5


def test_what_cannot_be_followed_is_refused(tiphys: Command, tmp_path: Path) -> None:
    stored_run(tmp_path)
    assert "--follow needs the names of runs" in tiphys("openlineage", "--follow").error
    assert tiphys("openlineage", "other", "-o", "json").code == 3


def test_a_damaged_record_is_named_and_the_rest_is_sent(tiphys: Command, tmp_path: Path, server: Server) -> None:
    store = stored_run(tmp_path)
    store.create(RunLayout(RUN).attempt_end("fit", 1), b"{}")
    answer = tiphys("openlineage", RUN)
    assert answer.code == 0
    assert "damaged, so something is missing" in answer.err
    assert sorted(states(server.events)) == ["FAIL", "START", "START"]
    [end] = [event for event in server.events if event["eventType"] == "FAIL"]
    assert "how it ended is not known" in end["run"]["facets"]["errorMessage"]["message"]


@pytest.mark.parametrize("outcome", list(AttemptEndOutcome))
def test_every_end_of_an_attempt_has_its_state(outcome: AttemptEndOutcome) -> None:
    from hera_pipelines.openlineage.events import _END_STATES

    assert outcome in _END_STATES
