"""What compile refuses: each would run, and lose something.

Each row of the tables holds a Workflow or step that is refused, words of the
message, and the same put right, which must compile.
"""

from typing import Any

import pytest
from support.builders.authored_workflows import (
    STORE,
    artifact,
    gated,
    output_parameter,
    parameters,
    plain,
    settings,
    step,
    task,
    train,
    workflow,
)

from hera_pipelines.compile import CompileOptions, SharedVolume, Spot, compile_workflow
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import CheckpointPolicy, GpuRequest, RetryPolicy

OPTIONS = CompileOptions(store=STORE)
LADDER = RetryPolicy(memory_ceiling_bytes=64 << 30)


def refusal(manifest: Manifest, options: CompileOptions = OPTIONS) -> str:
    with pytest.raises(UsageError) as caught:
        compile_workflow(manifest, options)
    return str(caught.value)


# name: (refused Workflow, words of the message, the same Workflow put right)
WORKFLOWS: dict[str, tuple[Manifest, str, Manifest]] = {
    "pod spec patch at workflow level": (
        workflow(step(), podSpecPatch="{}"),
        "podSpecPatch at workflow level",
        workflow(step(podSpecPatch="{}")),
    ),
    "retry strategy at workflow level": (
        workflow(step(), retryStrategy={"limit": 3}),
        "retryStrategy at workflow level",
        workflow(step(retryStrategy={"limit": 3})),
    ),
    "template defaults that reach plugins": (
        workflow(step(), templateDefaults={"nodeSelector": {}, "timeout": "1m"}),
        "templateDefaults would also apply timeout to the plugin templates",
        workflow(step(), templateDefaults={"nodeSelector": {"disk": "ssd"}}),
    ),
    "templates from elsewhere": (
        workflow(step(), workflowTemplateRef={"name": "other"}),
        "compile that pipeline instead",
        workflow(step()),
    ),
    "an empty plugin body": (
        workflow(step(), {"name": "tell", "plugin": {}}),
        "must have exactly one key, and has 0",
        workflow(step(), {"name": "tell", "plugin": {"slack": {}}}),
    ),
    "two plugins in one body": (
        workflow(step(), {"name": "tell", "plugin": {"slack": {}, "mail": {}}}),
        "must have exactly one key, and has 2",
        workflow(step(), {"name": "tell", "plugin": {"slack": {}}}),
    ),
    "a back-off without a limit": (
        workflow(step(), plain("tell", retryStrategy={"backoff": {"duration": "1s"}})),
        "'tell': Argo ignores a back-off without a limit",
        workflow(step(), plain("tell", retryStrategy={"limit": 5, "backoff": {"duration": "1s"}})),
    ),
    "a fan-out over nothing": (
        workflow(step(), tasks=[task("prep", withItems=[])]),
        "step 'prep': it has no items, and Argo would run it once",
        workflow(step(), tasks=[task("prep", withItems=[1])]),
    ),
    "a tag of an input that is not declared": (
        workflow(
            step(
                container={"args": ["{{inputs.parameters.rat}}"]},
                inputs={"parameters": [{"name": "rate", "value": "1"}]},
            )
        ),
        "{{inputs.parameters.rat}} never gets a value: template 'prep' has no input parameter 'rat'; did you mean",
        workflow(
            step(
                container={"args": ["{{inputs.parameters.rate}}"]},
                inputs={"parameters": [{"name": "rate", "value": "1"}]},
            )
        ),
    ),
    "a tag of a parameter that the Workflow lacks": (
        workflow(step(), plain("tell", inputs={"parameters": [{"name": "x", "value": "{{workflow.parameters.x}}"}]})),
        "{{workflow.parameters.x}} never gets a value: the Workflow has no parameter 'x'; it has: json; declare it in "
        "spec.arguments.parameters, without a value if it is given to each submission",
        workflow(
            step(),
            plain("tell", inputs={"parameters": [{"name": "x", "value": "{{workflow.parameters.x}}"}]}),
            arguments={"parameters": [{"name": "x", "value": "1"}]},
        ),
    ),
    "a tag of a variable that Argo does not know": (
        workflow(step(container={"args": ["{{workflow.nam}}"]})),
        "the Workflow has no variable 'nam'; did you mean 'name'?",
        workflow(
            step(container={"args": ["{{workflow.name}} {{workflow.labels.team}} {{tasks.name}} {{ site.title }}"]})
        ),
    ),
    "a tag of another task in a program": (
        workflow(step(container={"args": ["{{tasks.make.outputs.result}}"]}), plain("make")),
        "{{tasks.make.outputs.result}} never gets a value: template 'prep' has no task 'make'",
        workflow(step(container={"args": ["{{=tasks.make.outputs.result}}"]}), plain("make")),
    ),
    "a tag of an input in a template within a task": (
        workflow(
            step(),
            tasks=[
                task("prep"),
                {"name": "tell", "inline": plain("tell", metadata={"labels": {"x": "{{inputs.parameters.x}}"}})},
            ],
        ),
        "template 'tell' has no input parameter 'x'; it has: none",
        workflow(step(), tasks=[task("prep"), {"name": "tell", "inline": plain("tell")}]),
    ),
    "no name": (
        workflow(step()) | {"metadata": {}},
        "the pipeline has no name",
        workflow(step()) | {"metadata": {"generateName": "digits-"}},
    ),
    "a name that Kubernetes refuses": (
        workflow(step()) | {"metadata": {"generateName": "my_digits-"}},
        "pipeline 'my_digits' cannot name runs and Workflows",
        workflow(step()) | {"metadata": {"name": "my-digits"}},
    ),
    "a name that is too long for a label": (
        workflow(step()) | {"metadata": {"name": "d" * 64}},
        "at most 63",
        workflow(step()) | {"metadata": {"name": "d" * 63}},
    ),
    "no entry point": (
        {"kind": "Workflow", "metadata": {}, "spec": {"templates": [step()]}},
        "no entrypoint",
        workflow(step()),
    ),
    "an entry point that is missing": (
        workflow(step(), entrypoint="other"),
        "'other' is missing",
        workflow(step(), entrypoint="main"),
    ),
    "an entry point that is not a DAG": (
        workflow(step(), entrypoint="prep"),
        "'prep' is not a DAG",
        workflow(step(), entrypoint="main"),
    ),
    "no step at all": (
        workflow(plain("hello")),
        "decorate one with @step() or @train()",
        workflow(plain("hello"), step()),
    ),
    "a step inside another template": (
        workflow(
            step(),
            {"name": "inner", "dag": {"tasks": [task("again", "prep")]}},
            tasks=[task("prep"), task("inner")],
        ),
        "step 'prep' is used by template 'inner'",
        workflow(
            step(),
            plain("other"),
            {"name": "inner", "dag": {"tasks": [task("again", "other")]}},
            tasks=[task("prep"), task("inner")],
        ),
    ),
    "a step inside a group of steps": (
        workflow(
            step(),
            {"name": "inner", "steps": [[task("again", "prep")]]},
            tasks=[task("prep"), task("inner")],
        ),
        "step 'prep' is used by template 'inner'",
        workflow(step(), {"name": "inner", "steps": [[]]}, tasks=[task("prep"), task("inner")]),
    ),
    "a step as exit handler": (
        workflow(step(), onExit="prep"),
        "step 'prep' is used by onExit",
        workflow(step(), plain("bye"), tasks=[task("prep")], onExit="bye"),
    ),
    "a step as a task's hook": (
        workflow(step(), tasks=[task("prep", hooks={"exit": {"template": "prep"}})]),
        "the hook 'exit' of 'prep'",
        workflow(step(), plain("bye"), tasks=[task("prep", hooks={"exit": {"template": "bye"}})]),
    ),
    "a step that is inline": (
        workflow(step(), tasks=[task("prep"), {"name": "more", "inline": {"metadata": settings()}}]),
        "task 'more': a step cannot be inline",
        workflow(step(), tasks=[task("prep"), {"name": "more", "inline": {"container": {"image": "plain:1"}}}]),
    ),
    "an exit hook with an expression": (
        workflow(step(), plain("bye"), tasks=[task("prep")], hooks={"exit": {"template": "bye", "expression": "true"}}),
        "exit hook has an expression",
        workflow(step(), plain("bye"), tasks=[task("prep")], hooks={"exit": {"template": "bye"}}),
    ),
    "a template with a name of ours": (
        workflow(step(), plain("tiphys-finalize")),
        "template 'tiphys-finalize'",
        workflow(step(), plain("finalize")),
    ),
    "a parameter with a name of ours": (
        workflow(step(), arguments=parameters("tiphys-run")),
        "workflow parameter 'tiphys-run'",
        workflow(step(), arguments=parameters("run")),
    ),
    "a step name that cannot be stored": (
        workflow(step(), tasks=[task("Prep_A", "prep")]),
        "task 'Prep_A' cannot name a step",
        workflow(step(), tasks=[task("prep-a", "prep")]),
    ),
    "a step that takes a generated name": (
        workflow(gated("fit"), gated("fit-run")),
        "step 'fit-run' compiles to a template 'fit-run', which is made for step 'fit' already",
        workflow(gated("fit"), gated("fit-it")),
    ),
    "a template that has a generated name": (
        workflow(gated("fit"), plain("fit-conclude")),
        "'fit-conclude', which is a template already",
        workflow(step("fit"), plain("fit-conclude")),
    ),
    "an input artifact that no argument gives": (
        workflow(step(inputs={"artifacts": [artifact("data")]}), tasks=[task("prep")]),
        "task 'prep': no argument gives its input artifact 'data'; pass the task that makes it",
        workflow(step(inputs={"artifacts": [artifact("data", s3={"key": "raw"}), artifact("more", optional=True)]})),
    ),
    "an input parameter that no argument gives": (
        workflow(step(), plain("report", inputs=parameters("loss")), tasks=[task("prep"), task("report")]),
        "task 'report': no argument gives its input parameter 'loss', and it has no default; pass a value",
        workflow(step(), plain("report", inputs={"parameters": [{"name": "loss", "default": "0"}]})),
    ),
    "an argument that is given twice": (
        workflow(
            step(inputs=parameters("lr")),
            tasks=[
                task("prep", arguments={"parameters": [{"name": "lr", "value": "1"}, {"name": "lr", "value": "2"}]})
            ],
        ),
        "task 'prep': two of its arguments are called 'lr'; rename or drop one",
        workflow(
            step(inputs=parameters("lr")),
            tasks=[task("prep", arguments={"parameters": [{"name": "lr", "value": "1"}]})],
        ),
    ),
    "inputs of one name": (
        workflow(
            step(inputs={"artifacts": [artifact("data", raw={"data": "a"}), artifact("data", raw={"data": "b"})]})
        ),
        "template 'prep': two of its inputs are called 'data'; rename or drop one",
        workflow(
            step(inputs={"artifacts": [artifact("data", raw={"data": "a"}), artifact("more", raw={"data": "b"})]})
        ),
    ),
    "a CronWorkflow": (
        {"kind": "CronWorkflow", "metadata": {}, "spec": {}},
        "not on a CronWorkflow",
        workflow(step()),
    ),
}

