"""A compiled pipeline of Kubeflow becomes a Workflow whose programs get what Kubeflow's launcher would give them.

| part of the IR | becomes |
|---|---|
| container component | a step; its placeholders are Argo's, or local paths |
| Python component | a step with `executor_input` as JSON, and a program that saves what it returned |
| accelerator | a training |
| loops, conditions, importers, lists of artifacts, settings of Kubernetes | refused by name |
"""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hera_pipelines.authoring.adoption.kubeflow import read_kubeflow_pipeline, translate_pipeline
from hera_pipelines.authoring.adoption.translation import translate_workflow
from hera_pipelines.compile import CompileOptions, compile_workflow
from hera_pipelines.local.arguments import replace_tags
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest, find_template
from tiphys.protocol.step_spec import StepKind

MODEL = {"artifactType": {"schemaTitle": "system.Model", "schemaVersion": "0.0.1"}}
IR: Manifest = {
    "schemaVersion": "2.1.0",
    "pipelineInfo": {"name": "My digits"},
    "components": {
        "comp-fit": {
            "executorLabel": "exec-fit",
            "inputDefinitions": {
                "parameters": {
                    "rows": {"parameterType": "NUMBER_INTEGER"},
                    "note": {"parameterType": "STRING"},
                    "tags": {"parameterType": "LIST", "defaultValue": ["a"], "isOptional": True},
                    "left-out": {"parameterType": "STRING", "isOptional": True},
                }
            },
            "outputDefinitions": {
                "parameters": {"Output": {"parameterType": "NUMBER_DOUBLE"}},
                "artifacts": {"model": MODEL},
            },
        },
        "comp-evaluate": {
            "executorLabel": "exec-evaluate",
            "inputDefinitions": {
                "artifacts": {"model": MODEL},
                "parameters": {"loss": {"parameterType": "NUMBER_DOUBLE"}},
            },
            "outputDefinitions": {"parameters": {"score": {"parameterType": "NUMBER_DOUBLE"}}},
        },
    },
    "deploymentSpec": {
        "executors": {
            "exec-fit": {
                "container": {
                    "image": "python:3.11",
                    "command": ["python3", "main.py"],
                    "args": ["--executor_input", "{{$}}", "--function_to_execute", "fit"],
                    "env": [{"name": "MODE", "value": "fast"}],
                    "resources": {
                        "resourceCpuLimit": "2",
                        "memoryLimit": 3.0,
                        "accelerator": {"resourceType": "nvidia.com/gpu", "resourceCount": "2"},
                    },
                }
            },
            "exec-evaluate": {
                "container": {
                    "image": "busybox",
                    "command": ["evaluate"],
                    "args": [
                        "{{$.inputs.artifacts['model'].path}}",
                        "--loss={{$.inputs.parameters['loss']}}",
                        '{{$.outputs.parameters["score"].output_file}}',
                        "{{$.pipeline_job_name}}/{{$.pipeline_task_name}}",
                    ],
                }
            },
        }
    },
    "root": {
        "inputDefinitions": {
            "parameters": {
                "rows": {"parameterType": "NUMBER_INTEGER", "defaultValue": 10.0},
                "who": {"parameterType": "STRING"},
            }
        },
        "dag": {
            "tasks": {
                "fit": {
                    "componentRef": {"name": "comp-fit"},
                    "retryPolicy": {"maxRetryCount": 2},
                    "inputs": {
                        "parameters": {
                            "rows": {"componentInputParameter": "rows"},
                            "pipelinechannel--who": {"componentInputParameter": "who"},
                            "note": {
                                "runtimeValue": {"constant": "for {{$.inputs.parameters['pipelinechannel--who']}}"}
                            },
                        }
                    },
                },
                "Evaluate_it": {
                    "componentRef": {"name": "comp-evaluate"},
                    "dependentTasks": ["fit"],
                    "inputs": {
                        "artifacts": {
                            "model": {"taskOutputArtifact": {"producerTask": "fit", "outputArtifactKey": "model"}}
                        },
                        "parameters": {
                            "loss": {"taskOutputParameter": {"producerTask": "fit", "outputParameterKey": "Output"}}
                        },
                    },
                },
            }
        },
    },
}


FIT = ("deploymentSpec", "executors", "exec-fit", "container")


def changed(*path: str, **values: Any) -> Manifest:
    document = copy.deepcopy(IR)
    part: Any = document
    for key in path:
        part = part[key]
    part.update(values)
    return document


