"""Translates a pipeline that the Kubeflow Pipelines SDK has compiled (its IR, version 2) into a marked Workflow.

Each task of the root DAG becomes a container step. A Python component gets the
``executor_input`` that Kubeflow's launcher would give it, with local paths, and
what it returns in ``executor_output.json`` becomes its outputs afterwards. Source:
kubeflow/pipelines, ``api/v2alpha1/pipeline_spec.proto`` and ``kfp/dsl/executor.py``.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hera_pipelines.authoring.adoption import marks
from hera_pipelines.authoring.adoption.documents import read_yaml_documents
from hera_pipelines.authoring.adoption.kubeflow_tasks import (
    PLACEHOLDER,
    VALUE,
    KubeflowTask,
    definitions,
    read_tasks,
    refuse_platform_settings,
)
from hera_pipelines.authoring.adoption.marks import AdoptedKind
from hera_pipelines.authoring.adoption.translation import translate_workflow
from hera_pipelines.authoring.functions.parameter_types import NO_TEXT
from hera_pipelines.compile import CompileOptions, compile_workflow
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest, replace_tags

_FOLDER = "/tmp/kfp"  # noqa: S108  a path in the container
_EXECUTOR_OUTPUT = f"{_FOLDER}/executor_output.json"
_EXECUTOR_ARTIFACT = "executor-output"
_METADATA_SUFFIX = "-metadata"
_RAW_TYPES = ("NUMBER_INTEGER", "NUMBER_DOUBLE", "BOOLEAN", "LIST", "STRUCT")
"""Types whose values as text are JSON already."""
_CHANNEL = "pipelinechannel--"
_JOB_PLACEHOLDERS = {
    ".pipeline_job_name": "{{workflow.name}}",
    ".pipeline_job_resource_name": "{{workflow.name}}",
    ".pipeline_job_uuid": "{{workflow.uid}}",
}
# Reads what a Python component returned, and writes each output to the file that Argo takes it from. Artifacts such as
# metrics may have metadata and no file.
_SAVE_OUTPUTS = """\
import json, os
with open({executor_output!r}) as file: found = json.load(file)
def save(path, value):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file: file.write(value if isinstance(value, str) else json.dumps(value))
for name, path in {parameters!r}.items():
    if name in found.get("parameterValues", dict()): save(path, found["parameterValues"][name])
for name, (file, path) in {artifacts!r}.items():
    if not os.path.exists(file): save(file, "")
    save(path, found.get("artifacts", dict()).get(name, dict()).get("artifacts", [dict()])[0].get("metadata", dict()))