STEPS: dict[str, tuple[Manifest, str, Manifest]] = {
    "a container set": (
        {"name": "prep", "metadata": settings(), "containerSet": {"containers": []}},
        "'prep' is a container set",
        step(),
    ),
    "a template without a program": (
        {"name": "prep", "metadata": settings(), "suspend": {}},
        "only container and script templates can be steps of Tiphys",
        step(),
    ),
    "checkpoints without attempts": (
        step(asked={"checkpoints": CheckpointPolicy()}),
        "use @train",
        train(),
    ),
    "GPUs without attempts": (step(asked={"gpu": GpuRequest(gpus=1)}), "use @train", train(asked={"gpu": None})),
    "a retry strategy on a training step": (
        train(retryStrategy={"limit": 2}),
        "repeats through admission",
        step(retryStrategy={"limit": 2}),
    ),
    "two ways to retry": (
        step(retryStrategy={"limit": 2}, asked={"retry": RetryPolicy(user_error=1)}),
        "both a retry_strategy and retries",
        step(asked={"retry": RetryPolicy(user_error=1)}),
    ),
    "a broken back-off factor": (
        train(asked={"retry": RetryPolicy(backoff_factor=1.5)}),
        "back-off factor is a whole number",
        train(asked={"retry": RetryPolicy(backoff_factor=3)}),
    ),
    "retries that Argo cannot make": (
        step(asked={"retry": RetryPolicy(output_missing=1)}),
        "drop output_missing",
        train(asked={"retry": RetryPolicy(output_missing=1)}),
    ),
    "causes that Argo cannot tell": (
        step(asked={"retry": RetryPolicy(gpu_out_of_memory=1)}),
        "cannot tell gpu_out_of_memory from other failures",
        step(asked={"retry": RetryPolicy(gpu_out_of_memory=0, hang=0, image=0)}),
    ),
    "memory that Argo would forget": (
        step(asked={"retry": LADDER}),
        "cannot apply memory_ceiling; use @train",
        train(asked={"retry": LADDER}, container={"resources": {"limits": {"memory": "8Gi"}}}),
    ),
    "a ceiling for no memory": (
        train(asked={"retry": LADDER}),
        "with memory in its resources",
        train(asked={"retry": LADDER}, container={"resources": {"requests": {"memory": "8Gi"}}}),
    ),
    "a ceiling below the ground": (
        train(asked={"retry": LADDER}, container={"resources": {"limits": {"memory": "80Gi"}}}),
        "ask for 80Gi, more than memory_ceiling",
        train(asked={"retry": LADDER}, container={"resources": {"limits": {"memory": "64Gi"}}}),
    ),
    "leaving spot nodes that it is not on": (
        train(asked={"retry": RetryPolicy(on_demand_after=2)}),
        "it runs on no spot nodes",
        train(asked={"retry": RetryPolicy(on_demand_after=2), "spot": [Spot(label="spot")]}),
    ),
    "a pod patch on a training step": (train(podSpecPatch="{}"), "not pod_spec_patch", step(podSpecPatch="{}")),
    "a pod patch beside grace": (
        step(podSpecPatch="{}", asked={"grace_seconds": 60}),
        "both grace and pod_spec_patch",
        step(asked={"grace_seconds": 60}),
    ),
    "memoize": (step(memoize={"key": "k"}), "memoize would hide its outputs", step()),
    "a daemon": (step(daemon=True), "a daemon never ends", step(daemon=False)),
    "two deadlines": (
        step(activeDeadlineSeconds=60, asked={"deadline_seconds": 60}),
        "both deadline and active_deadline_seconds",
        step(activeDeadlineSeconds=60),
    ),
    "an archive of its own": (
        step(archiveLocation={"s3": {"bucket": "other"}}),
        "out of the run's bucket",
        step(archiveLocation={"archiveLogs": True}),
    ),
    "an input with a name of ours": (
        step(inputs=parameters("tiphys-item")),
        "'tiphys-item': inputs and outputs named tiphys-",
        step(inputs=parameters("item")),
    ),
    "a variable of ours": (
        step(container={"env": [{"name": "TIPHYS_RUN", "value": "x"}]}),
        "TIPHYS_RUN: Tiphys sets this variable",
        step(container={"env": [{"name": "RUN", "value": "x"}]}),
    ),
    "the checkpoint variable": (
        train(container={"env": [{"name": "CHECKPOINT_URI", "value": "x"}]}),
        "CHECKPOINT_URI: Tiphys sets this variable",
        train(),
    ),
    "an output with a location": (
        step(outputs={"artifacts": [artifact("data", s3={"key": "mine"})]}),
        "output artifact 'data' has a location of its own (s3)",
        step(outputs={"artifacts": [artifact("data")]}),
    ),
    "an output without a path": (
        step(outputs={"artifacts": [{"name": "data"}]}),
        "output artifact 'data' has no path",
        step(outputs={"artifacts": [artifact("data")]}),
    ),
    "an optional output": (
        step(outputs={"artifacts": [artifact("data", optional=True)]}),
        "output artifact 'data' is optional",
        step(outputs={"artifacts": [artifact("data", optional=False)]}),
    ),
    "an output parameter without a file": (
        step(outputs={"parameters": [{"name": "loss", "valueFrom": {"expression": "1"}}]}),
        "output parameter 'loss' has no file",
        step(outputs={"parameters": [output_parameter("loss")]}),
    ),
    "an output parameter with a default": (
        step(outputs={"parameters": [output_parameter("loss", default="0")]}),
        "output parameter 'loss' has a default",
        step(outputs={"parameters": [output_parameter("loss")]}),
    ),
    "outputs that share a variable": (
        step(outputs={"parameters": [output_parameter("val-loss")], "artifacts": [artifact("val_loss")]}),
        "share the variable TIPHYS_OUTPUT_VAL_LOSS",
        step(outputs={"parameters": [output_parameter("val-loss")], "artifacts": [artifact("loss")]}),
    ),
    "a save that outlasts the grace period": (
        train(asked={"checkpoints": CheckpointPolicy(save_seconds=90), "grace_seconds": 60}),
        "a save takes 90 s and the grace period is 60 s",
        train(asked={"checkpoints": CheckpointPolicy(save_seconds=60), "grace_seconds": 60}),
    ),
    "a save that outlasts Kubernetes' grace period": (
        train(asked={"checkpoints": CheckpointPolicy(save_seconds=31)}),
        "the grace period is 30 s",
        train(asked={"checkpoints": CheckpointPolicy(save_seconds=30)}),
    ),
    "a volume that follows nobody": (
        train(asked={"volume": SharedVolume(claim="disk", access_mode="ReadWriteOnce")}),
        "'disk' is ReadWriteOnce",
        train(asked={"volume": SharedVolume(claim="disk")}),
    ),
    "a volume without checkpoints": (
        train(asked={"volume": SharedVolume(claim="disk"), "checkpoints": None}),
        "keeps no checkpoints",
        train(asked={"volume": SharedVolume(claim="disk")}),
    ),
    "a volume at no place": (
        train(asked={"volume": SharedVolume(claim="disk", mount_path="ckpt")}),
        "'ckpt' is not absolute",
        train(asked={"volume": SharedVolume(claim="disk", mount_path="/ckpt")}),
    ),
    "two answers to how many GPUs": (
        train(asked={"gpu": GpuRequest(gpus=2)}, container={"resources": {"limits": {"nvidia.com/gpu": 4}}}),
        "its container asks for nvidia.com/gpu: 4 and gpus= for 2 GPUs",
        train(asked={"gpu": GpuRequest(gpus=4)}, container={"resources": {"limits": {"nvidia.com/gpu": 4}}}),
    ),
    "GPUs of a step": (
        step(container={"resources": {"limits": {"nvidia.com/gpu": "2"}}}),
        "asks for nvidia.com/gpu: 2, and no lease counts them; use gpus=2 of @train",
        train(asked={"gpu": GpuRequest(gpus=2)}, container={"resources": {"requests": {"nvidia.com/gpu": "2"}}}),
    ),
    "GPUs in the resources of a training alone": (
        train(container={"resources": {"requests": {"nvidia.com/gpu": 1}}}),
        "use gpus=1 of @train",
        train(container={"resources": {"requests": {"nvidia.com/gpu": 0, "memory": "1Gi"}}}),
    ),
    "GPUs that are a parameter": (
        train(container={"resources": {"limits": {"nvidia.com/gpu": "{{workflow.parameters.gpus}}"}}}),
        "asks for nvidia.com/gpu: {{workflow.parameters.gpus}}, and no lease counts them; use gpus=a number",
        train(asked={"gpu": GpuRequest(gpus=1)}),
    ),
    "a slice of a GPU": (
        train(asked={"gpu": GpuRequest(gpus=1)}, container={"resources": {"limits": {"nvidia.com/mig-1g.5gb": 1}}}),
        "nvidia.com/mig-1g.5gb: 1, and its lease is for nvidia.com/gpu; say gpu_resource='nvidia.com/mig-1g.5gb'",
        train(asked={"gpu": GpuRequest(gpus=1)}, container={"resources": {"limits": {"nvidia.com/hostdev": 1}}}),
    ),
    "GPUs of another maker": (
        step(container={"resources": {"limits": {"amd.com/gpu": 1}}}),
        "use gpus=1, gpu_resource='amd.com/gpu' of @train",
        train(
            asked={"gpu": GpuRequest(gpus=1, resource="amd.com/gpu")},
            container={"resources": {"limits": {"amd.com/gpu": 1}}},
        ),
    ),
    "GPUs of NVIDIA beside those of a lease of another maker": (
        train(
            asked={"gpu": GpuRequest(gpus=1, resource="amd.com/gpu")},
            container={"resources": {"limits": {"nvidia.com/gpu": 1}}},
        ),
        "asks for nvidia.com/gpu: 1, and its lease is for amd.com/gpu",
        train(asked={"gpu": GpuRequest(gpus=1, resource="amd.com/gpu")}),
    ),
    "two numbers of a resource of its own name": (
        train(
            asked={"gpu": GpuRequest(gpus=1, resource="example.com/npu")},
            container={"resources": {"requests": {"example.com/npu": 2}}},
        ),
        "asks for example.com/npu: 2 and gpus= for 1 GPU; drop example.com/npu",
        step(container={"resources": {"limits": {"amd.com/gpu": 0}}}),
    ),
    "GPUs of a sidecar": (
        train(
            asked={"gpu": GpuRequest(gpus=1)},
            sidecars=[{"name": "eval", "image": "x:1", "resources": {"limits": {"nvidia.com/gpu": 1}}}],
        ),
        "'eval' asks for nvidia.com/gpu: 1 beside the GPUs of a lease",
        train(asked={"gpu": GpuRequest(gpus=1)}, sidecars=[{"name": "eval", "image": "x:1"}]),
    ),
    "GPUs of a patch": (
        step(podSpecPatch='{"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "2"}}}]}'),
        "'podSpecPatch' asks for nvidia.com/gpu: 2",
        step(
            podSpecPatch='{"nodeSelector": {"nvidia.com/gpu.product": "A100"}, '
            '"tolerations": [{"key": "nvidia.com/gpu"}]}'
        ),
    ),
}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_is_refused_with_words_that_help(name: str) -> None:
    refused, words, _ = WORKFLOWS[name]
    assert words in refusal(refused)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_the_workflow_put_right_compiles(name: str) -> None:
    compile_workflow(WORKFLOWS[name][2], OPTIONS)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_refused_by_name(name: str) -> None:
    refused, words, _ = STEPS[name]
    message = refusal(workflow(refused))
    assert words in message
    assert repr(refused["name"]) in message


