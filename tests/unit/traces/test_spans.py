"""Spans from records.

| end of an attempt        | result       | status |
|--------------------------|--------------|--------|
| done                     | success      | unset  |
| fenced, or stopped       | cancellation | unset  |
| user error, memory, …    | failure      | error  |
| deadline, hang           | timeout      | error  |
| preemption, lost node, … | error        | error  |

A span exists once it has an end: a step has one if its last attempt is done, or its submission has ended.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.semconv._incubating.attributes import cicd_attributes
from opentelemetry.semconv.attributes import error_attributes
from opentelemetry.trace import StatusCode
from support.builders.lineage import (
    LINEAGE,
    RUN,
    STEP,
    claim_of,
    commit,
    end_of,
    ref,
    write_claim,
    write_end,
    write_run,
)

from hera_pipelines.traces import spans as module
from hera_pipelines.traces.spans import (
    MAX_CHECKPOINTS,
    MAX_MESSAGE_CHARACTERS,
    derive_spans,
    describe_service,
)
from tiphys.lineage.run_history import RunHistory
from tiphys.protocol.step_spec import GpuRequest
from tiphys.records import (
    AttemptClaim,
    AttemptEnd,
    AttemptEndOutcome,
    Cause,
    FailureEvidence,
    SubmissionBinding,
    SubmissionClaim,
    SubmissionEnd,
    SubmissionKind,
)
from tiphys.store import DirectoryStore, RunLayout, Store

START = datetime(2026, 1, 1, tzinfo=UTC)


def submit(store: Store, number: int = 1, *, status: str = "", message: str = "", local: bool = False) -> None:
    claim = SubmissionClaim(
        run=RUN,
        submission=number,
        kind=SubmissionKind.ORIGINAL if number == 1 else SubmissionKind.RESUME,
        workflow_name=f"{RUN}-{number}",
        namespace="" if local else "ml",
        cluster="local:desk" if local else "prod",
    )
    store.create(RunLayout(RUN).submission(number), claim.to_bytes())
    if status:
        end = SubmissionEnd(run=RUN, submission=number, status=status, message=message)
        store.create(RunLayout(RUN).submission_end(number), end.to_bytes())


def attempt(store: Store, claim: AttemptClaim, end: AttemptEnd | None = None) -> None:
    write_claim(store, claim)
    if end is not None:
        write_end(store, end)


def spans_of(store: Store) -> list[ReadableSpan]:
    return derive_spans(RunHistory.for_display(store, RUN), describe_service())


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def by_name(spans: Sequence[ReadableSpan]) -> dict[str, ReadableSpan]:
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


def test_the_names_are_those_of_the_conventions() -> None:
    assert module.PIPELINE_NAME == cicd_attributes.CICD_PIPELINE_NAME
    assert module.RUN_ID == cicd_attributes.CICD_PIPELINE_RUN_ID
    assert module.RUN_RESULT == cicd_attributes.CICD_PIPELINE_RESULT
    assert module.TASK_NAME == cicd_attributes.CICD_PIPELINE_TASK_NAME
    assert module.TASK_RUN_ID == cicd_attributes.CICD_PIPELINE_TASK_RUN_ID
    assert module.TASK_RUN_RESULT == cicd_attributes.CICD_PIPELINE_TASK_RUN_RESULT
    assert module.ERROR_TYPE == error_attributes.ERROR_TYPE
    results = {one.value for one in cicd_attributes.CicdPipelineTaskRunResultValues}
    assert set(module._CAUSE_RESULTS.values()) < results
    assert set(module._CAUSE_RESULTS) == set(Cause)


@pytest.mark.parametrize(
    ("outcome", "cause", "result"),
    [
        (AttemptEndOutcome.DONE, None, "success"),
        (AttemptEndOutcome.FENCED, None, "cancellation"),
        (AttemptEndOutcome.FAILED, Cause.USER_ERROR, "failure"),
        (AttemptEndOutcome.FAILED, Cause.GPU_OUT_OF_MEMORY, "failure"),
        (AttemptEndOutcome.FAILED, Cause.DEADLINE, "timeout"),
        (AttemptEndOutcome.FAILED, Cause.HANG, "timeout"),
        (AttemptEndOutcome.FAILED, Cause.PREEMPTION, "error"),
        (AttemptEndOutcome.FAILED, Cause.STORAGE, "error"),
        (AttemptEndOutcome.FAILED, None, "failure"),
    ],
)
def test_every_end_of_an_attempt_has_its_result(
    store: Store, outcome: AttemptEndOutcome, cause: Cause | None, result: str
) -> None:
    write_run(store)
    submit(store)
    attempt(store, claim_of(1), end_of(1, cause, outcome=outcome, message="what happened"))
    span = by_name(spans_of(store))["fit attempt 1"]
    assert attributes(span)["cicd.pipeline.task.run.result"] == result
    if outcome is AttemptEndOutcome.FAILED:
        assert span.status.status_code is StatusCode.ERROR
        assert (span.status.description or "").endswith(": what happened")
        assert attributes(span)["tiphys.cause"] == attributes(span)["error.type"] == (cause or Cause.UNKNOWN).value
    else:
        assert span.status.status_code is StatusCode.UNSET
        assert "error.type" not in attributes(span)


@pytest.mark.parametrize(
    ("status", "message", "result"),
    [
        ("Succeeded", "", "success"),
        ("Failed", "fit: failed", "failure"),
        ("Failed", "Stopped with strategy 'Stop'", "cancellation"),
        ("Error", "", "error"),
    ],
)
def test_every_end_of_a_submission_has_its_result(store: Store, status: str, message: str, result: str) -> None:
    write_run(store)
    submit(store, status=status, message=message)
    [span] = spans_of(store)
    assert attributes(span)["cicd.pipeline.result"] == result
    failed = result in ("failure", "error")
    assert (span.status.status_code is StatusCode.ERROR) == failed
    assert ("error.type" in attributes(span)) == failed
    if failed:
        assert span.status.description == (message or "submission 1 ended as Error")


def test_a_span_exists_once_it_has_ended(store: Store) -> None:
    write_run(store)
    submit(store)
    assert spans_of(store) == []
    attempt(store, claim_of(1), end_of(1))
    attempt(store, claim_of(2))
    assert set(by_name(spans_of(store))) == {"fit attempt 1"}
    write_end(store, end_of(2))
    assert set(by_name(spans_of(store))) == {"fit attempt 1", "fit attempt 2"}  # a third may follow
    end = SubmissionEnd(run=RUN, submission=1, status="Failed", message="fit: failed")
    store.create(RunLayout(RUN).submission_end(1), end.to_bytes())
    spans = by_name(spans_of(store))
    assert set(spans) == {"fit attempt 1", "fit attempt 2", "fit", "digits"}
    assert attributes(spans["fit"])["tiphys.attempts"] == 2
    assert spans["fit"].end_time == spans["fit attempt 2"].end_time
    assert spans["fit"].start_time == spans["fit attempt 1"].start_time


def test_an_attempt_says_where_it_ran_and_from_what(store: Store) -> None:
    write_run(store, gpu=GpuRequest(gpus=8))
    submit(store)
    commit(store, ref(1, 10))
    evidence = FailureEvidence(rule="exit code", node="node-a")
    attempt(store, claim_of(1), end_of(1).model_copy(update={"exit_code": 137, "evidence": evidence}))
    claim = claim_of(2, ref(1, 10)).model_copy(update={"nodes": ("node-b", "node-c"), "gpu_type": "H100"})
    attempt(store, claim, end_of(2, outcome=AttemptEndOutcome.DONE))
    spans = by_name(spans_of(store))
    first, second = attributes(spans["fit attempt 1"]), attributes(spans["fit attempt 2"])
    assert (first["tiphys.exit_code"], first["tiphys.nodes"], first["tiphys.gpus"]) == (137, ("node-a",), 8)
    assert (second["tiphys.nodes"], second["tiphys.gpu_type"]) == (("node-b", "node-c"), "H100")
    assert second["tiphys.checkpoint.starts_from"] == f"{LINEAGE}/1-10"
    assert "tiphys.checkpoint.starts_from" not in first
    assert [dict(one.attributes or {})["tiphys.checkpoint"] for one in spans["fit attempt 1"].events] == [
        f"{LINEAGE}/1-10"
    ]


def test_the_workflow_of_argo_can_be_found_from_the_span(store: Store) -> None:
    write_run(store)
    submit(store, status="Succeeded")
    submit(store, 2, status="Succeeded", local=True)
    bound = SubmissionBinding(
        run=RUN, submission=1, cluster="prod", namespace="ml", workflow_name=f"{RUN}-1", uid="uid-1"
    )
    store.create(RunLayout(RUN).submission_binding(1), bound.to_bytes())
    first, second = spans_of(store)
    argo = {name: value for name, value in attributes(first).items() if name.startswith("argo.")}
    assert argo == {
        "argo.workflow.name": f"{RUN}-1",
        "argo.workflow.namespace": "ml",
        "argo.workflow.uid": "uid-1",
    }
    assert not any(name.startswith("argo.") for name in attributes(second))
    assert [link.context.span_id for link in second.links] == [first.context.span_id]


def test_spans_of_a_long_training_are_bounded(store: Store) -> None:
    write_run(store)
    submit(store)
    for step in range(MAX_CHECKPOINTS + 5):
        commit(store, ref(1, step))
    attempt(store, claim_of(1), end_of(1, Cause.USER_ERROR, message="x" * 10 * MAX_MESSAGE_CHARACTERS))
    [span] = spans_of(store)
    kept = [dict(one.attributes or {})["tiphys.checkpoint"] for one in span.events]
    assert kept == [f"{LINEAGE}/1-{step}" for step in range(5, MAX_CHECKPOINTS + 5)]
    assert len(span.status.description or "") == MAX_MESSAGE_CHARACTERS


def test_extreme_values_of_a_tenant_do_not_hold_up_other_spans(store: Store) -> None:
    """The format has 64-bit integers and times from 1970 on; records have more. The library leaves an integer out."""
    write_run(store)
    submit(store)
    claim = claim_of(1, submission=10**30).model_copy(update={"written_at": datetime(1, 1, 1, tzinfo=UTC)})
    end = end_of(1, Cause.USER_ERROR).model_copy(
        update={"exit_code": -(10**30), "written_at": datetime(9999, 1, 1, tzinfo=UTC)}
    )
    attempt(store, claim, end)
    later = claim_of(2).model_copy(update={"written_at": datetime(9999, 1, 1, tzinfo=UTC)})
    attempt(store, later, end_of(2, outcome=AttemptEndOutcome.DONE))
    spans = spans_of(store)
    encode_spans(spans)
    assert len(spans) == 3
    assert all((span.start_time or 0) <= (span.end_time or 0) for span in spans)


def test_a_damaged_end_makes_no_span(store: Store) -> None:
    write_run(store)
    submit(store, status="Failed")
    write_claim(store, claim_of(1))
    store.create(RunLayout(RUN).attempt_end(STEP, 1), b"{}")
    assert set(by_name(spans_of(store))) == {"digits"}


def test_the_name_of_the_service_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES", raising=False)
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    assert describe_service().attributes["service.name"] == "tiphys"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "training")
    assert describe_service().attributes["service.name"] == "training"


@given(
    ends=st.lists(st.sampled_from([*Cause, None]), min_size=1, max_size=4),
    resumed=st.booleans(),
    nonces=st.lists(st.text("0123456789abcdef", min_size=16, max_size=16), min_size=2, max_size=2, unique=True),
)
def test_ids_follow_from_the_records(
    tmp_path_factory: pytest.TempPathFactory, ends: list[Cause | None], resumed: bool, nonces: list[str]
) -> None:
    """The same records give the same spans; equal names in another store give none of their ids."""
    stores = []
    for nonce in nonces:
        store = DirectoryStore(tmp_path_factory.mktemp("store"))
        write_run(store, nonce=nonce, written_at=START)
        submit(store, status="Failed")
        if resumed:
            submit(store, 2, status="Succeeded")
        for number, cause in enumerate(ends, start=1):
            outcome = AttemptEndOutcome.FAILED if cause else AttemptEndOutcome.DONE
            claim = claim_of(number, submission=2 if resumed and number == len(ends) else 1)
            attempt(store, claim, end_of(number, cause, outcome=outcome))
        stores.append(store)
    spans, again, other = spans_of(stores[0]), spans_of(stores[0]), spans_of(stores[1])
    assert encode_spans(spans) == encode_spans(again)
    ids = {span.context.span_id for span in spans}
    assert len(ids) == len(spans) > len(ends)
    assert {span.context.trace_id for span in spans} == {spans[0].context.trace_id}
    assert all(span.context.is_valid for span in spans)
    assert {span.parent.span_id for span in spans if span.parent} <= ids
    assert not ids & {span.context.span_id for span in other}
    assert spans[0].context.trace_id != other[0].context.trace_id
