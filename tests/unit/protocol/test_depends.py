"""``depends`` without its finished tasks: the same decision, and the same waiting.

| written | a is | left |
|---|---|---|
| `a`, `a.Succeeded`, `a.Omitted \\|\\| a` | done | true |
| `a.Failed`, `!a`, `a.Skipped` | done | false |
| `a && b` | done | `b` |
| `a \\|\\| b` | done | b ended, in whatever way |
| `a.Failed && b` | done | never, once b ended |
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiphys.errors import UsageError
from tiphys.protocol.depends import (
    DONE_FAN_OUT_RESULTS,
    DONE_RESULTS,
    OMITTED_RESULTS,
    RESULTS,
    DependsExpression,
    drop_known_tasks,
    parse_depends,
    simplify,
    tasks_in,
)

ENDED = " || ".join(f"b.{result}" for result in RESULTS)
# What holds for a task that ended in each way; "" is the bare name.
HOLDS = {
    result: frozenset({result} | ({""} if result in ("Succeeded", "Skipped", "Daemoned") else set()))
    for result in RESULTS
}


@pytest.mark.parametrize(
    ("written", "left"),
    [
        ("a", True),
        ("a.Succeeded", True),
        ("a.Omitted || a", True),
        ("a.Failed", False),
        ("!a", False),
        ("a.Skipped", False),
        ("a.AnySucceeded", False),
        ("a && b", "b"),
        ("b.Failed && a.Succeeded", "b.Failed"),
        ("a || b", ENDED),
        ("a && (b || c)", "b || c"),
        ("(a || b) && c", f"c && ({ENDED})"),
        ("a.Failed && b", f"({ENDED}) && (b.Succeeded && b.Failed)"),
        ("!(a && b)", "!b"),
        ("!(b || c) && a", "!(b || c)"),
    ],
)
def test_done_task_leaves(written: str, left: str | bool) -> None:
    assert drop_known_tasks(written, {"a": DONE_RESULTS}) == left


def test_a_done_fan_out_has_an_item_that_succeeded_and_none_that_failed() -> None:
    assert drop_known_tasks("a.AnySucceeded", {"a": DONE_FAN_OUT_RESULTS}) is True
    assert drop_known_tasks("a.AllFailed", {"a": DONE_FAN_OUT_RESULTS}) is False


def test_an_omitted_task_holds_back_every_task_that_names_it_bare() -> None:
    assert drop_known_tasks("a", {"a": OMITTED_RESULTS}) is False
    assert drop_known_tasks("a.Omitted", {"a": OMITTED_RESULTS}) is True


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a &&", "a task is missing at the end"),
        ("&& a", "a task is missing before '&&'"),
        ("(a || b", "a bracket is not closed"),
        ("a b", "'b' is not expected there"),
        ("a == b", "'==' is not expected there"),
        ("a.Done", "'Done' is no result of a task"),
        ("", "a task is missing at the end"),
    ],
)
def test_an_invalid_condition_is_refused_with_the_place(text: str, what: str) -> None:
    with pytest.raises(UsageError, match="depends") as caught:
        parse_depends(text)

    assert what in str(caught.value)


def expressions() -> st.SearchStrategy[str]:
    names = st.sampled_from(["a", "b", "c"])
    results = st.sampled_from(["", *(f".{result}" for result in RESULTS)])
    return st.recursive(
        st.builds(str.__add__, names, results),
        lambda inner: st.one_of(
            st.builds("!({})".format, inner),
            st.builds("({}) && ({})".format, inner, inner),
            st.builds("({}) || ({})".format, inner, inner),
        ),
        max_leaves=6,
    )


def holds(expression: DependsExpression, endings: dict[str, str]) -> bool:
    found = simplify(expression, {task: HOLDS[ending] for task, ending in endings.items()})
    assert isinstance(found, bool)
    return found


@given(expressions(), st.sampled_from(["Succeeded", "Omitted"]))
def test_leaving_a_finished_task_out_changes_neither_decision_nor_waiting(text: str, ending: str) -> None:
    left = drop_known_tasks(text, {"a": DONE_RESULTS if ending == "Succeeded" else OMITTED_RESULTS})
    others = sorted(set(tasks_in(parse_depends(text))) - {"a"})

    if isinstance(left, bool):
        assert others == []
    else:
        assert set(tasks_in(parse_depends(left))) == set(others)
    for endings in itertools.product(RESULTS, repeat=len(others)):
        world = dict(zip(others, endings, strict=True))
        before = holds(parse_depends(text), {**world, "a": ending})
        assert before is (left if isinstance(left, bool) else holds(parse_depends(left), world))


@given(expressions())
def test_a_condition_reads_back_as_it_prints(text: str) -> None:
    expression = parse_depends(text)
    assert parse_depends(str(expression)) == expression
