"""The two languages of a Workflow, and what each makes of the same text.

`{{=…}}`, `depends`, `retryStrategy.expression`: expr-lang. `when`: govaluate.
"""

from typing import Any

import pytest

from hera_pipelines.local.expressions.evaluate import EvaluationError
from hera_pipelines.local.expressions.expr import (
    evaluate_condition,
    evaluate_expression,
    nest_variables,
    parse_expression,
)
from hera_pipelines.local.expressions.govaluate import condition_holds
from tiphys.errors import UsageError

ENVIRONMENT: dict[str, Any] = {
    "lastRetry": {"exitCode": "75", "status": "Failed", "message": "main: Error (exit code 75)"},
    "steps": {"run": {"status": "Failed"}, "list": {"items": [1, 2]}},
    "retries": "3",
    "nothing": None,
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("lastRetry.status == 'Error' || asInt(lastRetry.exitCode) in [75, 137, 143]", True),
        ("asInt(lastRetry.exitCode) not in [75]", False),
        ("steps['run'].exitCode ?? '-1'", "-1"),
        ("steps['run'].status ?? '-1'", "Failed"),
        ("steps.run?.exitCode?.more", None),
        ("nothing?.exitCode ?? 'x'", "x"),
        ("steps?.gone?.outputs.parameters['x'] ?? 'x'", "x"),
        ("steps?.['run'].status", "Failed"),
        ("lastRetry.message matches 'exit code \\\\d+'", True),
        ("lastRetry.message contains 'OOM'", False),
        ("lastRetry.message startsWith 'main' and lastRetry.message endsWith ')'", True),
        ("(asInt(retries) + 1) * 64", 256),
        ("retries == '3' ? 'three' : 'other'", "three"),
        ("toJson(string(retries))[1:-1]", "3"),
        ("toJson('a \"b\"')[1:-1]", 'a \\"b\\"'),
        ("steps.list.items[0:1]", [1]),
        ("not true or true", True),
        ("!true == false", True),  # ! binds tighter than ==
        ("not (true == false)", True),
        ("1 + 2 * 3 ** 2", 19),
        ("2 - -1", 3),
        ("7 % 4", 3),
        ("asFloat('0.5') < 1", True),
        ("string(12) + 'x'", "12x"),
        ("len('abc') >= 3 && len([1]) <= 1", True),
        ("toJson([1, 'a'])", '[1,"a"]'),
        ("steps.list.items[1]", 2),
        ('"quoted \\"text\\""', 'quoted "text"'),
        ("nil ?? 5", 5),
        ("1 == '1'", False),
        ('"\\u007bé\\u007d"', "{é}"),
        ("map(steps.list.items, # * 2)", [2, 4]),
        ("let one = 1; let two = one + 1; [one, two]", [1, 2]),
        ("map([['a'], 0], type(#) == 'array' ? #[0] : steps.list.items[int(#)])", ["a", 1]),
        ("map(fromJSON('[null, true, 1.5, \"x\", {}]'), type(#))", ["nil", "bool", "float", "string", "map"]),
        ("inner_in", "kept"),
        ("map([1, 2], { # * 2 })", [2, 4]),
        ("filter([1, 2], { # > 1})", [2]),
        ('map(filter(fromJSON(\'[{"n":"a","ok":true},{"n":"b","ok":false}]\'), .ok), .n)', ["a"]),
        ('jsonpath(\'{"steps": {"a b": [7, {"x": null}]}}\', \'$.steps["a b"][0]\')', 7),
        ("jsonpath('[{\"n\": 1}, {\"n\": 2}]', '$[*].n')", [1, 2]),
        ("jsonpath('[[1], [2]]', \"$[-1][0]\")", 2),
        ("jsonpath('{\"x\": null}', '$.x') ?? 'none'", "none"),
        ("sprig.trim(' a ') + sprig.upper('b')", "aB"),
        ("sprig.trimSuffix('.npz', 'w.npz') + sprig.trunc(-2, 'abcd') + sprig.default('x', '')", "wcdx"),
        ("join(split('a,b', ','), '-') + first(['c', 'd']) + last(['c', 'd'])", "a-bcd"),
        ("sprig.sha256sum('hello world')", "b94d27b9934d3e08a52e52d7da7dabfac484efe37a5380ee9088f7ace2efcde9"),
    ],
)
def test_expr(text: str, value: object) -> None:
    assert evaluate_expression(text, {**ENVIRONMENT, "inner_in": "kept"}) == value


