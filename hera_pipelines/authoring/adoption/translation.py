"""Turns a Workflow whose templates are marked into the one that `compile_workflow` takes.

Compile takes the steps from an entry DAG. So an entry point of `steps` becomes a
DAG in which each task waits for all tasks of the group before, and a single
container becomes a DAG of one task. Fields of the whole Workflow that would also
reach the plugin's templates move to the templates that they are meant for. What
Argo does with the author's programs stays the same.
"""

import copy
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hera_pipelines.authoring.adoption import marks
from hera_pipelines.authoring.adoption.marks import AdoptedKind
from hera_pipelines.compile.container import EXEC_PROGRAM
from hera_pipelines.compile.references import RESERVED_PREFIX, TemplateNames
from hera_pipelines.compile.settings import StepSettings
from hera_pipelines.compile.validate.validate_workflow import PLACEMENT_FIELDS
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest, find_template, is_fan_out
from tiphys.protocol.step_spec import STEP_ANNOTATION
from tiphys.protocol.variables import Variable, map_variables

ENTRY_DAG = "adopted"
_LEAF_FIELDS = ("container", "script")
_OTHER_KINDS = ("steps", "dag", "resource", "suspend", "http", "plugin", "data", "containerSet")
_POD_FIELDS = (*_LEAF_FIELDS, "containerSet", "resource", "data")
_COMPOSITE_DEFAULTS = ("retryStrategy", "memoize", "synchronization", "parallelism", "failFast", "metrics")
"""Fields of templateDefaults that Argo also applies to steps and DAGs."""


def translate_workflow(manifest: Manifest) -> Manifest:
    """The Workflow with the settings of each marked step, and a DAG as its entry point; ``manifest`` is not changed.

    Raises:
        UsageError: something has no counterpart; the message names it.
    """
    workflow = copy.deepcopy(manifest)
    spec = workflow["spec"]
    _check_spec(spec)
    _move_defaults(spec)
    # Compile withholds the token from programs; here one may need it. To Argo, true is as if it were not set.
    spec.setdefault("automountServiceAccountToken", True)
    called_by_steps = "steps" in find_template(workflow, spec["entrypoint"])
    entry = make_entry_dag(spec)
    original_names = {new: old for old, new in _rename_tasks(entry).items()}
    templates = {template["name"]: template for template in spec["templates"]}
    for task in entry["dag"].get("tasks") or []:
        original_name = original_names.get(task["name"], task["name"])
        _keep_task_name(templates, task, original_name, "steps" if called_by_steps else "tasks")
    spec["templates"] = list(templates.values())
    _mark_steps(spec, entry)
    _drop_unused(spec)
    _free_names(spec, entry)
    spec["templates"] = [marks.without_marks(template) for template in spec["templates"]]
    return workflow


def is_leaf(template: Manifest) -> bool:
    """Whether a template is one container, so that a step can be made of it."""
    return any(field in template for field in _LEAF_FIELDS)


def template_kind(template: Manifest) -> str:
    """The field that says what a template is, for messages."""
    return next((field for field in (*_LEAF_FIELDS, *_OTHER_KINDS) if field in template), "of an unknown type")


def is_marked(spec: Manifest) -> bool:
    """Whether any template of a Workflow says what becomes of it."""
    inline = [task["inline"] for task in inline_templates(spec).values()]
    return any(marks.adopted_kind(template) is not None for template in [*(spec.get("templates") or []), *inline])


def list_tasks(template: Manifest) -> list[Manifest]:
    """The tasks of a DAG, or the steps of all groups."""
    tasks: list[Manifest] = (template.get("dag") or {}).get("tasks") or []
    return tasks or [step for group in _step_groups(template) for step in group]


def inline_templates(spec: Manifest) -> dict[str, Manifest]:
    """Tasks of the entry point that have their template within them, by `marks.inline_name`."""
    entry: Manifest = next(
        (template for template in spec.get("templates") or [] if template.get("name") == spec.get("entrypoint")), {}
    )
    return {marks.inline_name(entry["name"], task["name"]): task for task in list_tasks(entry) if task.get("inline")}


