"""What the pruned Workflow looks like; that it means the same is held by tests/property/test_prune.py."""

from typing import Any

import pytest
from support.builders.compiled_workflows import gated, pipeline_of, plain
from tiphys_controller.plan.decide import PlanAction, PlanDecisions, TaskPlan
from tiphys_controller.plan.prune import SubmissionIdentity, apply_identity, prune_workflow, workflow_name

from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.protocol.depends import DONE_RESULTS
from tiphys.recording.bindings import (
    OMITTED_OUTPUTS,
    Reference,
    TaskOutputs,
    bind_references,
    find_references,
    find_unbound_references,
)

IDENTITY = SubmissionIdentity("digits-1", 2, "digits-1-2", "ml")
DONE = {"prep": TaskOutputs({"status": "Succeeded", "outputs.parameters.n": "5"}, {"data": "data/runs/digits/x/data"})}


def with_prefix(key: str) -> str:
    return f"team/{key}"


def pruned(
    manifest: Manifest,
    *running: str,
    finished: dict[str, TaskOutputs] = DONE,
    facts: frozenset[str] = DONE_RESULTS,
) -> Manifest:
    names = [task["name"] for task in manifest["spec"]["templates"][0]["dag"]["tasks"]]
    tasks = tuple(
        TaskPlan(name, PlanAction.RUN, "") if name in running else TaskPlan(name, PlanAction.SKIP, "", facts)
        for name in names
    )
    plan = PlanDecisions(tasks, dict.fromkeys(running, finished))
    return prune_workflow(CompiledPipeline.from_manifest(manifest), plan, with_prefix, IDENTITY)


def tasks(manifest: Manifest) -> dict[str, Manifest]:
    return {task["name"]: task for task in manifest["spec"]["templates"][0]["dag"]["tasks"]}


def parameter(value: str) -> dict[str, Any]:
    return {"parameters": [{"name": "n", "value": value}]}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("{{tasks.prep.outputs.parameters.n}}", "5"),
        ("{{ tasks.prep.outputs.parameters.n }}-{{tasks.prep.status}}", "5-Succeeded"),
        ("{{tasks.other.outputs.parameters.n}}", "{{tasks.other.outputs.parameters.n}}"),
        ("{{workflow.parameters.lr}} {{item}} {{=1 + 1}}", "{{workflow.parameters.lr}} {{item}} {{=1 + 1}}"),
    ],
)
def test_values_of_finished_tasks_are_put_in(before: str, after: str) -> None:
    assert bind_references(parameter(before), DONE, with_prefix) == parameter(after)


def test_values_reach_conditions_fan_outs_and_hooks() -> None:
    tag = "{{tasks.prep.outputs.parameters.n}}"
    body = {"when": f"{tag} > 3", "withParam": tag, "hooks": {"exit": {"template": "t", "arguments": parameter(tag)}}}

    assert bind_references(body, DONE, with_prefix) == {
        "when": "5 > 3",
        "withParam": "5",
        "hooks": {"exit": {"template": "t", "arguments": parameter("5")}},
    }


def test_artifacts_are_bound_by_their_key_in_the_bucket() -> None:
    source = {"name": "d", "from": "{{tasks.prep.outputs.artifacts.data}}", "optional": True}

    assert bind_references({"artifacts": [source]}, DONE, with_prefix) == {
        "artifacts": [{"name": "d", "optional": True, "s3": {"key": "team/data/runs/digits/x/data"}}]
    }


def test_a_path_below_an_artifact_becomes_part_of_its_key() -> None:
    source = {"name": "d", "from": "{{tasks.prep.outputs.artifacts.data}}", "subPath": "train/{{item}}"}

    assert bind_references(source, DONE, with_prefix) == {
        "name": "d",
        "s3": {"key": "team/data/runs/digits/x/data/train/{{item}}"},
    }


@pytest.mark.parametrize(
    "value",
    [
        "{{tasks.prep.id}}",
        "{{tasks.prep.outputs.result}}",
        "{{tasks.prep.outputs.parameters.missing}}",
        "{{tasks.prep.outputs.artifacts.data}}",
        "{{=tasks.prep.outputs.parameters.n}}",
        "{{=tasks['prep'].status == 'Succeeded'}}",
    ],
)
def test_a_reference_that_storage_cannot_answer_is_reported(value: str) -> None:
    assert [reference.task for reference in find_unbound_references(parameter(value), DONE)] == ["prep"]


def test_an_expression_for_an_artifact_is_reported() -> None:
    body = {"artifacts": [{"name": "d", "fromExpression": "tasks.prep.outputs.artifacts.data"}]}

    assert find_unbound_references(body, DONE) == [Reference("prep", "")]


@pytest.mark.parametrize(
    "value",
    [
        "{{inputs.parameters.tasks.prep}} tasks.prep.outputs {{mytasks.prep.x}}",
        "{{=jsonpath(workflow.parameters.x, '$.tasks.prep')}}",
        "{{=item.tasks.prep + item['tasks'].prep + tasks.name}}",
    ],
)
def test_a_text_that_only_looks_like_a_task_is_left_alone(value: str) -> None:
    assert list(find_references({"value": value})) == []


