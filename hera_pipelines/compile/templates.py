"""Compiles one gated step into its templates, in the shapes that `docs/architecture.md` draws.

A gated step is a DAG of admit, run and conclude, and Argo repeats that of a `Train`
for each attempt. The run template is the author's container with its identity, the
keys of its outputs and its placement.

Argo consumes the answer of a plugin at the end of one reconciliation and starts
what depends on it in the next one, and events start a reconciliation only after
DEFAULT_REQUEUE_TIME. Two timers beside a call start both sooner: `Suspend` nodes,
one behind the other, that end shortly after the answer
(``workflow/controller/operator.go``, ``executeSuspend`` and ``reconcileTaskSet``).
"""

import copy

from hera_pipelines.compile import references
from hera_pipelines.compile.authored_step import AuthoredStep, program_container
from hera_pipelines.compile.container import apply_placement, build_step_environment, launch_program
from hera_pipelines.compile.gang import gang_template
from hera_pipelines.compile.plugin_templates import (
    EXIT_CODE,
    STATUS,
    IdentityPlaceholders,
    admit_output_names,
    admit_placeholder,
    admit_template,
    conclude_template,
    drop_empty_fields,
    input_placeholder,
    item_input,
    leaf_artifact,
    wake_tasks,
)
from hera_pipelines.compile.retries import attempt_retry_strategy, step_retry_strategy
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.gang import GangBackend
from tiphys.protocol.step_spec import (
    ATTEMPT_LABEL,
    ITEM_PARAMETER,
    RESULT_PARAMETER,
    RUN_LABEL,
    STEP_ANNOTATION,
    STEP_LABEL,
    STORE_SECRET,
)

# A training program writes its checkpoints itself, and the ids of MLflow are kept in the store. Optional, because pods
# may get credentials in another way. First
# in the list, because Kubernetes uses the later of two variables of the same name.
_CREDENTIALS: Manifest = {"secretRef": {"name": STORE_SECRET, "optional": True}}


def run_template(step: AuthoredStep, store: str) -> Manifest:
    """The author's template as Argo runs it: renamed, without the annotation, with admit's outputs as inputs."""
    template = copy.deepcopy(step.program)
    template["name"] = step.template_names.run
    template["metadata"] = _metadata(step)
    template["inputs"] = _inputs(step)
    template["outputs"] = _outputs(step)
    container = program_container(template)
    container["env"] = [*(container.get("env") or []), *build_step_environment(step, store)]
    launch_program(template, step)
    if step.settings.gang is None or step.settings.gang.backend is not GangBackend.TRAINJOB:  # which has no such field
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    if step.is_training or step.uses_store:
        container["envFrom"] = [_CREDENTIALS, *(container.get("envFrom") or [])]
    if not step.is_training and template.get("retryStrategy") is None:
        template["retryStrategy"] = step_retry_strategy(step.settings.retry)
    apply_placement(template, step)
    # An empty one means something to Argo: retries without limit, or none of the Workflow's security context.
    return {field: value for field, value in template.items() if value or field not in ("inputs", "outputs")}


def _metadata(step: AuthoredStep) -> Manifest:
    metadata = copy.deepcopy(step.program.get("metadata") or {})
    metadata["annotations"] = {k: v for k, v in metadata["annotations"].items() if k != STEP_ANNOTATION}
    # The plugin finds the pods of an attempt by these labels; a podSpecPatch cannot set labels.
    metadata["labels"] = {
        **(metadata.get("labels") or {}),
        RUN_LABEL: admit_placeholder("run-id"),
        STEP_LABEL: step.name,
        ATTEMPT_LABEL: admit_placeholder("attempt"),
    }
    return {field: value for field, value in metadata.items() if value}


def _inputs(step: AuthoredStep) -> Manifest:
    declared = [{"name": p["name"]} for p in step.input_parameters]
    admitted = [{"name": references.admit_output_parameter(name)} for name in admit_output_names(step)]
    inputs: Manifest = {"parameters": declared + admitted}
    if step.input_artifacts:
        inputs["artifacts"] = [{**leaf_artifact(a), **readable_mode(a)} for a in step.input_artifacts]
    return inputs


def readable_mode(artifact: Manifest) -> Manifest:
    """Fields that make an input artifact readable for all: Argo's executor writes it as root, for root alone."""
    return {} if "mode" in artifact else {"mode": 0o755, "recurseMode": True}


def _outputs(step: AuthoredStep) -> Manifest:
    """The files of the outputs at fixed keys."""
    spec = step.spec()
    artifacts = [
        _keyed_artifact(step, a["name"], a["path"], f"artifacts/{spec.artifact_file(a['name'])}")
        for a in step.output_artifacts
    ]
    parameters = [
        _keyed_artifact(
            step, references.parameter_artifact(p["name"]), p["valueFrom"]["path"], f"parameters/{p['name']}"
        )
        for p in step.output_parameters
    ]
    return drop_empty_fields({"artifacts": artifacts + parameters})


def _keyed_artifact(step: AuthoredStep, name: str, path: str, key: str) -> Manifest:
    """An artifact at a fixed key. It is optional for Argo; the call that records the end checks that it exists."""
    # Argo's own retries of a step share one admit, and so one prefix; each writes below its retry number.
    retry = "" if step.is_training else "{{retries}}/"
    return {
        "name": name,
        "path": path,
        "optional": True,
        "archive": {"none": {}},
        "s3": {"key": f"{admit_placeholder('outputs')}/{retry}{key}"},
    }


