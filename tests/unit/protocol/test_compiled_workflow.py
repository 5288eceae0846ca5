"""Reading a compiled Workflow, and refusing what Tiphys did not compile."""

from typing import Any

import pytest

from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline, find_template, read_workflow_parameters
from tiphys.protocol.step_spec import StepKind, StepSpec


def manifest(*templates: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    entry = {"name": "main", "dag": {"tasks": [{"name": "prep", "template": "prep"}, {"name": "fit"}]}}
    return {
        "metadata": {
            "annotations": {"tiphys.dev/pipeline": "digits", "tiphys.dev/store": "s3://ml-runs/tiphys"},
            **metadata,
        },
        "spec": {"entrypoint": "main", "templates": [entry, *templates]},
    }


def annotated(spec: StepSpec) -> dict[str, Any]:
    return {"name": spec.name, "metadata": {"annotations": {"tiphys.dev/step": spec.model_dump_json()}}}


FIT = StepSpec(name="fit", kind=StepKind.TRAIN, template="t1")
PREP = StepSpec(name="prep", kind=StepKind.STEP, template="t2", artifacts=("data",))


def test_a_compiled_workflow_tells_its_name_store_and_steps() -> None:
    pipeline = CompiledPipeline.from_manifest(manifest(annotated(FIT), {"name": "plain"}, annotated(PREP)))

    assert (pipeline.name, pipeline.store) == ("digits", "s3://ml-runs/tiphys")
    assert pipeline.steps == {"fit": FIT, "prep": PREP}
    assert pipeline.step("fit") == FIT
    assert [task["name"] for task in pipeline.tasks()] == ["prep", "fit"]


def test_a_called_task_of_an_ungated_template_is_a_step_and_an_uncalled_one_is_none() -> None:
    calls = [
        {"name": "one", "template": "prep"},
        {"name": "two", "template": "prep", "withItems": [1]},
        {"name": "fit", "template": "fit"},
        {"name": "elsewhere", "templateRef": {"name": "library", "template": "prep"}},
    ]
    unused = PREP.model_copy(update={"name": "unused"})
    document = manifest(annotated(PREP), annotated(FIT), annotated(unused), {"name": "plain"})
    document["spec"]["templates"][0]["dag"]["tasks"] = calls
    document["spec"]["templates"].append({"name": "inner", "dag": {"tasks": [{"name": "three", "template": "prep"}]}})

    steps = CompiledPipeline.from_manifest(document).steps
    assert steps == {
        "one": PREP.model_copy(update={"name": "one"}),
        "two": PREP.model_copy(update={"name": "two", "fan_out": True}),
        "fit": FIT,
    }
    assert list(steps) == ["one", "two", "fit"], "in the order of the tasks"
    assert [spec.is_gated for spec in steps.values()] == [False, False, True]


@pytest.mark.parametrize("metadata", [{}, {"annotations": None}, {"annotations": {"other": "x"}}])
def test_a_workflow_of_another_maker_is_refused_with_what_to_do(metadata: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"Tiphys did not compile it; compile the pipeline with `tiphys compile`"):
        CompiledPipeline.from_manifest({"metadata": metadata, "spec": {}})


def test_a_workflow_of_a_template_without_its_metadata_is_refused_with_the_command() -> None:
    spec = {"arguments": {"parameters": [{"name": "tiphys-run", "value": ""}]}}
    with pytest.raises(UsageError, match=r"lacks spec\.workflowMetadata.*`tiphys compile --as workflowtemplate`"):
        CompiledPipeline.from_manifest({"metadata": {"name": "digits-x2"}, "spec": spec})


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "fit"}', '{"name": "fit", "kind": "x", "template": "t"}'])
def test_a_damaged_annotation_names_its_template(text: str) -> None:
    broken = {"name": "fit", "metadata": {"annotations": {"tiphys.dev/step": text}}}

    with pytest.raises(UsageError, match=r"template 'fit': annotation tiphys[.]dev/step is damaged"):
        CompiledPipeline.from_manifest(manifest(broken))


def test_an_unknown_step_is_refused_with_the_known_ones() -> None:
    pipeline = CompiledPipeline.from_manifest(manifest(annotated(PREP), annotated(FIT)))

    with pytest.raises(UsageError, match="pipeline digits has no step 'eval'; it has: fit, prep"):
        pipeline.step("eval")


def test_a_pipeline_without_steps_says_so() -> None:
    with pytest.raises(UsageError, match="it has: none"):
        CompiledPipeline.from_manifest(manifest()).step("fit")


def test_a_missing_entry_point_is_named() -> None:
    document = manifest()
    document["spec"]["entrypoint"] = "other"

    with pytest.raises(UsageError, match="no template 'other'"):
        CompiledPipeline.from_manifest(document).tasks()


def test_an_entry_point_that_is_no_dag_has_no_tasks() -> None:
    document = manifest({"name": "steps", "steps": []})
    document["spec"]["entrypoint"] = "steps"

    assert CompiledPipeline.from_manifest(document).tasks() == []


def test_a_template_is_found_by_its_name() -> None:
    assert find_template(manifest({"name": "plain", "container": {}}), "plain") == {"name": "plain", "container": {}}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (None, {}),
        ({}, {}),
        ({"parameters": None}, {}),
        ({"parameters": [{"name": "lr", "value": "0.1"}, {"name": "empty", "value": ""}]}, {"lr": "0.1", "empty": ""}),
        ({"parameters": [{"name": "n", "value": 3}, {"name": "unset"}, {"name": "null", "value": None}]}, {"n": "3"}),
    ],
)
def test_workflow_parameters_are_text_and_only_those_with_a_value(
    arguments: dict[str, Any] | None, expected: dict[str, str]
) -> None:
    assert read_workflow_parameters({"spec": {"arguments": arguments}}) == expected
