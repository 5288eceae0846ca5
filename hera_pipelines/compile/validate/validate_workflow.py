"""Refuses Workflows that would run but break a guarantee of Tiphys.

Examples are settings of the whole Workflow that also reach the plugin templates
or Argo's agent pod, and references that gated steps never fill. Each error names
the field, before anything runs.
"""

import re
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter

from hera_pipelines.compile import references
from hera_pipelines.compile.authored_step import AuthoredStep, list_declared, settings_annotation
from hera_pipelines.compile.references import fields_used
from hera_pipelines.compile.settings import CompileOptions
from hera_pipelines.compile.validate.validate_step import ARTIFACT_LOCATIONS, check_step
from tiphys.errors import UsageError, unknown_name_message
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import PIPELINE_ANNOTATION
from tiphys.protocol.variables import find_variables

_STEP_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_UNAVAILABLE_FIELDS = ("exitCode", "ip")
_VALUE_FIELDS = ("value", "default", "valueFrom", *ARTIFACT_LOCATIONS)
_REMEDY_BY_KIND = {
    "parameters": ", and it has no default; pass a value",
    "artifacts": "; pass the task that makes it, or give the input a location",
}
_PIPELINE_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?")
_RUN_NAME = re.compile(r"(?:[-a-z0-9.]|\{[-\w]+\})+")
_WORKFLOW_VARIABLES = (
    *("annotations", "creationTimestamp", "duration", "failures", "labels", "mainEntrypoint", "name", "namespace"),
    *("outputs", "parameters", "priority", "scheduledTime", "serviceAccountName", "status", "uid"),
)
"""Source: Argo ``docs/variables.md``."""
_UNDECLARED = "; declare it in spec.arguments.parameters, without a value if it is given to each submission"
PLACEMENT_FIELDS = frozenset(
    [
        "affinity",
        "automountServiceAccountToken",
        "executor",
        "hostAliases",
        "nodeSelector",
        "priorityClassName",
        "schedulerName",
        "securityContext",
        "serviceAccountName",
        "tolerations",
        "volumes",
    ]
)
"""Fields of templateDefaults that may also reach the plugin's templates."""


def check_workflow(manifest: Manifest, options: CompileOptions) -> str:
    """Check the Workflow as a whole, and return the name of the pipeline.

    Raises:
        UsageError: the Workflow cannot be compiled; the message says what to change.
    """
    if manifest.get("kind", "Workflow") != "Workflow":
        raise UsageError(f"compile works on a Workflow, not on a {manifest['kind']}; wrap its result instead")
    if PIPELINE_ANNOTATION in (manifest.get("metadata", {}).get("annotations") or {}):
        raise UsageError("this Workflow is compiled already; submit it unchanged")
    _check_spec(manifest["spec"])
    _check_entry(manifest["spec"])
    for template in manifest["spec"]["templates"]:
        _check_template(template)
    _check_run_name(manifest, options.run_name)
    return _resolve_pipeline_name(manifest, options.pipeline)


def check_steps(manifest: Manifest, steps: list[AuthoredStep], options: CompileOptions) -> None:
    """Check each step, and how the rest of the Workflow uses it.

    Raises:
        UsageError: a step cannot be compiled; the message names it and says what to change.
    """
    if not steps:
        raise UsageError(
            "no task of the entry DAG is a step of Tiphys; decorate one with @step() or @train(), "
            "or submit the Workflow with plain Hera"
        )
    _check_used_in_entry_only(manifest)
    _check_names(manifest, steps)
    _check_arguments(manifest)
    _check_unavailable_fields(manifest, steps)
    for step in steps:
        check_step(step, manifest, options)
    parameters = [parameter["name"] for parameter in list_declared(manifest["spec"], "arguments", "parameters")]
    for template in manifest["spec"]["templates"]:
        _check_tags(template, parameters)


def check_order(template: Manifest) -> None:
    """Check that the tasks of a DAG can follow each other.

    Raises:
        UsageError: tasks wait for each other in a circle, or one waits for a task that there is not.
    """
    waits = {
        task["name"]: references.task_dependencies(task) for task in (template.get("dag") or {}).get("tasks") or []
    }
    for name, before in waits.items():
        if unknown := sorted(before - waits.keys()):
            raise UsageError(unknown_name_message(f"the DAG of task {name!r}", "task", unknown[0], waits))
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        circle = " → ".join(reversed(error.args[1]))
        raise UsageError(
            f"these tasks of DAG {template['name']!r} wait for each other, so none starts: {circle}"
        ) from None