@pytest.mark.parametrize("name", STEPS)
def test_the_step_put_right_compiles(name: str) -> None:
    compile_workflow(workflow(STEPS[name][2]), OPTIONS)


@pytest.mark.parametrize(
    "use",
    [
        "{{tasks.prep.exitCode}}",
        "{{= tasks.prep.exitCode }}",
        "{{=tasks['prep'].exitCode}}",
        "{{tasks.prep.ip}}",
    ],
)
def test_field_that_a_gated_step_never_answers_is_refused(use: str) -> None:
    after = task("after", arguments={"parameters": [{"name": "x", "value": use}]})
    reader, calls = plain("after", inputs=parameters("x")), [task("prep"), after]

    message = refusal(workflow(gated(), reader, tasks=calls))

    compile_workflow(workflow(step(), reader, tasks=calls), OPTIONS)
    assert "step 'prep': {{tasks.prep." in message
    assert "declare an output parameter instead" in message


@pytest.mark.parametrize(
    "use",
    [
        "{{tasks.prep.status}}",
        "{{tasks.prep.outputs.parameters.result}}",
        "{{tasks.prep-2.outputs.result}}",
        "{{tasks.other.outputs.result}}",
        "tasks.prep.outputs.result is what we never ask for",
    ],
)
def test_field_that_a_gated_step_answers_is_not_refused(use: str) -> None:
    after = task("after", arguments={"parameters": [{"name": "x", "value": use}]})

    templates = (gated(), plain("after", inputs=parameters("x")), plain("other"))
    tasks = [task("prep"), task("prep-2", "other"), task("other"), after]
    compile_workflow(workflow(*templates, tasks=tasks), OPTIONS)