def test_tasks_pass_values_and_artifacts_on() -> None:
    workflow = translate_pipeline(IR)
    assert workflow["metadata"] == {"generateName": "my-digits-"}
    assert workflow["spec"]["arguments"]["parameters"] == [{"name": "rows", "value": "10"}, {"name": "who"}]
    fit, evaluate = find_template(workflow, "main")["dag"]["tasks"]
    assert {one["name"]: one["value"] for one in fit["arguments"]["parameters"]} == {
        "rows": "{{workflow.parameters.rows}}",
        "note": "for {{workflow.parameters.who}}",
        "tags": '["a"]',
    }
    assert (evaluate["name"], evaluate["dependencies"]) == ("evaluate-it", ["fit"])
    assert evaluate["arguments"] == {
        "parameters": [{"name": "loss", "value": "{{tasks.fit.outputs.parameters.Output}}"}],
        "artifacts": [{"name": "model", "from": "{{tasks.fit.outputs.artifacts.model}}"}],
    }


def test_a_container_component_gets_paths_and_values() -> None:
    evaluate = find_template(translate_pipeline(IR), "evaluate-it-component")
    [model] = evaluate["inputs"]["artifacts"]
    [score] = evaluate["outputs"]["parameters"]
    assert evaluate["container"]["args"] == [
        model["path"],
        "--loss={{inputs.parameters.loss}}",
        score["valueFrom"]["path"],
        "{{workflow.name}}/evaluate-it",
    ]


def test_a_python_component_gets_its_input_and_what_it_returned_is_saved(tmp_path: Path) -> None:
    fit = find_template(translate_pipeline(IR), "fit-component")
    shell, flags, script, saver, *program = fit["container"]["command"]
    assert (shell, flags, program) == ("sh", "-ec", ["python3", "main.py"])
    text = fit["container"]["args"][1]
    text = text.replace("{{=toJson(inputs.parameters['note'])}}", json.dumps('a "b"'))
    text = text.replace("{{inputs.parameters.rows}}", "7").replace("{{inputs.parameters.tags}}", '["a"]')
    given = json.loads(text)
    assert given["inputs"]["parameterValues"] == {
        "rows": 7,
        "note": 'a "b"',
        "tags": ["a"],
    }
    paths = {one["name"]: one["valueFrom"]["path"] for one in fit["outputs"]["parameters"]}
    artifacts = {one["name"]: one["path"] for one in fit["outputs"]["artifacts"]}
    assert given["outputs"]["parameters"] == {"Output": {"outputFile": paths["Output"]}}
    [model] = given["outputs"]["artifacts"]["model"]["artifacts"]
    assert (model["uri"], model["type"]) == (artifacts["model"], MODEL["artifactType"])

    # The program, with its folder moved here, and a `main.py` that returns as Kubeflow's executor does.
    returned = {
        "parameterValues": {"Output": 0.5},
        "artifacts": {"model": {"artifacts": [{"metadata": {"loss": 1}}]}},
    }
    folder = str(tmp_path)
    code = f"open({folder + '/executor_output.json'!r}, 'w').write({json.dumps(returned)!r})"
    python = Path(sys.executable).parent
    command = [shell, flags, script, saver.replace("/tmp/kfp", folder), sys.executable, "-c", code]
    subprocess.run(command, check=True, timeout=300, env={"PATH": f"{python}:/usr/bin:/bin"})
    assert Path(paths["Output"].replace("/tmp/kfp", folder)).read_text() == "0.5"
    assert json.loads(Path(paths["model-metadata"].replace("/tmp/kfp", folder)).read_text()) == {"loss": 1}


def test_accelerators_make_a_training_with_the_retries_of_the_task() -> None:
    workflow = translate_pipeline(IR)
    assert find_template(workflow, "fit-component")["container"]["resources"] == {
        "limits": {"cpu": "2", "memory": "3G", "nvidia.com/gpu": "2"}
    }
    compiled = compile_workflow(translate_workflow(workflow), CompileOptions(store="s3://ml-runs/tiphys"))
    steps = CompiledPipeline.from_manifest(compiled).steps
    assert {name: spec.kind for name, spec in steps.items()} == {"fit": StepKind.TRAIN, "evaluate-it": StepKind.STEP}
    assert steps["fit"].gpu is not None
    assert (steps["fit"].gpu.gpus, steps["fit"].retry.user_error) == (2, 2)


