"""Bodies of the four operations, and what a node's name tells.

| node | instance | try |
|---|---|---|
| wf.fit.attempts(1).admit | wf.fit | 1 |
| wf.sweep(1:lr:0.2).conclude | wf.sweep(1:lr:0.2) | 0 |
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from tiphys.protocol.operations import (
    ADMIT_OUTPUTS,
    AdmitOperation,
    ConcludeOperation,
    FinalizeOperation,
    Operation,
    SettleOperation,
    attempt_node_name,
    format_submission_end,
    parse_failure_summary,
    retry_number,
    step_instance_name,
)

OPERATION: TypeAdapter[AdmitOperation | SettleOperation | ConcludeOperation | FinalizeOperation] = TypeAdapter(
    Operation
)
IDENTITY = {"run": "digits", "submission": "1", "uid": "u-1", "node": "wf.fit.admit"}


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"op": "admit", "step": "fit", "inputs": {"lr": "0.1"}}, AdmitOperation),
        ({"op": "settle", "step": "fit", "status": "Failed", "exit_code": "75"}, SettleOperation),
        ({"op": "conclude", "step": "fit", "status": "Succeeded"}, ConcludeOperation),
        ({"op": "finalize", "status": "Failed", "failures": "[]"}, FinalizeOperation),
    ],
)
def test_a_body_is_the_operation_that_it_names(body: dict[str, object], kind: type) -> None:
    operation = OPERATION.validate_python(IDENTITY | body)

    assert type(operation) is kind
    assert operation.model_dump(exclude_unset=True) == IDENTITY | body


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"op": "delete", "step": "fit"},
        {"op": "admit"},
        {"op": "admit", "step": "fit", "namespace": "kube-system"},
        {"op": "admit", "step": "fit", "gpus": 8},
        {"op": "finalize", "step": "fit"},
        {"op": "admit", "step": 1},
    ],
)
def test_a_body_that_is_none_of_the_four_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        OPERATION.validate_python(IDENTITY | body)


@pytest.mark.parametrize("missing", ["uid", "node"])
def test_a_body_without_identity_is_refused(missing: str) -> None:
    body = {name: value for name, value in IDENTITY.items() if name != missing}

    with pytest.raises(ValidationError, match=missing):
        OPERATION.validate_python(body | {"op": "finalize"})


def test_a_bare_submit_leaves_run_and_submission_empty() -> None:
    operation = OPERATION.validate_python({"op": "admit", "step": "fit", "uid": "u", "node": "n"})

    assert (operation.run, operation.submission) == ("", "")


@pytest.mark.parametrize(
    ("node", "instance", "retry", "attempt"),
    [
        ("wf.fit.attempts(0).admit", "wf.fit", 0, "wf.fit.attempts(0)"),
        ("wf.fit.attempts(12).settle", "wf.fit", 12, "wf.fit.attempts(12)"),
        ("wf.fit.attempts(2).run", "wf.fit", 0, None),
        ("wf.fit.conclude", "wf.fit", 0, None),
        ("wf.prep.run(3)", "wf.prep", 0, None),
        ("wf.sweep(1:lr:0.2).attempts(1).admit", "wf.sweep(1:lr:0.2)", 1, "wf.sweep(1:lr:0.2).attempts(1)"),
        ("wf.sweep(0:.attempts(7).admit).admit", "wf.sweep(0:.attempts(7).admit)", 0, None),
        ("wf.attempts.attempts(1).admit", "wf.attempts", 1, "wf.attempts.attempts(1)"),
        ("wf.admit.admit", "wf.admit", 0, None),
        ("wf.prep.admit", "wf.prep", 0, None),
        ("wf", "wf", 0, None),
    ],
)
def test_a_nodes_name_tells_its_step_and_its_try(node: str, instance: str, retry: int, attempt: str | None) -> None:
    assert step_instance_name(node) == instance
    assert retry_number(node) == retry
    assert attempt_node_name(node) == attempt


@given(st.text(), st.integers(0, 10**6))
def test_whatever_the_item_contains_all_nodes_of_a_step_name_it(item: str, retry: int) -> None:
    step = f"wf.sweep(0:{item})"

    tried = [f"{step}.attempts({retry}).{op}" for op in ("admit", "run", "settle")]

    names = [*tried, f"{step}.conclude"]
    assert {step_instance_name(name) for name in names} == {step}
    assert {retry_number(tried[0]), retry_number(tried[2])} == {retry}


@given(st.from_regex(r"[a-z0-9-]+", fullmatch=True), st.integers(1, 10**6), st.text())
def test_finalize_tells_why_a_submission_failed(run: str, submission: int, summary: str) -> None:
    assert parse_failure_summary(format_submission_end(run, submission, "Failed", summary)) == summary
    assert parse_failure_summary(format_submission_end(run, submission, "Succeeded", "")) == ""


def test_admits_answers_are_distinct_parameter_names() -> None:
    assert len(set(ADMIT_OUTPUTS)) == len(ADMIT_OUTPUTS)
    assert all(name == name.lower() and "_" not in name for name in ADMIT_OUTPUTS)
