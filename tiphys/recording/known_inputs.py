"""The inputs of a step before it runs, where its manifest and finished tasks tell them all.

A result can then be looked for under the step key that the recorder or admit would compute.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tiphys.protocol.compiled_workflow import (
    CompiledPipeline,
    Manifest,
    contains_tags,
    find_template,
    read_workflow_parameters,
    substitute_tags,
)
from tiphys.protocol.fan_out import argo_text
from tiphys.protocol.operations import PLUGIN_BODY_KEY
from tiphys.protocol.step_spec import ITEM_PARAMETER, StepSpec
from tiphys.recording.step_key import StepInputs, workflow_parameters_used

_WORKFLOW_PARAMETER = "workflow.parameters."


def workflow_parameter_values(pipeline: CompiledPipeline) -> dict[str, str]:
    """Values of the workflow parameters, under the names by which tags read them."""
    return {
        f"{_WORKFLOW_PARAMETER}{name}": value for name, value in read_workflow_parameters(pipeline.manifest).items()
    }


def find_known_inputs(
    pipeline: CompiledPipeline, spec: StepSpec, body: Manifest, parameters: Mapping[str, str], item: str = ""
) -> StepInputs | None:
    """The inputs of a step; None if one of them is made at run time.

    ``body`` is its task, with outputs of finished tasks in the place of references; ``parameters`` are the
    `workflow_parameter_values`.

    Raises:
        UsageError: the Workflow has no such template.
    """
    template = find_template(pipeline.manifest, body["template"])
    declared = template.get("inputs") or {}
    arguments = body.get("arguments") or {}
    given = {argument["name"]: argument.get("value") for argument in arguments.get("parameters") or []}
    values: dict[str, str] = {}
    for parameter in declared.get("parameters") or []:
        value = given.get(parameter["name"])
        value = next((v for v in (value, parameter.get("value"), parameter.get("default")) if v is not None), None)
        if value is None:
            return None
        values[parameter["name"]] = argo_text(value)
    values.pop(ITEM_PARAMETER, None)
    values |= {
        f"{_WORKFLOW_PARAMETER}{name}": parameters.get(f"{_WORKFLOW_PARAMETER}{name}", "")
        for name in _parameters_used(pipeline, spec, template)
    }
    artifacts = _bind_artifacts(declared.get("artifacts") or [], arguments.get("artifacts") or [])
    filled = substitute_tags(values, parameters.get)
    if artifacts is None:
        return None
    located: list[dict[str, Any]] = substitute_tags(artifacts, parameters.get)
    return None if contains_tags(filled) or contains_tags(located) else StepInputs(filled, located, item)


def _parameters_used(pipeline: CompiledPipeline, spec: StepSpec, template: Manifest) -> list[str]:
    if not spec.is_gated:
        return workflow_parameters_used(template)
    names = (name for name in _admit_inputs(pipeline, spec.name) if name.startswith(_WORKFLOW_PARAMETER))
    return [name.removeprefix(_WORKFLOW_PARAMETER) for name in names]


def _admit_inputs(pipeline: CompiledPipeline, step: str) -> Mapping[str, str]:
    for template in pipeline.manifest["spec"]["templates"]:
        body: Manifest = (template.get("plugin") or {}).get(PLUGIN_BODY_KEY) or {}
        if (body.get("op"), body.get("step")) == ("admit", step):
            return body.get("inputs") or {}
    return {}


def _bind_artifacts(declared: Sequence[Manifest], arguments: Sequence[Manifest]) -> list[dict[str, Any]] | None:
    """The input artifacts with their locations; None if one is made at run time."""
    given = {argument["name"]: argument for argument in arguments}
    if any("from" in argument or "fromExpression" in argument for argument in given.values()):
        return None
    return [{**parameter, **given.get(parameter["name"], {})} for parameter in declared]
