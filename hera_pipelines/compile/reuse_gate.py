"""Has a Workflow that is submitted as it is take over shared results: one gate at its start decides for all steps.

The gate's answer has the outputs of each step that it takes over. The task of such a
step is skipped, and what reads its outputs reads those of the gate. The author's entry
DAG stays, and a copy with the gate becomes the entry point: whoever decides before the
Workflow exists (`tiphys run`, a resume, a trigger) submits the former, and whoever reads
a Workflow sees no other (`CompiledPipeline`).

Source: Argo Workflows, ``workflow/controller/dag.go``: ``resolveDependencyReferences``.
"""

import copy
from collections.abc import Collection, Iterator, Sequence

from hera_pipelines.compile.authored_step import AuthoredStep
from hera_pipelines.compile.plugin_templates import IdentityPlaceholders, reuse_template, wake_tasks
from hera_pipelines.compile.references import add_task_dependencies, uses_dependency_lists
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.depends import AllOf, AnyOf, DependsExpression, Not, TaskResult, awaited_tasks, parse_depends
from tiphys.protocol.operations import REUSE_TEMPLATE, reuse_output
from tiphys.protocol.variables import Expression, Variable, find_variables, map_variables

_OWN_FLOW_FIELDS = ("when", "hooks", "onExit", "continueOn")
"""Fields of a task that decide about it by its end, which a step that is taken over does not have."""
_VALUE_NAMES = len(("tasks", "NAME", "outputs", "parameters", "OUTPUT"))
_NO_LOCATION = {"key": "unused"}
"""Argo refuses ``fromExpression`` in arguments without a location, and then ignores the location."""


def add_reuse_gate(
    spec: Manifest, entry: Manifest, steps: Sequence[AuthoredStep], identity: IdentityPlaceholders
) -> None:
    """Make a copy of the compiled ``entry`` DAG with the gate the entry point of ``spec``.

    Raises:
        UsageError: no step can be taken over.
    """
    reusable = _find_reusable(entry, steps)
    if not reusable:
        raise UsageError(
            "the pipeline has reuse=True, but nothing can be taken over at its start: give share=True to a step "
            "without gate, fan-out and condition, whose inputs are known then or are outputs of such steps"
        )
    gate = {"name": REUSE_TEMPLATE, "template": REUSE_TEMPLATE}
    as_lists = uses_dependency_lists(entry["dag"]["tasks"])
    tasks = [gate, *wake_tasks(gate, as_lists=as_lists)]
    names = [task["name"] for task in tasks]
    if taken := sorted({task["name"] for task in entry["dag"]["tasks"]} & set(names)):
        raise UsageError(f"task {taken[0]!r} has the name of a task of the gate that reuse=True adds; rename it")
    for task in entry["dag"]["tasks"]:
        gated = _read_from_gate(copy.deepcopy(task), reusable.keys())
        if task["name"] in reusable:
            add_task_dependencies(gated, [REUSE_TEMPLATE], as_lists)
            gated["when"] = f"{{{{tasks.{REUSE_TEMPLATE}.outputs.parameters.{task['name']}}}}} != true"
        tasks.append(gated)
    dag = {**entry["dag"], "tasks": tasks}
    if target := dag.get("target"):  # Argo runs no task that no target needs
        dag["target"] = f"{target} {names[-1]}"
    name = f"{REUSE_TEMPLATE}-{entry['name']}"
    spec["entrypoint"] = name
    spec["templates"] += [
        {**entry, "name": name, "dag": dag},
        reuse_template(list(reusable.values()), identity),
    ]


def _find_reusable(entry: Manifest, steps: Sequence[AuthoredStep]) -> dict[str, AuthoredStep]:
    """The steps that the gate can decide about, each behind those that it waits for."""
    eligible = {
        step.name: step
        for step in steps
        if step.settings.share
        and step.settings.cache
        and not (step.is_gated or step.fan_out or any(step.task.get(field) for field in _OWN_FLOW_FIELDS))
    }
    tasks = entry["dag"]["tasks"]
    exported = (variable.task for variable in find_variables(entry.get("outputs") or {}))
    for name in (*exported, *_read_otherwise(tasks)):
        eligible.pop(name, None)
    ordered: dict[str, AuthoredStep] = {}
    waits = {task["name"]: awaited_tasks(task) for task in tasks}
    while found := [name for name in eligible if name not in ordered and waits[name] <= ordered.keys()]:
        ordered |= {name: eligible[name] for name in found}
    return ordered


def _read_otherwise(tasks: Sequence[Manifest]) -> Iterator[str]:
    """Tasks of which something else is read than their outputs, or an artifact elsewhere than as an argument.

    An argument may be missing if it is optional, but Argo knows no expression without an artifact.
    """
    for task in tasks:
        arguments = task.get("arguments") or {}
        given = arguments.get("artifacts") or []
        artifacts = [artifact if artifact.get("optional") else _without_source(artifact) for artifact in given]
        for variable in find_variables({**task, "arguments": {**arguments, "artifacts": artifacts}}):
            is_value = variable.names[2:4] == ("outputs", "parameters") and len(variable.names) == _VALUE_NAMES
            if not is_value and variable.names[2:] != ("status",):
                yield variable.task


def _without_source(artifact: Manifest) -> Manifest:
    return {field: value for field, value in artifact.items() if field != "from"}


def _read_from_gate(task: Manifest, reusable: Collection[str]) -> Manifest:
    for artifact in (task.get("arguments") or {}).get("artifacts") or []:
        variables = list(find_variables(artifact.get("from", "")))
        if variables and variables[0].task in reusable:
            del artifact["from"]
            artifact["fromExpression"] = _either(variables[0].task, "artifacts", variables[0].names[4])
            artifact["s3"] = dict(_NO_LOCATION)
    if depends := task.get("depends"):
        task["depends"] = str(_accept_skipped(parse_depends(depends), reusable))

    def change(variable: Variable) -> Sequence[str] | Expression:
        if variable.task not in reusable or variable.names[3:4] == ("artifacts",):
            return variable.names
        if variable.names[2:] == ("status",):
            return Expression(f"{_is_taken(variable.task)} ? 'Succeeded' : tasks['{variable.task}'].status")
        return Expression(_either(variable.task, "parameters", variable.names[4]))

    changed: Manifest = map_variables(task, change)
    return changed


def _is_taken(step: str) -> str:
    return f"tasks['{REUSE_TEMPLATE}'].outputs.parameters['{step}'] == 'true'"


def _either(step: str, kind: str, output: str) -> str:
    """The output of the gate if it takes the step over, else that of the step."""
    taken = f"tasks['{REUSE_TEMPLATE}'].outputs.{kind}['{reuse_output(step, output)}']"
    return f"{_is_taken(step)} ? {taken} : tasks['{step}'].outputs.{kind}['{output}']"


def _accept_skipped(condition: DependsExpression, reusable: Collection[str]) -> DependsExpression:
    """``condition`` where a step that is taken over, and so skipped, has succeeded."""
    match condition:
        case TaskResult(task, "Succeeded") if task in reusable:
            return AnyOf((condition, TaskResult(task, "Skipped")))
        case TaskResult(task, "Skipped") if task in reusable:  # it has no condition of its own
            return AllOf((TaskResult(task, "Succeeded"), TaskResult(task, "Failed")))
        case Not(term):
            return Not(_accept_skipped(term, reusable))
        case AllOf(terms):
            return AllOf(tuple(_accept_skipped(term, reusable) for term in terms))
        case AnyOf(terms):
            return AnyOf(tuple(_accept_skipped(term, reusable) for term in terms))
    return condition