def test_image_and_variables_get_values_of_the_pipeline_and_of_tasks() -> None:
    document = changed(
        *FIT,
        image="python:{{$.inputs.parameters['pipelinechannel--who']}}",
        env=[
            {"name": "JOB", "value": "{{$.pipeline_job_name}}/{{$.pipeline_task_name}}"},
            {"name": "ROWS", "value": "größe {{$.inputs.parameters['rows']}}"},
            {"name": "EMPTY"},
        ],
    )
    workflow = translate_pipeline(document)
    fit = find_template(workflow, "fit-component")
    assert fit["container"]["image"] == "python:{{inputs.parameters.pipeline-who}}"
    assert fit["container"]["env"] == [
        {"name": "JOB", "value": "{{workflow.name}}/fit"},
        {"name": "ROWS", "value": "größe {{inputs.parameters.rows}}"},
        {"name": "EMPTY", "value": ""},
    ]
    assert {"name": "pipeline-who"} in fit["inputs"]["parameters"]
    arguments = find_template(workflow, "main")["dag"]["tasks"][0]["arguments"]["parameters"]
    assert {"name": "pipeline-who", "value": "{{workflow.parameters.who}}"} in arguments


@pytest.mark.parametrize(
    ("kind", "absent", "given"),
    [
        ("NUMBER_INTEGER", "null", "7"),
        ("STRUCT", "null", '{"a": "größe"}'),
        ("STRING", "<none>", 'a "größe"'),
        ("STRING", "<none>", "null"),
        ("STRING", "<none>", ""),
    ],
)
def test_an_optional_input_without_a_value_is_null_for_a_python_component(kind: str, absent: str, given: str) -> None:
    optional = {"parameterType": kind, "isOptional": True}
    document = changed("components", "comp-fit", "inputDefinitions", "parameters", k=optional)
    document["root"]["inputDefinitions"]["parameters"]["k"] = optional
    document["root"]["dag"]["tasks"]["fit"]["inputs"]["parameters"]["k"] = {"componentInputParameter": "k"}
    workflow = translate_pipeline(document)
    assert {"name": "k", "value": absent} in workflow["spec"]["arguments"]["parameters"]
    text = find_template(workflow, "fit-component")["container"]["args"][1]
    variables = {"inputs.parameters.rows": "7", "inputs.parameters.tags": "[]", "inputs.parameters.note": "n"}
    for value in (absent, given):
        filled = replace_tags(text, {**variables, "inputs.parameters.k": value})
        expected = None if value == absent else given if kind == "STRING" else json.loads(given)
        assert json.loads(filled)["inputs"]["parameterValues"]["k"] == expected


def test_an_optional_value_that_a_task_must_have_is_asked_for() -> None:
    optional = {"parameterType": "STRING", "isOptional": True}
    document = changed("root", "inputDefinitions", "parameters", who=optional)
    assert {"name": "who"} in translate_pipeline(document)["spec"]["arguments"]["parameters"]


def test_long_names_that_begin_alike_stay_apart() -> None:
    long = "lade_und_bereinige_alle_transaktionen_einer_region_und_eines_jahres"
    document = changed("root", "dag", tasks={})
    tasks = document["root"]["dag"]["tasks"]
    tasks |= {f"{long}{end}": copy.deepcopy(IR["root"]["dag"]["tasks"]["fit"]) for end in ("", "_2", "-2", "_3")}
    tasks[f"{long}_3"]["dependentTasks"] = [f"{long}-2"]
    names = [task["name"] for task in find_template(translate_pipeline(document), "main")["dag"]["tasks"]]
    assert len(set(names)) == 4
    assert max(map(len, names)) <= 50
    *_, last = find_template(translate_pipeline(document), "main")["dag"]["tasks"]
    assert last["dependencies"] == [names[2]]


