"""The entry DAG of a pipeline with ``reuse=True``: a gate in front, and readers of its outputs or those of a step.

| a step | the gate decides about it |
|---|---|
| with `share`, whose inputs are known at the start | yes |
| behind such steps only | yes |
| behind another, or with a gate, a fan-out, a condition, hooks, without `share`, with `cache=False` | no |
| of which an exit code, or anything in the outputs of the pipeline, is read | no |
"""

from typing import Any

import pytest
from support.builders.authored_workflows import (
    STORE,
    artifact,
    by_name,
    output_parameter,
    parameters,
    plain,
    step,
    task,
    train,
    workflow,
)

from hera_pipelines.compile import CompileOptions, compile_workflow
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.protocol.operations import PLUGIN_BODY_KEY

MADE = {"outputs": {"parameters": [output_parameter("rows")], "artifacts": [artifact("data")]}}
TAKEN = "tasks['tiphys-reuse'].outputs.parameters['prep'] == 'true'"
ROWS = f"{TAKEN} ? tasks['tiphys-reuse'].outputs.parameters['prep__rows'] : tasks['prep'].outputs.parameters['rows']"


def shared(name: str = "prep", *, asked: Manifest | None = None, **fields: Any) -> Manifest:
    return step(name, asked={"share": True, **(asked or {})}, **MADE, **fields)


def with_gate(*templates: Manifest, **fields: Any) -> Manifest:
    return compile_workflow(workflow(*templates, **fields), CompileOptions(store=STORE, reuse=True))


def gated_tasks(*templates: Manifest, **fields: Any) -> dict[str, Manifest]:
    made = with_gate(*templates, **fields)
    return {one["name"]: one for one in by_name(made)[made["spec"]["entrypoint"]]["dag"]["tasks"]}


def decided(*templates: Manifest, **fields: Any) -> list[str]:
    """The steps that the gate decides about."""
    body = by_name(with_gate(*templates, **fields))["tiphys-reuse"]["plugin"][PLUGIN_BODY_KEY]
    assert body["op"] == "reuse"
    return list(body["steps"])


def reader(**fields: Any) -> Manifest:
    return task("read", "read", **fields)


def given(name: str, value: str) -> Manifest:
    return {"arguments": {"parameters": [{"name": name, "value": value}]}}


READ = step("read", inputs=parameters("n"))


def test_a_shared_step_waits_for_the_gate_and_is_skipped_where_it_is_taken_over() -> None:
    tasks = gated_tasks(shared(), step("other"))
    assert list(tasks) == ["tiphys-reuse", "wake-tiphys-reuse", "wake-tiphys-reuse-again", "prep", "other"]
    assert tasks["prep"] == {
        "name": "prep",
        "template": "prep",
        "depends": "tiphys-reuse",
        "when": "{{tasks.tiphys-reuse.outputs.parameters.prep}} != true",
    }
    assert tasks["other"] == {"name": "other", "template": "other"}


@pytest.mark.parametrize(
    ("field", "written", "read"),
    [
        ("value", "{{tasks.prep.outputs.parameters.rows}}", f"{{{{={ROWS}}}}}"),
        (
            "value",
            "a {{tasks.prep.outputs.parameters.rows}} {{workflow.name}}",
            f"a {{{{={ROWS}}}}} {{{{workflow.name}}}}",
        ),
        ("value", "{{=asInt(tasks.prep.outputs.parameters.rows) + 1}}", f"{{{{=asInt(({ROWS})) + 1}}}}"),
        ("value", "{{tasks.prep.status}}", f"{{{{={TAKEN} ? 'Succeeded' : tasks['prep'].status}}}}"),
        ("value", "{{tasks.prep-b.outputs.parameters.rows}}", "{{tasks.prep-b.outputs.parameters.rows}}"),
        ("value", "tasks.prep.outputs.parameters.rows ü", "tasks.prep.outputs.parameters.rows ü"),
    ],
)
def test_a_reader_gets_the_value_of_the_gate_or_of_the_step(field: str, written: str, read: str) -> None:
    calls = [task("prep"), task("prep-b"), reader(**given("n", written))]
    others = step("prep-b", asked={"cache": False}, **MADE)
    tasks = gated_tasks(shared(), others, READ, tasks=calls)
    assert tasks["read"]["arguments"]["parameters"] == [{"name": "n", field: read}]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("prep", "prep"),
        ("prep.Succeeded", "prep.Succeeded || prep.Skipped"),
        ("prep.Succeeded && !other.Failed", "(prep.Succeeded || prep.Skipped) && !other.Failed"),
        ("prep.Failed || other", "prep.Failed || other"),
        ("prep && !prep.Skipped", "prep && !(prep.Succeeded && prep.Failed)"),
    ],
)
def test_a_condition_takes_a_step_that_is_taken_over_for_one_that_succeeded(written: str, read: str) -> None:
    tasks = gated_tasks(
        shared(), plain("other"), plain("read"), tasks=[task("prep"), task("other"), reader(depends=written)]
    )
    assert tasks["read"]["depends"] == read


def test_a_dag_of_dependency_lists_stays_one() -> None:
    calls = [task("first"), task("second", dependencies=["first"]), reader(dependencies=["second"])]
    tasks = gated_tasks(shared("first"), shared("second"), plain("read"), tasks=calls)
    assert not any("depends" in one for one in tasks.values()), "Argo takes one of both in a DAG"
    assert {name: one.get("dependencies") for name, one in tasks.items()} == {
        "tiphys-reuse": None,
        "wake-tiphys-reuse": None,
        "wake-tiphys-reuse-again": ["wake-tiphys-reuse"],
        "first": ["tiphys-reuse"],
        "second": ["first", "tiphys-reuse"],
        "read": ["second"],
    }


