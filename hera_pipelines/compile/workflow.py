"""compile: the one road from a Hera pipeline to a Workflow that Argo can run.

What Argo's pages show of a Workflow before anybody keeps it up to date, in place of a generated name.

The workflow's end: finalize, beside the author's own exit handler.
"""

import copy
from collections.abc import Mapping

from hera_pipelines.compile import references as names
from hera_pipelines.compile.executor_plugins import executor_plugin
from hera_pipelines.compile.gated_step import GatedStep, find_gated, listed, settings_text
from hera_pipelines.compile.plugin_templates import Identity, finalize_template, run_identity
from hera_pipelines.compile.references import ITEM, add_dependencies
from hera_pipelines.compile.retries import limit_open_nodes
from hera_pipelines.compile.settings import CompileOptions
from hera_pipelines.compile.templates import step_templates
from hera_pipelines.compile.validate import check_steps, check_workflow
from tiphys.protocol.auto_resume_policy import AUTO_RESUME_ANNOTATION
from tiphys.protocol.compiled_workflow import Manifest, parameters_of, template
from tiphys.protocol.drift_policy import DRIFT_ANNOTATION
from tiphys.protocol.step_spec import (
    DESCRIPTION_ANNOTATION,
    NARRATED_ANNOTATION,
    PIPELINE_ANNOTATION,
    RUN_PARAMETER,
    STORE_ANNOTATION,
    SUBMISSION_PARAMETER,
    TITLE_ANNOTATION,
)


def narrate(annotations: Mapping[str, str], pipeline: str, store: str) -> dict[str, str]:
    """``annotations`` with title and description, where the author gave none, and a note which of them are ours."""
    kept = f" Its steps and checkpoints are kept in `{store}`." if store else ""
    texts = {TITLE_ANNOTATION: pipeline, DESCRIPTION_ANNOTATION: f"Pipeline `{pipeline}`.{kept}"}
    ours = [name for name in texts if name not in annotations]
    if not ours:
        return dict(annotations)
    names = ",".join(name.rpartition("/")[2] for name in ours)
    return {**annotations, **{name: texts[name] for name in ours}, NARRATED_ANNOTATION: names}


def exit_templates(manifest: Manifest, identity: Identity) -> list[Manifest]:
    """Make finalize the exit handler of ``manifest`` and return the templates that takes.

    An author's handler runs in the same group of steps, so neither can keep the
    other from running, and its failure still fails the workflow.
    """
    spec = manifest["spec"]
    handler = _authors_handler(manifest)
    finalize = finalize_template(identity)
    if handler is None:
        spec["onExit"] = names.FINALIZE
        return [finalize]
    spec["onExit"] = names.EXIT
    group = [handler, {"name": "finalize", "template": names.FINALIZE}]
    return [{"name": names.EXIT, "steps": [group]}, finalize]


def _authors_handler(manifest: Manifest) -> Manifest | None:
    spec = manifest["spec"]
    hook = (spec.get("hooks") or {}).pop("exit", None)
    if not spec.get("hooks"):
        spec.pop("hooks", None)
    # Where both are given, Argo runs onExit and never the hook.
    if template := spec.get("onExit"):
        return _step(template, _workflow_arguments(manifest, template))
    if hook is None:
        return None
    step = {field: hook[field] for field in ("template", "templateRef", "arguments") if hook.get(field)}
    return {"name": "handler", **step}


def _step(template: str, arguments: Manifest) -> Manifest:
    return {"name": "handler", "template": template, **({"arguments": arguments} if arguments else {})}


def _workflow_arguments(manifest: Manifest, template: str) -> Manifest:
    """What Argo would have handed to an exit handler itself: the workflow's parameters of the same names."""
    known = {p["name"] for p in listed(manifest["spec"], "arguments", "parameters")}
    handler: Manifest = next((t for t in manifest["spec"]["templates"] if t.get("name") == template), {})
    wanted = [p["name"] for p in listed(handler, "inputs", "parameters") if p["name"] in known]
    values = [{"name": name, "value": f"{{{{workflow.parameters.{name}}}}}"} for name in wanted]
    return {"parameters": values} if values else {}


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