def test_a_training_step_with_checkpoints_needs_a_store() -> None:
    assert "no store to record them in" in refusal(workflow(train()), CompileOptions())
    compile_workflow(workflow(train(asked={"checkpoints": None})), CompileOptions())


def test_a_claim_that_the_workflow_makes_is_refused_for_checkpoints() -> None:
    claims = {"volumeClaimTemplates": [{"metadata": {"name": "disk"}}]}
    volume = {"volume": SharedVolume(claim="disk")}

    assert "next submission would find it empty" in refusal(workflow(train(asked=volume), **claims))
    compile_workflow(workflow(train(), **claims), OPTIONS)


@pytest.mark.parametrize(
    ("queues", "refused"), [({"batch"}, True), (set(), True), ({"research", "batch"}, False), (None, False)]
)
def test_an_unknown_queue_is_refused_where_the_queues_are_known(queues: Any, refused: bool) -> None:
    options = CompileOptions(store=STORE, queues=None if queues is None else frozenset(queues))
    manifest = workflow(train(asked={"gpu": GpuRequest(gpus=1, queue="research")}))

    if refused:
        assert "queue 'research' does not exist" in refusal(manifest, options)
    else:
        compile_workflow(manifest, options)


@pytest.mark.parametrize(
    ("run_name", "words"),
    [("Digits", "not valid"), ("digits lr", "not valid"), ("digits-{lr", "not valid"), ("digits-{seed}", "'seed'")],
)
def test_a_run_name_that_cannot_be_made_is_refused(run_name: str, words: str) -> None:
    manifest = workflow(step(), arguments={"parameters": [{"name": "lr", "value": "0.1"}]})

    assert words in refusal(manifest, CompileOptions(run_name=run_name))
    compile_workflow(manifest, CompileOptions(run_name="digits-{lr}"))


