"""What `tiphys traces` sends to a collector, and what it does without one.

| situation                                   | result                                          |
|---------------------------------------------|-------------------------------------------------|
| a run that failed, and was resumed          | a trace with the spans of both submissions      |
| the same again                              | the same bytes                                  |
| no collector, a failing one, a disabled one | says so; nothing is lost, no secret is printed  |
"""

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from support.builders.lineage import RUN, claim_of, end_of, write_claim, write_end, write_run
from support.stories import small_pipeline

from hera_pipelines.traces import command
from tiphys.records import AttemptEndOutcome, Cause, SubmissionClaim, SubmissionEnd, SubmissionKind
from tiphys.store import DirectoryStore, RunLayout

from .conftest import Command

SECRET = "hidden-token"


class Collector:
    """Receives spans; ``status`` is what it answers, and ``fail_after`` the number of requests after which it fails."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.status = 200
        self.fail_after: int | None = None

    def take(self, path: str, authorization: str, body: bytes) -> int:
        assert (path, authorization) == ("/v1/traces", SECRET)
        if self.fail_after is not None and len(self.bodies) >= self.fail_after:
            return 500
        if self.status < 300:
            self.bodies.append(body)
        return self.status

    @property
    def requests(self) -> list[ExportTraceServiceRequest]:
        return [ExportTraceServiceRequest.FromString(body) for body in self.bodies]

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "HEADERS", "PROTOCOL", "TIMEOUT", "COMPRESSION", "CERTIFICATE"):
        for signal in ("", "TRACES_"):
            monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{signal}{name}", raising=False)
    for name in ("SDK_DISABLED", "TRACES_EXPORTER", "SERVICE_NAME", "RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(f"OTEL_{name}", raising=False)


@pytest.fixture
def collector(no_settings: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    state = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(state.take(self.path, self.headers["Authorization"], body))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{http.server_address[1]}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization={SECRET}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "120")
    yield state
    http.shutdown()
    thread.join()
    http.server_close()


def attributes(span: Span) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_a_run_that_failed_and_was_resumed(tiphys: Command, tmp_path: Path, collector: Collector) -> None:
    file = small_pipeline.write(tmp_path / "code")
    assert tiphys("run", file, "--run", "tiny-1", "-p", "fail=yes").code == 1

    answer = tiphys("traces", "tiny-1")

    assert (answer.code, answer.out) == (0, "")
    assert "sent 7 spans" in answer.err
    assert len({span.trace_id for span in collector.spans}) == 1
    assert len({span.span_id for span in collector.spans}) == 7
    [resource] = collector.requests[0].resource_spans
    assert {one.key: one.value.string_value for one in resource.resource.attributes}["service.name"] == "tiphys"
    [run] = collector.named("tiny")
    assert run.parent_span_id == b""
    assert run.status.code == Status.STATUS_CODE_ERROR
    assert "report" in run.status.message
    assert attributes(run)["cicd.pipeline.run.id"] == "tiny-1"
    assert attributes(run)["cicd.pipeline.result"] == "failure"
    for step in ("prepare", "fit", "report"):
        [span], [attempt] = collector.named(step), collector.named(f"{step} attempt 1")
        assert span.parent_span_id == run.span_id
        assert attempt.parent_span_id == span.span_id
        assert run.start_time_unix_nano <= span.start_time_unix_nano == attempt.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano == attempt.end_time_unix_nano
        result = "failure" if step == "report" else "success"
        for one in (span, attempt):
            assert attributes(one)["cicd.pipeline.task.run.result"] == result
            assert (one.status.code == Status.STATUS_CODE_ERROR) == (step == "report")
    [failed] = collector.named("report attempt 1")
    assert failed.status.message.startswith("user error: ")
    assert attributes(failed)["tiphys.exit_code"] != 0
    checkpoints = [attributes(event)["tiphys.checkpoint"] for event in collector.named("fit attempt 1")[0].events]
    assert checkpoints == [f"tiny-1/fit/1-{step}" for step in (5, 10, 15, 20)]

    # Again: the same bytes.
    first = list(collector.bodies)
    assert tiphys("traces", "tiny-1").code == 0
    assert collector.bodies == [*first, *first]

    # A resume adds spans, and changes none.
    before = {span.span_id: span.SerializeToString() for span in collector.spans}
    collector.bodies.clear()
    file.write_text(file.read_text().replace('"fail": "no"', '"fail": "nope"'))
    assert tiphys("resume", "tiny-1", "--from", "fit").code == 1
    assert tiphys("traces", "tiny-1").code == 0
    after = {span.span_id: span.SerializeToString() for span in collector.spans}
    assert before.items() < after.items()
    assert {span.trace_id for span in collector.spans} == {run.trace_id}
    first_run, second_run = collector.named("tiny")
    assert [link.span_id for link in second_run.links] == [first_run.span_id]
    [attempt] = collector.named("fit attempt 2")
    assert attempt.parent_span_id == collector.named("fit")[1].span_id
    assert [span.parent_span_id for span in collector.named("fit")] == [first_run.span_id, second_run.span_id]


def stored_run(folder: Path) -> DirectoryStore:
    """A run of two attempts, of which the second is open, in the store of the desk."""
    store = DirectoryStore(folder / ".tiphys" / "store")
    write_run(store)
    claim = SubmissionClaim(
        run=RUN, submission=1, kind=SubmissionKind.ORIGINAL, workflow_name=RUN, namespace="", cluster="local:desk"
    )
    store.create(RunLayout(RUN).submission(1), claim.to_bytes())
    write_claim(store, claim_of(1))
    write_end(store, end_of(1, Cause.PREEMPTION))
    write_claim(store, claim_of(2))
    return store


def finish(store: DirectoryStore) -> None:
    write_end(store, end_of(2, outcome=AttemptEndOutcome.DONE))
    end = SubmissionEnd(run=RUN, submission=1, status="Succeeded")
    store.create(RunLayout(RUN).submission_end(1), end.to_bytes())


def names(collector: Collector) -> list[str]:
    return [span.name for span in collector.spans]


def test_the_spans_are_printed_in_the_place_of_a_collector(tiphys: Command, tmp_path: Path, no_settings: None) -> None:
    finish(stored_run(tmp_path))
    answer = tiphys("traces", "-o", "json")
    spans = [json.loads(line) for line in answer.out.splitlines()]
    assert sorted(span["name"] for span in spans) == ["digits", "fit", "fit attempt 1", "fit attempt 2"]
    assert {span["resource"]["attributes"]["service.name"] for span in spans} == {"tiphys"}
    assert tiphys("traces", "-o", "yaml").out.count("---") == 4
    assert tiphys("traces", "--since", "0.001s", "-o", "json").out == ""
    assert tiphys("traces", "--since", "900d", "-o", "json").out == answer.out


def test_a_collector_that_fails_half_way_loses_nothing(
    tiphys: Command, tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(stored_run(tmp_path))
    monkeypatch.setattr(command, "_BATCH_SPANS", 1)
    collector.fail_after = 1
    answer = tiphys("traces", RUN)
    assert answer.code == 75
    assert "the OpenTelemetry collector took 1 spans and then failed (status 500)" in answer.error
    collector.fail_after = None
    assert tiphys("traces", RUN).code == 0
    assert collector.bodies[0] == collector.bodies[1]
    assert len(set(collector.bodies)) == 4


@pytest.mark.parametrize("status", [302, 401])
def test_a_collector_that_refuses_is_named_and_no_secret_is(
    tiphys: Command, tmp_path: Path, collector: Collector, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    stored_run(tmp_path)
    collector.status = status
    answer = tiphys("traces", RUN)
    assert (answer.code, f"took 0 spans and then failed (status {status})" in answer.error) == (75, True)
    assert SECRET not in answer.err + caplog.text


def test_without_an_answer_nothing_is_lost_and_no_secret_is_printed(
    tiphys: Command,
    tmp_path: Path,
    no_settings: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stored_run(tmp_path)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://ada:{SECRET}@127.0.0.1:1/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"{SECRET}")  # malformed: the library would log it
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    answer = tiphys("traces", RUN)
    assert (answer.code, "took 0 spans and then failed (no answer; check address and certificate)" in answer.error) == (
        75,
        True,
    )
    assert SECRET not in answer.err + caplog.text


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "set OTEL_EXPORTER_OTLP_ENDPOINT"),
        ({"OTEL_SDK_DISABLED": "true"}, "OpenTelemetry is disabled (OTEL_SDK_DISABLED)"),
        ({"OTEL_TRACES_EXPORTER": "none"}, "OTEL_TRACES_EXPORTER=none"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "collector:4317"}, "OTEL_EXPORTER_OTLP_ENDPOINT is no URL"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "as http/protobuf alone",
        ),
    ],
)
def test_settings_that_cannot_be_sent_to_are_named(
    tiphys: Command,
    tmp_path: Path,
    no_settings: None,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    words: str,
) -> None:
    stored_run(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    answer = tiphys("traces", RUN)
    assert (answer.code, words in answer.error) == (78, True), answer.error


def test_without_the_library_its_extra_is_named(
    tiphys: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored_run(tmp_path)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    answer = tiphys("traces", RUN, "-o", "json")
    assert (answer.code, "pip install 'tiphys-VERSION-py3-none-any.whl[otel]'" in answer.error) == (2, True)


def test_traces_of_an_unknown_run_are_an_error(tiphys: Command, tmp_path: Path) -> None:
    stored_run(tmp_path)
    assert tiphys("traces", "other", "-o", "json").code == 3
