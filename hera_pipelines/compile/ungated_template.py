"""Compiles the template of steps without a gate: the author's own, with places for its outputs.

Such a step is one node of the Workflow, and several tasks share its template. The outputs
lie below the uid of the Workflow and the name of the pod, which no copy of the Workflow and
no other try share. Whoever watches the Workflow records the step (`tiphys.recording`).
"""

import copy
from collections.abc import Sequence

from hera_pipelines.compile.authored_step import AuthoredStep, program_container
from hera_pipelines.compile.container import apply_placement, data_variables, path_variables
from hera_pipelines.compile.plugin_templates import drop_empty_fields
from hera_pipelines.compile.retries import has_retries, step_retry_strategy
from hera_pipelines.compile.templates import readable_mode
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import ITEM_PARAMETER, STEP_ANNOTATION
from tiphys.store import artifact_prefix
from tiphys.store.workflow_layout import pod_outputs


def ungated_template(steps: Sequence[AuthoredStep], store: str) -> Manifest:
    """The template that ``steps`` share, which differ by their tasks alone; ``store`` is the run store's URL."""
    step = steps[0]
    template = copy.deepcopy(step.program)
    spec = step.spec().model_copy(update={"name": template["name"], "fan_out": False})
    template["metadata"]["annotations"][STEP_ANNOTATION] = spec.model_dump_json(exclude_defaults=True)
    template["inputs"] = _inputs(step, has_item=any(sibling.fan_out for sibling in steps))
    template["outputs"] = _outputs(step, artifact_prefix(store))
    container = program_container(template)
    variables = [
        {"name": name, "value": value} for name, value in (path_variables(step) | data_variables(step)).items()
    ]
    container["env"] = [*(container.get("env") or []), *variables]
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    if template.get("retryStrategy") is None and has_retries(step.settings.retry):
        template["retryStrategy"] = step_retry_strategy(step.settings.retry)
    apply_placement(template, step)
    for side in ("inputs", "outputs"):
        if not template[side]:
            del template[side]
    if not container["env"]:
        del container["env"]
    return template


def _inputs(step: AuthoredStep, *, has_item: bool) -> Manifest:
    # The value of an item cannot be read back from the name that Argo gives its node.
    item = [{"name": ITEM_PARAMETER, "default": ""}] if has_item else []
    own = step.program.get("inputs") or {}
    artifacts = [{**artifact, **readable_mode(artifact)} for artifact in step.input_artifacts]
    return drop_empty_fields({**own, "parameters": [*step.input_parameters, *item], "artifacts": artifacts})


def _outputs(step: AuthoredStep, prefix: str) -> Manifest:
    folder = prefix + pod_outputs("{{workflow.uid}}", "{{pod.name}}")
    spec = step.spec()
    artifacts = [
        {**artifact, "archive": {"none": {}}, "s3": {"key": f"{folder}{spec.artifact_file(artifact['name'])}"}}
        for artifact in step.output_artifacts
    ]
    own = step.program.get("outputs") or {}
    return drop_empty_fields({**own, "artifacts": artifacts})
