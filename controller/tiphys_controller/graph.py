"""The entry DAG as a graph, so that planning can ask what hangs on what."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

from tiphys.errors import UsageError
from tiphys.protocol.fan_out import is_fan_out
from tiphys.protocol.pipeline import CompiledPipeline, Manifest, template
from tiphys.protocol.policy import StepSpec
from tiphys_controller import conditions
from tiphys_controller.references import has_tags, references


@dataclass(frozen=True)
class Task:
    """One task of the entry DAG. ``spec`` is None for a plain task, which keeps no record."""

    name: str
    body: Manifest
    spec: StepSpec | None
    waits_for: frozenset[str]
    """Tasks that its condition names."""
    reads: frozenset[str]
    """Tasks whose outputs it reads. Argo demands that it waits for them too, if only by way of others."""

    @property
    def needs(self) -> frozenset[str]:
        """Tasks before it."""
        return self.waits_for | self.reads

    @property
    def fan_out(self) -> bool:
        return is_fan_out(self.body)


@dataclass(frozen=True)
class Graph:
    """Tasks that the workflow runs, by name, each after everything that it needs."""

    tasks: Mapping[str, Task]

    @classmethod
    def of(cls, pipeline: CompiledPipeline) -> "Graph":
        """Read the entry DAG.

        Raises:
            UsageError: the entry point is not a DAG, or its tasks do not fit together.
        """
        entry = template(pipeline.manifest, pipeline.manifest["spec"]["entrypoint"])
        if "dag" not in entry:
            raise UsageError(
                f"pipeline {pipeline.name}: the entry point {entry['name']} is not a DAG; compile it again"
            )
        bodies = {body["name"]: body for body in pipeline.tasks()}
        tasks = {name: _task(name, body, pipeline, bodies) for name, body in bodies.items()}
        wanted = _wanted(entry["dag"].get("target", ""), tasks)
        return cls({name: tasks[name] for name in _in_order(tasks) if name in wanted})

    @cached_property
    def readers(self) -> Mapping[str, frozenset[str]]:
        """Tasks that need a task, by its name."""
        found: dict[str, set[str]] = {name: set() for name in self.tasks}
        for task in self.tasks.values():
            for name in task.needs:
                found[name].add(task.name)
        return {name: frozenset(readers) for name, readers in found.items()}

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Place of a task in the order of the graph."""
        return {name: index for index, name in enumerate(self.tasks)}


def _task(name: str, body: Manifest, pipeline: CompiledPipeline, bodies: Mapping[str, Manifest]) -> Task:
    waits_for = frozenset(_waits_for(body))
    reads = frozenset(reference.task for reference in references(body)) - {name}
    for other in sorted(name for name in waits_for | reads if name not in bodies):
        raise UsageError(f"pipeline {pipeline.name}: task {name} names {other}, which its DAG does not have")
    return Task(name, body, pipeline.steps.get(name), waits_for, reads)


def _waits_for(body: Manifest) -> Iterator[str]:
    yield from body.get("dependencies") or ()
    if body.get("depends"):
        yield from conditions.tasks_in(conditions.parse(body["depends"]))


def _in_order(tasks: Mapping[str, Task]) -> list[str]:
    try:
        return list(TopologicalSorter({name: sorted(task.needs) for name, task in tasks.items()}).static_order())
    except CycleError as error:
        raise UsageError(f"the tasks of the DAG wait for each other: {' → '.join(error.args[1])}") from error


def _wanted(target: str, tasks: Mapping[str, Task]) -> set[str]:
    """Tasks that Argo runs: everything, or the targets and what they need."""
    if has_tags(target):
        raise UsageError(f"the DAG's target {target!r} is made at run time, so there is no plan; write task names")
    found: set[str] = set()
    left = target.split() or list(tasks)
    while left:
        if (name := left.pop()) not in found and name in tasks:
            found.add(name)
            left.extend(tasks[name].needs)
    return found
