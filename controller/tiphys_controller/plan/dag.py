"""The entry DAG as a graph: which task needs which, and which templates are used.

See `tiphys.recording.bindings` for the references between tasks.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any

from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import (
    CompiledPipeline,
    Manifest,
    contains_tags,
    find_template,
    is_fan_out,
)
from tiphys.protocol.depends import awaited_tasks
from tiphys.protocol.step_spec import StepSpec
from tiphys.recording.bindings import find_references


@dataclass(frozen=True)
class Task:
    """One task of the entry DAG. ``spec`` is None for a plain task, which keeps no record in storage."""

    name: str
    body: Manifest
    spec: StepSpec | None
    waits_for: frozenset[str]
    """Tasks named by its condition."""
    reads: frozenset[str]
    """Tasks whose outputs it reads. Argo requires that it also waits for them, directly or indirectly."""

    @property
    def needs(self) -> frozenset[str]:
        """Tasks that must end before this one starts."""
        return self.waits_for | self.reads

    @property
    def is_fan_out(self) -> bool:
        return is_fan_out(self.body)


@dataclass(frozen=True)
class TaskGraph:
    """Tasks of the workflow by name, in topological order."""

    tasks: Mapping[str, Task]

    @classmethod
    def from_pipeline(cls, pipeline: CompiledPipeline) -> "TaskGraph":
        """Build the graph of the entry DAG.

        Raises:
            UsageError: the entry point is not a DAG, or its tasks name missing tasks or form a cycle.
        """
        entry = find_template(pipeline.manifest, pipeline.manifest["spec"]["entrypoint"])
        if "dag" not in entry:
            raise UsageError(
                f"pipeline {pipeline.name}: the entry point {entry['name']} is not a DAG; compile it again"
            )
        bodies = {body["name"]: body for body in pipeline.tasks()}
        tasks = {name: _task(name, body, pipeline, bodies) for name, body in bodies.items()}
        selected = _find_target_tasks(entry["dag"].get("target", ""), tasks)
        return cls({name: tasks[name] for name in _sort_tasks(tasks) if name in selected})

    @cached_property
    def dependents(self) -> Mapping[str, frozenset[str]]:
        """By task, the tasks that need it."""
        dependents: dict[str, set[str]] = {name: set() for name in self.tasks}
        for task in self.tasks.values():
            for name in task.needs:
                dependents[name].add(task.name)
        return {name: frozenset(readers) for name, readers in dependents.items()}

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Index of each task in topological order."""
        return {name: index for index, name in enumerate(self.tasks)}


def _task(name: str, body: Manifest, pipeline: CompiledPipeline, bodies: Mapping[str, Manifest]) -> Task:
    waits_for = awaited_tasks(body)
    reads = frozenset(reference.task for reference in find_references(body)) - {name}
    for other in sorted(name for name in waits_for | reads if name not in bodies):
        raise UsageError(f"pipeline {pipeline.name}: task {name} names {other}, which its DAG does not have")
    return Task(name, body, pipeline.steps.get(name), waits_for, reads)


def _sort_tasks(tasks: Mapping[str, Task]) -> list[str]:
    try:
        return list(TopologicalSorter({name: sorted(task.needs) for name, task in tasks.items()}).static_order())
    except CycleError as error:
        raise UsageError(f"the tasks of the DAG wait for each other: {' → '.join(error.args[1])}") from error


def _find_target_tasks(target: str, tasks: Mapping[str, Task]) -> set[str]:
    """Tasks that Argo runs: all, or the targets and the tasks that they need."""
    if contains_tags(target):
        raise UsageError(f"the DAG's target {target!r} is made at run time, so there is no plan; write task names")
    selected: set[str] = set()
    queue = target.split() or list(tasks)
    while queue:
        if (name := queue.pop()) not in selected and name in tasks:
            selected.add(name)
            queue.extend(tasks[name].needs)
    return selected


def find_reachable_templates(manifest: Manifest, roots: Iterable[str]) -> set[str]:
    """Names of the templates reachable from ``roots``, which are included.

    All templates, if one of the names is made at run time.
    """
    by_name = {candidate["name"]: candidate for candidate in manifest["spec"].get("templates", [])}
    reachable: set[str] = set()
    queue = list(roots)
    while queue:
        name = queue.pop()
        if contains_tags(name):
            return set(by_name)
        if name in by_name and name not in reachable:
            reachable.add(name)
            queue.extend(find_template_names(by_name[name]))
    return reachable


def find_root_templates(spec: Manifest) -> Iterator[str]:
    """Templates that the Workflow spec names: entry point, exit handler and hooks."""
    yield from find_template_names({name: value for name, value in spec.items() if name != "templates"})
    if entrypoint := spec.get("entrypoint"):
        yield entrypoint


def find_template_names(part: Any) -> Iterator[str]:
    """Templates that a part of a manifest names."""
    if isinstance(part, dict):
        for field, value in part.items():
            if field in ("template", "onExit") and isinstance(value, str):
                yield value
            else:
                yield from find_template_names(value)
    elif isinstance(part, list):
        for value in part:
            yield from find_template_names(value)


def contains_field(part: Any, field: str) -> bool:
    """Whether a field of this name occurs anywhere in a part of a manifest."""
    if isinstance(part, dict):
        return field in part or any(contains_field(value, field) for value in part.values())
    return isinstance(part, list) and any(contains_field(value, field) for value in part)
