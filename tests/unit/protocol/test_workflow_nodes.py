"""The nodes of a Workflow as Argo stores them, and which are those of its steps.

| name of the node               | is                                   |
|--------------------------------|--------------------------------------|
| ``wf.prep``                    | the step, with or without tries      |
| ``wf.prep(0)``                 | a try of it                          |
| ``wf.sweep``                   | the group of a fan-out               |
| ``wf.sweep(2:lr:0.1)``         | an item, with or without tries       |
| ``wf.sweep(2:lr:0.1)(0)``      | a try of it                          |
| ``wf.prep.onExit``, ``wf.prep.hooks.x``, ``wf.prep.main`` | of a hook or a container |
"""

import gzip
import json
import random
import tracemalloc
from base64 import b64encode
from datetime import UTC, datetime
from typing import Any

import pytest

from tiphys.errors import UsageError
from tiphys.protocol.gang import NODE_ANNOTATION
from tiphys.protocol.workflow_nodes import (
    NODE_NAME_ANNOTATION,
    StepNode,
    are_nodes_offloaded,
    find_step_nodes,
    node_of_pod,
    parse_node_time,
    read_nodes,
    without_try,
)


def node(name: str, **fields: Any) -> dict[str, Any]:
    started = {"type": "Pod", "phase": "Running", "startedAt": "2026-01-01T00:00:00Z"}
    return {"id": name, "name": name, **started, **fields}


def compress(document: Any) -> str:
    """As Argo does (``util/file/fileutil.go``, CompressEncodeString)."""
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    return b64encode(gzip.compress(data, 6, mtime=0)).decode()


def compressed(document: Any) -> dict[str, Any]:
    return {"status": {"compressedNodes": compress(document)}}


def found(*names: str, **tasks: bool) -> list[tuple[str, str, int]]:
    """Instance, task and number of tries of each step that is found."""
    nodes = find_step_nodes("wf", [node(name) for name in names], tasks or {"prep": False, "sweep": True})
    return [(one.instance, one.task, len(one.tries)) for one in nodes]


def test_nodes_are_in_the_order_of_their_starts():
    late, early, never = node("b", startedAt="2026-01-02T00:00:00Z"), node("a"), node("c", startedAt=None)
    documents = {one["id"]: one for one in (late, early, never)}
    assert read_nodes({"status": {"nodes": documents}}) == [never, early, late]


@pytest.mark.parametrize("workflow", [{}, {"status": None}, {"status": {}}, {"status": {"nodes": None}}])
def test_workflow_that_has_not_started_has_no_nodes(workflow):
    assert read_nodes(workflow) == []


def test_compressed_nodes_are_read_instead_of_none():
    document = {"a": node("a", message="é😀")}
    assert read_nodes(compressed(document)) == [document["a"]]
    both = {"status": {"nodes": {"b": node("b")}, **compressed(document)["status"]}}
    assert read_nodes(both) == [document["a"]]


@pytest.mark.parametrize(
    "text",
    [
        "no base64!",
        "é",
        b64encode(b"no gzip").decode(),
        compress(b"no json"),
        compress(b'{"a": '),
        compress(b"\xff\xfe\xfd"),
        compress({"a": node("a")})[:-40],
        compress(b"[" * 100_000),
        compress(b'{"a":' * 100_000),
        compress(b"1" * 100_000),
        5,
        True,
        ["x"],
        {"x": "y"},
    ],
)
def test_garbage_in_compressed_nodes_is_an_error_that_names_them(text):
    with pytest.raises(UsageError, match="compressed nodes of the Workflow cannot be read"):
        read_nodes({"status": {"compressedNodes": text}})


@pytest.mark.parametrize(
    "nodes",
    [
        ["x"],
        "text",
        5,
        {"a": "text"},
        {"a": None},
        {"a": {"id": "a"}},
        {"a": [["name", "a"]]},
        {"a": node("a"), "b": 5},
    ],
)
def test_nodes_that_are_none_are_an_error_that_says_so(nodes):
    with pytest.raises(UsageError, match="not those that Argo writes"):
        read_nodes({"status": {"nodes": nodes}})
    with pytest.raises(UsageError, match="not those that Argo writes"):
        read_nodes(compressed(nodes))


