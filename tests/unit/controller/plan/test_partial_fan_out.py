"""What a reader of a partly run fan-out gets: the list that Argo would have made of all items."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiphys_controller.plan.partial_fan_out import PartialOutputs, merge_outputs

from hera_pipelines.local.expressions.expr import evaluate_expression, nest_variables
from tiphys.protocol.fan_out import aggregate_outputs, parse_go_json

_DOCUMENTS = st.one_of(
    st.lists(st.integers(0, 9) | st.text(max_size=3)), st.dictionaries(st.text(max_size=3), st.none())
)
_TEXTS = st.one_of(st.text(max_size=6), st.sampled_from(["0.10", "}}", "{a}", '"', "\\", "\n", "<é😀>"]))


def evaluate(reader: str, made: Sequence[Mapping[str, str]]) -> str:
    """What Argo makes of the reader's text once the items that run have made their outputs."""
    expression = reader.removeprefix("{{=").removesuffix("}}")
    assert "}}" not in expression
    assert "{{" not in expression
    scope = {f"tasks.sweep.{path}": value for path, value in aggregate_outputs(made).items()}
    return str(evaluate_expression(expression, nest_variables(scope)))


def meaning(value: Any) -> Any:
    """``value`` with the documents in its texts read: the spelling of one may change on its way through a list."""
    if isinstance(value, list):
        return [meaning(element) for element in value]
    if isinstance(value, dict):
        return {name: meaning(element) for name, element in value.items()}
    try:
        document = parse_go_json(value)
    except (TypeError, ValueError):
        return value
    return ("document", document) if isinstance(document, dict | list) else value


def check_same(outputs: Sequence[Mapping[str, str]], running: set[int]) -> None:
    partial = PartialOutputs(tuple(None if number in running else item for number, item in enumerate(outputs)))
    made = [item for number, item in enumerate(outputs) if number in running]
    for path, whole in aggregate_outputs(outputs).items():
        merged = merge_outputs({"value": f"{{{{tasks.sweep.{path}}}}}"}, {"sweep": partial})["value"]
        assert meaning(json.loads(evaluate(merged, made))) == meaning(json.loads(whole)), path


@pytest.mark.parametrize(
    "losses",
    [
        ["0.10", "0.20", "0.30"],
        ["[1.50]", '{"a":{"b":12345678901234567890}}', "[]"],
        ["[1]", "text", "{}"],
        ["text", "[1]", "text"],
        ["}}", "{{x", '\\"\n😀'],
    ],
)
@pytest.mark.parametrize("running", [{0}, {1}, {1, 2}])
def test_a_reader_gets_the_outputs_of_all_items_in_their_order(losses: list[str], running: set[int]) -> None:
    check_same([{"loss": loss, "a-b": str(number)} for number, loss in enumerate(losses)], running)


@given(st.data())
def test_a_reader_gets_what_argo_would_have_made_of_any_outputs(data: st.DataObject) -> None:
    values = st.one_of(_TEXTS, _DOCUMENTS.map(lambda document: json.dumps(document, separators=(",", ":"))))
    outputs = data.draw(st.lists(st.fixed_dictionaries({"x": _TEXTS, "y": values}), min_size=2, max_size=6))
    running = data.draw(st.sets(st.integers(0, len(outputs) - 1), min_size=1, max_size=len(outputs) - 1))
    check_same(outputs, running)


def test_items_without_outputs_make_an_empty_list() -> None:
    merged = merge_outputs({"value": "{{tasks.sweep.outputs.parameters}}"}, {"sweep": PartialOutputs(({}, None))})
    assert evaluate(merged["value"], [{}]) == "[]"


def test_an_expression_has_the_same_number_of_terms_for_any_number_of_items() -> None:
    """expr-lang refuses more than 10,000."""

    def merge(items: int) -> str:
        outputs = PartialOutputs(tuple({"loss": "0"} if number % 2 else None for number in range(items)))
        return str(merge_outputs({"value": "{{tasks.sweep.outputs.parameters.loss}}"}, {"sweep": outputs})["value"])

    assert merge(1000).count("made0") == merge(2).count("made0")