def test_a_compiled_workflow_is_not_compiled_again() -> None:
    compiled = compile_workflow(workflow(step()), OPTIONS)

    assert "compiled already" in refusal(compiled)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", "let @step or @train write it"),
        ("{}", "kind"),
        ('{"kind": "step", "chache": false}', "chache"),
        ('{"kind": "train", "gpu": {"gpus": 0}}', "gpu.gpus"),
    ],
)
def test_a_damaged_annotation_is_refused_with_the_place(text: str, words: str) -> None:
    template = step()
    template["metadata"]["annotations"]["tiphys.dev/step"] = text

    message = refusal(workflow(template))

    assert "template 'prep'" in message
    assert words in message


@pytest.mark.parametrize(
    ("prep", "fields", "words"),
    [
        (train("prep"), {}, "a training has no such output"),
        (step("prep"), {"withItems": [1, 2]}, "makes of all items in a form of its own"),
        (step("prep", outputs={"parameters": [output_parameter("result")]}), {}, "output parameter 'result' as well"),
        (step("prep"), {"continueOn": {"failed": True}}, "which a failed step does not have"),
    ],
)
def test_standard_output_that_no_record_can_hold_is_refused(prep: Manifest, fields: Manifest, words: str) -> None:
    after = task("after", arguments={"parameters": [{"name": "x", "value": "{{tasks.prep.outputs.result}}"}]})
    message = refusal(workflow(prep, plain("after", inputs=parameters("x")), tasks=[task("prep", **fields), after]))
    assert words in message


