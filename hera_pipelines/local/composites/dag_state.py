"""Decides which tasks of a DAG run, the phase of the DAG, and the items of a fan-out. Pure.

`TemplateDag` evaluates ``depends``. With or without ``failFast`` (the default),
Argo 4.1 starts every task whose ``depends`` holds and waits for all running tasks;
so does this module. `expand_child` resolves the condition, references and items
(withItems, withParam, withSequence) of a DAG task or a step; both follow the same
rules, which Argo implements twice.

Source: Argo Workflows ``workflow/common/ancestry.go``, ``controller/dag.go`` and
``controller/steps.go``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hera_pipelines.local.arguments import (
    Variables,
    VariableScope,
    replace_tags,
    resolve_arguments,
    substitute_all_variables,
    substitute_variables,
)
from hera_pipelines.local.expressions.govaluate import condition_holds
from hera_pipelines.local.nodes import NodePhase, item_name
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import FAN_OUT_FIELDS, Manifest, is_fan_out
from tiphys.protocol.depends import AllOf, DependsExpression, TaskResult, parse_depends, simplify, tasks_in
from tiphys.protocol.fan_out import item_documents, item_variables


class TaskState(NamedTuple):
    """Phase of a finished task, and the phases of its items if it is a fan-out."""

    phase: NodePhase
    items: tuple[NodePhase, ...] = ()


@dataclass(frozen=True)
class TemplateDag:
    """The tasks of one DAG template, and its ``target``."""

    tasks: Sequence[Manifest]
    target: str = ""
    fail_fast: bool = True
    """Whether the first or the last failed target decides between Failed and Error."""

    @cached_property
    def _by_name(self) -> dict[str, Manifest]:
        return {task["name"]: task for task in self.tasks}

    @cached_property
    def _conditions(self) -> dict[str, DependsExpression | None]:
        return {name: self._parse_condition(name) for name in self._by_name}

    @cached_property
    def dependencies(self) -> dict[str, tuple[str, ...]]:
        """Names of the tasks that each task waits for."""
        return {
            name: tuple(dict.fromkeys(tasks_in(condition))) if condition else ()
            for name, condition in self._conditions.items()
        }

    def _parse_condition(self, name: str) -> DependsExpression | None:
        """The condition of a task, None for a task without; ``dependencies`` is the conjunction of bare names."""
        task = self._by_name[name]
        if task.get("depends"):
            try:
                condition: DependsExpression = parse_depends(task["depends"])
            except UsageError as error:
                raise UsageError(f"task {name}: {error}") from error
        elif task.get("dependencies"):
            condition = AllOf(tuple(TaskResult(dependency, "") for dependency in task["dependencies"]))
        else:
            return None
        for dependency in tasks_in(condition):
            if dependency not in self._by_name:
                raise UsageError(f"task {name} depends on {dependency!r}, which is no task of this DAG")
        return condition

    def check(self) -> None:
        """Raise `UsageError` for an unknown task or result, a cycle, or a condition that cannot be read."""
        for name in self._by_name:
            self.ancestors(name)
        for name in self.target.split():
            if name not in self._by_name:
                raise UsageError(f"the DAG's target {name!r} is not one of its tasks")

    def ancestors(self, name: str) -> tuple[str, ...]:
        """All tasks that ``name`` depends on, directly or not, in the order of the template.

        Raises:
            UsageError: the task depends on itself.
        """
        visited: set[str] = set()
        waiting = list(self.dependencies[name])
        while waiting:
            task = waiting.pop()
            if task not in visited:
                visited.add(task)
                waiting += self.dependencies[task]
        if name in visited:
            raise UsageError(f"task {name} depends on itself")
        return tuple(task for task in self._by_name if task in visited)

    def should_run(self, name: str, states: Mapping[str, TaskState]) -> bool:
        """Whether ``name`` runs, or is Omitted; all tasks that it depends on have finished."""
        condition = self._conditions[name]
        if condition is None:
            return True
        results = {task: _true_results(self._by_name[task], states[task]) for task in self.dependencies[name]}
        return simplify(condition, results) is True

    @property
    def targets(self) -> tuple[str, ...]:
        """Tasks that decide the phase of the DAG: the named ones, or all that no other task depends on, by name."""
        if self.target:
            return tuple(self.target.split())
        awaited = {dependency for names in self.dependencies.values() for dependency in names}
        return tuple(sorted(name for name in self._by_name if name not in awaited))

    @property
    def needed_tasks(self) -> tuple[str, ...]:
        """The targets and all their ancestors, in the order of the template."""
        needed = set(self.targets).union(*(self.ancestors(name) for name in self.targets))
        return tuple(name for name in self._by_name if name in needed)

    def phase(self, states: Mapping[str, TaskState]) -> NodePhase:
        """Phase of the DAG after all needed tasks have finished.

        A skipped or omitted task counts as its worst predecessor, so that a failure
        reaches the end of its branch.
        """
        branches: dict[str, NodePhase] = {}
        phases = ((target, self._branch_phase(target, states, branches)) for target in self.targets)
        failures = [
            phase
            for target, phase in phases
            if phase in (NodePhase.FAILED, NodePhase.ERROR) and not tolerates_failure(self._by_name[target], phase)
        ]
        if not failures:
            return NodePhase.SUCCEEDED
        return failures[0 if self.fail_fast else -1]

    def _branch_phase(self, name: str, states: Mapping[str, TaskState], branches: dict[str, NodePhase]) -> NodePhase:
        """Phase of the branch that ends in ``name``; ``branches`` caches phases, because branches share tasks."""
        waiting = [name]
        while name not in branches:
            task = waiting[-1]
            is_skipped = states[task].phase in (NodePhase.SKIPPED, NodePhase.OMITTED)
            dependencies = self.dependencies[task] if is_skipped else ()
            if missing := [dependency for dependency in dependencies if dependency not in branches]:
                waiting += missing
                continue
            phases = [branches[dependency] for dependency in dependencies] if is_skipped else [states[task].phase]
            worst = (phase for phase in phases if phase in (NodePhase.FAILED, NodePhase.ERROR))
            branches[task] = next(worst, NodePhase.SUCCEEDED)
            waiting.pop()
        return branches[name]


def tolerates_failure(task: Manifest, phase: NodePhase) -> bool:
    """Whether ``continueOn`` of a task or step accepts this phase."""
    continue_on = task.get("continueOn") or {}
    return bool(
        (phase is NodePhase.FAILED and continue_on.get("failed"))
        or (phase is NodePhase.ERROR and continue_on.get("error"))
    )


def _true_results(task: Manifest, state: TaskState) -> frozenset[str]:
    """Results that hold for a finished task; "" is its bare name: it did well, or its failure is tolerated."""
    phase, items = state
    results = {
        "": phase in (NodePhase.SUCCEEDED, NodePhase.SKIPPED) or tolerates_failure(task, phase),
        "Succeeded": phase is NodePhase.SUCCEEDED,
        "Failed": phase is NodePhase.FAILED,
        "Errored": phase is NodePhase.ERROR,
        "Skipped": phase is NodePhase.SKIPPED,
        "Omitted": phase is NodePhase.OMITTED,
        "AnySucceeded": NodePhase.SUCCEEDED in items,
        "AllFailed": bool(items) and all(item is NodePhase.FAILED for item in items),
    }
    return frozenset(result for result, holds in results.items() if holds)


class ExpandedItem(NamedTuple):
    """One item of a fan-out: the name of its task, and its ``{{item}}`` variables."""

    name: str
    variables: Variables


def without_items(task: Manifest) -> Manifest:
    """Return ``task`` without its fan-out fields."""
    return {key: value for key, value in task.items() if key not in FAN_OUT_FIELDS}


def expand_items(task: Manifest) -> list[ExpandedItem]:
    """Expand the items of a task whose variables are substituted.

    Raises:
        UsageError: withParam is not a JSON list, withSequence has no end, or an item is null.
    """
    return [_build_item(task["name"], index, text) for index, text in enumerate(item_documents(task))]


def _build_item(name: str, index: int, document: str) -> ExpandedItem:
    try:
        label, variables = item_variables(document)
    except UsageError as error:
        raise UsageError(f"{name}: item {index} is {error}") from error
    return ExpandedItem(item_name(name, index, label), variables)


EMPTY_FAN_OUT_MESSAGE = "Skipped, empty params"
_REFERENCE_ROOTS = ("steps", "tasks")


def expand_child(child: Manifest, scope: VariableScope) -> list[Manifest]:
    """Return the tasks or steps to run for ``child``: itself, or one per item, with all variables substituted.

    A child whose condition is already false keeps its references, because it does
    not run and they may name outputs that do not exist.

    Raises:
        UsageError: a reference has no value, or the items are invalid.
    """
    child = {**child, "when": replace_tags(child.get("when", ""), scope.values, _REFERENCE_ROOTS)}
    if _is_skipped(child):
        return _skipped_children(child)
    resolved = _resolve_references(child, scope)
    if not is_fan_out(child):
        return [resolved]
    return [_fill_in_item(resolved, item, scope) for item in expand_items(resolved)]


def _is_skipped(child: Manifest) -> bool:
    try:
        return not condition_holds(child["when"])
    except UsageError:
        if is_fan_out(child):  # the condition may contain {{item}}, which has no value yet
            return False
        raise


def _skipped_children(child: Manifest) -> list[Manifest]:
    """Children to mark as skipped; none if the items of the fan-out are unknown."""
    if not is_fan_out(child):
        return [child]
    try:
        return [{**without_items(child), "name": item.name} for item in expand_items(child)]
    except UsageError:
        return []


def _resolve_references(child: Manifest, scope: VariableScope) -> Manifest:
    rest = {key: value for key, value in child.items() if key not in ("arguments", "name", "when")}
    return {
        **substitute_variables(rest, scope.values, _REFERENCE_ROOTS),
        "name": child["name"],
        "when": child["when"],
        "arguments": resolve_arguments(child.get("arguments") or {}, scope),
    }


def _fill_in_item(child: Manifest, item: ExpandedItem, scope: VariableScope) -> Manifest:
    filled: Manifest = substitute_all_variables(without_items(child), {**scope.values, **item.variables})
    return {**filled, "name": item.name}
