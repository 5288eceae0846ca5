"""Every use of a variable is found, in tags and in expressions, and nothing else is taken for one.

| text | a use |
|---|---|
| `{{a.b}}`, also within another tag, or in a field that is an expression | yes |
| `a.b`, `a['b']`, `a["b"]`, a?.b, `a . b`, $env.a.b in an expression | yes |
| a string, a comment, a member of another object, a key of a map, text outside of tags | no |
"""

from typing import Any

import pytest

from tiphys.protocol.variables import Variable, find_variables, map_variables


def dotted(part: Any) -> list[str]:
    return [".".join(variable.names) for variable in find_variables(part)]


@pytest.mark.parametrize(
    ("part", "found"),
    [
        ({"value": "a {{x}} b {{ y.z }}"}, ["x", "y.z"]),
        ({"value": "{{x\ny}}"}, ["x\ny"]),
        ({"value": '{{"a": {{steps.train-1.id}}'}, ["steps.train-1.id"]),
        ({"args": [["{{a}}"], {"deep": "{{b}}"}]}, ["a", "b"]),
        ({"value": "{{=x + 1}} x"}, ["x"]),
        ({"value": "{{ =x}}"}, ["=x"]),  # a tag for Argo, as the sign does not come first
        ({"valueFrom": {"expression": "tasks.a.status"}}, ["tasks.a.status"]),
        ({"fromExpression": "'{{tasks.a.status}}' == b"}, ["tasks.a.status", "b"]),
        ({"expression": "asInt(lastRetry.exitCode) > {{=inputs.parameters.n}}"}, None),
        ({"value": "tasks.a.status", "limit": 3, "none": None}, []),
        ({"{{key}}": "text"}, []),
    ],
)
def test_variables_are_found_in_tags_and_expression_fields(part: Any, found: list[str] | None) -> None:
    assert dotted(part) == (["inputs.parameters.n", "asInt", "lastRetry.exitCode"] if found is None else found)


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("steps['Straße-1'].outputs", ["steps.Straße-1.outputs"]),
        ('steps [ "a-b" ] . id', ["steps.a-b.id"]),
        ("steps[`a`]?.id ?? steps?.['b']", ["steps.a.id", "steps.b"]),
        ("steps /* of ' all */ .a // and steps.b\n.id", ["steps.a.id"]),
        ("$env.steps.a == $env['steps'].b", ["steps.a", "steps.b"]),
        ("steps.a-b", ["steps.a", "b"]),
        ("größe.steps.a + x['k'].steps.b", ["größe.steps.a", "x.k.steps.b"]),
        ("f(x).steps.a + x[0].steps.b + (x).steps", ["f", "x", "x", "x"]),
        ("filter(xs, .steps == #.steps)", ["filter", "xs"]),
        ("{steps: 1, 'steps': {steps : steps.a}}", ["steps.a"]),
        ("go ? steps : tasks", ["go", "steps", "tasks"]),
        ("1..steps.a", ["steps.a"]),
        ("1.5e3 + 0x1f", []),
        ("steps[tasks.a.id].x", ["steps", "tasks.a.id"]),
        (r"""'it\'s steps.a' + "\"steps.b" + `\` + steps.c""", ["steps.c"]),
        ("`steps.a\nsteps.b` + 'steps.c", []),
    ],
)
def test_an_expression_is_cut_into_tokens(expression: str, found: list[str]) -> None:
    assert dotted({"expression": expression}) == found
    assert dotted([f"{{{{steps.x}}}} steps.y {{{{={expression}}}}}"]) == ["steps.x", *found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{ tasks.A.id }} tasks.A", "{{ all.a-x.id }} tasks.A"),
        ("{{= tasks . A?.id + 'tasks.A' }}", "{{= all ['a-x']?.id + 'tasks.A' }}"),
        ("{{=tasks?.A}} {{=tasks?.[ `A` ]}}", "{{=all?.['a-x']}} {{=all?.[ `a-x` ]}}"),
        ("{{=$env.tasks.A.ß}}", "{{=all['a-x'].ß}}"),
        ("{{=other.tasks.A}} {{other.tasks.A}}", "{{=other.tasks.A}} {{other.tasks.A}}"),
    ],
)
def test_names_change_where_they_are_members_of_the_variable(text: str, expected: str) -> None:
    def rename(variable: Variable) -> tuple[str, ...]:
        return ("all", "a-x", *variable.names[2:]) if variable.names[:2] == ("tasks", "A") else variable.names

    assert map_variables([{"value": text, "limit": 3}], rename) == [{"value": expected, "limit": 3}]


def test_a_variable_gets_more_names_or_gives_way_to_a_text() -> None:
    part = {"expression": "'{{ x.y }}' == x['y'] + x.z", "value": "{{x.z}}{{x.y}}{{x.y}}"}

    assert map_variables(part, lambda found: (*found.names, "s", "t-u") if found.names[-1] == "y" else "ü") == {
        "expression": "'{{ x.y.s.t-u }}' == x['y'].s['t-u'] + 'ü'",
        "value": "ü{{x.y.s.t-u}}{{x.y.s.t-u}}",
    }


@pytest.mark.parametrize(
    ("text", "task"),
    [("{{tasks.a.id}}", "a"), ("{{=tasks['a']}}", "a"), ("{{tasks.name}}", ""), ("{{tasks.name.id}}", "name")],
)
def test_the_name_of_the_own_task_reads_no_task(text: str, task: str) -> None:
    assert [variable.task for variable in find_variables(text)] == [task]
