"""Bodies of the operations, and what a node's name tells.

| node | instance | try | attempt |
|---|---|---|---|
| wf.fit(1).admit | wf.fit | 1 | wf.fit(1) |
| wf.sweep(1:lr:0.2).conclude | wf.sweep(1:lr:0.2) | 0 | wf.sweep(1:lr:0.2) |
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from tiphys.protocol.operations import (
    ADMIT_OUTPUTS,
    OPERATIONS,
    AdmitOperation,
    ConcludeOperation,
    FinalizeOperation,
    Operation,
    attempt_node_name,
    format_submission_end,
    parse_failure_summary,
    step_instance_name,
    try_number,
)

OPERATION: TypeAdapter[AdmitOperation | ConcludeOperation | FinalizeOperation] = TypeAdapter(Operation)
IDENTITY = {"run": "digits", "submission": "1", "uid": "u-1", "node": "wf.fit.admit"}


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"op": "admit", "step": "fit", "inputs": {"lr": "0.1"}}, AdmitOperation),
        ({"op": "conclude", "step": "fit", "status": "Failed", "exit_code": "75"}, ConcludeOperation),
        ({"op": "conclude", "step": "fit", "status": "Succeeded", "result": "0.9"}, ConcludeOperation),
        ({"op": "finalize", "status": "Failed", "failures": "[]"}, FinalizeOperation),
    ],
)
def test_a_body_is_the_operation_that_it_names(body: dict[str, object], kind: type) -> None:
    operation = OPERATION.validate_python(IDENTITY | body)

    assert type(operation) is kind
    assert operation.model_dump(exclude_unset=True) == IDENTITY | body
    assert body["op"] in OPERATIONS


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"op": "delete", "step": "fit"},
        {"op": "settle", "step": "fit", "status": "Failed", "exit_code": "75"},
        {"op": "admit"},
        {"op": "admit", "step": "fit", "namespace": "kube-system"},
        {"op": "admit", "step": "fit", "gpus": 8},
        {"op": "finalize", "step": "fit"},
        {"op": "admit", "step": 1},
    ],
)
def test_a_body_that_is_no_operation_is_refused(body: dict[str, object]) -> None:
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
    ("node", "instance", "number", "attempt"),
    [
        ("wf.fit(0).admit", "wf.fit", 0, "wf.fit(0)"),
        ("wf.fit(12).conclude", "wf.fit", 12, "wf.fit(12)"),
        ("wf.fit(2).run", "wf.fit", 0, "wf.fit(2).run"),
        ("wf.fit.conclude", "wf.fit", 0, "wf.fit"),
        ("wf.prep.run(3)", "wf.prep", 0, "wf.prep.run(3)"),
        ("wf.prep(3)", "wf.prep", 0, "wf.prep(3)"),
        ("wf.sweep(1:lr:0.2)(1).admit", "wf.sweep(1:lr:0.2)", 1, "wf.sweep(1:lr:0.2)(1)"),
        ("wf.sweep(1:lr:0.2).conclude", "wf.sweep(1:lr:0.2)", 0, "wf.sweep(1:lr:0.2)"),
        ("wf.sweep(0:(7).admit).admit", "wf.sweep(0:(7).admit)", 0, "wf.sweep(0:(7).admit)"),
        ("wf.conclude(1).admit", "wf.conclude", 1, "wf.conclude(1)"),
        ("wf.admit.admit", "wf.admit", 0, "wf.admit"),
        ("wf.prep.admit", "wf.prep", 0, "wf.prep"),
        ("wf.onExit", "wf.onExit", 0, "wf.onExit"),
        ("wf", "wf", 0, "wf"),
    ],
)
def test_a_nodes_name_tells_its_step_its_try_and_its_attempt(
    node: str, instance: str, number: int, attempt: str
) -> None:
    assert step_instance_name(node) == instance
    assert try_number(node) == number
    assert attempt_node_name(node) == attempt


@given(st.text().filter(lambda text: "(" not in text), st.integers(0, 10**6))
def test_nodes_of_a_step_name_it_whatever_the_item_contains(item: str, number: int) -> None:
    """Argo takes parentheses out of the text of an item."""
    step = f"wf.sweep(0:{item})"
    tried = [f"{step}({number}).{op}" for op in ("admit", "run", "conclude")]
    once = [f"{step}.{op}" for op in ("admit", "run", "run(2)", "conclude")]

    assert {step_instance_name(name) for name in (*tried, *once)} == {step}
    assert [try_number(name) for name in (tried[0], tried[2], once[0], once[3])] == [number, number, 0, 0]
    assert {attempt_node_name(name) for name in (tried[0], tried[2])} == {f"{step}({number})"}
    assert {attempt_node_name(name) for name in (once[0], once[3])} == {step}


@given(st.from_regex(r"[a-z0-9-]+", fullmatch=True), st.integers(1, 10**6), st.text())
def test_finalize_tells_why_a_submission_failed(run: str, submission: int, summary: str) -> None:
    assert parse_failure_summary(format_submission_end(run, submission, "Failed", summary)) == summary
    assert parse_failure_summary(format_submission_end(run, submission, "Succeeded", "")) == ""


def test_admits_answers_are_distinct_parameter_names() -> None:
    assert len(set(ADMIT_OUTPUTS)) == len(ADMIT_OUTPUTS)
    assert all(name == name.lower() and "_" not in name for name in ADMIT_OUTPUTS)
