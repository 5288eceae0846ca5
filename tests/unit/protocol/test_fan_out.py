"""Fan-outs as Argo makes them.

| source | items |
|---|---|
| withItems | as listed; an empty list is no fan-out |
| withParam | a JSON list |
| withSequence | count from start, or start to end in either direction |
"""

import json
from typing import Any

import pytest

from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import is_fan_out
from tiphys.protocol.fan_out import aggregate_outputs, item_values


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"withItems": ["a", 1, {"lr": 0.1}]}, ["a", 1, {"lr": 0.1}]),
        ({"withParam": '["a", {"lr": 0.1}]'}, ["a", {"lr": 0.1}]),
        ({"withParam": "[]"}, []),
        ({"withSequence": {"count": "3"}}, ["0", "1", "2"]),
        ({"withSequence": {"count": 0}}, []),
        ({"withSequence": {"start": "3", "count": 2}}, ["3", "4"]),
        ({"withSequence": {"start": "1", "end": "3"}}, ["1", "2", "3"]),
        ({"withSequence": {"start": "3", "end": "1"}}, ["3", "2", "1"]),
        ({"withSequence": {"count": 2, "format": "host-%03d"}}, ["host-000", "host-001"]),
    ],
)
def test_items(source: dict[str, Any], expected: list[Any]) -> None:
    assert is_fan_out({"name": "s", **source})
    assert item_values({"name": "s", **source}) == expected


@pytest.mark.parametrize("task", [{"name": "s"}, {"name": "s", "withItems": []}])
def test_a_task_without_items_is_one_task(task: dict[str, Any]) -> None:
    assert not is_fan_out(task)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ({"withParam": "no JSON"}, "s: withParam is not a JSON list: 'no JSON'"),
        ({"withParam": '{"a": 1}'}, "s: withParam is not a JSON list"),
        ({"withSequence": {"start": 1}}, "s: withSequence needs end or count"),
        ({"withSequence": {"count": "many"}}, "s: withSequence: 'many' is not a whole number"),
        ({"withSequence": {"count": 1, "format": "%s"}}, "s: withSequence format '%s' must hold one %d"),
    ],
)
def test_a_source_without_items_is_refused(source: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError) as caught:
        item_values({"name": "s", **source})

    assert str(caught.value).startswith(what)


def test_a_fan_in_reads_all_parameters_and_each_by_name_in_order() -> None:
    found = aggregate_outputs([{"acc": "0.1", "n": "1"}, {"acc": "0.2", "n": "2"}])

    assert {path: json.loads(text) for path, text in found.items()} == {
        "outputs.parameters": [{"acc": "0.1", "n": "1"}, {"acc": "0.2", "n": "2"}],
        "outputs.parameters.acc": ["0.1", "0.2"],
        "outputs.parameters.n": ["1", "2"],
    }


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (['{"a": 1}', "[2]"], [{"a": 1}, [2]]),
        (['{"a": 1}', "2"], ['{"a": 1}', "2"]),
        (["1", "2"], ["1", "2"]),
        (["x", "[1]"], ["x", "[1]"]),
    ],
)
def test_only_objects_and_lists_are_taken_as_json(texts: list[str], expected: list[Any]) -> None:
    assert json.loads(aggregate_outputs([{"n": text} for text in texts])["outputs.parameters.n"]) == expected


def test_a_fan_in_reads_keys_and_numbers_as_argo_writes_them() -> None:
    found = aggregate_outputs([{"model": '{"lr": 1e-5, "acc": 1.0}', "acc": "2"}])
    assert found["outputs.parameters"] == '[{"acc":"2","model":"{\\"lr\\": 1e-5, \\"acc\\": 1.0}"}]'
    assert found["outputs.parameters.model"] == '[{"acc":1,"lr":0.00001}]'


def test_items_without_parameters_are_left_out() -> None:
    assert aggregate_outputs([{}, {"n": "1"}])["outputs.parameters"] == '[{"n":"1"}]'


@pytest.mark.parametrize(
    ("texts", "by_name"),
    [
        (["a<b", "c&d"], r'["a\u003cb","c\u0026d"]'),
        (
            ['{"x": "<&>", "n": 12345678901234567890}', "[-0.0, 1e-7]"],
            r'[{"n":12345678901234567000,"x":"\u003c\u0026\u003e"},[-0,1e-7]]',
        ),
        (["\b\f\x01\x7f\u2028", "é"], '["\\b\\f\\u0001\x7f\\u2028","é"]'),
        (["[NaN]", "[1e999]"], '["[NaN]","[1e999]"]'),
        ([r'["\u00e9\/"]', "[ ]"], '[["é/"],[]]'),
    ],
)  # made with json.Marshal of Go 1.26, as aggregatedJSONValueList calls it
def test_a_fan_in_reads_the_bytes_that_go_writes(texts: list[str], by_name: str) -> None:
    found = aggregate_outputs([{"n": text} for text in texts])
    assert found["outputs.parameters.n"] == by_name
    assert json.loads(found["outputs.parameters"]) == [{"n": text} for text in texts]


def test_parameters_of_a_fan_in_are_escaped_as_go_does() -> None:
    assert (
        aggregate_outputs([{"a": "x<y", "b": ">&"}])["outputs.parameters"] == r'[{"a":"x\u003cy","b":"\u003e\u0026"}]'
    )