def peak_of(workflow: dict[str, Any], error: str) -> int:
    """Most bytes in memory while these nodes are refused."""
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match=error):
            read_nodes(workflow)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_bomb_of_bytes_is_refused_before_it_is_in_memory():
    bomb = compressed(b'{"a":"' + b"x" * (120 << 20) + b'"}')
    assert len(bomb["status"]["compressedNodes"]) < 1 << 20
    assert peak_of(bomb, "more than 33,554,432 bytes") < 100 << 20


def test_bomb_of_values_is_refused_before_it_is_in_memory():
    """An empty list has three bytes as JSON, and twenty times as many in memory."""
    bomb = compressed(b'{"a":{"name":"a","x":[' + b"[]," * (10 << 20) + b"[]]}}")
    assert peak_of(bomb, "more than 3,000,000 values") < 100 << 20


def test_more_nodes_than_argo_can_store_are_refused():
    with pytest.raises(UsageError, match="more than 50,000 nodes"):
        read_nodes(compressed({str(number): {"name": "a"} for number in range(50_001)}))
    assert len(read_nodes(compressed({str(number): {"name": "a"} for number in range(50_000)}))) == 50_000


def test_nodes_of_the_largest_workflow_are_read():
    """Twenty thousand nodes as Argo writes them are more than fit into an object of etcd, compressed."""
    ids = [f"digits-abc-{random.Random(number).getrandbits(32)}" for number in range(20_001)]
    documents = {
        ids[number]: node(
            f"digits-abc.sweep({number}:lr:0.{number})(0)",
            id=ids[number],
            startedAt=f"2026-01-01T{number % 24:02}:{number * 7 % 60:02}:{number * 11 % 59:02}Z",
            hostNodeName=f"gpu-{number % 17}",
            displayName=f"sweep({number}:lr:0.{number})(0)",
            templateName="sweep",
            inputs={"parameters": [{"name": "lr", "value": f"0.{number}"}]},
            outputs={"parameters": [{"name": "loss", "value": str(number)}], "exitCode": "0"},
            resourcesDuration={"cpu": number, "memory": number},
            children=[ids[number + 1]],
        )
        for number in range(20_000)
    }
    workflow = compressed(documents)
    assert len(workflow["status"]["compressedNodes"]) > 1 << 20
    assert len(read_nodes(workflow)) == 20_000


@pytest.mark.parametrize(
    ("status", "expected"),
    [({}, False), ({"offloadNodeStatusVersion": ""}, False), ({"offloadNodeStatusVersion": "fnv:1"}, True)],
)
def test_offloaded_nodes_are_recognised_by_their_version(status, expected):
    assert are_nodes_offloaded({"status": status}) is expected
    assert not are_nodes_offloaded({})


def test_pod_names_its_node():
    def pod(**annotations: str) -> dict[str, Any]:
        return {"metadata": {"annotations": annotations}}

    assert node_of_pod(pod(**{NODE_NAME_ANNOTATION: "wf.prep(0)"})) == "wf.prep(0)"
    assert node_of_pod(pod(**{NODE_ANNOTATION: "wf.fit(0).run"})) == "wf.fit(0).run"
    assert node_of_pod({"metadata": {}}) == node_of_pod({"metadata": {"annotations": None}}) == ""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("wf.prep(1)", "wf.prep"),
        ("wf.prep", "wf.prep"),
        ("wf.sweep(2:lr:0.1)", "wf.sweep(2:lr:0.1)"),
        ("wf.sweep(2:lr:0.1)(10)", "wf.sweep(2:lr:0.1)"),
        ("wf.prep(0)(1)", "wf.prep(0)"),
        ("", ""),
    ],
)
def test_try_is_taken_off_the_end_of_a_name(name, expected):
    assert without_try(name) == expected


