"""Which task of a DAG may run, and what the DAG comes to: pure functions over phases.

Source: Argo Workflows ``workflow/common/ancestry.go`` and ``controller/dag.go``.
With ``failFast`` (the default) and without it Argo 4.1 starts every task whose
``depends`` holds, and waits for all that run; so does this module.

withItems, withParam and withSequence: one task becomes many.

From a task or step as written to what is to be run: condition, references, items.

DAG tasks and steps follow the same rules; Argo holds two copies of them, in
``dag.go`` and ``steps.go``.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from hera_pipelines.local.arguments import Scope, Variables, replace_tags, resolve_arguments, substitute, substitute_all
from hera_pipelines.local.expressions.evaluate import go_json, go_text
from hera_pipelines.local.expressions.expr import truth_of
from hera_pipelines.local.expressions.govaluate import holds
from hera_pipelines.local.nodes import NodePhase, item_name
from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.fan_out import FIELDS, is_fan_out, values

RESULTS = ("Succeeded", "Failed", "Errored", "Skipped", "Omitted", "Daemoned", "AnySucceeded", "AllFailed")
_REFERENCE = re.compile(r"([a-zA-Z0-9][-a-zA-Z0-9]*?)\.([A-Z][a-zA-Z]+)|([a-zA-Z0-9][-a-zA-Z0-9]*)")


class TaskState(NamedTuple):
    """A finished task: its phase, and those of its items if it was fanned out."""

    phase: NodePhase
    items: tuple[NodePhase, ...] = ()


@dataclass(frozen=True)
class Graph:
    """The tasks of one DAG template."""

    tasks: Sequence[Manifest]
    target: str = ""

    @cached_property
    def _by_name(self) -> dict[str, Manifest]:
        return {task["name"]: task for task in self.tasks}

    @cached_property
    def dependencies(self) -> dict[str, tuple[str, ...]]:
        """Names of the tasks that each task waits for."""
        return {name: tuple(dict.fromkeys(_names(self.condition(name)))) for name in self._by_name}

    def condition(self, name: str) -> str:
        """``depends`` of a task with every result spelled out."""
        task = self._by_name[name]
        if not task.get("depends"):
            return " && ".join(self._good(name, dependency) for dependency in task.get("dependencies") or [])
        return _REFERENCE.sub(lambda match: match[0] if match[2] else self._good(name, match[3]), task["depends"])

    def _good(self, dependent: str, name: str) -> str:
        """What a bare name means: the task did well, or its failure is tolerated."""
        if name not in self._by_name:
            raise UsageError(f"task {dependent} depends on {name!r}, which is no task of this DAG")
        go_on = self._by_name[name].get("continueOn") or {}
        results = ["Succeeded", "Skipped", "Daemoned"]
        results += ["Errored"] if go_on.get("error") else []
        results += ["Failed"] if go_on.get("failed") else []
        return "(" + " || ".join(f"{name}.{result}" for result in results) + ")"

    def check(self) -> None:
        """Raise `UsageError` for an unknown task or result, a cycle, or a condition that cannot be read."""
        for name in self._by_name:
            for task, result, _bare in _REFERENCE.findall(self.condition(name)):
                if task not in self._by_name:
                    raise UsageError(f"task {name} depends on {task!r}, which is no task of this DAG")
                if result not in RESULTS:
                    raise UsageError(f"task {name}: {task}.{result} is not a result; use {', '.join(RESULTS)}")
            self.ancestors(name)
            blank = {task: TaskState(NodePhase.SUCCEEDED) for task in self.dependencies[name]}
            self.runs(name, blank)
        for name in self.target.split():
            if name not in self._by_name:
                raise UsageError(f"the DAG's target {name!r} is not one of its tasks")

    def ancestors(self, name: str) -> tuple[str, ...]:
        """All tasks that come before ``name``, in the order written.

        Raises:
            UsageError: the task waits for itself.
        """
        seen: set[str] = set()
        waiting = list(self.dependencies[name])
        while waiting:
            task = waiting.pop()
            if task not in seen:
                seen.add(task)
                waiting += self.dependencies[task]
        if name in seen:
            raise UsageError(f"task {name} waits for itself")
        return tuple(task for task in self._by_name if task in seen)

    def runs(self, name: str, states: Mapping[str, TaskState]) -> bool:
        """Whether ``name`` runs (else it is Omitted), once all it waits for has finished."""
        condition = self.condition(name)
        if not condition:
            return True
        results = {_identifier(task): _results(states[task]) for task in self.dependencies[name]}
        return truth_of(_REFERENCE.sub(lambda match: match[0].replace("-", "_"), condition), results)

    @property
    def targets(self) -> tuple[str, ...]:
        """Tasks that must come to an end: those named, or all that nothing waits for."""
        if self.target:
            return tuple(self.target.split())
        awaited = {dependency for names in self.dependencies.values() for dependency in names}
        return tuple(name for name in self._by_name if name not in awaited)

    @property
    def needed(self) -> tuple[str, ...]:
        """The targets and everything before them, in the order written."""
        wanted = set(self.targets).union(*(self.ancestors(name) for name in self.targets))
        return tuple(name for name in self._by_name if name in wanted)

    def phase(self, states: Mapping[str, TaskState]) -> NodePhase:
        """What the DAG comes to once all needed tasks have finished.

        A task that was passed over counts as its worst predecessor, so that a
        failure reaches the end of its branch.
        """
        branches: dict[str, NodePhase] = {}
        for target in self.targets:
            phase = self._branch(target, states, branches)
            if phase in (NodePhase.FAILED, NodePhase.ERROR) and not tolerates(self._by_name[target], phase):
                return phase
        return NodePhase.SUCCEEDED

    def _branch(self, name: str, states: Mapping[str, TaskState], known: dict[str, NodePhase]) -> NodePhase:
        """Phase of the branch that ends in ``name``; ``known`` holds those found before, as branches meet often."""
        waiting = [name]
        while name not in known:
            task = waiting[-1]
            passed_over = states[task].phase in (NodePhase.SKIPPED, NodePhase.OMITTED)
            before = self.dependencies[task] if passed_over else ()
            if missing := [dependency for dependency in before if dependency not in known]:
                waiting += missing
                continue
            phases = [known[dependency] for dependency in before] if passed_over else [states[task].phase]
            worst = (phase for phase in phases if phase in (NodePhase.FAILED, NodePhase.ERROR))
            known[task] = next(worst, NodePhase.SUCCEEDED)
            waiting.pop()
        return known[name]


def tolerates(task: Manifest, phase: NodePhase) -> bool:
    """Whether ``continueOn`` of a task or step accepts this phase."""
    go_on = task.get("continueOn") or {}
    return bool(
        (phase is NodePhase.FAILED and go_on.get("failed")) or (phase is NodePhase.ERROR and go_on.get("error"))
    )


def _names(condition: str) -> list[str]:
    return [task for task, _result, _bare in _REFERENCE.findall(condition)]


def _identifier(name: str) -> str:
    return name.replace("-", "_")


def _results(state: TaskState) -> dict[str, bool]:
    phase, items = state
    return {
        "Succeeded": phase is NodePhase.SUCCEEDED,
        "Failed": phase is NodePhase.FAILED,
        "Errored": phase is NodePhase.ERROR,
        "Skipped": phase is NodePhase.SKIPPED,
        "Omitted": phase is NodePhase.OMITTED,
        "Daemoned": False,
        "AnySucceeded": NodePhase.SUCCEEDED in items,
        "AllFailed": bool(items) and all(item is NodePhase.FAILED for item in items),
    }


__all__ = ["Item", "is_fan_out", "items_of", "without_items"]


class Item(NamedTuple):
    """One item: the name its task gets, and what ``{{item}}`` stands for."""

    name: str
    variables: Variables


def without_items(task: Manifest) -> Manifest:
    """``task`` without what says that it stands for many."""
    return {key: value for key, value in task.items() if key not in FIELDS}


def items_of(task: Manifest) -> list[Item]:
    """The items of a task whose variables have been filled in.

    Raises:
        UsageError: withParam is not a JSON list, or withSequence has no end.
    """
    return [_item(task["name"], index, value) for index, value in enumerate(values(task))]


def _item(name: str, index: int, value: Any) -> Item:
    if value is None:
        raise UsageError(f"{name}: item {index} is null; use a text, number, list or map")
    if not isinstance(value, dict):
        text = go_json(value) if isinstance(value, list) else go_text(value)
        return Item(item_name(name, index, go_text(value)), {"item": text})
    label = ",".join(sorted(f"{key}:{go_text(field)}" for key, field in value.items()))
    fields = {f"item.{key}": go_text(field) for key, field in value.items()}
    return Item(item_name(name, index, label), {"item": go_json(value), **fields})


EMPTY_FAN_OUT = "Skipped, empty params"
_ROOTS = ("steps", "tasks")


def expand(child: Manifest, scope: Scope) -> list[Manifest]:
    """What ``child`` stands for: itself, or one of each item, with nothing left to fill in.

    A child whose condition is already known to be false keeps its references:
    they may name what was never made, and it will not run.

    Raises:
        UsageError: a reference has no value, or the items cannot be read.
    """
    child = {**child, "when": replace_tags(child.get("when", ""), scope.values, _ROOTS)}
    if _never_runs(child):
        return _as_written(child)
    resolved = _resolve(child, scope)
    if not is_fan_out(child):
        return [resolved]
    return [_fill_in(resolved, item, scope) for item in items_of(resolved)]


def _never_runs(child: Manifest) -> bool:
    try:
        return not holds(child["when"])
    except UsageError:
        if is_fan_out(child):  # it may hold {{item}}
            return False
        raise


def _as_written(child: Manifest) -> list[Manifest]:
    """Children that will be skipped; where even their items are not known there are none."""
    if not is_fan_out(child):
        return [child]
    try:
        return [{**without_items(child), "name": item.name} for item in items_of(child)]
    except UsageError:
        return []


def _resolve(child: Manifest, scope: Scope) -> Manifest:
    rest = {key: value for key, value in child.items() if key not in ("arguments", "name", "when")}
    return {
        **substitute(rest, scope.values, _ROOTS),
        "name": child["name"],
        "when": child["when"],
        "arguments": resolve_arguments(child.get("arguments") or {}, scope),
    }


def _fill_in(child: Manifest, item: Item, scope: Scope) -> Manifest:
    filled: Manifest = substitute_all(without_items(child), {**scope.values, **item.variables})
    return {**filled, "name": item.name}
