"""The ready pipeline: four programs, and what flows between them."""

from pathlib import Path
from typing import Any

import pytest
from hera.workflows import Env

from hera_pipelines import Checkpoints, Pipeline, grid
from hera_pipelines.pipelines import Program, Training, sweep_pipeline, train_pipeline
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline, find_template
from tiphys.protocol.gang import GangSpec
from tiphys.protocol.step_spec import StepKind


def program(name: str, **options: Any) -> Program:
    return Program(image=f"{name}:1", command=[name], options=options)


def ready(**fields: Any) -> Pipeline:
    programs = {name: program(name) for name in ("validate", "preprocess", "train", "register")}
    return train_pipeline("digits", store="s3://ml-runs/t", source="s3://raw", **{**programs, **fields})


def test_a_program_gets_what_the_one_before_made() -> None:
    pipeline = CompiledPipeline.from_manifest(ready().compile())

    flow = {task["name"]: (task.get("depends"), task.get("arguments", {})) for task in pipeline.tasks()}
    assert flow == {
        "validate": (None, {"parameters": [{"name": "source", "value": "{{workflow.parameters.source}}"}]}),
        "preprocess": (
            "validate",
            {
                "parameters": [
                    {"name": "source", "value": "{{workflow.parameters.source}}"},
                    {"name": "fingerprint", "value": "{{tasks.validate.outputs.parameters.fingerprint}}"},
                ]
            },
        ),
        "train": (
            "preprocess",
            {"artifacts": [{"name": "data", "from": "{{tasks.preprocess.outputs.artifacts.data}}"}]},
        ),
        "register": (
            "train",
            {
                "artifacts": [
                    {"name": "model", "from": "{{tasks.train.outputs.artifacts.model}}"},
                    {"name": "metrics", "from": "{{tasks.train.outputs.artifacts.metrics}}"},
                ]
            },
        ),
    }


def swept(**fields: Any) -> CompiledPipeline:
    programs = {name: program(name) for name in ("validate", "preprocess", "train", "register")}
    given = {"sweep": grid(lr=[0.1, 0.2], width=[64]), "metric": "loss", **programs, **fields}
    return CompiledPipeline.from_manifest(
        sweep_pipeline("digits", store="s3://ml-runs/t", source="s3://raw", **given).compile()
    )


def test_a_sweep_trains_many_times_on_the_same_data_and_registers_the_best() -> None:
    made = swept(parallel=2)
    tasks = {task["name"]: task for task in made.tasks()}

    assert list(tasks) == ["validate", "preprocess", "train", "best", "register"]
    assert tasks["train"]["withItems"] == [{"lr": 0.1, "width": 64}, {"lr": 0.2, "width": 64}]
    assert tasks["train"]["arguments"]["artifacts"] == [
        {"name": "data", "from": "{{tasks.preprocess.outputs.artifacts.data}}"}
    ]
    assert {one["from"] for one in tasks["register"]["arguments"]["artifacts"]} == {
        "{{tasks.best.outputs.artifacts.model}}",
        "{{tasks.best.outputs.artifacts.metrics}}",
    }
    assert find_template(made.manifest, "main")["parallelism"] == 2


def test_a_sweep_keeps_the_checkpoint_that_a_trial_is_compared_by() -> None:
    def keeps(**fields: Any) -> str:
        checkpoints = swept(mode="max", **fields).step("train").checkpoints
        return str(checkpoints.keep_best if checkpoints else None)

    assert keeps() == "loss:max:1"
    assert keeps(training=Training(checkpoints=Checkpoints(keep_best="error:min"))) == "error:min:1"
    assert keeps(training=Training(checkpoints=Checkpoints(keep_last=None))) == "None"


def test_only_validation_is_repeated_when_nothing_changed() -> None:
    steps = CompiledPipeline.from_manifest(ready().compile()).steps

    assert {name: spec.cache for name, spec in steps.items()} == {
        "validate": False,
        "preprocess": True,
        "train": True,
        "register": True,
    }
    assert {name for name, spec in steps.items() if spec.kind is StepKind.TRAIN} == {"train"}


def test_the_needs_of_training_are_the_training_steps() -> None:
    pipeline = ready(training=Training(gpus=8, queue="research", checkpoints=Checkpoints(every="1m"), grace="1m"))

    spec = CompiledPipeline.from_manifest(pipeline.compile()).step("train")
    assert spec.gpu is not None
    assert (spec.gpu.gpus, spec.gpu.queue, spec.grace_seconds) == (8, "research", 60)
    assert spec.checkpoints is not None
    assert spec.checkpoints.every == 60


def test_the_pipeline_trains_on_several_nodes() -> None:
    pipeline = ready(training=Training(gpus=8, nodes=4))
    assert CompiledPipeline.from_manifest(pipeline.compile()).step("train").gang == GangSpec(members=4)


def test_parameters_and_container_options_arrive() -> None:
    pipeline = ready(
        parameters={"lr": "0.1"}, run_name="digits-{lr}", train=program("train", env=Env(name="SEED", value="1"))
    )

    compiled = pipeline.compile()
    assert {"name": "lr", "value": "0.1"} in compiled["spec"]["arguments"]["parameters"]
    assert find_template(compiled, "train-run")["container"]["env"][0] == {"name": "SEED", "value": "1"}


def test_a_value_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(UsageError, match="step 'train': grace"):
        ready(training=Training(grace="soon"))


def test_a_program_that_is_not_root_can_make_the_folder_of_its_outputs() -> None:
    """Kubernetes makes every folder on the way to an input as root; none of them may be one of an output."""
    manifest = ready().compile()
    for made in (find_template(manifest, name) for name in ("train-run", "register")):
        inputs = [Path(artifact["path"]) for artifact in made["inputs"]["artifacts"]]
        outputs = [Path(artifact["path"]) for artifact in made["outputs"].get("artifacts", [])]
        outputs += [Path(parameter["valueFrom"]["path"]) for parameter in made["outputs"].get("parameters", [])]
        assert outputs
        by_root = {folder for path in inputs for folder in path.parents} - {Path("/"), Path("/tmp")}
        assert by_root.isdisjoint(folder for path in outputs for folder in path.parents)