"""


def _is_kubeflow_pipeline(document: object) -> bool:
    """Whether a parsed YAML document is the IR of a pipeline."""
    return isinstance(document, dict) and "pipelineInfo" in document and "root" in document


def read_kubeflow_pipeline(path: Path) -> Manifest:
    """The Workflow of a compiled pipeline in a file; see `translate_pipeline`.

    Raises:
        UsageError: the file cannot be read, holds no such pipeline, or one with a part that has no counterpart.
    """
    documents = read_yaml_documents(path)
    if not documents or not _is_kubeflow_pipeline(documents[0]):
        raise UsageError(
            f"{path}: this is no pipeline that the SDK of Kubeflow has compiled; `kfp dsl compile` makes one"
        )
    platforms = documents[1] if len(documents) > 1 and isinstance(documents[1], dict) else None
    try:
        return translate_pipeline(documents[0], platforms)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def translate_pipeline(document: Manifest, platforms: Manifest | None = None) -> Manifest:
    """The Workflow of a pipeline in the IR, with marks for `translate_workflow`.

    ``platforms`` is the document after it, with settings for Kubernetes; None if there is none.

    Raises:
        UsageError: a part has no counterpart; the message names it.
    """
    if not str(document.get("schemaVersion", "")).startswith("2."):
        raise UsageError(
            f"its schemaVersion is {document.get('schemaVersion')!r}; compile it with version 2 of the SDK"
        )
    try:
        name = re.sub(r"[^-a-z0-9]+", "-", str(document["pipelineInfo"]["name"] or "").lower()).strip("-") or "pipeline"
        refuse_platform_settings(platforms)
        tasks = list(read_tasks(document))
        by_key = {task.key: task for task in tasks}
        declared = definitions(document["root"], "inputDefinitions")
        parameters = [_pipeline_parameter(name, parameter, tasks) for name, parameter in declared.items()]
        dag = {"name": "main", "dag": {"tasks": [_build_task(task, by_key) for task in tasks]}}
        templates = [dag, *(_build_template(task) for task in tasks)]
    except KeyError as error:
        raise UsageError(f"this is no pipeline that the SDK has compiled: it lacks the field {error}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"this is no pipeline that the SDK has compiled: {type(error).__name__}: {error}") from error
    spec: Manifest = {"entrypoint": "main", "templates": templates}
    if parameters:
        spec["arguments"] = {"parameters": parameters}
    workflow: Manifest = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"generateName": f"{name}-"},
        "spec": spec,
    }
    if left := json.dumps(workflow, ensure_ascii=False).partition(PLACEHOLDER)[2]:
        raise UsageError(f"it uses {PLACEHOLDER}{left.partition('}}')[0]}}}}}, which is not translated")
    compile_workflow(translate_workflow(workflow), CompileOptions(pipeline=name, store="s3://bucket/prefix"))
    return workflow


def _pipeline_parameter(name: str, definition: Manifest, tasks: list[KubeflowTask]) -> Manifest:
    if "defaultValue" in definition:
        return {"name": name, "value": _text(definition["defaultValue"], definition)}
    uses = [
        (task, key)
        for task in tasks
        for key, argument in task.given.items()
        if argument.get("componentInputParameter") == name
    ]
    if definition.get("isOptional") and all(_may_be_absent(*use, definition) for use in uses):
        return {"name": name, "value": _absent_value(definition)}
    return {"name": name}


def _may_be_absent(task: KubeflowTask, name: str, definition: Manifest) -> bool:
    """Whether a task runs without an input, which a value of the pipeline with this definition fills in."""
    own = task.inputs("parameters").get(name, {})
    return task.is_python and bool(own.get("isOptional")) and _absent_value(own) == _absent_value(definition)


def _absent_value(definition: Manifest) -> str:
    return "null" if definition.get("parameterType") in _RAW_TYPES else NO_TEXT


def _text(value: Any, definition: Manifest) -> str:
    """A constant as the text of a parameter; integers are floats in the IR."""
    if isinstance(value, str) and definition.get("parameterType") not in _RAW_TYPES:
        return value
    if definition.get("parameterType") == "NUMBER_INTEGER":
        return str(int(value))
    return value if isinstance(value, str) else json.dumps(value)


def _build_task(task: KubeflowTask, tasks: Mapping[str, KubeflowTask]) -> Manifest:
    """The task of the DAG that runs ``task``, with its arguments."""
    values = {name: _argument(task, name, tasks) for name in task.inputs("parameters")}
    values |= {_input_name(name): _argument(task, name, tasks) for name in task.channels()}
    parameters = [{"name": name, "value": value} for name, value in values.items() if value is not None]
    artifacts = []
    for name, source in ((task.document.get("inputs") or {}).get("artifacts") or {}).items():
        producer, key = _producer(task, name, source.get("taskOutputArtifact") or {}, "outputArtifactKey", tasks)
        artifacts.append({"name": name, "from": f"{{{{tasks.{producer.name}.outputs.artifacts.{key}}}}}"})
        if task.is_python:
            metadata = f"{{{{tasks.{producer.name}.outputs.parameters.{key}{_METADATA_SUFFIX}}}}}"
            parameters.append({"name": f"{name}{_METADATA_SUFFIX}", "value": metadata if producer.is_python else "{}"})
    arguments = {"parameters": parameters, "artifacts": artifacts}
    built: Manifest = {"name": task.name, "template": f"{task.name}-component"}
    built["arguments"] = {kind: entries for kind, entries in arguments.items() if entries}
    if after := task.document.get("dependentTasks"):
        built["dependencies"] = [tasks[key].name for key in after]
    return built


def _producer(
    task: KubeflowTask, name: str, source: Manifest, field: str, tasks: Mapping[str, KubeflowTask]
) -> tuple[KubeflowTask, str]:
    if source.get("producerTask") not in tasks:
        raise UsageError(
            f"task {task.key!r}: its input {name!r} comes from no task of the pipeline, but is given to it; hand its "
            "address on as a parameter"
        )
    return tasks[source["producerTask"]], source[field]


def _input_name(name: str) -> str:
    return f"pipeline-{name.removeprefix(_CHANNEL)}" if name.startswith(_CHANNEL) else name


def _argument(task: KubeflowTask, name: str, tasks: Mapping[str, KubeflowTask]) -> str | None:
    """The value of an input parameter in the DAG; None for one that the task may leave out and does."""
    definition = task.inputs("parameters").get(name, {})  # that of a value within another has none
    source = task.given.get(name)
    if source is None and "defaultValue" in definition:
        source = {"runtimeValue": {"constant": definition["defaultValue"]}}
    if source is None:
        if definition.get("isOptional"):
            return None
        raise UsageError(f"task {task.key!r}: its input {name!r} has no value")
    if source.get("parameterExpressionSelector"):
        raise UsageError(
            f"task {task.key!r}: its input {name!r} selects a part of a value; make it an output of its own"
        )
    if "componentInputParameter" in source:
        return f"{{{{workflow.parameters.{source['componentInputParameter']}}}}}"
    if "taskOutputParameter" in source:
        producer, key = _producer(task, name, source["taskOutputParameter"], "outputParameterKey", tasks)
        return f"{{{{tasks.{producer.name}.outputs.parameters.{key}}}}}"
    if "runtimeValue" not in source:
        raise UsageError(
            f"task {task.key!r}: its input {name!r} comes from {', '.join(source)}; that is not translated"
        )

    def resolve(inner: str) -> str:
        value = VALUE.fullmatch(inner)
        if value and value[1] == "inputs" and value[2] == "parameters" and value[3] != name:
            return _argument(task, value[3], tasks) or ""
        return _job_value(task, _placeholder(inner), inner)

    text = _text(source["runtimeValue"]["constant"], definition)
    _refuse_braces(task, f"its input {name!r}", text)
    return replace_tags(text, resolve, PLACEHOLDER)


def _refuse_braces(task: KubeflowTask, part: str, text: str) -> None:
    if "{{" in replace_tags(text, lambda _: "", PLACEHOLDER):
        raise UsageError(f"task {task.key!r}: {part} contains '{{{{', which Argo would take for a placeholder")


def _job_value(task: KubeflowTask, placeholder: str, inner: str) -> str:
    if inner == ".pipeline_task_name":
        return task.name
    if inner not in _JOB_PLACEHOLDERS:
        raise UsageError(f"task {task.key!r} uses {placeholder}, which is not translated; hand it on as a parameter")
    return _JOB_PLACEHOLDERS[inner]


def _build_template(task: KubeflowTask) -> Manifest:
    container: Manifest = {"image": _translate_word(task, task.container["image"], "its image")}
    for field in ("command", "args"):
        container[field] = [_translate_word(task, word) for word in task.container.get(field) or []]
    if task.is_python:
        script = _SAVE_OUTPUTS.format(
            executor_output=_EXECUTOR_OUTPUT,
            parameters={name: _parameter_path(name) for name in task.outputs("parameters")},
            artifacts={
                name: (_artifact_path(name), _parameter_path(f"{name}{_METADATA_SUFFIX}"))
                for name in task.outputs("artifacts")
            },
        )
        container["command"] = ["sh", "-ec", '"$@"; exec python3 -c "$0"', script, *container["command"]]
    if env := task.environment:
        container["env"] = [
            {"name": name, "value": _translate_word(task, value, f"its variable {name}")} for name, value in env.items()
        ]
    resources, has_gpus = _translate_resources(task)
    if resources:
        container["resources"] = resources
    kind = AdoptedKind.TRAIN if has_gpus else AdoptedKind.STEP
    template: Manifest = {
        "name": f"{task.name}-component",
        "metadata": {"annotations": {marks.ADOPT: kind.value}},
        "inputs": _template_inputs(task),
        "outputs": _template_outputs(task),
        "container": container,
    }
    if strategy := task.retry_strategy():
        template["retryStrategy"] = strategy
    return {field: value for field, value in template.items() if value}


def _template_inputs(task: KubeflowTask) -> Manifest:
    names = [name for name, parameter in task.inputs("parameters").items() if _is_passed(task, name, parameter)]
    names += map(_input_name, task.channels())
    if task.is_python:
        names += [f"{name}{_METADATA_SUFFIX}" for name in task.inputs("artifacts")]
    artifacts = [{"name": name, "path": f"{_FOLDER}/inputs/{name}"} for name in task.inputs("artifacts")]
    inputs = {"parameters": [{"name": name} for name in names], "artifacts": artifacts}
    return {kind: entries for kind, entries in inputs.items() if entries}


def _is_passed(task: KubeflowTask, name: str, definition: Manifest) -> bool:
    return name in task.given or "defaultValue" in definition


def _template_outputs(task: KubeflowTask) -> Manifest:
    names = list(task.outputs("parameters"))
    artifacts = [{"name": name, "path": _artifact_path(name)} for name in task.outputs("artifacts")]
    if task.is_python:
        names += [f"{name}{_METADATA_SUFFIX}" for name in task.outputs("artifacts")]
        artifacts.append({"name": _EXECUTOR_ARTIFACT, "path": _EXECUTOR_OUTPUT})
    parameters = [{"name": name, "valueFrom": {"path": _parameter_path(name)}} for name in names]
    return {kind: entries for kind, entries in (("parameters", parameters), ("artifacts", artifacts)) if entries}


def _artifact_path(name: str) -> str:
    return f"{_FOLDER}/artifacts/{name}"


def _parameter_path(name: str) -> str:
    return f"{_FOLDER}/outputs/{name}"


def _translate_word(task: KubeflowTask, word: str, part: str = "its program") -> str:
    """A text of the container with Argo's placeholders in the place of Kubeflow's."""
    if not isinstance(word, str) or word.startswith(('{"IfPresent"', '{"Concat"')):
        raise UsageError(
            f"task {task.key!r} builds its command from optional parts (ConcatPlaceholder, IfPresentPlaceholder), "
            "which is not translated; write the words out, or make it a Python component"
        )
    _refuse_braces(task, part, word)

    def translate(inner: str) -> str:
        if not inner:
            return _executor_input(task)
        if (value := VALUE.fullmatch(inner)) is None:
            return _job_value(task, _placeholder(inner), inner)
        return _translate_value(task, _placeholder(inner), *value.groups())

    return replace_tags(word, translate, PLACEHOLDER)


def _placeholder(inner: str) -> str:
    return f"{PLACEHOLDER}{inner}}}}}"


def _translate_value(task: KubeflowTask, placeholder: str, side: str, kind: str, name: str, field: str | None) -> str:
    if (side, kind, field) == ("inputs", "parameters", None):
        return f"{{{{inputs.parameters.{_input_name(name)}}}}}"
    if (kind, side) == ("artifacts", "inputs") and field in ("path", "uri"):
        return f"{_FOLDER}/inputs/{name}"
    if (kind, side) == ("artifacts", "outputs") and field in ("path", "uri"):
        return _artifact_path(name)
    if (side, kind, field) == ("outputs", "parameters", "output_file"):
        return _parameter_path(name)
    raise UsageError(f"task {task.key!r} uses {placeholder}, which is not translated; hand it on as a parameter")


def _executor_input(task: KubeflowTask) -> str:
    """The JSON that Kubeflow's launcher passes to a Python component, with Argo's placeholders for the values."""
    values = ",".join(
        f"{json.dumps(name)}:{_json_placeholder(task, name, definition)}"
        for name, definition in task.inputs("parameters").items()
        if _is_passed(task, name, definition)
    )
    read = ",".join(
        f"{json.dumps(name)}:{_artifact_list(name, artifact, f'{_FOLDER}/inputs/{name}', _metadata_placeholder(name))}"
        for name, artifact in task.inputs("artifacts").items()
    )
    parameters = {name: {"outputFile": _parameter_path(name)} for name in task.outputs("parameters")}
    written = ",".join(
        f"{json.dumps(name)}:{_artifact_list(name, artifact, _artifact_path(name), '{}')}"
        for name, artifact in task.outputs("artifacts").items()
    )
    return (
        f'{{"inputs":{{"parameterValues":{{{values}}},"artifacts":{{{read}}}}},'
        f'"outputs":{{"parameters":{json.dumps(parameters)},"outputFile":{json.dumps(_EXECUTOR_OUTPUT)},'
        f'"artifacts":{{{written}}}}}}}'
    )


def _json_placeholder(task: KubeflowTask, name: str, definition: Manifest) -> str:
    """Kubeflow's executor takes null for a parameter without a value."""
    if definition.get("parameterType") in _RAW_TYPES:
        return f"{{{{inputs.parameters.{name}}}}}"
    value = f"inputs.parameters['{name}']"
    if definition.get("isOptional") and "componentInputParameter" in task.given.get(name, {}):
        return f"{{{{={value} == '{NO_TEXT}' ? 'null' : toJson({value})}}}}"
    return f"{{{{=toJson({value})}}}}"


