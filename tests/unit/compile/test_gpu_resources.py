"""GPUs under another name than ``nvidia.com/gpu``, in the three styles in which a pipeline is written.

| style                                  | name of the resource                                   |
|----------------------------------------|--------------------------------------------------------|
| `Train(gpus=…, gpu_resource=…)`        | that of the option, in the pod and in the request      |
| `@train(…)` with the resources of Hera | refused until the option names it, too                 |
| a template in YAML                     | that of its resources, or of the annotation            |
"""

import json

import pytest
from hera.workflows import Resources

from hera_pipelines import Pipeline, Train, train
from hera_pipelines.authoring.adoption.translation import translate_workflow
from hera_pipelines.compile import CompileOptions, compile_workflow
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest, find_template, read_template_specs
from tiphys.protocol.step_spec import GpuRequest

SLICE, AMD = "nvidia.com/mig-1g.10gb", "amd.com/gpu"
STORE = "s3://ml-runs/tiphys"


def compiled(**options: object) -> Manifest:
    with Pipeline("digits") as pipeline:
        Train(name="fit", image="trainer:1", command=["python", "train.py"], **options)()
    return pipeline.compile(store=STORE)


def request(manifest: Manifest) -> GpuRequest:
    [gpu] = [spec.gpu for _, spec in read_template_specs(manifest["spec"]["templates"]) if spec.gpu]
    return gpu


def test_training_asks_the_cluster_and_its_queue_for_the_same_resource() -> None:
    manifest = compiled(gpus=4, gpu_resource=AMD, gpu_type="MI300X", min_gpu_memory_mb=100_000, queue="research")
    run = find_template(manifest, "fit-run")
    assert run["container"]["resources"] == {"limits": {AMD: "4"}}
    assert "nodeSelector" not in run, "no label of NVIDIA is on its nodes"
    assert "affinity" not in run
    asked = request(manifest)
    assert (asked.gpus, asked.resource, asked.gpu_type, asked.min_gpu_memory_mb) == (4, AMD, "MI300X", 100_000)


def test_training_on_several_nodes_asks_in_each_pod_for_the_resource() -> None:
    manifest = compiled(gpus=8, gpu_resource=AMD, nodes=4)
    assert (request(manifest).gpus, request(manifest).resource) == (32, AMD)
    text = json.dumps(find_template(manifest, "fit-run"))
    assert text.count(AMD) >= 1
    assert "nvidia.com" not in text


def test_training_of_the_default_resource_compiles_as_ever() -> None:
    assert compiled(gpus=1) == compiled(gpus=1, gpu_resource="nvidia.com/gpu")
    assert "resource" not in request(compiled(gpus=1)).model_dump()


def test_function_with_resources_of_hera_is_refused_until_it_names_the_resource() -> None:
    def build(**options: object) -> Manifest:
        with Pipeline("digits") as pipeline:

            @train(image="trainer:1", resources=Resources(gpus=2, gpu_flag=SLICE), **options)
            def fit() -> None: ...

            fit()
        return pipeline.compile(store=STORE)

    with pytest.raises(UsageError, match=rf"use gpus=2, gpu_resource='{SLICE}' of @train"):
        build()
    with pytest.raises(UsageError, match=rf"its lease is for nvidia.com/gpu; say gpu_resource='{SLICE}'"):
        build(gpus=2)
    manifest = build(gpus=2, gpu_resource=SLICE)
    assert (request(manifest).gpus, request(manifest).resource) == (2, SLICE)
    with pytest.raises(UsageError, match=r"asks for nvidia\.com.*: 2 and gpus= for 1 GPU"):
        build(gpus=1, gpu_resource=SLICE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": 1, "gpu_resource": "gpu"}, "gpu_resource|resource"),
        ({"gpus": 1, "gpu_resource": "amd.com/gpu/x"}, "resource"),
        ({"gpu_resource": AMD}, "but gpus=0; add gpus=1"),
    ],
)
def test_resource_that_kubernetes_cannot_have_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        compiled(**options)


def adopted(resources: Manifest, **marks: str) -> Manifest:
    named = {f"tiphys.dev/{name}".replace("_", "-"): text for name, text in marks.items()}
    annotations = {"tiphys.dev/adopt": "train", **named}
    container = {"image": "trainer:1", "command": ["python", "train.py"], "resources": {"limits": resources}}
    main = {"name": "main", "dag": {"tasks": [{"name": "fit", "template": "fit"}]}}
    fit = {"name": "fit", "metadata": {"annotations": annotations}, "container": container}
    workflow = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"name": "nightly"},
        "spec": {"entrypoint": "main", "templates": [main, fit]},
    }
    return compile_workflow(translate_workflow(workflow), CompileOptions(store=STORE))


def test_template_in_yaml_takes_its_resource_from_its_resources_or_the_annotation() -> None:
    assert request(adopted({SLICE: 3})).resource == SLICE
    marked = request(adopted({}, gpus="4", gpu_resource=AMD))
    assert (marked.gpus, marked.resource) == (4, AMD)
    named = request(adopted({"example.com/npu": 2}, gpus="2", gpu_resource="example.com/npu"))
    assert (named.gpus, named.resource) == (2, "example.com/npu")
    with pytest.raises(UsageError, match=rf"asks for {AMD}: 4, and its lease is for {SLICE}"):
        adopted({SLICE: 1, AMD: 4})