@pytest.mark.parametrize(
    ("waits", "words"),
    [
        ({"a": "b", "b": "a"}, ["these tasks of DAG 'main' wait for each other, so none starts: ", " → b → "]),
        ({"a": "a.Failed"}, ["so none starts: a → a"]),
        ({"a": "", "b": "a && d", "c": "b", "d": "!c.Succeeded"}, ["so none starts: ", "b → d", "d → c", "c → b"]),
        ({"a": "", "b": "A"}, ["the DAG of task 'b' has no task 'A'"]),
    ],
)
def test_tasks_that_cannot_follow_each_other_are_refused(waits: dict[str, str], words: list[str]) -> None:
    tasks = [task(name, "prep", **({"depends": depends} if depends else {})) for name, depends in waits.items()]
    found = refusal(workflow(step(), tasks=tasks))
    circle = found + found.partition("starts: ")[2][1:]  # it may begin with any of its tasks
    assert [word for word in words if word not in circle] == []


def test_a_circle_by_the_use_of_outputs_and_one_in_a_dag_below_are_refused() -> None:
    used = {"parameters": [{"name": "n", "value": "{{tasks.second.outputs.parameters.n}}"}]}
    prep = step(inputs=parameters("n"), outputs={"parameters": [output_parameter("n")]})
    first, second = task("first", "prep", arguments=used), task("second", "prep", depends="first", **_given("n"))
    assert "wait for each other" in refusal(workflow(prep, tasks=[first, second]))
    below = {"name": "below", "dag": {"tasks": [task("x", "log", depends="y"), task("y", "log", depends="x")]}}
    tasks = [task("prep", **_given("n")), task("below")]
    assert "these tasks of DAG 'below' wait" in refusal(workflow(prep, plain("log"), below, tasks=tasks))


def _given(name: str) -> Manifest:
    return {"arguments": {"parameters": [{"name": name, "value": "1"}]}}


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("{{tasks.name}}", "tasks.name"),
        ("a {{ pod.name }}", "pod.name"),
        ("{{=node.name + '.txt'}}", "node.name"),
        ("{{workflow.parameters.name}} tasks.name", ""),
    ],
)
def test_a_shared_program_that_reads_its_own_name_is_refused(text: str, refused: str) -> None:
    for share in (True, False):
        given = step("prep", container={"env": [{"name": "A", "value": text}]}, asked={"share": share})
        manifest = workflow(given, arguments={"parameters": [{"name": "name", "value": "x"}]})
        if not (refused and share):
            compile_workflow(manifest)
            continue
        with pytest.raises(UsageError, match=f"step 'prep': its program reads .*{refused}.*leave share=True out"):
            compile_workflow(manifest)