@pytest.mark.parametrize(
    "text",
    [
        "missing",
        "missing.deep",
        "true ? 1 : missing",
        "steps.gone.exitCode ?? '-1'",
        "nothing.exitCode",
        "asInt('many')",
        "asInt(nil)",
        "1 < 'a'",
        "1 + 'a'",
        "1 / 0",
        "1 % 0",
        "'a' && true",
        "'a' in 'abc'",
        "5 matches 'a'",
        "steps.list.items[7]",
        "-'a'",
        "#",
        "map(1, #)",
        "map([1])",
        "let one = missing; one",
        "filter([1], #)",
        "jsonpath('{}', '$.gone')",
        "jsonpath('[1]', '$[1]')",
        "jsonpath('no json', '$')",
        "sprig.upper(1)",
    ],
)
def test_an_expression_without_a_value_is_an_error_and_not_a_guess(text: str) -> None:
    with pytest.raises(EvaluationError):
        evaluate_expression(text, ENVIRONMENT)


def test_functions_that_are_not_known_are_named() -> None:
    with pytest.raises(
        UsageError, match=r"calls sprig.now, toBase64, which the local engine does not support; supported are asFloat"
    ):
        parse_expression("toBase64(sprig.now())")


def test_a_json_path_that_cannot_be_followed_here_is_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match=r"jsonpath '\$\.\.x': the local engine supports keys.* write fromJSON"):
        parse_expression("jsonpath(steps.a.outputs.result, '$..x')")


@pytest.mark.parametrize("text", ["", "1 +", "a b", "x = 1", "map(list, {# + 1)"])
def test_a_text_outside_the_expression_subset_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is invalid"):
        parse_expression(text)


def test_a_decision_must_be_true_or_false() -> None:
    with pytest.raises(EvaluationError, match="gives 1, not true or false"):
        evaluate_condition("1", {})


def test_dotted_names_become_maps_and_longer_names_win() -> None:
    variables = {"workflow.parameters": "[...]", "workflow.parameters.lr": "0.1", "item": "a"}
    assert nest_variables(variables) == {"workflow": {"parameters": {"lr": "0.1"}}, "item": "a"}


@pytest.mark.parametrize(
    ("when", "result"),
    [
        ("", True),
        ("true == true", True),
        ("false == true", False),
        ("foo == foo", True),
        ("foo != bar", True),
        ("'' == ''", True),
        ("Succeeded in (Succeeded, Failed)", True),
        ("'a-b' in ('c', 'a-b')", True),
        ("3 > 2 && 2 >= 2 && 1 < 2 && 1 <= 1", True),
        ("!false || nonsense == 1", True),
        ("abc =~ '^a'", True),
        ("abc !~ '^a'", False),
        ("1 + 1 == 2", True),
        ("2 * 3 - 1 == 10 / 2", True),
        ("7 % 4 == 3", True),
        ("true == 'true'", False),
        ("(true || false) && index != 0", True),
    ],
)
def test_a_condition_of_when_is_evaluated_as_by_govaluate(when: str, result: bool) -> None:
    assert condition_holds(when) is result


@pytest.mark.parametrize("when", [" == true", "{{item}} == a", "a ==", "(a == b", "a = b"])
def test_a_condition_that_cannot_be_read_says_how_to_write_it(when: str) -> None:
    with pytest.raises(UsageError, match="put quotes around"):
        condition_holds(when)


@pytest.mark.parametrize("when", ["a-b == a-b", "1 < a", "word", "'5'", "!word"])
def test_a_condition_without_an_answer_is_an_error(when: str) -> None:
    with pytest.raises(EvaluationError):
        condition_holds(when)
