"""The plugin templates of a step: admit, settle, conclude and finalize.

Their bodies are the models of `tiphys.protocol.operations`, which the plugin parses.
"""

from typing import Any

from hera_pipelines.compile import references
from hera_pipelines.compile.gated_step import GatedStep
from hera_pipelines.compile.references import workflow_parameters_used
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.operations import (
    ADMIT_OUTPUTS,
    PLUGIN_BODY_KEY,
    AdmitOperation,
    ConcludeOperation,
    FinalizeOperation,
    SettleOperation,
    gang_outputs,
)
from tiphys.protocol.step_spec import RUN_PARAMETER, SUBMISSION_PARAMETER

STATUS, EXIT_CODE = "status", "exit-code"


class IdentityPlaceholders:
    """Placeholders that name run, submission, workflow and node in the body of a plugin template."""

    def __init__(self, run: str) -> None:
        self._run = run

    def fields(self) -> dict[str, str]:
        return {
            "run": self._run,
            "submission": f"{{{{workflow.parameters.{SUBMISSION_PARAMETER}}}}}",
            "uid": "{{workflow.uid}}",
            "node": "{{node.name}}",
        }

    def step_fields(self, step: GatedStep) -> dict[str, str]:
        return {
            **self.fields(),
            "step": step.name,
            "item": input_placeholder(references.ITEM_PARAMETER) if step.fan_out else "",
        }


def identity_placeholders(run_name: str) -> IdentityPlaceholders:
    """Placeholders for the run of ``run_name`` (``digits-lr{lr}``); empty: of the parameter ``tiphys-run``."""
    if not run_name:
        return IdentityPlaceholders(f"{{{{workflow.parameters.{RUN_PARAMETER}}}}}")
    return IdentityPlaceholders(run_name.replace("{", "{{workflow.parameters.").replace("}", "}}"))


def input_placeholder(name: str) -> str:
    """Argo's placeholder for an input parameter."""
    return f"{{{{inputs.parameters.{name}}}}}"


def admit_template(step: GatedStep, identity: IdentityPlaceholders) -> Manifest:
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
    outputs = [supplied_output(name) for name in ADMIT_OUTPUTS + gang_outputs(step.settings.gang)]
    outputs += [supplied_output(name, amount) for name, amount in step.admitted_memory.items()]
    return drop_empty_fields(
        {
            "name": step.template_names.admit,
            "inputs": drop_empty_fields(inputs),
            "outputs": {"parameters": outputs},
            "plugin": _plugin_body(
                AdmitOperation(**identity.step_fields(step), inputs={**inputs_by_name, **workflow_parameters})
            ),
        }
    )


def settle_template(step: GatedStep, identity: IdentityPlaceholders) -> Manifest:
    """Build the template that asks if another attempt follows a training attempt."""
    body = SettleOperation(
        **identity.step_fields(step), status=input_placeholder(STATUS), exit_code=input_placeholder(EXIT_CODE)
    )
    inputs = [{"name": STATUS}, {"name": EXIT_CODE}, *item_input(step)]
    return {"name": step.template_names.settle, "inputs": {"parameters": inputs}, "plugin": _plugin_body(body)}


def conclude_template(step: GatedStep, identity: IdentityPlaceholders) -> Manifest:
    """Build the template that asks for the result of the step; its outputs are those of the step."""
    body = ConcludeOperation(
        **identity.step_fields(step), status=input_placeholder(STATUS), exit_code=input_placeholder(EXIT_CODE)
    )
    outputs = {
        "parameters": [supplied_output(p["name"]) for p in step.output_parameters],
        # Argo requires a path for the artifacts of a leaf template; this one is never used.
        "artifacts": [
            {"name": a["name"], "path": f"/unused/{a['name']}", "optional": True} for a in step.output_artifacts
        ],
    }
    return drop_empty_fields(
        {
            "name": step.template_names.conclude,
            "inputs": {"parameters": [{"name": STATUS}, {"name": EXIT_CODE}, *item_input(step)]},
            "outputs": drop_empty_fields(outputs),
            "plugin": _plugin_body(body),
        }
    )


def finalize_template(identity: IdentityPlaceholders) -> Manifest:
    """Build the template that reports the end of the workflow to the plugin."""
    body = FinalizeOperation(**identity.fields(), status="{{workflow.status}}", failures="{{workflow.failures}}")
    return {"name": references.FINALIZE, "plugin": _plugin_body(body)}


def item_input(step: GatedStep) -> list[Manifest]:
    """The input parameter for the fan-out item; empty for a step that is not fanned out."""
    return [{"name": references.ITEM_PARAMETER}] if step.fan_out else []


def leaf_artifact(artifact: Manifest) -> Manifest:
    """An input artifact of a leaf template: it comes as an argument, so it has no location of its own."""
    return {
        field: artifact[field] for field in ("name", "path", "optional", "mode", "recurseMode") if field in artifact
    }


def supplied_output(name: str, default: str = "") -> Manifest:
    """An output parameter whose value the plugin's answer supplies."""
    return {"name": name, "valueFrom": {"default": default, "supplied": {}}}


def drop_empty_fields(template: Manifest) -> Manifest:
    """``template`` without fields that are an empty list or object."""
    return {field: value for field, value in template.items() if value not in ({}, [])}


def _plugin_body(operation: AdmitOperation | SettleOperation | ConcludeOperation | FinalizeOperation) -> dict[str, Any]:
    return {PLUGIN_BODY_KEY: operation.model_dump()}
