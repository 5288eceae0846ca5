"""Nodes that Argo would never write, from somebody who may change Workflows: a fault of their steps, and no more.

A recorder works for all tenants. It neither breaks off, nor does it keep other steps from their records.
"""

import json
from typing import Any

import pytest
from support.fakes.argo_workflow import ArgoWorkflow, attempt_keys, bare, claim_of, end_of, ungated
from support.fakes.memory_store import MemoryStore

from tiphys.protocol.workflow_nodes import read_nodes
from tiphys.records import AttemptEndOutcome

DEEP: Any = json.loads("[" * 900 + "]" * 900)
NO_TEXT = "half \ud83d"


def deep_location(depth: int) -> dict[str, Any]:
    location: dict[str, Any] = {}
    for _ in range(depth):
        location = {"s3": location}
    return location


@pytest.fixture
def flow() -> ArgoWorkflow:
    flow = ArgoWorkflow(MemoryStore(), [ungated(artifacts=()), bare("check")])
    flow.finish(flow.start(), parameters={"rows": "3"})
    flow.finish(flow.start("check"))
    return flow


def record(flow: ArgoWorkflow) -> dict[str, str]:
    """Record; the faults. The other step has its result."""
    workflow = flow.manifest
    recorded = flow.recorder().record(workflow, read_nodes(workflow))
    assert end_of(flow, "check").outcome is AttemptEndOutcome.DONE
    return dict(recorded.faults)


WRONG_ENTRIES = ["text", 5, True, {"rows": "3"}, ["rows"], [["rows", "3"]], [{}], [{"value": "3"}], [{"name": 5}]]


@pytest.mark.parametrize("side", ["inputs", "outputs"])
@pytest.mark.parametrize("kind", ["parameters", "artifacts"])
@pytest.mark.parametrize("entries", WRONG_ENTRIES)
def test_lists_that_argo_did_not_write_are_a_fault_of_their_step(flow, side, kind, entries):
    flow.specs = [ungated(), bare("check")]
    parameters = {"parameters": [{"name": "rows", "value": "3"}]} if side == "outputs" else {}
    flow.nodes["digits-abc.prep"][side] = {**parameters, kind: entries}
    assert record(flow) == {
        "prep": f"node digits-abc.prep has {kind} among its {side} that Argo did not write",
    }


@pytest.mark.parametrize("side", ["inputs", "outputs"])
@pytest.mark.parametrize("found", ["text", 5, ["rows"], True])
def test_side_that_argo_did_not_write_is_a_fault_of_its_step(flow, side, found):
    flow.nodes["digits-abc.prep"][side] = found
    assert record(flow) == {"prep": f"node digits-abc.prep has {side} that Argo did not write"}


@pytest.mark.parametrize(
    "fields",
    [
        {"phase": 5},
        {"phase": ["Succeeded"]},
        {"phase": None},
        {"type": ["Pod"]},
        {"startedAt": 5},
        {"startedAt": {"seconds": 5}},
        {"finishedAt": ["now"]},
        {"startedAt": "9999-12-31T23:59:59-14:00", "finishedAt": "0001-01-01T00:00:00+14:00"},
        {"startedAt": "2026-01-01", "finishedAt": "2026-01-01T00:00:00"},
        {"message": {"text": "x"}},
        {"phase": "Failed", "message": ["main: Error (exit code 1)"]},
        {"phase": "Failed", "message": 5, "outputs": {"exitCode": ["1"]}},
        {"phase": "Failed", "outputs": {"exitCode": {"code": 1}}, "hostNodeName": ["gpu-7"]},
        {"phase": "Failed", "terminationMessage": {"log": "x"}},
        {"taskResultSynced": "no"},
        {"outputs": {"parameters": [{"name": "rows", "value": {"a": 1}}]}},
        {"outputs": {"parameters": [{"name": "rows", "value": 5}], "result": {"a": 1}}},
        {"inputs": {"parameters": [{"name": "lr", "value": {"a": 1}}]}},
    ],
)
def test_fields_of_the_wrong_kind_break_nothing(flow, fields):
    flow.nodes["digits-abc.prep"] |= fields
    assert record(flow) == {}


def test_value_that_argo_wrote_as_a_number_is_its_text(flow):
    flow.nodes["digits-abc.prep"]["outputs"] = {"parameters": [{"name": "rows", "value": 5}]}
    record(flow)
    assert end_of(flow).outputs[0].value == "5"


