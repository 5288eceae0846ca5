"""`compile_workflow`: turns the Workflow that Hera built into the Workflow that Argo runs.

This module holds the parts that belong to the whole Workflow: the templates of
all steps, finalize beside the author's own exit handler, parameters, annotations
and labels. Title and description appear in the Argo UI until the controller
writes newer ones.
"""

import copy
from collections.abc import Mapping

from hera_pipelines.compile import references
from hera_pipelines.compile.authored_step import (
    AuthoredStep,
    find_steps,
    list_declared,
    read_data_versions,
    settings_annotation,
)
from hera_pipelines.compile.plugin_templates import (
    IdentityPlaceholders,
    finalize_template,
    identity_placeholders,
    wake_tasks,
    wake_template,
)
from hera_pipelines.compile.references import add_dependencies
from hera_pipelines.compile.retries import limit_open_nodes
from hera_pipelines.compile.reuse_gate import add_reuse_gate
from hera_pipelines.compile.settings import CompileOptions
from hera_pipelines.compile.templates import step_templates
from hera_pipelines.compile.ungated_template import ungated_template
from hera_pipelines.compile.validate.validate_workflow import check_order, check_steps, check_workflow
from tiphys.errors import UsageError, unknown_name_message
from tiphys.protocol.auto_resume_policy import AUTO_RESUME_ANNOTATION
from tiphys.protocol.compiled_workflow import Manifest, find_template, read_workflow_parameters
from tiphys.protocol.drift_policy import DRIFT_ANNOTATION
from tiphys.protocol.step_spec import (
    DESCRIPTION_ANNOTATION,
    EXECUTOR_ACCOUNT,
    GENERATED_TEXT_ANNOTATION,
    ITEM_PARAMETER,
    PIPELINE_ANNOTATION,
    RUN_PARAMETER,
    STORE_ANNOTATION,
    SUBMISSION_PARAMETER,
    TITLE_ANNOTATION,
)
from tiphys.records import TriggerSpec
from tiphys.records.trigger import TRIGGER_ANNOTATION


def add_description(annotations: Mapping[str, str], pipeline: str, store: str) -> dict[str, str]:
    """Add title and description where the author gave none, and record which of them are generated."""
    store_sentence = f" Its steps and checkpoints are kept in `{store}`." if store else ""
    texts = {TITLE_ANNOTATION: pipeline, DESCRIPTION_ANNOTATION: f"Pipeline `{pipeline}`.{store_sentence}"}
    generated = [name for name in texts if name not in annotations]
    if not generated:
        return dict(annotations)
    names = ",".join(name.rpartition("/")[2] for name in generated)
    return {**annotations, **{name: texts[name] for name in generated}, GENERATED_TEXT_ANNOTATION: names}


def exit_templates(manifest: Manifest, identity: IdentityPlaceholders) -> list[Manifest]:
    """Make finalize the exit handler of ``manifest``, and return the templates for it.

    The author's handler runs beside it. So neither can prevent the other, and a
    failure of the author's handler still fails the workflow. Two timers end the
    workflow soon: Argo consumes the answer after the first, and looks at the
    result after the second.
    """
    spec = manifest["spec"]
    handler = _author_exit_handler(manifest)
    spec["onExit"] = references.EXIT_HANDLER
    finalize_task = {"name": "finalize", "template": references.FINALIZE}
    tasks = [*([handler] if handler else []), finalize_task, *wake_tasks(finalize_task)]
    return [{"name": references.EXIT_HANDLER, "dag": {"tasks": tasks}}, finalize_template(identity), wake_template()]


def _author_exit_handler(manifest: Manifest) -> Manifest | None:
    spec = manifest["spec"]
    hook = (spec.get("hooks") or {}).pop("exit", None)
    if not spec.get("hooks"):
        spec.pop("hooks", None)
    # Where both are given, Argo runs onExit and never the hook.
    if template := spec.get("onExit"):
        arguments = _workflow_arguments(manifest, template)
        return {"name": "handler", "template": template, **({"arguments": arguments} if arguments else {})}
    if hook is None:
        return None
    step = {field: hook[field] for field in ("template", "templateRef", "arguments") if hook.get(field)}
    return {"name": "handler", **step}


def _workflow_arguments(manifest: Manifest, template: str) -> Manifest:
    """Arguments that Argo itself passes to an exit handler: the workflow parameters of the same names."""
    workflow_parameters = {p["name"] for p in list_declared(manifest["spec"], "arguments", "parameters")}
    handler: Manifest = next((t for t in manifest["spec"]["templates"] if t.get("name") == template), {})
    shared = [p["name"] for p in list_declared(handler, "inputs", "parameters") if p["name"] in workflow_parameters]
    values = [{"name": name, "value": f"{{{{workflow.parameters.{name}}}}}"} for name in shared]
    return {"parameters": values} if values else {}


