"""The entry DAG as a graph, so that planning can ask what hangs on what.

What one task of a DAG says about another: Argo's ``{{tasks.…}}`` tags and expressions.

Pruning must find every mention of a task that is taken out, or the Workflow
that is left would wait for a value that nobody makes.

Which templates of a Workflow something still leads to.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import TAG, CompiledPipeline, Manifest, placeholders, template
from tiphys.protocol.fan_out import is_fan_out
from tiphys.protocol.step_spec import StepSpec
from tiphys_controller.plan import depends as conditions

_PLAIN = re.compile(r"tasks\.([A-Za-z0-9][-A-Za-z0-9]*)\.(.+)", re.DOTALL)
_IN_EXPRESSION = re.compile(r"""\btasks(?:\.([A-Za-z0-9_]+)|\[\s*['"]([^'"]+)['"]\s*\])""")


class Reference(NamedTuple):
    """One mention of a task.

    ``path`` is what is asked of it, such as ``outputs.parameters.loss``; it is
    empty in an expression, which only Argo can evaluate.
    """

    task: str
    path: str

    def __str__(self) -> str:
        return f"{{{{tasks.{self.task}.{self.path}}}}}" if self.path else f"an expression over tasks.{self.task}"


def references(part: Any) -> Iterator[Reference]:
    """Every mention of a task in a part of a manifest."""
    for text, is_expression in placeholders(part):
        if is_expression:
            yield from _in_expression(text)
        elif reference := parse_reference(text):
            yield reference


def artifact_reference(text: str) -> Reference | None:
    """The reference in an artifact's ``from``, which is one tag and nothing else; None for any other text."""
    tag = TAG.fullmatch(text.strip())
    return parse_reference(tag[1]) if tag else None


def has_tags(part: Any) -> bool:
    """Whether anything is left for Argo to put in."""
    if isinstance(part, dict):
        return any(has_tags(value) for value in part.values())
    if isinstance(part, list):
        return any(has_tags(value) for value in part)
    return isinstance(part, str) and "{{" in part


def substitute(part: Any, value_of: Callable[[str], str | None]) -> Any:
    """``part`` with each plain tag replaced where ``value_of`` knows its text, as Argo would; others stay."""
    if isinstance(part, dict):
        return {name: substitute(value, value_of) for name, value in part.items()}
    if isinstance(part, list):
        return [substitute(value, value_of) for value in part]
    if isinstance(part, str):
        return TAG.sub(lambda tag: _or_itself(value_of(tag[1].strip()), tag[0]), part)
    return part


def parse_reference(tag: str) -> Reference | None:
    """The reference inside a plain tag; None for a tag that names no task."""
    match = _PLAIN.fullmatch(tag.strip())
    return Reference(match[1], match[2]) if match else None


def _or_itself(value: str | None, tag: str) -> str:
    return tag if value is None else value


def _in_expression(text: str) -> Iterator[Reference]:
    for dotted, quoted in _IN_EXPRESSION.findall(text):
        yield Reference(dotted or quoted, "")


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


def reachable(manifest: Manifest, roots: Iterable[str]) -> set[str]:
    """Names of the templates that ``roots`` lead to, themselves included.

    All of them, if a name is made at run time.
    """
    by_name = {candidate["name"]: candidate for candidate in manifest["spec"].get("templates", [])}
    found: set[str] = set()
    left = list(roots)
    while left:
        name = left.pop()
        if has_tags(name):
            return set(by_name)
        if name in by_name and name not in found:
            found.add(name)
            left.extend(template_names(by_name[name]))
    return found


def roots_of(spec: Manifest) -> Iterator[str]:
    """Templates that the Workflow itself names: entry point, exit handler and hooks."""
    yield from template_names({name: value for name, value in spec.items() if name != "templates"})
    if entrypoint := spec.get("entrypoint"):
        yield entrypoint


def template_names(part: Any) -> Iterator[str]:
    """Templates that a part of a manifest names."""
    if isinstance(part, dict):
        for field, value in part.items():
            if field in ("template", "onExit") and isinstance(value, str):
                yield value
            else:
                yield from template_names(value)
    elif isinstance(part, list):
        for value in part:
            yield from template_names(value)


def declares(part: Any, field: str) -> bool:
    """Whether a field of this name occurs anywhere in a part of a manifest."""
    if isinstance(part, dict):
        return field in part or any(declares(value, field) for value in part.values())
    return isinstance(part, list) and any(declares(value, field) for value in part)
