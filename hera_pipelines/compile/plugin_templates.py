"""The plugin templates: admit and conclude of a step, finalize and reuse of a Workflow.

Their bodies are the models of `tiphys.protocol.operations`, which the plugin parses.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hera_pipelines.compile import references
from hera_pipelines.compile.authored_step import AuthoredStep
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.operations import (
    PLUGIN_BODY_KEY,
    REPORT_ARTIFACT,
    REUSE_TEMPLATE,
    WAKE_TEMPLATE,
    AdmitOperation,
    ConcludeOperation,
    FinalizeOperation,
    Operation,
    ReuseOperation,
    gang_outputs,
    reuse_output,
)
from tiphys.protocol.step_spec import ITEM_PARAMETER, RESULT_PARAMETER, RUN_PARAMETER, SUBMISSION_PARAMETER
from tiphys.recording.step_key import workflow_parameters_used
from tiphys.records.tracking import TRACKING_ID_OUTPUT

STATUS, EXIT_CODE = "status", "exit-code"
_RUN_OUTPUTS = ("run-id", "attempt", "outputs")
_CHECKPOINT_OUTPUTS = ("lineage", "resume-from", "checkpoint-uri")
_TRAINING_OUTPUTS = ("pod-patch",)


def admit_output_names(step: AuthoredStep) -> tuple[str, ...]:
    """Names of the outputs of admit that the run template of ``step`` takes as inputs."""
    checkpoints = _CHECKPOINT_OUTPUTS if step.settings.checkpoints else ()
    placement = (*gang_outputs(step.settings.gang), *step.admitted_memory) or _TRAINING_OUTPUTS
    item = ("step",) if step.fan_out else ()
    tracked = (TRACKING_ID_OUTPUT,) if step.spec().tracker == "wandb" else ()
    return item + _RUN_OUTPUTS + checkpoints + tracked + (placement if step.is_training else ())


IdentityPlaceholders = Mapping[str, str]
"""Placeholders that name run, submission, workflow and node in the body of a plugin template, by its fields."""


def identity_placeholders(run_name: str) -> IdentityPlaceholders:
    """Placeholders for the run of ``run_name`` (``digits-lr{lr}``); empty: of the parameter ``tiphys-run``."""
    authored = run_name.replace("{", "{{workflow.parameters.").replace("}", "}}")
    return {
        "run": authored or f"{{{{workflow.parameters.{RUN_PARAMETER}}}}}",
        "submission": f"{{{{workflow.parameters.{SUBMISSION_PARAMETER}}}}}",
        "uid": "{{workflow.uid}}",
        "node": "{{node.name}}",
    }


def _name_step(step: AuthoredStep, identity: IdentityPlaceholders) -> dict[str, str]:
    return {**identity, "step": step.name, "item": input_placeholder(ITEM_PARAMETER) if step.fan_out else ""}


def input_placeholder(name: str) -> str:
    """Argo's placeholder for an input parameter."""
    return f"{{{{inputs.parameters.{name}}}}}"


def admit_placeholder(name: str) -> str:
    """Argo's placeholder for the input parameter of the run template that has the output ``name`` of admit."""
    return input_placeholder(references.admit_output_parameter(name))


def admit_template(step: AuthoredStep, identity: IdentityPlaceholders) -> Manifest:
    """Build the template that asks if the step may run; it takes the step's inputs, which are part of the step key."""
    inputs_by_name = {p["name"]: input_placeholder(p["name"]) for p in step.input_parameters}
    workflow_parameters = {
        f"workflow.parameters.{name}": f"{{{{workflow.parameters.{name}}}}}"
        for name in workflow_parameters_used(step.program)
    }
    inputs = {
        "parameters": [{"name": p["name"]} for p in step.input_parameters] + item_input(step),
        "artifacts": [leaf_artifact(a) for a in step.input_artifacts],
    }
    parameters = [
        supplied_output(name, step.admitted_memory.get(name, "")) for name in ("run", *admit_output_names(step))
    ]
    outputs: Manifest = {"parameters": parameters}
    body = AdmitOperation(**_name_step(step, identity), inputs={**inputs_by_name, **workflow_parameters})
    return drop_empty_fields(
        {
            "name": step.template_names.admit,
            "inputs": drop_empty_fields(inputs),
            "outputs": drop_empty_fields(outputs),
            "plugin": _plugin_body(body),
        }
    )