def test_a_reference_that_cannot_be_answered_is_refused_by_name() -> None:
    manifest = pipeline_of(gated("prep"), gated("fit", arguments=parameter("{{tasks.prep.outputs.parameters.n}}")))

    with pytest.raises(UsageError, match=r"task fit reads \{\{tasks.prep.outputs.parameters.n\}\}, but prep does not"):
        pruned(manifest, "fit", finished={"prep": OMITTED_OUTPUTS})


def test_dependencies_on_finished_tasks_are_dropped() -> None:
    manifest = pipeline_of(
        gated("prep"), gated("a", dependencies=["prep"]), gated("b", dependencies=["prep", "a"]), gated("c")
    )

    found = tasks(pruned(manifest, "a", "b", "c"))

    assert {name: task.get("dependencies") for name, task in found.items()} == {"a": None, "b": ["a"], "c": None}


def test_conditions_over_finished_tasks_are_simplified_and_others_left_as_written() -> None:
    manifest = pipeline_of(
        gated("prep"),
        gated("a", depends="prep"),
        gated("b", depends="prep.Succeeded  &&  a.Succeeded"),
        gated("c", depends="a  ||  b"),
    )

    found = tasks(pruned(manifest, "a", "b", "c"))

    assert {name: task.get("depends") for name, task in found.items()} == {
        "a": None,
        "b": "a.Succeeded",
        "c": "a  ||  b",
    }


def test_templates_that_nothing_leads_to_are_dropped() -> None:
    manifest = pipeline_of(gated("prep"), gated("fit", depends="prep"), plain("notify", depends="fit"))

    names = [one["name"] for one in pruned(manifest, "fit", "notify")["spec"]["templates"]]

    assert names == ["main", "fit", "fit-admit", "fit-run", "fit-conclude", "notify", "tiphys-finalize"]


def test_templates_of_hooks_and_nested_dags_are_kept() -> None:
    manifest = pipeline_of(
        gated("prep"),
        plain("nested", hooks={"exit": {"template": "hook"}}),
        hooks={"running": {"template": "alarm", "expression": "true"}},
    )
    inner = {"dag": {"tasks": [{"name": "x", "template": "leaf", "onExit": "leaf-exit"}]}}
    extra = [{"name": name, "container": {}} for name in ("hook", "alarm", "leaf", "leaf-exit", "unused")]
    templates = [one for one in manifest["spec"]["templates"] if one["name"] != "nested"]
    manifest["spec"]["templates"] = [*templates, {"name": "nested", **inner}, *extra]

    names = {one["name"] for one in pruned(manifest, "nested")["spec"]["templates"]}

    assert names == {"main", "nested", "leaf", "leaf-exit", "hook", "alarm", "tiphys-finalize"}


def test_a_template_named_at_run_time_keeps_all() -> None:
    manifest = pipeline_of(gated("prep"), plain("any"))
    manifest["spec"]["templates"][0]["dag"]["tasks"][1]["template"] = "{{workflow.parameters.which}}"

    found = pruned(manifest, "any")

    assert len(found["spec"]["templates"]) == len(manifest["spec"]["templates"])


def test_the_recorded_manifest_is_not_changed() -> None:
    def fresh() -> Manifest:
        return pipeline_of(gated("prep"), gated("fit", depends="prep", arguments=parameter("{{tasks.prep.status}}")))

    manifest = fresh()
    pruned(manifest, "fit")

    assert manifest == fresh()


def test_fields_added_by_the_server_are_not_copied() -> None:
    manifest = pipeline_of(gated("prep"), serviceAccountName="trainer", shutdown="Stop")
    manifest["status"] = {"phase": "Failed"}
    manifest["metadata"] |= {
        "name": "old",
        "uid": "u",
        "resourceVersion": "7",
        "ownerReferences": [{"kind": "CronWorkflow"}],
        "labels": {
            "team": "vision",
            "workflows.argoproj.io/completed": "true",
            "workflows.argoproj.io/cron-workflow": "nightly",
            "workflows.argoproj.io/controller-instanceid": "blue",
        },
    }

    found = apply_identity(manifest, IDENTITY)

    assert found["metadata"] == {
        "name": "digits-1-2",
        "namespace": "ml",
        "annotations": manifest["metadata"]["annotations"],
        "labels": {
            "team": "vision",
            "workflows.argoproj.io/controller-instanceid": "blue",
            "tiphys.dev/run": "digits-1",
        },
    }
    assert "status" not in found
    assert "shutdown" not in found["spec"]
    assert found["spec"]["serviceAccountName"] == "trainer"


@pytest.mark.parametrize(
    ("run", "submission", "name"),
    [
        ("digits-1", 1, "digits-1"),
        ("digits-1", 12, "digits-1-12"),
        ("a" * 61, 2, "a" * 61 + "-2"),
    ],
)
def test_a_workflow_is_named_after_run_and_number(run: str, submission: int, name: str) -> None:
    assert workflow_name(run, submission) == name


def test_names_that_grow_too_long_are_cut_and_stay_apart() -> None:
    runs = ["a" * 63, "a" * 62 + "b", "a" * 50 + "-" * 12 + "c"]
    names = [workflow_name(run, submission) for run in runs for submission in (2, 3, 10**6)]

    assert len(set(names)) == len(names)
    assert [len(name) for name in names[:3]] == [63, 63, 63]
    assert all(len(name) <= 63 for name in names)
