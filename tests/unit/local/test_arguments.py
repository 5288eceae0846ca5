"""Arguments in, outputs out.

| input parameter | argument | default | value |
|---|---|---|---|
| given | yes | any | the argument |
| not given, or made by a skipped step | no | yes | the default |
| not given | no | no | error that names it |
"""

from datetime import UTC, datetime
from typing import Any

import pytest
from support.stories.local_engine import shell, workflow

from hera_pipelines.local.arguments import (
    VariableScope,
    bind_arguments,
    collect_outputs,
    node_scope,
    resolve_arguments,
)
from hera_pipelines.local.nodes import NodePhase, NodeTable, WorkflowNodeOutputs, ignore_change
from hera_pipelines.local.workflow_object import WorkflowDefinition, merge_defaults
from tiphys.errors import UsageError

SCOPE = VariableScope(
    {"steps.make.outputs.parameters.x": "1", "steps.gone.outputs.parameters.x": None, "inputs.parameters.p": "in"},
    {"steps.make.outputs.artifacts.m": {"name": "m", "path": "/there", "s3": {"key": "k"}, "optional": True}},
)


def template(**inputs: Any) -> dict[str, Any]:
    return {"name": "t", "inputs": inputs, "container": {"args": ["{{inputs.parameters.a}} {{workflow.name}}"]}}


def arguments(**parameters: Any) -> dict[str, Any]:
    return {"parameters": [{"name": name, "value": value} for name, value in parameters.items()]}


def args_of(bound: dict[str, Any]) -> str:
    text: str = bound["container"]["args"][0]
    return text


@pytest.mark.parametrize(
    ("declared", "given", "value"),
    [
        ({"name": "a"}, {"a": "x"}, "x"),
        ({"name": "a", "default": "d"}, {"a": "x"}, "x"),
        ({"name": "a", "default": "d"}, {}, "d"),
        ({"name": "a", "value": "v", "default": "d"}, {}, "v"),
        ({"name": "a"}, {"a": ""}, ""),
        ({"name": "a"}, {"a": True}, "true"),
        ({"name": "a"}, {"a": 0.5}, "0.5"),
        ({"name": "a", "default": "{{workflow.name}}!"}, {}, "wf!"),
    ],
)
def test_inputs_take_arguments_before_defaults(declared: dict[str, Any], given: dict[str, Any], value: str) -> None:
    bound = bind_arguments(template(parameters=[declared]), arguments(**given), {"workflow.name": "wf"})
    assert args_of(bound) == f"{value} wf"


def test_an_input_without_a_value_is_named() -> None:
    with pytest.raises(UsageError, match=r"inputs\.parameters\.a was not supplied and has no default"):
        bind_arguments(template(parameters=[{"name": "a"}]), {}, {})


def test_an_argument_that_looks_like_a_tag_stays_a_text() -> None:
    bound = bind_arguments(template(parameters=[{"name": "a"}]), arguments(a="{{inputs.parameters.b}}"), {})
    assert args_of(bound).startswith("{{inputs.parameters.b}}")


def test_input_artifacts_keep_their_own_path_and_take_the_place_of_the_bytes() -> None:
    given = {"artifacts": [{"name": "d", "s3": {"key": "given"}, "path": "/theirs"}]}
    bound = bind_arguments(template(artifacts=[{"name": "d", "path": "/mine", "s3": {"key": "own"}}]), given, {})
    assert bound["inputs"]["artifacts"] == [{"name": "d", "path": "/mine", "s3": {"key": "given"}}]


def test_an_input_artifact_may_name_its_own_place() -> None:
    bound = bind_arguments(template(artifacts=[{"name": "d", "path": "/mine", "s3": {"key": "own"}}]), {}, {})
    assert bound["inputs"]["artifacts"][0]["s3"] == {"key": "own"}


def test_a_missing_artifact_is_named_unless_it_is_optional() -> None:
    with pytest.raises(UsageError, match=r"inputs\.artifacts\.d was not supplied"):
        bind_arguments(template(artifacts=[{"name": "d", "path": "/d"}]), {}, {})
    bound = bind_arguments(template(artifacts=[{"name": "d", "path": "/d", "optional": True}]), {}, {})
    assert "s3" not in bound["inputs"]["artifacts"][0]