def test_an_artifact_comes_from_the_gate_or_from_the_step_with_its_subpath() -> None:
    source = {"name": "data", "from": "{{tasks.prep.outputs.artifacts.data}}", "subPath": "a/b"}
    calls = [task("prep"), reader(arguments={"artifacts": [source, {"name": "own", "s3": {"key": "k"}}]})]
    inputs = {"artifacts": [artifact("data"), artifact("own")]}
    tasks = gated_tasks(shared(), train("read", inputs=inputs), tasks=calls)
    assert tasks["read"]["arguments"]["artifacts"] == [
        {
            "name": "data",
            "subPath": "a/b",
            "fromExpression": f"{TAKEN} ? tasks['tiphys-reuse'].outputs.artifacts['prep__data'] : "
            "tasks['prep'].outputs.artifacts['data']",
            "s3": {"key": "unused"},
        },
        {"name": "own", "s3": {"key": "k"}},
    ]


def test_a_fan_out_reads_its_list_from_the_gate_or_from_the_step() -> None:
    calls = [task("prep"), reader(withParam="{{tasks.prep.outputs.parameters.rows}}", **given("n", "{{item}}"))]
    tasks = gated_tasks(shared(), READ, tasks=calls)
    assert tasks["read"]["withParam"] == f"{{{{={ROWS}}}}}"


BEHIND = [task("prep"), task("next", depends="prep"), task("last", depends="next && prep")]


@pytest.mark.parametrize(
    ("first", "steps"),
    [
        (shared(), ["prep", "next", "last"]),
        (shared(asked={"cache": False}), []),
        (step("prep", **MADE), []),
        (shared(asked={"gate": True}), []),
    ],
    ids=["shared", "never cached", "not shared", "with a gate"],
)
def test_the_gate_decides_about_steps_behind_those_that_it_decides_about(first: Manifest, steps: list[str]) -> None:
    templates = [first, shared("next"), shared("last"), shared("alone")]
    found = decided(*templates, tasks=[*BEHIND, task("alone")])
    assert [name for name in found if name != "alone"] == steps
    assert "alone" in found


@pytest.mark.parametrize(
    "changes",
    [
        {"withItems": ["a", "b"]},
        {"when": "{{workflow.name}} == x"},
        {"hooks": {"exit": {"template": "bye"}}},
        {"onExit": "bye"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_step_with_a_flow_of_its_own_runs(changes: Manifest) -> None:
    calls = [task("prep", **changes), task("alone")]
    assert decided(shared(), shared("alone"), plain("bye"), tasks=calls) == ["alone"]


def test_a_step_whose_outputs_the_pipeline_exports_runs() -> None:
    exported = {"parameters": [{"name": "n", "valueFrom": {"parameter": "{{tasks.prep.outputs.parameters.rows}}"}}]}
    calls = [task("prep"), task("alone")]
    entry = {"outputs": exported}
    assert decided(shared(), shared("alone"), tasks=calls, entry=entry) == ["alone"]


@pytest.mark.parametrize("read", ["{{tasks.prep.startedAt}}", "{{=tasks.prep.id}}", "{{=tasks['prep']}}"])
def test_a_step_of_which_a_reader_wants_more_than_outputs_runs(read: str) -> None:
    calls = [task("prep"), task("alone"), reader(**given("n", read))]
    assert decided(shared(), shared("alone"), READ, tasks=calls) == ["alone"]


def test_a_step_whose_artifact_a_reader_can_do_without_runs() -> None:
    source = {"name": "data", "from": "{{tasks.prep.outputs.artifacts.data}}", "optional": True}
    calls = [task("prep"), task("alone"), reader(arguments={"artifacts": [source]})]
    read = step("read", inputs={"artifacts": [artifact("data", optional=True)]})
    assert decided(shared(), shared("alone"), read, tasks=calls) == ["alone"]


def test_targets_of_the_dag_take_the_timers_of_the_gate_along() -> None:
    made = with_gate(
        shared(), plain("other"), entry={"dag": {"target": "prep", "tasks": [task("prep"), task("other")]}}
    )
    assert by_name(made)["tiphys-reuse-main"]["dag"]["target"] == "prep wake-tiphys-reuse-again"
    assert by_name(made)["main"]["dag"]["target"] == "prep"


@pytest.mark.parametrize("name", ["tiphys-reuse", "wake-tiphys-reuse", "wake-tiphys-reuse-again"])
def test_a_task_with_a_name_of_the_gate_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"task '{name}' has the name of a task of the gate"):
        with_gate(shared(), plain("other"), tasks=[task("prep"), task(name, "other")])


def test_a_pipeline_without_anything_to_take_over_is_refused() -> None:
    with pytest.raises(UsageError, match="reuse=True, but nothing can be taken over at its start: give share=True"):
        with_gate(step(), train())


def test_a_run_is_recorded_as_if_there_were_no_gate() -> None:
    templates = [shared(), shared("next"), train(), READ]
    calls = [*BEHIND[:2], task("fit", depends="next"), reader(**given("n", "{{tasks.prep.outputs.parameters.rows}}"))]
    plainly = compile_workflow(workflow(*templates, tasks=calls), CompileOptions(store=STORE))
    recorded = CompiledPipeline.from_manifest(with_gate(*templates, tasks=calls)).manifest
    assert recorded == plainly


def test_a_pipeline_of_very_many_shared_steps_compiles() -> None:
    names = [f"prep-{number}" for number in range(300)]
    assert decided(shared(), tasks=[task(name, "prep") for name in names]) == names