def _check_spec(spec: Manifest) -> None:
    if spec.get("workflowTemplateRef"):
        name = spec["workflowTemplateRef"].get("name")
        raise UsageError(f"its templates are those of WorkflowTemplate {name!r}; adopt that, and refer to the result")
    templates = spec.get("templates") or []
    if any(STEP_ANNOTATION in _annotations(template) for template in templates):
        raise UsageError("it is compiled already; submit it as it is, or adopt the file that it was compiled from")
    if not spec.get("entrypoint"):
        raise UsageError("it has no entrypoint; a library of templates has nothing that runs")
    if not any(template.get("name") == spec["entrypoint"] for template in templates):
        raise UsageError(f"its entry point {spec['entrypoint']!r} is no template of it")
    names = [template.get("name") for template in templates]
    if duplicates := [name for name, count in Counter(names).items() if count > 1]:
        raise UsageError(f"two of its templates are called {duplicates[0]!r}")
    strategy = (spec.get("artifactGC") or {}).get("strategy", "Never")
    if strategy != "Never":
        raise UsageError(f"artifactGC {strategy} deletes outputs that a resume would take over; set it to Never")
    entry = next(template for template in templates if template["name"] == spec["entrypoint"])
    if not is_leaf(entry):
        _check_composite_entry(spec, entry)


def _check_composite_entry(spec: Manifest, entry: Manifest) -> None:
    defaults = spec.get("templateDefaults") or {}
    if field := next((field for field in _COMPOSITE_DEFAULTS if field in defaults), None):
        raise UsageError(
            f"templateDefaults has {field}, which Argo also applies to the entry point as a whole; write it into the "
            "templates that need it"
        )
    if field := next((field for field in ("retryStrategy", "memoize") if field in entry), None):
        raise UsageError(
            f"its entry point {entry['name']!r} has a {field}, which would repeat or hide recorded steps; write it "
            "into the templates of the steps"
        )


def _move_defaults(spec: Manifest) -> None:
    """Move what Argo applies to every template to the author's own templates."""
    defaults = spec.get("templateDefaults") or {}
    moved = {field: defaults.pop(field) for field in list(defaults) if field not in PLACEMENT_FIELDS}
    for template in filter(is_leaf, spec["templates"]):
        for field, value in moved.items():
            if not isinstance(value, dict) or field not in template:
                template.setdefault(field, copy.deepcopy(value))
            elif template[field] != value:
                raise UsageError(
                    f"templateDefaults and template {template['name']!r} both have {field}; Argo merges the two, "
                    "Tiphys does not: write all of it into the template"
                )
    if not defaults:
        spec.pop("templateDefaults", None)
    if patch := spec.pop("podSpecPatch", None):
        for template in spec["templates"]:
            if any(field in template for field in _POD_FIELDS) and template.setdefault("podSpecPatch", patch) != patch:
                raise UsageError(
                    f"the Workflow and template {template['name']!r} both have a podSpecPatch; write one into the other"
                )


def make_entry_dag(spec: Manifest) -> Manifest:
    """Make the entry point of ``spec`` a DAG, if it is steps or one container, and return it.

    Raises:
        UsageError: it is another kind of template.
    """
    entry: Manifest = next(template for template in spec["templates"] if template["name"] == spec["entrypoint"])
    if "dag" in entry:
        return entry
    if "steps" in entry:
        _turn_steps_into_dag(entry)
        return entry
    if not is_leaf(entry):
        raise UsageError(
            f"its entry point {entry['name']!r} is {template_kind(entry)}, of which no step can be made; call it from "
            "an entry point of steps or a DAG that also runs a container or script"
        )
    inputs = entry.get("inputs") or {}
    parameters = inputs.get("parameters") or []
    arguments = {
        "parameters": [{"name": p["name"], "value": f"{{{{inputs.parameters.{p['name']}}}}}"} for p in parameters],
        "artifacts": [
            {"name": a["name"], "from": f"{{{{inputs.artifacts.{a['name']}}}}}"}
            for a in _passed_artifacts(inputs, spec)
        ],
    }
    task = {"name": entry["name"], "template": entry["name"], "arguments": {k: v for k, v in arguments.items() if v}}
    dag_inputs = {
        "parameters": copy.deepcopy(parameters),
        "artifacts": [{"name": artifact["name"]} for artifact in _passed_artifacts(inputs, spec)],
    }
    names = {template["name"] for template in spec["templates"]}
    dag: Manifest = {"name": free_name(ENTRY_DAG, names), "inputs": {k: v for k, v in dag_inputs.items() if v}}
    dag["dag"] = {"tasks": [task]}
    spec["templates"].append(dag)
    spec["entrypoint"] = dag["name"]
    return dag


