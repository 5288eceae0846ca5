"""compile: the one road from a Hera pipeline to a Workflow that Argo can run."""

import copy

from hera_pipelines.compile.executor_plugins import executor_plugin
from hera_pipelines.compile.exit import exit_templates
from hera_pipelines.compile.gated import GatedStep, find_gated, settings_text
from hera_pipelines.compile.limits import limit_open_nodes
from hera_pipelines.compile.names import ITEM
from hera_pipelines.compile.narration import narrate
from hera_pipelines.compile.operations import run_identity
from hera_pipelines.compile.options import CompileOptions
from hera_pipelines.compile.references import add_dependencies
from hera_pipelines.compile.refusals import check_steps, check_workflow
from hera_pipelines.compile.shapes import step_templates
from tiphys.protocol.auto_resume import AUTO_RESUME_ANNOTATION
from tiphys.protocol.drift import DRIFT_ANNOTATION
from tiphys.protocol.pipeline import Manifest, parameters_of, template
from tiphys.protocol.policy import PIPELINE_ANNOTATION, RUN_PARAMETER, STORE_ANNOTATION, SUBMISSION_PARAMETER


def compile_workflow(manifest: Manifest, options: CompileOptions | None = None) -> Manifest:
    """The Workflow that Argo runs, made from the one that Hera built.

    Tasks of the entry DAG whose template is annotated become gated steps;
    everything else is left as it is. ``manifest`` is not changed.

    Raises:
        UsageError: the Workflow asks for what a gated step cannot keep; the
            message names the step and says what to do.
    """
    options = options or CompileOptions()
    workflow = copy.deepcopy(manifest)
    name = check_workflow(workflow, options)
    spec = workflow["spec"]
    entry = template(workflow, spec["entrypoint"])
    steps = find_gated(entry, spec["templates"])
    check_steps(workflow, steps, options)
    identity = run_identity(options.run_name)
    made = [made for step in steps for made in step_templates(step, identity, options.store, spec)]
    made += exit_templates(workflow, identity)
    limit_open_nodes(entry, steps, made, parameters_of(workflow))
    _point_to_wrappers(entry, steps)
    spec["templates"] = [t for t in spec["templates"] if settings_text(t) is None] + made
    _add_parameters(workflow)
    _describe(workflow, name, options)
    if options.executor_plugin is not None:
        spec["executorPlugins"] = [*(spec.get("executorPlugins") or []), executor_plugin(options.executor_plugin)]
    return workflow


def _point_to_wrappers(entry: Manifest, steps: list[GatedStep]) -> None:
    for step in steps:
        step.task["template"] = step.name
        if step.fan_out:
            parameters = step.task.setdefault("arguments", {}).setdefault("parameters", [])
            parameters.append({"name": ITEM, "value": "{{item}}"})
    add_dependencies(entry["dag"]["tasks"])


def _add_parameters(workflow: Manifest) -> None:
    arguments = workflow["spec"].setdefault("arguments", {})
    ours = [{"name": name, "value": ""} for name in (RUN_PARAMETER, SUBMISSION_PARAMETER)]
    arguments["parameters"] = [*(arguments.get("parameters") or []), *ours]


def _describe(workflow: Manifest, pipeline: str, options: CompileOptions) -> None:
    metadata, store = workflow.setdefault("metadata", {}), options.store
    annotations = {PIPELINE_ANNOTATION: pipeline} | ({STORE_ANNOTATION: store} if store else {})
    if options.auto_resume is not None:
        annotations[AUTO_RESUME_ANNOTATION] = options.auto_resume.model_dump_json()
    if options.drift is not None:
        annotations[DRIFT_ANNOTATION] = options.drift.model_dump_json()
    metadata["annotations"] = narrate({**(metadata.get("annotations") or {}), **annotations}, pipeline, store)
    metadata["labels"] = {**(metadata.get("labels") or {}), PIPELINE_ANNOTATION: pipeline}
