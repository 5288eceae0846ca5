"""Names in storage keys, and the identity of a fan-out item."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiphys.errors import UsageError
from tiphys.records import (
    canonical_json,
    check_run_name,
    check_step_id,
    item_hash,
    item_step_id,
    json_digest,
    make_run_name,
    task_name,
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("run", ["a", "digits-7xk2p", "a.b", "0", "x" * 63])
def test_a_dns_name_may_name_a_run(run: str) -> None:
    assert check_run_name(run) == run


@pytest.mark.parametrize("run", ["", "A", "-a", "a-", ".", "..", "a/b", "a b", "a\n", "x" * 64, "ä"])
def test_an_invalid_run_name_is_refused(run: str) -> None:
    with pytest.raises(UsageError, match="use lower-case letters"):
        check_run_name(run)


@pytest.mark.parametrize("step", ["fit", "fit-2", "x" * 63, "fit.0123456789ab.0", "fit.0123456789ab.12"])
def test_a_label_or_an_item_of_it_may_name_a_step(step: str) -> None:
    assert check_step_id(step) == step


@pytest.mark.parametrize(
    "step", ["", "Fit", "fit_2", "fit.", ".x", "fit.abc.0", "fit.0123456789AB.0", "fit\n", "x" * 64]
)
def test_an_invalid_step_id_is_refused(step: str) -> None:
    with pytest.raises(UsageError, match="use a DNS label"):
        check_step_id(step)


@pytest.mark.parametrize("step", ["fit-2", item_step_id("fit-2", "0.1", 3)])
def test_a_step_id_begins_with_the_name_of_its_task(step: str) -> None:
    assert task_name(step) == "fit-2"


def test_canonical_json_has_one_form() -> None:
    assert canonical_json({"b": 1, "a": ["é", None]}) == '{"a":["é",null],"b":1}'.encode()


def test_a_digest_is_the_sha256_of_the_canonical_form() -> None:
    assert json_digest({"b": 1, "a": 2}) == hashlib.sha256(b'{"a":2,"b":1}').hexdigest()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a":1,"b":2}', '{ "b": 2, "a": 1 }'),
        ("1", "1.0"),
        ("[1, 2.50]", "[1.0,2.5]"),
        ('"text"', "text"),
        ('"\\u00e9"', "é"),
        ("1e2", "100"),
    ],
)
def test_an_item_is_the_same_however_it_is_spelled(one: str, other: str) -> None:
    assert item_hash(one) == item_hash(other)


@pytest.mark.parametrize(("one", "other"), [("1", "2"), ("0.1", "0.2"), ("a", "A"), ("[1,2]", "[2,1]"), ("", " ")])
def test_different_items_differ(one: str, other: str) -> None:
    assert item_hash(one) != item_hash(other)


@given(json_values)
def test_any_item_has_a_name_that_a_key_can_hold(value: object) -> None:
    for text in (json.dumps(value), json.dumps(value, indent=1, sort_keys=True), str(value)):
        assert check_step_id(item_step_id("fit", text, 3)).endswith(".3")
    assert item_hash(json.dumps(value)) == item_hash(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


@pytest.mark.parametrize("item", ['"\\ud800"', "1e999", "NaN", "{", "", "[" * 50])
def test_a_strange_item_has_a_name_too(item: str) -> None:
    assert len(item_hash(item)) == 12


def test_equal_items_are_distinguished_by_their_ordinal() -> None:
    assert item_step_id("fit", "0.1", 0) == f"fit.{item_hash('0.1')}.0"
    assert item_step_id("fit", "0.1", 1) != item_step_id("fit", "0.1", 0)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Digits_LR=0.1", "digits-lr-0.1"),
        ("--a--", "a"),
        ("ä", None),
        ("", None),
        ("x" * 80, "x" * 63),
        ("a" * 62 + "-b", "a" * 62),
    ],
)
def test_run_names_are_made_valid(text: str, name: str | None) -> None:
    if name is None:
        with pytest.raises(UsageError, match="has no letter or digit"):
            make_run_name(text)
    else:
        assert make_run_name(text) == name


@pytest.mark.parametrize("depth", [50_000, 200_000])
def test_an_item_nested_too_deeply_is_refused_by_name(depth: int) -> None:
    with pytest.raises(UsageError, match="the fan-out item is nested too deeply; pass it as a text, or in a file"):
        item_hash("[" * depth + "]" * depth)