def _passed_artifacts(inputs: Manifest, spec: Manifest) -> list[Manifest]:
    """Input artifacts of the entry point that the arguments of the Workflow give."""
    given = {artifact["name"] for artifact in (spec.get("arguments") or {}).get("artifacts") or []}
    return [artifact for artifact in inputs.get("artifacts") or [] if artifact["name"] in given]


def _turn_steps_into_dag(entry: Manifest) -> None:
    groups = _step_groups(entry)
    del entry["steps"]
    tasks: list[Manifest] = []
    before: list[str] = []
    for group in filter(None, groups):
        tasks += [{**step, **({"dependencies": before} if before else {})} for step in group]
        before = [step["name"] for step in group]
    # A group goes on to its end when one of its steps fails.
    dag: Manifest = {"tasks": tasks, "failFast": False}
    entry["dag"] = map_variables(dag, _refer_to_tasks)
    if "outputs" in entry:
        entry["outputs"] = map_variables(entry["outputs"], _refer_to_tasks)


def _step_groups(template: Manifest) -> list[list[Manifest]]:
    return [group if isinstance(group, list) else [group] for group in template.get("steps") or []]


def _refer_to_tasks(variable: Variable) -> Sequence[str]:
    return ("tasks", *variable.names[1:]) if variable.names[0] == "steps" else variable.names


def _rename_tasks(entry: Manifest) -> dict[str, str]:
    """Give each task a name under which results can be stored; Argo also allows capitals. Returns new names by old."""
    dag = entry["dag"]
    names = _storable_names([task["name"] for task in dag.get("tasks") or []])
    if not names:
        return names
    if "{{" in (dag.get("target") or ""):
        raise UsageError(f"a parameter chooses its targets, so its tasks cannot be renamed: write {min(names)!r} small")
    for task in dag["tasks"]:
        task["name"] = names.get(task["name"], task["name"])
        if task.get("dependencies"):
            task["dependencies"] = [names.get(name, name) for name in task["dependencies"]]
        if task.get("depends"):
            task["depends"] = re.sub(
                r"(?<![.\w-])[A-Za-z0-9][-\w]*", lambda found: names.get(found[0], found[0]), task["depends"]
            )
    if target := dag.get("target"):
        dag["target"] = " ".join(names.get(name, name) for name in target.split())
    for field in ("dag", "outputs"):
        if field in entry:
            entry[field] = map_variables(entry[field], lambda variable: _renamed_variable(variable, names))
    return names


def _renamed_variable(variable: Variable, names: Mapping[str, str]) -> Sequence[str]:
    if variable.names == ("tasks",):
        raise UsageError(f"an expression chooses a task, so none can have another name: write {min(names)!r} small")
    task = variable.task
    return ("tasks", names.get(task, task), *variable.names[2:]) if task else variable.names


def _keep_task_name(templates: dict[str, Manifest], task: Manifest, original_name: str, called_by: str) -> None:
    """Write the name of a task in the place of ``{{tasks.name}}`` or ``{{steps.name}}`` where the variable changes.

    Argo resolves it within the template that the task runs, also in its arguments. The program of a gated step is run
    by another task than the author's, a DAG has no ``steps.name``, and a task may have a new name. The key of a step
    holds its program, so two steps that differ by the name alone need programs that differ.

    ``templates`` gets a copy of the template that has the name in it. ``called_by`` is ``steps`` or ``tasks``: what the
    entry point was.
    """
    template: Manifest = task.get("inline") or templates.get(task.get("template") or "", {})
    is_step = marks.adopted_kind(template) in (AdoptedKind.STEP, AdoptedKind.TRAIN)
    if not is_step and called_by == "tasks" and task["name"] == original_name:
        return

    arguments = _write_task_name(task.get("arguments"), "tasks", original_name)
    # What was written within a step has become part of the DAG, with its references.
    program = _write_task_name(template, "tasks" if task.get("inline") else called_by, original_name)
    if (arguments, program) == (task.get("arguments"), template):
        return
    where = f"task {original_name!r}: {{{{{called_by}.name}}}}"
    if is_fan_out(task):
        raise UsageError(f"{where} of an item has no counterpart")
    if task.get("inline") and program != template:
        raise UsageError(f"{where} of a template within a task is empty in Argo; write the name itself")
    if arguments:
        task["arguments"] = arguments
    if program != template:
        program["name"] = task["template"] = free_name(f"{task['name']}-template", templates)
        templates[program["name"]] = program


