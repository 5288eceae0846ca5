"""A task waits for the tasks whose outputs it takes, said or not."""

from typing import Any

import pytest

from hera_pipelines.compile.references import (
    add_dependencies,
    fields_used,
    read_results_as_parameters,
)
from tiphys.recording.step_key import workflow_parameters_used


def taking(name: str, value: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "arguments": {"parameters": [{"name": "x", "value": value}]}, **fields}


USES_A = "{{tasks.a.outputs.parameters.x}}"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"depends": "a"}),
        ({"depends": "b"}, {"depends": "b && a"}),
        ({"depends": "b || c.Failed"}, {"depends": "(b || c.Failed) && a"}),
        ({"depends": "a.Succeeded || a.Failed"}, {"depends": "a.Succeeded || a.Failed"}),
        ({"depends": "!a.Failed&&b"}, {"depends": "!a.Failed&&b"}),
        ({"dependencies": ["b"]}, {"dependencies": ["b", "a"]}),
        ({"dependencies": ["a"]}, {"dependencies": ["a"]}),
    ],
)
def test_a_missing_dependency_is_added_and_a_given_one_kept(given: dict[str, Any], expected: dict[str, Any]) -> None:
    task = taking("d", USES_A, **given)

    add_dependencies([{"name": "a"}, {"name": "b"}, {"name": "c"}, task])

    assert {k: v for k, v in task.items() if k in ("depends", "dependencies")} == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"when": "{{tasks.a.outputs.parameters.go}} == true"},
        {"withParam": "{{tasks.a.outputs.parameters.items}}"},
        {"arguments": {"artifacts": [{"name": "m", "from": "{{tasks.a.outputs.artifacts.m}}"}]}},
        {"arguments": {"artifacts": [{"name": "m", "fromExpression": "tasks.a.outputs.artifacts.m"}]}},
        {"arguments": {"parameters": [{"name": "x", "value": "{{= tasks['a'].outputs.parameters.x ?? '' }}"}]}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_every_place_that_can_take_an_output_counts(fields: dict[str, Any]) -> None:
    task = {"name": "d", **fields}

    add_dependencies([{"name": "a"}, task])

    assert task["depends"] == "a"


def test_an_ancestor_further_up_is_not_named_again() -> None:
    tasks = [{"name": "a"}, {"name": "b", "depends": "a"}, taking("c", USES_A, depends="b")]

    add_dependencies(tasks)

    assert tasks[2]["depends"] == "b"


def test_a_dag_that_mixes_both_words_comes_out_with_one() -> None:
    # Argo refuses a DAG whose tasks use `depends` here and `dependencies` there.
    tasks: list[dict[str, Any]] = [
        {"name": "a"},
        {"name": "b", "dependencies": ["a"]},
        taking("c", USES_A, dependencies=["b"]),
        {"name": "d", "depends": "a.Failed || c"},
    ]

    add_dependencies(tasks)

    assert [task.get("depends") for task in tasks] == [None, "a", "b", "a.Failed || c"]
    assert not any("dependencies" in task for task in tasks)


@pytest.mark.parametrize("other", [{"dependencies": ["a"]}, {"continueOn": {"failed": True}}])
def test_a_dag_written_with_lists_keeps_them(other: dict[str, Any]) -> None:
    # `continueOn` is allowed beside `dependencies` only.
    tasks = [{"name": "a"}, {"name": "b", **other}, taking("c", USES_A)]

    add_dependencies(tasks)

    assert tasks[2]["dependencies"] == ["a"]
    assert "depends" not in tasks[2]


@pytest.mark.parametrize(
    "value",
    [
        "tasks.a is text",
        "{{tasks.unknown.outputs.parameters.x}}",
        "{{item}}",
        "{{=jsonpath(workflow.parameters.x, '$.tasks.a')}}",
        "{{=item.tasks.a + `tasks['a']`}}",
    ],
)
def test_a_text_that_is_no_reference_adds_no_dependency(value: str) -> None:
    task = taking("d", value)

    add_dependencies([{"name": "a"}, task])

    assert "depends" not in task


def test_a_task_that_is_awaited_by_way_of_others_is_not_named_again() -> None:
    condition = "(b.Succeeded || b.Failed)"
    tasks: list[dict[str, Any]] = [
        {"name": "a"},
        {"name": "b", "dependencies": ["a"]},
        taking("c", USES_A, depends=condition),
        taking("d", USES_A, depends="other"),
        {"name": "other"},
    ]

    add_dependencies(tasks)

    assert [task.get("depends") for task in tasks] == [None, "a", condition, "other && a", None]


def test_workflow_parameters_are_found_in_any_spelling() -> None:
    part = ["{{workflow.parameters.a-b}}", {"x": "{{=asInt(workflow.parameters['c'])}}"}, "workflow.parameters.text"]
    part.append("""{{=jsonpath('$.workflow.parameters.d', "workflow.parameters['e']")}}""")

    assert workflow_parameters_used(part) == ["a-b", "c"]


def test_uses_do_not_confuse_tasks_of_similar_names() -> None:
    assert fields_used("{{tasks.fit.exitCode}}", ["ip", "exitCode"]) == {("fit", "exitCode")}
    assert fields_used("{{tasks.fit-2.exitCode}}", ["exitCode"]) == {("fit-2", "exitCode")}
    assert fields_used("{{=tasks['fit-2'].outputs.result}}", ["outputs.result"]) == {("fit-2", "outputs.result")}
    assert fields_used("{{tasks.fit.exitCodes}} tasks.fit.exitCode", ["exitCode"]) == set()


def test_the_printed_result_of_a_step_is_read_as_a_parameter_in_any_spelling() -> None:
    value = (
        "{{tasks.a.outputs.result}} "
        "{{=tasks['a'].outputs['result'] + 'tasks.a.outputs.result' + tasks.b.outputs.result}}"
    )
    entry = {"dag": {"tasks": [taking("d", value)]}}

    read_results_as_parameters(entry, ["a"])

    assert entry["dag"]["tasks"][0]["arguments"]["parameters"][0]["value"] == (
        "{{tasks.a.outputs.parameters.result}} "
        "{{=tasks['a'].outputs['parameters'].result + 'tasks.a.outputs.result' + tasks.b.outputs.result}}"
    )