def test_steps_are_found_with_their_tries_and_items():
    assert found("wf.prep") == [("wf.prep", "prep", 0)]
    assert found("wf.prep(0)", "wf.prep", "wf.prep(1)") == [("wf.prep", "prep", 2)]
    assert found("wf.sweep", "wf.sweep(0:a)", "wf.sweep(1:b)", "wf.sweep(1:b)(0)") == [
        ("wf.sweep(0:a)", "sweep", 0),
        ("wf.sweep(1:b)", "sweep", 1),
    ]


@pytest.mark.parametrize(
    "text", ["", "a.b", "[0]", "lr:0.1,w:a", "a b", "line\nbreak", "é", "wf.prep", "0", "(".strip("(")]
)
def test_item_is_found_whatever_its_text(text):
    assert found(f"wf.sweep(3:{text})(0)", f"wf.sweep(3:{text})") == [(f"wf.sweep(3:{text})", "sweep", 1)]


@pytest.mark.parametrize(
    "name",
    [
        *("wf", "wf.", "wf.other", "wf.prepare", "wf.prep.onExit", "wf.prep.hooks.running", "wf.prep.hooks.running(0)"),
        *("wf.prep(0).onExit", "wf.prep.main", "wf.prep[0]", "wf.prep[0].run", "wf.other.prep", "wf2.prep", "Wf.prep"),
        *(
            "wf.prep(0:a)",
            "wf.sweep",
            "wf.sweep(0)",
            "wf.sweep(0:a).onExit",
            "wf.sweep(0:a)(0).hooks.x",
            "wf.sweep(a:0)",
        ),
        *("wf.sweep(0:a)(1:b)", "wf.sweep(0:a(b))", "wf.prep(0)(1)", "wf.prep(-1)", "wf.prep()", "xwf.prep", "prep"),
        *("wf.prep\n", "wf.prep(0)\n", "wf.prep(٣:a)x", "wf.prep(" + "9" * 5000 + ")"),
    ],
)
def test_node_of_another_name_is_no_step(name):
    assert found(name, name) == []


def test_try_without_the_node_of_all_tries_is_no_step():
    assert found("wf.prep(0)") == []


def test_name_of_a_workflow_may_have_dots():
    nodes = [node("my.wf.prep"), node("my.wf.prep(0)"), node("my.prep")]
    assert [one.instance for one in find_step_nodes("my.wf", nodes, {"prep": False})] == ["my.wf.prep"]


def test_name_that_is_no_text_is_no_step():
    assert (
        list(
            find_step_nodes(
                "wf", [node("wf.prep") | {"name": name} for name in (5, None, ["wf.prep"])], {"prep": False}
            )
        )
        == []
    )


def test_tries_are_in_the_order_of_their_numbers():
    names = ["wf.prep", *(f"wf.prep({number})" for number in (10, 2, 0, 9, 1))]
    (step,) = find_step_nodes("wf", [node(name) for name in names], {"prep": False})
    assert [one["name"] for one in step.tries] == [f"wf.prep({number})" for number in (0, 1, 2, 9, 10)]
    assert step.last_try["name"] == "wf.prep(10)"