def _write_task_name(part: Any, called_by: str, name: str) -> Any:
    """``part`` with ``name`` in the place of ``{{steps.name}}`` or ``{{tasks.name}}``, also within an expression."""
    return map_variables(part, lambda found: name if found.names == (called_by, "name") else found.names)


def _storable_names(tasks: list[str]) -> dict[str, str]:
    """New names of the tasks whose own name cannot name results."""
    taken, names = set(tasks), dict[str, str]()
    for task in tasks:
        name = re.sub(r"[^-a-z0-9]+", "-", task.lower()).strip("-")[:50] or "step"
        if name != task:
            while name in taken:
                name += "-x"
            taken.add(name)
            names[task] = name
    return names


def _mark_steps(spec: Manifest, entry: Manifest) -> None:
    """Make steps of the tasks whose template is marked, each with its program: a template that has settings.

    The program of a gated step is a copy of its own. Tasks without a gate share the author's template, or a copy of it
    where something else uses it, too.
    """
    authored = {template["name"]: template for template in spec["templates"]}
    others = _templates_used_otherwise(spec, entry)
    programs, shared = dict(authored), dict[str, str]()
    for task in entry["dag"].get("tasks") or []:
        author_name = task.get("template") or ""
        template = task.get("inline") or authored.get(author_name)
        kind = None if template is None else marks.adopted_kind(template)
        if template is None or kind is None or kind is AdoptedKind.PLAIN:
            continue
        if author_name not in shared:
            program, settings = _make_program(spec, template, kind, template.get("name") or task["name"])
            if "inline" in task or settings.is_gated:
                program["name"] = free_name(f"{task['name']}-program", programs)
            elif author_name in others:
                program["name"] = shared[author_name] = free_name(f"{author_name}-program", programs)
            else:
                shared[author_name] = author_name
            programs[program["name"]] = program
        task.pop("inline", None)
        task["template"] = shared.get(author_name) or program["name"]
    spec["templates"] = list(programs.values())


def _templates_used_otherwise(spec: Manifest, entry: Manifest) -> set[str]:
    """Names of the templates that something else uses than tasks of the entry DAG as their program."""
    called = [id(task) for task in entry["dag"].get("tasks") or []]
    return {
        name
        for user in _template_users(spec)
        for name in _used_templates({**user, "template": ""} if id(user) in called else user)
    }


def _make_program(spec: Manifest, template: Manifest, kind: AdoptedKind, name: str) -> tuple[Manifest, StepSettings]:
    """The template of a step, with its settings; ``name`` is that of the template, or of the task that it is in."""
    if not is_leaf(template):
        raise UsageError(f"template {name!r} is no container, so no step can be made of it; drop its {marks.ADOPT}")
    outputs = (template.get("outputs") or {}).get("artifacts") or []
    if collected := next((output["name"] for output in outputs if output.get("artifactGC")), None):
        raise UsageError(
            f"template {name!r}: artifactGC would delete its output {collected!r}, which a resume would take over; "
            "drop it, or leave the template plain"
        )
    step = copy.deepcopy(marks.without_marks(template))
    settings = marks.read_settings({**template, "name": name}, kind)
    if mounts_workflow_volume(template, spec):
        settings = settings.model_copy(update={"cache": False})
    annotations = {
        **((step.get("metadata") or {}).get("annotations") or {}),
        STEP_ANNOTATION: settings.model_dump_json(),
    }
    step["metadata"] = {**(step.get("metadata") or {}), "annotations": annotations}
    if kind is AdoptedKind.TRAIN:
        step.pop("retryStrategy", None)
        _wrap_program(step, template, name)
    return step, settings