def _metadata_placeholder(name: str) -> str:
    return f"{{{{inputs.parameters.{name}{_METADATA_SUFFIX}}}}}"


def _artifact_list(name: str, definition: Manifest, uri: str, metadata: str) -> str:
    kind = definition.get("artifactType") or {}
    if definition.get("isArtifactList"):
        raise UsageError(f"artifact {name!r} is a list of artifacts, which is not translated; make a folder of it")
    fields = json.dumps({"name": name, "type": kind, "uri": uri})
    return f'{{"artifacts":[{fields[:-1]}, "metadata":{metadata}}}]}}'


def _translate_resources(task: KubeflowTask) -> tuple[Manifest, bool]:
    """Resources as Kubernetes has them, and whether GPUs are among them."""
    resources = task.container.get("resources") or {}
    sides: dict[str, Manifest] = {"requests": {}, "limits": {}}
    for side, name, value in _amounts(resources):
        sides[side][name] = value
    accelerator = resources.get("accelerator") or {}
    kind = accelerator.get("resourceType") or accelerator.get("type")
    if kind:
        sides["limits"][kind] = str(accelerator.get("resourceCount") or accelerator.get("count") or 1)
    for name, value in itertools.chain(*(amounts.items() for amounts in sides.values())):
        if "{{" in f"{name}{value}":
            raise UsageError(
                f"task {task.key!r}: its resource {name} of {value} is known only when the pipeline runs, which Argo "
                "and the queues of GPUs do not take; write the name and the number into the pipeline"
            )
    return {side: amounts for side, amounts in sides.items() if amounts}, bool(kind)


def _amounts(resources: Manifest) -> Iterator[tuple[str, str, str]]:
    """Side, name and amount of each resource; the older fields are numbers of cores and of 10^9 bytes."""
    for side, suffix in (("requests", "Request"), ("limits", "Limit")):
        for name, field, unit in (("cpu", "Cpu", ""), ("memory", "Memory", "G")):
            older = resources.get(f"{field.lower()}{suffix}")
            if amount := resources.get(f"resource{field}{suffix}") or (f"{older:g}{unit}" if older else ""):
                yield side, name, str(amount)