@pytest.mark.parametrize(
    ("fields", "tries", "expected"),
    [
        ({"type": "Pod"}, [], True),
        ({"type": "Pod", "phase": "Pending"}, [], True),
        ({"type": "Pod", "phase": "Error"}, [], True),
        ({"type": "Pod", "startedAt": None}, [], False),
        ({"type": "Skipped", "phase": "Skipped"}, [], False),
        ({"type": "Skipped", "phase": "Omitted"}, [], False),
        ({"type": "Skipped", "phase": "Error"}, [], False),
        ({"type": "Pod", "phase": "Omitted"}, [], False),
        ({"type": "Retry"}, [], False),
        ({"type": "TaskGroup"}, [], False),
        ({"type": "Plugin"}, [], False),
        ({"type": "Retry"}, [{"type": "Pod"}], True),
        ({"type": "Retry", "phase": "Error"}, [{"type": "Skipped", "phase": "Error"}], False),
        ({"type": "Retry", "phase": "Error"}, [{"type": "Pod", "phase": "Failed"}, {"type": "Skipped"}], True),
    ],
)
def test_step_has_started_once_argo_has_tried_to_make_a_pod(fields, tries, expected):
    step = StepNode("wf.prep", "prep", node("wf.prep", **fields), tuple(node("wf.prep(0)", **one) for one in tries))
    assert step.has_started is expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"phase": "Pending"}, False),
        ({"phase": "Running"}, False),
        ({"phase": ""}, False),
        ({"phase": "Succeeded"}, True),
        ({"phase": "Failed"}, True),
        ({"phase": "Error"}, True),
        ({"phase": "Skipped"}, True),
        ({"phase": "Omitted"}, True),
        ({"phase": "Succeeded", "taskResultSynced": True}, True),
        ({"phase": "Succeeded", "taskResultSynced": None}, True),
        ({"phase": "Succeeded", "taskResultSynced": False}, False),
        ({"phase": "Failed", "taskResultSynced": False}, False),
        ({"phase": "Error", "taskResultSynced": False}, False),
        ({"phase": "Skipped", "taskResultSynced": False}, True),
        ({"phase": "succeeded"}, False),
    ],
)
def test_step_has_ended_when_argo_calls_its_node_fulfilled(fields, expected):
    assert StepNode("wf.prep", "prep", node("wf.prep", **fields)).has_ended is expected


def test_inputs_and_outputs_are_those_of_the_last_pod():
    def sides(value: str) -> dict[str, Any]:
        entries = {"parameters": [{"name": "x", "value": value}], "artifacts": [{"name": "a", "s3": {"key": value}}]}
        return {"inputs": entries, "outputs": {**entries, "exitCode": value}}

    tries = tuple(node(f"wf.prep({number})", **sides(str(number))) for number in range(2))
    step = StepNode("wf.prep", "prep", node("wf.prep", **sides("all")), tries)
    assert (step.input_values(), step.output_values()) == ({"x": "1"}, {"x": "1"})
    assert step.input_artifacts() == step.output_artifacts() == [{"name": "a", "s3": {"key": "1"}}]
    assert step.outputs["exitCode"] == "1"
    without = StepNode("wf.prep", "prep", node("wf.prep", **sides("all")), (node("wf.prep(0)"),))
    assert (without.input_values(), without.output_values()) == ({"x": "all"}, {"x": "all"})


def test_node_without_inputs_and_outputs_has_none():
    for fields in ({}, {"inputs": None, "outputs": None}, {"inputs": {}, "outputs": {"parameters": None}}):
        step = StepNode("wf.prep", "prep", node("wf.prep", **fields))
        assert (step.input_values(), step.input_artifacts(), step.output_values(), step.output_artifacts()) == (
            *({}, []),
            *({}, []),
        )
    supplied = node("wf.prep", inputs={"parameters": [{"name": "x"}, {"name": "y", "value": ""}]})
    assert StepNode("wf.prep", "prep", supplied).input_values() == {"y": ""}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-01-01T00:00:00Z", datetime(2026, 1, 1, tzinfo=UTC)),
        ("2026-01-01T02:00:00+02:00", datetime(2026, 1, 1, tzinfo=UTC)),
        ("2026-01-01T00:00:00.5Z", datetime(2026, 1, 1, microsecond=500_000, tzinfo=UTC)),
        *((text, None) for text in ("", None, "null", "yesterday", 5, "2026-01-01", "2026-01-01T00:00:00", ["x"])),
        *((text, None) for text in ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "10000-01-01T00:00:00Z")),
    ],
)
def test_time_of_a_node_is_one_with_a_zone_within_the_calendar(text, expected):
    assert parse_node_time(text) == expected