@pytest.mark.parametrize("depth", [2000, 300])
def test_input_that_is_nested_deeper_than_python_hashes_is_a_fault_of_its_step(flow, depth):
    artifact = {"name": "data", **deep_location(depth)}
    flow.nodes["digits-abc.prep"]["inputs"] = {"artifacts": [artifact]}
    faults = record(flow)
    assert faults == ({"prep": "its inputs are nested deeper than their hash can be computed"} if depth > 1000 else {})


def test_item_that_is_nested_deeper_than_python_reads_is_a_fault_of_its_step(flow):
    flow.specs = [*flow.specs, bare("sweep", fan_out=True)]
    flow.start_item("sweep", 0, "[" * 100_000, "deep")
    assert record(flow) == {"sweep(0:deep)": "the fan-out item is nested too deeply; pass it as a text, or in a file"}


@pytest.mark.parametrize(
    "fields",
    [
        {"outputs": {"parameters": [{"name": "rows", "value": NO_TEXT}]}},
        {"outputs": {"parameters": [{"name": "rows", "value": "3"}], "result": NO_TEXT}},
        {"phase": "Failed", "message": NO_TEXT, "outputs": {}},
        {"phase": "Failed", "message": "main: Error (exit code 1)", "hostNodeName": NO_TEXT},
    ],
)
def test_text_that_no_record_can_hold_is_a_fault_of_its_step(flow, fields):
    flow.nodes["digits-abc.prep"] |= fields
    assert record(flow) == {"prep": "its node holds a text that is not valid Unicode"}
    assert flow.end() is None


def test_item_that_is_no_text_is_a_fault_of_its_step(flow):
    flow.specs = [*flow.specs, bare("sweep", fan_out=True)]
    flow.start_item("sweep", 0, NO_TEXT, "half")
    assert list(record(flow).values()) == ["its node holds a text that is not valid Unicode"]


def test_input_that_is_no_text_has_a_key(flow):
    flow.nodes["digits-abc.prep"]["inputs"] = {"parameters": [{"name": "lr", "value": NO_TEXT}]}
    assert record(flow) == {}
    assert claim_of(flow).step_key


def test_record_of_more_bytes_than_readers_accept_is_not_written(flow):
    flow.specs = [ungated(artifacts=(), parameters=tuple(f"p{number}" for number in range(80))), bare("check")]
    values = [{"name": f"p{number}", "value": "x" * (60 << 10)} for number in range(80)]
    flow.nodes["digits-abc.prep"]["outputs"] = {"parameters": values}
    faults = record(flow)
    assert "such a record has at most 4,194,304" in faults["prep"]
    assert attempt_keys(flow.store) == ["check/000000001.end.json", "check/000000001.json", "prep/000000001.json"]


def test_location_that_is_no_place_is_a_part_of_the_key(flow):
    for location in ({"s3": "text"}, {"s3": ["data/runs/x"]}, {"gcs": 5}, {"azure": None}, {"s3": {"key": ["x"]}}):
        flow.store = MemoryStore()
        flow.finish(flow.start("check"))
        flow.nodes["digits-abc.prep"]["inputs"] = {"artifacts": [{"name": "data", **location}]}
        assert record(flow) == {}
        assert claim_of(flow).dataset


@pytest.mark.parametrize(
    "name",
    [
        "digits-abc.prep(1:a)",
        "digits-abc.prep(x)",
        "digits-abc.prep()",
        "digits-abc.prep(0)(1)(2)",
        "digits-abc.prep(0:a)(1:b)",
        "digits-abc.prep(99999999999999999999)",
        "digits-abc.prep ",
        "digits-abc.prep\n",
        "digits-abc..prep",
        "digits-abc.prep.run",
        "digits-abc.prep[0]",
        "digits-abc.PREP",
        "DIGITS-ABC.prep",
        "",
    ],
)
def test_name_that_argo_does_not_give_a_step_is_none_of_it(flow, name):
    flow.nodes[name] = {**flow.nodes["digits-abc.prep"], "id": "forged", "name": name, "phase": "Failed"}
    assert record(flow) == {}
    assert end_of(flow).outcome is AttemptEndOutcome.DONE
    assert len(attempt_keys(flow.store)) == 4


def test_second_node_of_a_name_opens_no_second_attempt(flow):
    flow.nodes["forged"] = {**flow.nodes["digits-abc.prep"], "id": "forged", "phase": "Running"}
    record(flow)
    record(flow)
    assert [key for key in attempt_keys(flow.store) if "prep/000000002" in key] == []