def _check_spec(spec: Manifest) -> None:
    if spec.get("podSpecPatch"):
        raise UsageError(
            "podSpecPatch at workflow level also patches Argo's agent pod and the plugin's sidecar in it; "
            "move it to the templates that need it"
        )
    if spec.get("retryStrategy"):
        raise UsageError(
            "retryStrategy at workflow level also repeats the plugin's answers; use Retries(…) on the steps, "
            "or a retry_strategy on the plain templates that need one"
        )
    if unsupported := sorted(set(spec.get("templateDefaults") or {}) - PLACEMENT_FIELDS):
        raise UsageError(
            f"templateDefaults would also apply {', '.join(unsupported)} to the plugin templates; "
            "set that on the templates that need it"
        )
    if spec.get("workflowTemplateRef"):
        raise UsageError("the Workflow takes its templates from a WorkflowTemplate; compile that pipeline instead")
    if (spec.get("hooks") or {}).get("exit", {}).get("expression"):
        raise UsageError("the workflow's exit hook has an expression; make it a `when` of a step in the exit handler")


def _check_entry(spec: Manifest) -> None:
    entrypoint = spec.get("entrypoint")
    if not entrypoint:
        raise UsageError("the Workflow has no entrypoint; give Pipeline(entrypoint=…) the name of its DAG")
    entry = next((t for t in spec.get("templates") or [] if t.get("name") == entrypoint), None)
    if entry is None or "dag" not in entry:
        problem = "missing" if entry is None else "not a DAG"
        raise UsageError(
            f"entry point {entrypoint!r} is {problem}; the steps of a run are the tasks of its entry DAG: "
            "put them into `with DAG(name=…)`"
        )
    for task in entry["dag"].get("tasks") or []:
        if settings_annotation(task.get("inline") or {}) is not None:
            raise UsageError(f"task {task['name']!r}: a step cannot be inline; give it a template of its own")


def _check_template(template: Manifest) -> None:
    name = template.get("name", "")
    if name.startswith(references.RESERVED_PREFIX):
        raise UsageError(
            f"template {name!r}: names that begin with {references.RESERVED_PREFIX!r} are Tiphys' own; rename it"
        )
    if "plugin" in template and len(template["plugin"] or {}) != 1:
        raise UsageError(
            f"template {name!r}: its plugin body must have exactly one key, and has {len(template['plugin'] or {})}; "
            "Hera's own model drops the body, so declare it with PluginTemplate(name=…, body={'plugin-name': …})"
        )
    strategy = template.get("retryStrategy") or {}
    if strategy.get("backoff") and strategy.get("limit") is None:
        raise UsageError(f"template {name!r}: Argo ignores a back-off without a limit; add limit to its retryStrategy")


def _resolve_pipeline_name(manifest: Manifest, declared: str) -> str:
    metadata = manifest.get("metadata") or {}
    name = references.pipeline_name(declared, metadata.get("name"), metadata.get("generateName"))
    if not name:
        raise UsageError("the pipeline has no name; give it one, as in Pipeline('digits', …)")
    if not _PIPELINE_NAME.fullmatch(name):
        raise UsageError(
            f"pipeline {name!r} cannot name runs and Workflows: use lower-case letters, digits, '-' and '.', at most 63"
        )
    return name


def _check_run_name(manifest: Manifest, run_name: str) -> None:
    parameters = {p["name"] for p in list_declared(manifest["spec"], "arguments", "parameters")}
    if reserved := sorted(name for name in parameters if name.startswith(references.RESERVED_PREFIX)):
        raise UsageError(f"workflow parameter {reserved[0]!r}: {references.RESERVED_PREFIX}… is Tiphys' own; rename it")
    if not run_name:
        return
    if not _RUN_NAME.fullmatch(run_name):
        raise UsageError(
            f"run_name {run_name!r} is not valid: use lower-case letters, digits, '-', '.' and {{parameter}}"
        )
    if unknown := sorted(set(re.findall(r"\{([-\w]+)\}", run_name)) - parameters):
        raise UsageError(f"run_name {run_name!r} uses {unknown[0]!r}, which is not a parameter of the workflow; add it")


def _check_used_in_entry_only(manifest: Manifest) -> None:
    spec = manifest["spec"]
    programs = {t["name"] for t in spec["templates"] if settings_annotation(t) is not None}
    for user, used in _template_uses(spec):
        if used in programs:
            raise UsageError(
                f"step {used!r} is used by {user}; only tasks of the entry DAG {spec['entrypoint']!r} can be steps: "
                "move it there, or make it a plain @script"
            )


def _template_uses(spec: Manifest) -> Iterator[tuple[str, str]]:
    """Yield (user, template) for every use of a template, except by the tasks of the entry DAG."""
    yield "onExit", spec.get("onExit") or ""
    yield from _hook_uses("the workflow", spec)
    for template in spec["templates"]:
        name, is_entry = template["name"], template["name"] == spec["entrypoint"]
        tasks = (template.get("dag") or {}).get("tasks") or []
        grouped = [step for group in template.get("steps") or [] for step in group]
        for node in tasks + grouped:
            if not is_entry:
                yield f"template {name!r}", node.get("template") or ""
            yield f"the exit handler of {node['name']!r}", node.get("onExit") or ""
            yield from _hook_uses(repr(node["name"]), node)


