"""The plugin templates of a step. Their bodies are the models that the plugin itself reads."""

from typing import Any

from hera_pipelines.compile import references as names
from hera_pipelines.compile.gated_step import GatedStep
from hera_pipelines.compile.references import workflow_parameters
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.operations import ADMIT_OUTPUTS, PLUGIN, Admit, Conclude, Finalize, Settle, gang_outputs
from tiphys.protocol.step_spec import RUN_PARAMETER, SUBMISSION_PARAMETER

STATUS, EXIT_CODE = "status", "exit-code"


class Identity:
    """Says which run, submission, workflow and node a plugin body speaks for."""

    def __init__(self, run: str) -> None:
        self._run = run

    def fields(self) -> dict[str, str]:
        return {
            "run": self._run,
            "submission": f"{{{{workflow.parameters.{SUBMISSION_PARAMETER}}}}}",
            "uid": "{{workflow.uid}}",
            "node": "{{node.name}}",
        }

    def of_step(self, step: GatedStep) -> dict[str, str]:
        return {**self.fields(), "step": step.name, "item": input_value(names.ITEM) if step.fan_out else ""}


def run_identity(run_name: str) -> Identity:
    """Identity of the author's ``run_name`` (``digits-lr{lr}``), or of the parameter where that is empty."""
    if not run_name:
        return Identity(f"{{{{workflow.parameters.{RUN_PARAMETER}}}}}")
    return Identity(run_name.replace("{", "{{workflow.parameters.").replace("}", "}}"))


def input_value(name: str) -> str:
    """Argo's placeholder for an input parameter."""
    return f"{{{{inputs.parameters.{name}}}}}"


def admit_template(step: GatedStep, identity: Identity) -> Manifest:
    """Asks whether the step may run. It takes the step's inputs, because they decide the step's key."""
    given = {p["name"]: input_value(p["name"]) for p in step.input_parameters}
    ambient = {
        f"workflow.parameters.{name}": f"{{{{workflow.parameters.{name}}}}}"
        for name in workflow_parameters(step.program)
    }
    inputs = {
        "parameters": [{"name": p["name"]} for p in step.input_parameters] + item_input(step),
        "artifacts": [plain_artifact(a) for a in step.input_artifacts],
    }
    answered = [supplied(name) for name in ADMIT_OUTPUTS + gang_outputs(step.settings.gang)]
    answered += [supplied(name, amount) for name, amount in step.admitted_memory.items()]
    return without_empty(
        {
            "name": step.names.admit,
            "inputs": without_empty(inputs),
            "outputs": {"parameters": answered},
            "plugin": _body(Admit(**identity.of_step(step), inputs={**given, **ambient})),
        }
    )


def settle_template(step: GatedStep, identity: Identity) -> Manifest:
    """Asks whether a training attempt shall be followed by another."""
    body = Settle(**identity.of_step(step), status=input_value(STATUS), exit_code=input_value(EXIT_CODE))
    inputs = [{"name": STATUS}, {"name": EXIT_CODE}, *item_input(step)]
    return {"name": step.names.settle, "inputs": {"parameters": inputs}, "plugin": _body(body)}


def conclude_template(step: GatedStep, identity: Identity) -> Manifest:
    """Asks for the step's verdict; its outputs are the step's."""
    body = Conclude(**identity.of_step(step), status=input_value(STATUS), exit_code=input_value(EXIT_CODE))
    outputs = {
        "parameters": [supplied(p["name"]) for p in step.output_parameters],
        # A leaf template must declare a path for its artifacts, though nothing will ever lie there.
        "artifacts": [
            {"name": a["name"], "path": f"/unused/{a['name']}", "optional": True} for a in step.output_artifacts
        ],
    }
    return without_empty(
        {
            "name": step.names.conclude,
            "inputs": {"parameters": [{"name": STATUS}, {"name": EXIT_CODE}, *item_input(step)]},
            "outputs": without_empty(outputs),
            "plugin": _body(body),
        }
    )


def finalize_template(identity: Identity) -> Manifest:
    """Tells the plugin how the workflow ended."""
    body = Finalize(**identity.fields(), status="{{workflow.status}}", failures="{{workflow.failures}}")
    return {"name": names.FINALIZE, "plugin": _body(body)}


def item_input(step: GatedStep) -> list[Manifest]:
    """The input that hands the fan-out item down; none for a step that is not fanned out."""
    return [{"name": names.ITEM}] if step.fan_out else []


def plain_artifact(artifact: Manifest) -> Manifest:
    """An input artifact as a leaf receives it: by argument, so without a location of its own."""
    return {
        field: artifact[field] for field in ("name", "path", "optional", "mode", "recurseMode") if field in artifact
    }


def supplied(name: str, default: str = "") -> Manifest:
    """An output parameter that the plugin's answer fills in."""
    return {"name": name, "valueFrom": {"default": default, "supplied": {}}}


def without_empty(template: Manifest) -> Manifest:
    """``template`` without fields that are an empty list or object."""
    return {field: value for field, value in template.items() if value not in ({}, [])}


def _body(operation: Admit | Settle | Conclude | Finalize) -> dict[str, Any]:
    return {PLUGIN: operation.model_dump()}
