"""What becomes of a tag.

| tag | variable | lenient | strict root |
|---|---|---|---|
| {{a}} | known | its value | its value |
| {{a}} | unknown | stays | error that names it |
| {{a}} | None: its step was skipped | error | error |
| {{=a ?? 'x'}} | None | x | x |
| {{=a}} | unknown | stays | error |
| {{steps.x.outputs.artifacts.m}} | | stays | stays: resolved apart |
"""

import pytest

from hera_pipelines.local.arguments import (
    UnresolvedError,
    is_absent_output,
    substitute_all_variables,
    substitute_variables,
)
from tiphys.errors import UsageError

KNOWN = {
    "a": "1",
    "inputs.parameters.x": 'say "hi"\n',
    "steps.run.status": "Failed",
    "steps.gone.outputs.parameters.y": None,
}
ROOTS = ("steps", "tasks")


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("{{a}}", "1"),
        ("{{ a }}-{{a}}", "1-1"),
        ("{{unknown}}", "{{unknown}}"),
        ("{{inputs.parameters.x}}", 'say "hi"\n'),
        ("{{=steps['run'].exitCode ?? '-1'}}", "-1"),
        ("{{=inputs.parameters.x == 'a' ? 1 : [2]}}", "[2]"),
        ("{{=steps.gone.outputs.parameters.y ?? 'none'}}", "none"),
        ("{{=later.value ?? 'x'}}", "{{=later.value ?? 'x'}}"),
        ("{{=workflow.status ?? 'x'}}", "{{=workflow.status ?? 'x'}}"),
        ("{{=nonsense(}}", "{{=nonsense(}}"),
        ("{{=asInt('many')}}", "{{=asInt('many')}}"),
        ("{{", "{{"),
        ("a }} b", "a }} b"),
    ],
)
def test_known_tags_are_replaced_and_unknown_ones_stay(text: str, result: str) -> None:
    assert substitute_variables(text, KNOWN) == result


def test_keys_and_nested_values_are_filled_in_and_other_types_kept() -> None:
    assert substitute_variables({"{{a}}": ["{{a}}", 2, None, {"b": "{{a}}"}]}, KNOWN) == {
        "1": ["1", 2, None, {"b": "1"}]
    }


def test_a_value_is_not_filled_in_again() -> None:
    assert substitute_variables("{{a}}", {"a": "{{b}}", "b": "2"}) == "{{b}}"


def test_a_tag_within_a_tag_gives_the_outer_one_its_name() -> None:
    assert substitute_variables("{{inputs.{{which}}}}", {"which": "a"}) == "{{inputs.a}}"


def test_a_plain_tag_that_would_hang_a_cluster_is_named_with_the_way_out() -> None:
    with pytest.raises(
        UnresolvedError, match=r"\{\{steps.run.exitCode\}\} has no value; on a cluster .* forever"
    ) as error:
        substitute_variables({"value": "{{steps.run.exitCode}}"}, KNOWN, ROOTS)
    assert "{{=steps['run'].exitCode ?? ''}}" in str(error.value)


@pytest.mark.parametrize("text", ["{{=steps['none'].id}}", "{{=tasks.x.id ?? 'a'}}", "{{=asInt(steps.run.status)}}"])
def test_a_strict_expression_must_have_a_value(text: str) -> None:
    with pytest.raises(UsageError):
        substitute_variables(text, KNOWN, ROOTS)


def test_roots_are_whole_words() -> None:
    assert substitute_variables("{{stepsize}}", KNOWN, ROOTS) == "{{stepsize}}"


def test_references_to_artifacts_are_left_for_later() -> None:
    reference = "{{steps.x.outputs.artifacts.m}}"
    assert substitute_variables(reference, KNOWN, ROOTS) == reference


def test_an_output_that_was_never_made_is_no_text() -> None:
    with pytest.raises(UnresolvedError, match=r"its step was skipped, and it has no default"):
        substitute_variables("x-{{steps.gone.outputs.parameters.y}}", KNOWN)


def test_items_leave_no_tag_behind() -> None:
    assert substitute_all_variables("{{item}}", {"item": "v"}) == "v"
    with pytest.raises(UnresolvedError, match=r"\{\{unknown\}\} has no value here"):
        substitute_all_variables("{{unknown}}", {"item": "v"})


@pytest.mark.parametrize(
    ("text", "absent"),
    [
        ("{{steps.gone.outputs.parameters.y}}", True),
        ("x{{steps.gone.outputs.parameters.y}}", False),
        ("{{a}}", False),
        ("{{unknown}}", False),
        ("{{=steps.gone.outputs.parameters.y}}", False),
    ],
)
def test_only_a_bare_reference_counts_as_not_given(text: str, absent: bool) -> None:
    assert is_absent_output(text, KNOWN) is absent