def _hook_uses(owner: str, part: Manifest) -> Iterator[tuple[str, str]]:
    for name, hook in (part.get("hooks") or {}).items():
        yield f"the hook {name!r} of {owner}", hook.get("template") or ""


def _check_names(manifest: Manifest, steps: list[AuthoredStep]) -> None:
    kept = {step.program["name"] for step in steps if not step.is_gated}
    taken = {
        template["name"]: "a template"
        for template in manifest["spec"]["templates"]
        if settings_annotation(template) is None or template["name"] in kept
    }
    for step in steps:
        if not _STEP_NAME.fullmatch(step.name):
            raise UsageError(
                f"task {step.name!r} cannot name a step: its results are stored under it, so use lower-case letters, "
                "digits and '-', at most 63; give the task another name=…"
            )
        for name in step.template_names.all if step.is_gated else ():
            if name in taken:
                raise UsageError(
                    f"step {step.name!r} compiles to a template {name!r}, which is {taken[name]} already; "
                    "rename one of the two"
                )
            taken[name] = f"made for step {step.name!r}"


def _check_arguments(manifest: Manifest) -> None:
    """Check that each task of the entry DAG gives every input of its template once."""
    spec = manifest["spec"]
    templates = {template["name"]: template for template in spec["templates"]}
    for task in templates[spec["entrypoint"]]["dag"].get("tasks") or []:
        template = templates.get(task.get("template", ""), {})
        for kind in ("parameters", "artifacts"):
            inputs, arguments = list_declared(template, "inputs", kind), list_declared(task, "arguments", kind)
            _check_unique(f"template {template.get('name')!r}", "inputs", inputs)
            _check_unique(f"task {task['name']!r}", "arguments", arguments)
            missing = {entry["name"] for entry in inputs if not _has_value(entry)} - {a["name"] for a in arguments}
            if missing:
                raise UsageError(
                    f"task {task['name']!r}: no argument gives its input {kind[:-1]} {min(missing)!r}"
                    + _REMEDY_BY_KIND[kind]
                )


def _check_tags(template: Manifest, parameters: Sequence[str]) -> None:
    """Refuse tags that Argo could not resolve, as it does (``workflow/validate``, resolveAllVariables)."""
    groups = [(template.get("dag") or {}).get("tasks") or [], *(template.get("steps") or [])]
    tasks = [task for group in groups for task in (group if isinstance(group, list) else [group])]
    for task in tasks:
        if task.get("inline"):
            _check_tags({"name": task["name"], **task["inline"]}, parameters)
    rest = {field: value for field, value in template.items() if field not in ("dag", "steps")}
    owner = f"template {template.get('name')!r}"
    missing: tuple[str, str, str, Sequence[str]]
    for variable in find_variables([rest, *({**task, "inline": None} for task in tasks)]):
        match variable.names:
            case _ if variable.is_expression:
                continue
            case ("workflow", "parameters", name, *_):
                missing = ("the Workflow", "parameter", name, [*parameters, "json"])
            case ("workflow", name, *_):
                missing = ("the Workflow", "variable", name, _WORKFLOW_VARIABLES)
            case ("inputs", ("parameters" | "artifacts") as kind, name, *_):
                known = [entry["name"] for entry in list_declared(template, "inputs", kind)]
                missing = (owner, f"input {kind[:-1]}", name, known)
            case ("tasks" | "steps" as kind, name, _, *_):
                missing = (owner, kind[:-1], name, [task["name"] for task in tasks])
            case _:
                continue
        if name not in missing[-1]:
            tag = ".".join(variable.names)
            remedy = _UNDECLARED if missing[:2] == ("the Workflow", "parameter") else ""
            raise UsageError(f"{{{{{tag}}}}} never gets a value: {unknown_name_message(*missing)}{remedy}")


def _check_unique(owner: str, role: str, entries: list[Manifest]) -> None:
    names = [entry["name"] for entry in entries]
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"{owner}: two of its {role} are called {duplicates[0]!r}; rename or drop one")


def _has_value(entry: Manifest) -> bool:
    """Whether an input of a template has a value without an argument."""
    return any(entry.get(field) is not None for field in _VALUE_FIELDS) or bool(entry.get("optional"))


def _check_unavailable_fields(manifest: Manifest, steps: list[AuthoredStep]) -> None:
    step_names = {step.name for step in steps if step.is_gated}
    for task, field in sorted(fields_used(manifest["spec"], _UNAVAILABLE_FIELDS)):
        if task in step_names:
            raise UsageError(
                f"step {task!r}: {{{{tasks.{task}.{field}}}}} never gets a value; declare an output parameter instead"
            )