def compile_workflow(manifest: Manifest, options: CompileOptions | None = None) -> Manifest:
    """Compile the Workflow that Hera built into the Workflow that Argo runs.

    Tasks of the entry DAG whose template is annotated become steps. The rest of
    the Workflow, and ``manifest`` itself, stay unchanged.

    Raises:
        UsageError: the Workflow, or a setting of a step, is not supported; the
            message names it and says what to do.
        NotFoundError: data of a step does not exist.
        StoreError: the server that knows the version of data does not answer, or refuses.
    """
    options = options or CompileOptions()
    workflow = copy.deepcopy(manifest)
    name = check_workflow(workflow, options)
    spec = workflow["spec"]
    _withhold_token(spec)
    entry = find_template(workflow, spec["entrypoint"])
    _give_defaults_to_fan_ins(entry, spec["templates"])
    steps = find_steps(entry, spec["templates"])
    check_steps(workflow, steps, options)
    steps = read_data_versions(steps, options.read_data_version)
    add_dependencies(entry["dag"]["tasks"])
    for template in spec["templates"]:
        check_order(template)
    identity = identity_placeholders(options.run_name)
    gated = [step for step in steps if step.is_gated]
    references.read_results_as_parameters(entry, (step.name for step in gated if step.has_result))
    compiled = _compile_steps(steps, identity, options.store, spec)
    compiled += exit_templates(workflow, identity)
    limit_open_nodes(entry, gated, compiled, read_workflow_parameters(workflow))
    for step in steps:
        _use_compiled_template(step)
    spec["templates"] = [t for t in spec["templates"] if settings_annotation(t) is None] + compiled
    if options.reuse:
        add_reuse_gate(spec, entry, steps, identity)
    _add_parameters(workflow)
    _add_metadata(workflow, name, options)
    return workflow


def _give_defaults_to_fan_ins(entry: Manifest, templates: list[Manifest]) -> None:
    """Let a step that takes the outputs of all items start with ``[]`` if there were no items.

    Argo skips a fan-out without items, and drops an argument that is nothing but an output of a skipped task.
    """
    tasks = (entry.get("dag") or {}).get("tasks") or []
    references_to_items = {
        f"{{{{tasks.{task['name']}.outputs.{output}}}}}"
        for task in tasks
        if "withParam" in task
        for program in templates
        if program["name"] == task.get("template")
        for output in (
            "result",
            *(f"parameters.{parameter['name']}" for parameter in list_declared(program, "outputs", "parameters")),
        )
    }
    for task in tasks:
        arguments = list_declared(task, "arguments", "parameters") if references_to_items else []
        lists = {
            argument["name"]
            for argument in arguments
            if str(argument.get("value")).replace(" ", "") in references_to_items
        }
        program = next((template for template in templates if lists and template["name"] == task.get("template")), {})
        for parameter in list_declared(program, "inputs", "parameters"):
            if parameter["name"] in lists and "value" not in parameter:
                parameter.setdefault("default", "[]")


def _withhold_token(spec: Manifest) -> None:
    """Give the token of an account to Argo's executor only, and none to programs whose author did not ask for one.

    Argo refuses the first without the second (``workflow/controller/workflowpod.go``, ``setupServiceAccount``).
    """
    spec.setdefault("automountServiceAccountToken", False)
    spec["executor"] = {"serviceAccountName": EXECUTOR_ACCOUNT, **(spec.get("executor") or {})}


def _compile_steps(
    steps: list[AuthoredStep], identity: IdentityPlaceholders, store: str, spec: Manifest
) -> list[Manifest]:
    """The templates of all steps: one for each function without a gate, and several for each gated step."""
    by_function: dict[str, list[AuthoredStep]] = {}
    for step in steps:
        if not step.is_gated:
            by_function.setdefault(step.program["name"], []).append(step)
    compiled = [ungated_template(calls, store) for calls in by_function.values()]
    for step in steps:
        if step.is_gated:
            compiled += step_templates(step, identity, store, spec)
    return compiled


def _use_compiled_template(step: AuthoredStep) -> None:
    if step.is_gated:
        step.task["template"] = step.name
    if step.fan_out:
        parameters = step.task.setdefault("arguments", {}).setdefault("parameters", [])
        parameters.append({"name": ITEM_PARAMETER, "value": "{{item}}"})


def _add_parameters(workflow: Manifest) -> None:
    arguments = workflow["spec"].setdefault("arguments", {})
    identity = [{"name": name, "value": ""} for name in (RUN_PARAMETER, SUBMISSION_PARAMETER)]
    arguments["parameters"] = [*(arguments.get("parameters") or []), *identity]


def _add_metadata(workflow: Manifest, pipeline: str, options: CompileOptions) -> None:
    metadata, store = workflow.setdefault("metadata", {}), options.store
    annotations = {PIPELINE_ANNOTATION: pipeline} | ({STORE_ANNOTATION: store} if store else {})
    if options.auto_resume is not None:
        annotations[AUTO_RESUME_ANNOTATION] = options.auto_resume.model_dump_json()
    if options.drift is not None:
        annotations[DRIFT_ANNOTATION] = options.drift.model_dump_json()
    if options.trigger is not None:
        _check_trigger(options.trigger, workflow)
        annotations[TRIGGER_ANNOTATION] = options.trigger.model_dump_json(exclude_defaults=True)
    metadata["annotations"] = add_description({**(metadata.get("annotations") or {}), **annotations}, pipeline, store)
    metadata["labels"] = {**(metadata.get("labels") or {}), PIPELINE_ANNOTATION: pipeline}


def _check_trigger(trigger: TriggerSpec, workflow: Manifest) -> None:
    """Check that the parameters of a trigger exist.

    Raises:
        UsageError: the Workflow declares no such parameter.
    """
    names = [parameter["name"] for parameter in list_declared(workflow["spec"], "arguments", "parameters")]
    declared = [name for name in names if name not in (RUN_PARAMETER, SUBMISSION_PARAMETER)]
    if unknown := sorted(set(trigger.parameters) - set(declared)):
        raise UsageError(unknown_name_message("the pipeline of this trigger", "parameter", unknown[0], declared))