def conclude_template(step: AuthoredStep, identity: IdentityPlaceholders) -> Manifest:
    """Build the template that asks what became of an attempt; its outputs are those of the step."""
    result = {"result": input_placeholder(RESULT_PARAMETER)} if step.has_result else {}
    body = ConcludeOperation(
        **_name_step(step, identity), **result, status=input_placeholder(STATUS), exit_code=input_placeholder(EXIT_CODE)
    )
    outputs = {
        "parameters": [supplied_output(name) for name in step.spec().output_parameters],
        "artifacts": [supplied_artifact(a["name"]) for a in step.output_artifacts],
    }
    return drop_empty_fields(
        {
            "name": step.template_names.conclude,
            "inputs": {
                "parameters": [
                    {"name": STATUS},
                    {"name": EXIT_CODE},
                    *({"name": name} for name in result),
                    *item_input(step),
                ]
            },
            "outputs": drop_empty_fields(outputs),
            "plugin": _plugin_body(body),
        }
    )


def finalize_template(identity: IdentityPlaceholders) -> Manifest:
    """Build the template that reports the end of the workflow to the plugin."""
    body = FinalizeOperation(**identity, status="{{workflow.status}}", failures="{{workflow.failures}}")
    outputs = {"artifacts": [supplied_artifact(REPORT_ARTIFACT)]}
    return {"name": references.FINALIZE, "outputs": outputs, "plugin": _plugin_body(body)}


def reuse_template(steps: Sequence[AuthoredStep], identity: IdentityPlaceholders) -> Manifest:
    """Build the template that asks which of ``steps`` are taken over at the start of the Workflow."""
    body = ReuseOperation(**identity, steps=tuple(step.name for step in steps))
    parameters, artifacts = list[Manifest](), list[Manifest]()
    for step in steps:
        names = ["", *(parameter["name"] for parameter in step.output_parameters)]
        parameters += [supplied_output(reuse_output(step.name, name)) for name in names]
        files = [reuse_output(step.name, artifact["name"]) for artifact in step.output_artifacts]
        artifacts += [supplied_artifact(name) for name in files]
    outputs = drop_empty_fields({"parameters": parameters, "artifacts": artifacts})
    return {"name": REUSE_TEMPLATE, "outputs": outputs, "plugin": _plugin_body(body)}


_WAKE_DURATION = "300ms"
"""Longer than an answer usually takes; a later one waits for Argo's next reconciliation, as without the timer."""


def wake_template() -> Manifest:
    """Build the template of the timer that makes Argo reconcile the workflow soon after a plugin has answered."""
    return {"name": WAKE_TEMPLATE, "suspend": {"duration": _WAKE_DURATION}}


def wake_tasks(call: Manifest, *, as_lists: bool = False) -> list[Manifest]:
    """The two timers beside the task ``call``: the first has Argo consume the answer, the second go on after it.

    They begin when the call does. That of finalize and of admit needs nothing to begin. ``as_lists`` in a DAG that uses
    dependency lists.
    """
    first = "wake" if call["name"] in ("admit", "finalize") else f"wake-{call['name']}"
    begin = {"depends": call["depends"]} if call.get("depends") else {}
    after: Manifest = {"dependencies": [first]} if as_lists else {"depends": first}
    return [
        {"name": first, "template": WAKE_TEMPLATE, **begin},
        {"name": f"{first}-again", "template": WAKE_TEMPLATE, **after},
    ]


def item_input(step: AuthoredStep) -> list[Manifest]:
    """The input parameter for the fan-out item; empty for a step that is not fanned out."""
    return [{"name": ITEM_PARAMETER}] if step.fan_out else []


def leaf_artifact(artifact: Manifest) -> Manifest:
    """An input artifact of a leaf template: it comes as an argument, so it has no location of its own."""
    return {
        field: artifact[field] for field in ("name", "path", "optional", "mode", "recurseMode") if field in artifact
    }


def supplied_output(name: str, default: str = "") -> Manifest:
    """An output parameter whose value the plugin's answer supplies."""
    return {"name": name, "valueFrom": {"default": default, "supplied": {}}}


def supplied_artifact(name: str) -> Manifest:
    """An output artifact whose location the plugin's answer supplies."""
    # Argo requires a path for the artifacts of a leaf template; this one is never used.
    return {"name": name, "path": f"/unused/{name}", "optional": True}


def drop_empty_fields(template: Manifest) -> Manifest:
    """``template`` without fields that are an empty list or object."""
    return {field: value for field, value in template.items() if value not in ({}, [])}


def _plugin_body(operation: Operation) -> dict[str, Any]:
    return {PLUGIN_BODY_KEY: {name: value for name, value in operation.model_dump().items() if value not in ("", {})}}