TASKS = ("root", "dag", "tasks")
CHANNEL = "{{$.inputs.parameters['pipelinechannel--who']}}"


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (changed(schemaVersion="1.0"), "compile it with version 2 of the SDK"),
        (changed(*TASKS, "fit", parameterIterator={"x": 1}), "task 'fit' is a loop (ParallelFor)"),
        (changed(*TASKS, "fit", triggerPolicy={"condition": "x"}), "task 'fit' is a condition (If, Elif, Else)"),
        (changed("components", "comp-fit", dag={"tasks": {}}), "task 'fit' is a pipeline of its own"),
        (
            changed(*TASKS, "fit", retryPolicy={"maxRetryCount": 1, "backoffDuration": "1s", "backoffFactor": 1.5}),
            "1.5",
        ),
        (
            changed(
                "components", "comp-fit", "inputDefinitions", "parameters", rows={"parameterType": "TASK_FINAL_STATUS"}
            ),
            "task 'fit': its input 'rows' is the status of another task (PipelineTaskFinalStatus)",
        ),
        (changed("deploymentSpec", "executors", **{"exec-fit": {"importer": {}}}), "run by importer and not by"),
        (changed(*FIT, args=['{"IfPresent": {"InputName": "x"}}']), "builds its command from optional parts"),
        (changed(*FIT, args=["print('{{ x }}')"]), "which Argo would take for a placeholder"),
        (changed(*FIT, args=["{{$.pipeline_root}}"]), "task 'fit' uses {{$.pipeline_root}}"),
        (changed(*FIT, image="x:{{$.pipeline_root}}"), "task 'fit' uses {{$.pipeline_root}}"),
        (changed(*FIT, image="x:{{y}}"), "task 'fit': its image contains '{{', which Argo would take"),
        (changed(*FIT, env=[{"name": "A", "value": "{{$.json_escape[1]}}"}]), "task 'fit' uses {{$.json_escape[1]}}"),
        (changed(*FIT, env=[{"name": "A", "value": "ü {{"}]), "its variable A contains '{{'"),
        (
            changed(*FIT, resources={"accelerator": {"resourceType": "nvidia.com/gpu", "resourceCount": CHANNEL}}),
            f"task 'fit': its resource nvidia.com/gpu of {CHANNEL} is known only when the pipeline runs",
        ),
        (changed(*FIT, resources={"accelerator": {"type": CHANNEL}}), f"its resource {CHANNEL} of 1 is known only"),
        (changed(*FIT, resources={"resourceCpuLimit": CHANNEL}), f"its resource cpu of {CHANNEL} is known only"),
        (
            changed("root", "inputDefinitions", "parameters", who={"defaultValue": "{{$.pipeline_job_name}}"}),
            "it uses {{$.pipeline_job_name}}, which is not translated",
        ),
        (
            changed(*TASKS, "fit", "inputs", "parameters", note={"runtimeValue": {"constant": "{{ x }}"}}),
            "task 'fit': its input 'note' contains '{{'",
        ),
        (changed(*TASKS, "fit", "inputs", "parameters", rows={"taskFinalStatus": {}}), "comes from taskFinalStatus"),
        (
            changed(*TASKS, "fit", "inputs", "parameters", rows={"parameterExpressionSelector": "x"}),
            "selects a part of a value",
        ),
        (changed(*TASKS, "fit", inputs={}), "its input 'rows' has no value"),
        (
            changed(*TASKS, "Evaluate_it", "inputs", artifacts={"model": {"componentInputArtifact": "m"}}),
            "its input 'model' comes from no task",
        ),
        (
            changed("components", "comp-fit", "outputDefinitions", artifacts={"m": {**MODEL, "isArtifactList": True}}),
            "a list of artifacts",
        ),
        (changed(*TASKS, "fit", componentRef={"name": "absent"}), "it lacks the field 'absent'"),
        (changed(root={"dag": 7}), "this is no pipeline that the SDK has compiled"),
    ],
)
def test_a_kubeflow_feature_without_counterpart_is_refused_by_name(document: Manifest, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        translate_pipeline(document)


def test_settings_of_kubernetes_are_refused() -> None:
    executors = {"exec-fit": {}, "exec-evaluate": {}}
    translate_pipeline(IR, {"platforms": {"kubernetes": {"deploymentSpec": {"executors": executors}}}})
    executors["exec-fit"] = {"secretAsEnv": [{"secretName": "s"}]}  # type: ignore[dict-item]
    with pytest.raises(UsageError, match=r"'exec-fit' has settings of kfp-kubernetes \(secretAsEnv\)"):
        translate_pipeline(IR, {"platforms": {"kubernetes": {"deploymentSpec": {"executors": executors}}}})


def test_a_pipeline_that_compile_would_refuse_is_refused_before_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    document = changed("root", "inputDefinitions", "parameters", **{"tiphys-größe": {"parameterType": "STRING"}})
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match=r"p\.yaml: workflow parameter 'tiphys-größe': .* rename it"):
        read_kubeflow_pipeline(path)


def test_a_file_that_is_no_pipeline_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    for text in ("", "a: 1", "- 1", "apiVersion: v1\nkind: Service"):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"p\.yaml: this is no pipeline that the SDK of Kubeflow has compiled"):
            read_kubeflow_pipeline(path)