_EXIT_CODE = "{{=tasks['run'].exitCode ?? '-1'}}"
"""A plain ``{{tasks.run.exitCode}}`` hangs the workflow where the node has no exit code."""
_PRINTED = "{{=tasks['run'].status == 'Succeeded' ? tasks['run'].outputs.result ?? '' : ''}}"
"""Argo keeps the standard output of a task only if it finds this form of a reference to it beside the task."""


def step_templates(
    step: AuthoredStep, identity: IdentityPlaceholders, store: str, workflow: Manifest
) -> list[Manifest]:
    """Return all templates of one step, the wrapper first; ``workflow`` is the ``spec`` of the Workflow."""
    run = run_template(step, store)
    return [
        _wrapper_template(step),
        admit_template(step, identity),
        run if step.settings.gang is None else gang_template(step, run, workflow),
        conclude_template(step, identity),
    ]


def _awoken(step: AuthoredStep, call: Manifest) -> list[Manifest]:
    """The task of a call with its timers beside it; alone in an item of a fan-out, of which there may be thousands."""
    return [call] if step.fan_out else [call, *wake_tasks(call)]


def _wrapper_template(step: AuthoredStep) -> Manifest:
    retries = {"retryStrategy": attempt_retry_strategy(step.settings.retry)} if step.is_training else {}
    return drop_empty_fields(
        {
            "name": step.name,
            "metadata": {"annotations": {STEP_ANNOTATION: step.spec().model_dump_json(exclude_defaults=True)}},
            "inputs": _wrapper_inputs(step),
            "outputs": _wrapper_outputs(step),
            **retries,
            "dag": {
                "tasks": [
                    *_awoken(step, _admit_task(step)),
                    _run_task(step),
                    *_awoken(step, _conclude_task(step)),
                ]
            },
        }
    )


def _wrapper_inputs(step: AuthoredStep) -> Manifest:
    # Argo allows the path of an artifact in leaf templates only.
    artifacts = [{k: v for k, v in a.items() if k not in ("path", "mode", "recurseMode")} for a in step.input_artifacts]
    return drop_empty_fields({"parameters": step.input_parameters + item_input(step), "artifacts": artifacts})


def _wrapper_outputs(step: AuthoredStep) -> Manifest:
    declared = [*step.output_parameters, *([{"name": RESULT_PARAMETER}] if step.has_result else [])]
    source = "{{tasks.conclude.outputs"
    parameters = [
        _exported_output(p, valueFrom={"parameter": f"{source}.parameters.{p['name']}}}}}"}) for p in declared
    ]
    artifacts = [{**_exported_output(a), "from": f"{source}.artifacts.{a['name']}}}}}"} for a in step.output_artifacts]
    return drop_empty_fields({"parameters": parameters, "artifacts": artifacts})


def _exported_output(output: Manifest, **fields: Manifest) -> Manifest:
    declared: Manifest = {field: output[field] for field in ("name", "globalName", "description") if field in output}
    return {**declared, **fields}


def _admit_task(step: AuthoredStep) -> Manifest:
    return drop_empty_fields(
        {"name": "admit", "template": step.template_names.admit, "arguments": _passed_arguments(step)}
    )


def _run_task(step: AuthoredStep) -> Manifest:
    arguments = _passed_arguments(step, item=False)
    if step.settings.gang is not None:
        arguments.pop("artifacts", None)  # the members fetch them, by keys from admit
    admitted = [
        {"name": references.admit_output_parameter(name), "value": f"{{{{tasks.admit.outputs.parameters.{name}}}}}"}
        for name in admit_output_names(step)
    ]
    return {
        "name": "run",
        "template": step.template_names.run,
        "depends": "admit",
        "when": "{{tasks.admit.outputs.parameters.run}} == true",
        "arguments": {**arguments, "parameters": arguments.get("parameters", []) + admitted},
    }


def _conclude_task(step: AuthoredStep) -> Manifest:
    """The task that judges how the program ended; Argo leaves it out where a stop kept that from starting."""
    parameters = [{"name": STATUS, "value": "{{tasks.run.status}}"}, {"name": EXIT_CODE, "value": _EXIT_CODE}]
    if step.has_result:
        parameters.append({"name": RESULT_PARAMETER, "value": _PRINTED})
    return {
        "name": "conclude",
        "template": step.template_names.conclude,
        "depends": " || ".join(f"run.{result}" for result in ("Succeeded", "Failed", "Errored", "Skipped")),
        "arguments": {"parameters": [*parameters, *_item_arguments(step)]},
    }


def _passed_arguments(step: AuthoredStep, item: bool = True) -> Manifest:
    parameters = [{"name": p["name"], "value": input_placeholder(p["name"])} for p in step.input_parameters]
    artifacts = [
        {"name": a["name"], "from": f"{{{{inputs.artifacts.{a['name']}}}}}"}
        | ({"optional": True} if a.get("optional") else {})
        for a in step.input_artifacts
    ]
    return drop_empty_fields(
        {"parameters": parameters + (_item_arguments(step) if item else []), "artifacts": artifacts}
    )


def _item_arguments(step: AuthoredStep) -> list[Manifest]:
    return [{"name": ITEM_PARAMETER, "value": input_placeholder(ITEM_PARAMETER)}] if step.fan_out else []
