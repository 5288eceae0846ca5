"""Pipelines as Kubeflow's tutorials write them, compiled by its own SDK, are imported or refused by name and remedy.

``kubeflow/pipelines.py.txt`` is their source. ``tests/integration/test_kubeflow.py`` compiles it again and runs what is
imported, with Kubeflow's own executor.
"""

from pathlib import Path

import pytest

from hera_pipelines.authoring.adoption.kubeflow import read_kubeflow_pipeline
from hera_pipelines.authoring.adoption.translation import translate_workflow
from hera_pipelines.compile import CompileOptions, compile_workflow
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.protocol.step_spec import StepKind

SAMPLES = Path(__file__).parent / "kubeflow"
STEPS = {
    "hello-world": ["say-hello"],
    "addition-pipeline": ["add", "add-2", "add-3"],
    "containers": ["count-words", "greet", "show"],
    "artifacts": ["create-dataset", "read-model", "train-model"],
    "visualization": ["evaluate"],
    "lists-and-dicts": ["confirm", "gather"],
    "defaults": ["optional"],
    "variables": ["variables"],
    "resources": ["add"],
    "retries": ["add"],
}
REFUSED = {
    "condition": "task 'condition-1' is a condition (If, Elif, Else), which is not translated; write it with "
    "hera_pipelines: when=",
    "conditions": "task 'condition-branches-1' is a condition (If, Elif, Else)",
    "loops": "task 'for-loop-2' is a loop (ParallelFor), which is not translated; write it with hera_pipelines",
    "exit-handling": "task 'exit-handler-1' is an exit handler (ExitHandler), which is not translated; write it with",
    "failures-ignored": "task 'add-2' is to run also after failures (the task of an ExitHandler, or "
    "ignore_upstream_failure), which is not translated",
    "nesting": "task 'inner' is a pipeline of its own, which is not translated; call its components in this pipeline",
    "importing": "task 'importer' is run by importer and not by a container; hand its data on as a parameter",
    "given-artifact": "input 'dataset' comes from no task of the pipeline, but is given to it; hand its address on",
    "optional-words": "from optional parts (ConcatPlaceholder, IfPresentPlaceholder), which is not translated; write",
    "volumes": "executor 'exec-add' has settings of kfp-kubernetes (pvcMount), which are not translated; remove them",
    "claim-alone": "task 'createpvc' is argostub/createpvc, which Kubeflow's driver does in the place of a container",
    "configured": "its PipelineConfig has workspace, which is not translated; remove it",
}


def imported(name: str) -> Manifest:
    return read_kubeflow_pipeline(SAMPLES / f"{name}.yaml")


def test_every_sample_is_in_the_table() -> None:
    assert {path.stem for path in SAMPLES.glob("*.yaml")} == STEPS.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", STEPS)
def test_a_tutorial_becomes_steps(name: str) -> None:
    workflow = translate_workflow(imported(name))
    compiled = CompiledPipeline.from_manifest(compile_workflow(workflow, CompileOptions(store="s3://ml-runs/tiphys")))
    assert sorted(compiled.steps) == STEPS[name]
    assert {spec.kind for spec in compiled.steps.values()} == {StepKind.TRAIN if name == "resources" else StepKind.STEP}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tutorial_without_counterpart_is_refused_with_its_remedy(name: str) -> None:
    with pytest.raises(UsageError) as refused:
        imported(name)
    assert f"{name}.yaml: " in str(refused.value)
    assert REFUSED[name] in str(refused.value)


def test_the_backoff_of_retries_is_kept() -> None:
    [template] = [one for one in imported("retries")["spec"]["templates"] if one["name"] == "add-component"]
    assert template["retryStrategy"] == {
        "limit": "3",
        "backoff": {"duration": "10s", "factor": "2", "maxDuration": "300s"},
    }