def mounts_workflow_volume(template: Manifest, spec: Manifest) -> bool:
    """Whether a template mounts a claim that each Workflow makes anew, so that a resume finds nothing in it."""
    made = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates") or []}
    containers = [template.get("container"), template.get("script"), *(template.get("sidecars") or [])]
    containers += template.get("initContainers") or []
    return any(
        mount["name"] in made for container in containers if container for mount in container.get("volumeMounts") or []
    )


def _wrap_program(step: Manifest, template: Manifest, name: str) -> None:
    """Have `tiphys-exec` commit the checkpoints that the program writes into a folder, if one is marked."""
    annotations = (template.get("metadata") or {}).get("annotations") or {}
    folder = annotations.get(marks.CHECKPOINT_FOLDER)
    if not folder:
        return
    container = step["container"] if "container" in step else step["script"]
    command = container.get("command") or []
    if not command:
        raise UsageError(
            f"template {name!r}: {marks.CHECKPOINT_FOLDER} needs a command, to run it under tiphys-exec; write the "
            "entry point of its image as command"
        )
    marker = annotations.get(marks.CHECKPOINT_MARKER)
    options = ["--dir", folder, *(["--marker", marker] if marker else [])]
    container["command"] = [EXEC_PROGRAM, *options, "--", *command]


def _drop_unused(spec: Manifest) -> None:
    """Drop marked templates of which every user has a copy."""
    used = {spec["entrypoint"], *(name for user in _template_users(spec) for name in _used_templates(user))}
    spec["templates"] = [
        template
        for template in spec["templates"]
        if template["name"] in used or marks.adopted_kind(template) in (None, AdoptedKind.PLAIN)
    ]


def _template_users(spec: Manifest) -> Iterator[Manifest]:
    """The Workflow itself, and each of its tasks and steps."""
    yield spec
    for template in spec["templates"]:
        yield from (template.get("dag") or {}).get("tasks") or []
        yield from (step for group in _step_groups(template) for step in group)


def _used_templates(user: Manifest) -> Iterator[str]:
    hooks = (user.get("hooks") or {}).values()
    yield from filter(None, (user.get("template"), user.get("onExit"), *(hook.get("template") for hook in hooks)))


def _free_names(spec: Manifest, entry: Manifest) -> None:
    """Rename other templates that have the name of a gated step: compile names its templates after these steps."""
    gated = {template["name"] for template in spec["templates"] if _is_gated(template)}
    steps = {task["name"] for task in entry["dag"].get("tasks") or [] if task.get("template") in gated}
    taken = {name for step in steps for name in TemplateNames(step).all}
    names = {template["name"] for template in spec["templates"]}
    clashing, used = (taken & names) - gated, taken | names
    for name in sorted(clashing):
        fresh = f"{name}-template"
        while fresh in used:
            fresh += "-x"
        used.add(fresh)
        _rename_template(spec, name, fresh)


def _is_gated(template: Manifest) -> bool:
    settings = _annotations(template).get(STEP_ANNOTATION)
    return settings is not None and StepSettings.from_annotation(template["name"], settings).is_gated


def _rename_template(spec: Manifest, name: str, fresh: str) -> None:
    for field in ("entrypoint", "onExit"):
        if spec.get(field) == name:
            spec[field] = fresh
    for template in spec["templates"]:
        if template["name"] == name:
            template["name"] = fresh
    for user in _template_users(spec):
        for field in ("template", "onExit"):
            if user is not spec and user.get(field) == name:
                user[field] = fresh
        for hook in (user.get("hooks") or {}).values():
            if hook.get("template") == name:
                hook["template"] = fresh


def free_name(wanted: str, taken: Collection[str]) -> str:
    """``wanted``, or a longer name that is not in ``taken``; never one that Tiphys reserves."""
    name = wanted.removeprefix(RESERVED_PREFIX)
    while name in taken:
        name += "-x"
    return name


def _annotations(template: Manifest) -> Manifest:
    return (template.get("metadata") or {}).get("annotations") or {}
