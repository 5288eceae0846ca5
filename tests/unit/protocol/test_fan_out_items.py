"""What the items of a fan-out are, and how people know them."""

import pytest

from tiphys.protocol.fan_out import assign_item_ids, format_item_parameters, parse_item_parameters, static_items
from tiphys.records import item_step_id


def test_items_are_known_by_their_value_wherever_they_stand_and_however_they_are_spelled() -> None:
    first, second, third = assign_item_ids("fit", [{"lr": 1, "w": "a"}, {"w": "a", "lr": 1.0}, "x"])
    assert first.step_id == item_step_id("fit", '{"w":"a","lr":1}', 0)
    assert second.step_id == item_step_id("fit", '{"lr":1.0,"w":"a"}', 1)
    assert third == (item_step_id("fit", "x", 0), "x")


@pytest.mark.parametrize(
    "task",
    [
        {"name": "fit"},
        {"name": "fit", "withItems": []},
        {"name": "fit", "withParam": "{{workflow.parameters.all}}"},
        {"name": "fit", "withParam": "no list"},
        {"name": "fit", "withItems": ["{{workflow.parameters.lr}}"]},
    ],
)
def test_items_that_only_a_run_can_tell_are_not_guessed(task: dict[str, object]) -> None:
    assert static_items(task) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"lr": 0.1, "width": 64, "on": true, "name": "a b"}', "lr=0.1 width=64 on=true name=a b"),
        ("0.5", "item=0.5"),
        ("plain", "item=plain"),
        ("[1, 2]", "item=[1, 2]"),
    ],
)
def test_an_item_in_words(text: str, words: str) -> None:
    assert format_item_parameters(parse_item_parameters(text)) == words