def test_arguments_that_a_skipped_step_never_made_are_not_given() -> None:
    resolved = resolve_arguments(
        arguments(x="{{steps.make.outputs.parameters.x}}", y="{{steps.gone.outputs.parameters.x}}"), SCOPE
    )
    assert resolved["parameters"] == [{"name": "x", "value": "1"}]


def test_artifacts_are_handed_on_by_their_key_alone() -> None:
    found = resolve_arguments({"artifacts": [{"name": "a", "from": "{{steps.make.outputs.artifacts.m}}"}]}, SCOPE)
    assert found["artifacts"] == [{"name": "a", "s3": {"key": "k"}}]


def test_an_artifact_that_was_not_made_is_named_unless_it_is_optional() -> None:
    missing = {"name": "a", "from": "{{steps.gone.outputs.artifacts.m}}"}
    with pytest.raises(UsageError, match=r"artifact a: \{\{steps\.gone\.outputs\.artifacts\.m\}\} does not exist"):
        resolve_arguments({"artifacts": [missing]}, SCOPE)
    assert resolve_arguments({"artifacts": [{**missing, "optional": True}]}, SCOPE)["artifacts"] == []


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ({"parameter": "{{steps.make.outputs.parameters.x}}"}, "1"),
        ({"parameter": "{{steps.gone.outputs.parameters.x}}", "default": "d"}, "d"),
        ({"parameter": "{{steps.none.outputs.parameters.x}}", "default": "d"}, "d"),
        ({"parameter": "{{inputs.parameters.p}}"}, "in"),
        ({"expression": "asInt(steps.make.outputs.parameters.x) + 1"}, "2"),
        ({"expression": "steps.gone.outputs.parameters.x ?? 'e'"}, "e"),
        ({"expression": "asInt(steps.gone.outputs.parameters.x)", "default": "d"}, "d"),
    ],
)
def test_outputs_of_a_composite(source: dict[str, str], value: str) -> None:
    declared = {"outputs": {"parameters": [{"name": "o", "valueFrom": source}]}}
    assert collect_outputs(declared, SCOPE) == WorkflowNodeOutputs({"o": value})


@pytest.mark.parametrize(
    "source", [{"parameter": "{{steps.gone.outputs.parameters.x}}"}, {"expression": "steps.none.id"}]
)
def test_an_output_without_a_value_is_an_error(source: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        collect_outputs({"outputs": {"parameters": [{"name": "o", "valueFrom": source}]}}, SCOPE)


def test_output_artifacts_of_a_composite() -> None:
    declared = [
        {"name": "a", "from": "{{steps.make.outputs.artifacts.m}}"},
        {"name": "b", "from": "{{steps.gone.outputs.artifacts.m}}", "optional": True},
    ]
    assert collect_outputs({"outputs": {"artifacts": declared}}, SCOPE) == WorkflowNodeOutputs(
        artifacts={"a": {"name": "a", "s3": {"key": "k"}}}
    )


# As in Argo: of the outputs of a skipped task there are the declared parameters, of those of a failed task none.
TASKS = VariableScope(
    {
        "tasks.admit.status": "Succeeded",
        "tasks.admit.outputs.parameters.x-y": "1",
        "tasks.skipped.status": "Skipped",
        "tasks.skipped.outputs.parameters.x-y": None,
        "tasks.failed.status": "Failed",
        "tasks.failed.exitCode": "1",
    },
    {"tasks.admit.outputs.artifacts.a-b": {"name": "a-b", "path": "/there", "s3": {"key": "k"}}},
)
ADMITTED = "tasks.admit.outputs.artifacts['a-b']"


def from_expression(text: str) -> dict[str, Any]:
    return {"outputs": {"artifacts": [{"name": "m", "fromExpression": text, "optional": True}]}}


@pytest.mark.parametrize("task", ["skipped", "failed"])
@pytest.mark.parametrize(
    "text",
    [
        f"tasks.TASK.status == 'Succeeded' ? tasks.TASK.outputs.artifacts['a-b'] : {ADMITTED}",
        f"tasks['TASK'].outputs?.artifacts?.['a-b'] ?? {ADMITTED}",
    ],
)
def test_an_artifact_may_come_from_either_of_two_tasks(task: str, text: str) -> None:
    assert collect_outputs(from_expression(text.replace("TASK", task)), TASKS) == WorkflowNodeOutputs(
        artifacts={"m": {"name": "m", "s3": {"key": "k"}}}
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"tasks.skipped.outputs.artifacts['a-b'] ?? {ADMITTED}", "cannot take 'a-b' of nil"),
        (f"tasks.failed.outputs.artifacts['a-b'] ?? {ADMITTED}", "cannot take 'artifacts' of nil"),
        (f"true ? {ADMITTED} : steps.gone.outputs.artifacts.x", "steps has no value here"),
        (f"workflow.name == 'wf' ? {ADMITTED} : nil", "workflow has no value here"),
        ("tasks.admit.outputs.artifacts['none']", "gives no artifact"),
        ("tasks.admit.status", "gives no artifact"),
        (f"{ADMITTED}.s3.key", "cannot take 's3'"),
    ],
)
def test_an_expression_without_an_artifact_is_an_error_even_for_an_optional_one(text: str, words: str) -> None:
    with pytest.raises(UsageError, match="artifact m: the expression") as caught:
        collect_outputs(from_expression(text), TASKS)
    assert words in str(caught.value)


