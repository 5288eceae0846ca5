"""Names and texts that must be Argo's to the letter.

| item | name | {{item}} |
|---|---|---|
| {lr: "0.2", code: "1"} | sweep(1:code:1,lr:0.2) | {"code":"1","lr":"0.2"} |
| 1e-5 | sweep(0:0.00001) | 0.00001 |
| "a(b)" | sweep(0:ab) | a(b) |
| [1, "x"] | sweep(0:[1 x]) | [1,"x"] |
| true | sweep(0:true) | true |
"""

import pytest

from hera_pipelines.local.composites.dag_state import expand_items
from hera_pipelines.local.nodes import display_name, node_id, pod_name
from tiphys.errors import UsageError
from tiphys.protocol.fan_out import go_json


@pytest.mark.parametrize(
    ("value", "name", "text"),
    [
        ({"lr": "0.2", "code": "1"}, "sweep(0:code:1,lr:0.2)", '{"code":"1","lr":"0.2"}'),
        (1e-5, "sweep(0:0.00001)", "0.00001"),
        ("a(b)", "sweep(0:ab)", "a(b)"),
        ([1, "x"], "sweep(0:[1 x])", '[1,"x"]'),
        (True, "sweep(0:true)", "true"),
        (3, "sweep(0:3)", "3"),
        ({"n": {"deep": [1]}}, 'sweep(0:n:{"deep":[1]})', '{"n":{"deep":[1]}}'),
    ],
)
def test_an_item_is_named_and_written_as_argo_does(value: object, name: str, text: str) -> None:
    [item] = expand_items({"name": "sweep", "withItems": [value]})
    assert (item.name, item.variables["item"]) == (name, text)


def test_fields_of_an_item_are_variables() -> None:
    [_, item] = expand_items({"name": "s", "withItems": [{"a": 1}, {"a": "x", "b": 0.5}]})
    assert item.name == "s(1:a:x,b:0.5)"
    assert (item.variables["item.a"], item.variables["item.b"]) == ("x", "0.5")


@pytest.mark.parametrize(
    ("parameter", "name", "variables"),
    [
        (r'["a<b"]', "s(0:a<b)", {"item": "a<b"}),
        (r'["caf\u00e9 \"q\" (1)"]', r"s(0:caf\u00e9 \"q\" 1)", {"item": 'café "q" (1)'}),
        ("[1e5]", "s(0:1e5)", {"item": "1e5"}),
        (
            r'[{"n": 1.0, "deep": {"z": 1, "a": [1, "x<"]}, "text": "a, b: [c]\n"}]',
            r's(0:deep:{"z":1,"a":[1,"x<"]},n:1.0,text:a, b: [c]\n)',
            {
                "item": r'{"deep":{"z":1,"a":[1,"x\u003c"]},"n":1.0,"text":"a, b: [c]\n"}',
                "item.deep": '{"z":1,"a":[1,"x<"]}',
                "item.n": "1.0",
                "item.text": r"a, b: [c]\n",
            },
        ),
        (r'[["a<", 1.50, {"k": "v"}]]', 's(0:[a< 1.50 {"k":"v"}])', {"item": r'["a\u003c",1.50,{"k":"v"}]'}),
        (r'[{"a<": null}]', "s(0:a<:null)", {"item": r'{"a\u003c":null}', "item.a<": "null"}),
        ("[{}]", "s(0:)", {"item": "{}"}),
        ("[[]]", "s(0:[])", {"item": "[]"}),
    ],
)  # made with Argo's processItem and Item.String under Go 1.26
def test_an_item_of_a_parameter_keeps_its_spelling_as_in_argo(
    parameter: str, name: str, variables: dict[str, str]
) -> None:
    assert expand_items({"name": "s", "withParam": parameter}) == [(name, variables)]


@pytest.mark.parametrize(
    ("sequence", "items"),
    [
        ({"count": "3"}, ["0", "1", "2"]),
        ({"start": 2, "end": "4"}, ["2", "3", "4"]),
        ({"start": "3", "end": 1}, ["3", "2", "1"]),
        ({"start": 5, "count": 2, "format": "host-%03d"}, ["host-005", "host-006"]),
        ({"count": 0}, []),
    ],
)
def test_a_sequence_counts_as_argo_does(sequence: dict[str, object], items: list[str]) -> None:
    found = expand_items({"name": "s", "withSequence": sequence})
    assert [item.variables["item"] for item in found] == items


@pytest.mark.parametrize(
    "task",
    [
        {"withParam": "not json"},
        {"withParam": '{"a": 1}'},
        {"withSequence": {"start": 1}},
        {"withSequence": {"count": "many"}},
        {"withSequence": {"count": 1, "format": "%s%s"}},
        {"withItems": [None]},
    ],
)
def test_items_that_cannot_be_read_are_refused_with_the_name_of_the_task(task: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="fan"):
        expand_items({"name": "fan", **task})


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.0, "1"), (0.1, "0.1"), (1e-7, "1e-7"), (1e-6, "0.000001"), (1e21, "1e+21"), (-2.5e-10, "-2.5e-10")],
)
def test_numbers_are_written_as_go_does(value: float, text: str) -> None:
    assert go_json(value) == text


def test_ids_are_fnv_hashes_of_names() -> None:
    # FNV-1a, 32 bit: the vector of the hash's authors for "foobar"
    assert node_id("wf", "foobar") == f"wf-{0xBF9CF968}"
    assert node_id("wf", "wf") == "wf"
    assert pod_name("wf", "foobar", "run") == f"wf-run-{0xBF9CF968}"
    assert len(pod_name("w" * 250, "foobar", "run")) <= 253


@pytest.mark.parametrize(
    ("node", "shown"),
    [
        ("wf", "wf"),
        ("wf.fit", "fit"),
        ("wf.fit[0]", "[0]"),
        ("wf.fit(1)", "fit(1)"),
        ("wf.fit(1).conclude", "conclude"),
        ("wf.sweep(1:lr:0.2)", "sweep(1:lr:0.2)"),
    ],
)
def test_the_last_part_of_a_name_is_shown(node: str, shown: str) -> None:
    assert display_name(node) == shown