def test_a_task_takes_an_artifact_by_an_expression() -> None:
    arguments = {"artifacts": [{"name": "d", "fromExpression": ADMITTED}]}
    assert resolve_arguments(arguments, TASKS)["artifacts"] == [{"name": "d", "s3": {"key": "k"}}]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("tasks.skipped.outputs.parameters['x-y'] ?? tasks.admit.outputs.parameters['x-y']", "1"),
        ("tasks.failed.status == 'Failed' ? 2 / 1 : tasks.failed.outputs.parameters['x-y']", "2"),
        ("tasks.failed.outputs.parameters['x-y']", "default"),
        ("tasks.skipped.outputs.parameters['x-y']", "default"),
        (f"{ADMITTED} != nil", "true"),
    ],
)
def test_output_parameters_of_tasks_that_did_not_succeed(text: str, value: str) -> None:
    source = {"expression": text, "default": "default"}
    declared = {"outputs": {"parameters": [{"name": "o", "valueFrom": source}]}}
    assert collect_outputs(declared, TASKS) == WorkflowNodeOutputs({"o": value})


@pytest.mark.parametrize("text", [ADMITTED, "['a']", "tasks.admit"])
def test_an_output_parameter_is_a_text_or_a_number(text: str) -> None:
    with pytest.raises(UsageError, match="is no text or number"):
        collect_outputs({"outputs": {"parameters": [{"name": "o", "valueFrom": {"expression": text}}]}}, TASKS)


@pytest.mark.parametrize(("kind", "places"), [("steps", {"steps.a.outputs.artifacts.m": {}}), ("tasks", {})])
def test_only_a_skipped_step_has_artifacts(kind: str, places: dict[str, Any]) -> None:
    table = NodeTable("wf", lambda: datetime(2026, 1, 1, tzinfo=UTC), ignore_change)
    node = table.add("wf.a", "Skipped", "t", "a", NodePhase.SKIPPED)
    assert node_scope(kind, "a", node, {"outputs": {"artifacts": [{"name": "m"}]}}).artifacts == places


def test_a_composite_without_outputs_has_none() -> None:
    assert collect_outputs({}, SCOPE) is None


def test_defaults_are_merged_below_what_a_template_says() -> None:
    assert merge_defaults({"a": {"x": 1, "y": 2}, "b": [1]}, {"a": {"x": 3}, "b": [2]}) == {
        "a": {"x": 3, "y": 2},
        "b": [2],
    }


def test_defaults_of_another_type_do_not_change_a_templates_type() -> None:
    defaults = {"container": {"image": "default"}, "script": {"image": "s"}}
    manifest = workflow(shell("true", "a"), {"name": "p", "plugin": {"x": {}}}, templateDefaults=defaults)
    definitions = WorkflowDefinition(manifest)
    assert "script" not in definitions.template("a")
    assert definitions.template("p").keys() == {"name", "plugin"}
