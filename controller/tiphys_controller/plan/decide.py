"""One pass over the DAG: decide each task, given those that have to stay for reasons found before.

Whether a task must stay can depend on tasks behind it (a plain step that a
missing one reads), so `tiphys_controller.plan.decide` repeats the pass until nothing
is demanded any more. Demands only grow, so that it ends.

Tasks whose outputs are read where no binding reaches, so that they must stay in the Workflow.

What would run, and why: the decision that a resume carries out.

A task runs again when its result is missing or damaged, and so does everything
behind it, because its inputs may change. Such a task is only *kept* in the next
Workflow: if its inputs turn out the same, its admit takes the old result over.

A plain task keeps no record. It runs again unless everything that reads it is
finished: those readers could only start after it had ended.

Steps that a person wants to run again although they are done, and everything that hangs on them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from typing import NamedTuple

from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline, parameters_of, template
from tiphys_controller.plan import depends as conditions
from tiphys_controller.plan.bindings import OMITTED, TaskOutputs, outputs_of_items, outputs_of_step, unbound
from tiphys_controller.plan.dag import Graph, Task, declares, reachable, references, template_names
from tiphys_controller.plan.observe import RunState
from tiphys_controller.plan.progress import ItemProgress, Judge, TaskProgress, of_fan_out, of_step
from tiphys_controller.plan.step_state import EndKey, Standing


def exporting(pipeline: CompiledPipeline, graph: Graph) -> Iterator[tuple[str, str]]:
    """Such tasks, each with the reader in words."""
    spec = pipeline.manifest["spec"]
    for reference in references(template(pipeline.manifest, spec["entrypoint"]).get("outputs") or {}):
        yield reference.task, "the workflow's own outputs read it"
    if "workflow.outputs." not in json.dumps(spec):
        return
    for name, task in graph.tasks.items():
        used = reachable(pipeline.manifest, template_names(task.body))
        if any(declares(template(pipeline.manifest, one), "globalName") for one in used):
            yield name, "it sets outputs of the workflow"


class Action(StrEnum):
    """Whether a task is in the next Workflow."""

    SKIP = "skip"
    RUN = "run"


class TaskPlan(NamedTuple):
    """The decision on one task of the entry DAG.

    ``facts`` are the results of a skipped task, as far as storage tells them;
    None where it does not, and then nothing that runs depends on them.
    """

    name: str
    action: Action
    reason: str
    facts: frozenset[str] | None = None
    items: tuple[ItemProgress, ...] = ()


class Draft:
    """The decisions of one pass, and what they still ask for."""

    def __init__(
        self, graph: Graph, state: RunState, judge: Judge, parameters: Mapping[str, str], demands: Mapping[str, str]
    ) -> None:
        self._graph = graph
        self._state = state
        self._judge = judge
        self._parameters = parameters
        self._demands = demands
        self._progress: dict[str, TaskProgress] = {}
        self.unread: set[EndKey] = set()
        self.decided: dict[str, TaskPlan] = {}
        for name, task in graph.tasks.items():
            self.decided[name] = self._decide(task)

    def running(self) -> list[str]:
        """Names of the tasks that run, in the order of the DAG."""
        return [name for name, decision in self.decided.items() if decision.action is Action.RUN]

    def finished(self, task: Task) -> dict[str, TaskOutputs]:
        """What the skipped tasks left that ``task`` reads; records not read yet are noted and left out."""
        named = {reference.task for reference in references(task.body)} - {task.name}
        left = {name: self._outputs(name) for name in sorted(named) if self._is_skipped(name)}
        return {name: outputs for name, outputs in left.items() if outputs is not None}

    def new_demands(self, exported: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Skipped tasks that must stay after all, each with the reason. Nothing where nothing runs."""
        running = self.running()
        for name, decision in self.decided.items():
            if running and decision.action is Action.SKIP and decision.facts != conditions.OMITTED:
                yield from self._demand(self._graph.tasks[name], decision, exported)
        for name in running:
            task = self._graph.tasks[name]
            for reference in unbound(task.body, self.finished(task)):
                if self.decided[reference.task].facts != conditions.OMITTED:
                    yield reference.task, f"done, but {name} reads {reference}, which only a workflow can answer"

    def _demand(self, task: Task, decision: TaskPlan, exported: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        if task.spec and not task.spec.cache:
            yield task.name, _NO_CACHE
        if task.name in exported:
            yield task.name, f"done, but {exported[task.name]}"
        reader = self._first_running(self._graph.readers[task.name])
        if decision.facts is None and reader:
            yield task.name, f"{_PLAIN if task.spec is None else 'never started'}, and {reader} needs it"

    def _decide(self, task: Task) -> TaskPlan:
        if condition := self._false_condition(task):
            return TaskPlan(task.name, Action.SKIP, f"its condition {condition!r} is false", conditions.OMITTED)
        before = self._first_running(task.needs)
        if task.spec is None:
            return self._decide_plain(task, before)
        progress = self._progress_of(task)
        self._progress[task.name] = progress
        self.unread |= progress.unread
        return self._decide_gated(task, progress, before)

    def _decide_plain(self, task: Task, before: str | None) -> TaskPlan:
        if task.name in self._demands:
            return TaskPlan(task.name, Action.RUN, self._demands[task.name])
        if before:
            return TaskPlan(task.name, Action.RUN, f"depends on {before}, which runs again")
        if self._graph.readers[task.name]:
            return TaskPlan(task.name, Action.SKIP, f"{_PLAIN}, and everything that needs it is finished")
        if self._state.succeeded:
            return TaskPlan(task.name, Action.SKIP, f"{_PLAIN}, and the last submission succeeded")
        return TaskPlan(task.name, Action.RUN, _PLAIN)

    def _decide_gated(self, task: Task, progress: TaskProgress, before: str | None) -> TaskPlan:
        if progress.standing is not Standing.DONE:
            return self._decide_open(task, progress, before)
        if reason := self._reason_to_repeat(task, before):
            return TaskPlan(task.name, Action.RUN, reason, items=progress.items)
        facts = conditions.DONE_GROUP if task.fan_out else conditions.DONE
        return TaskPlan(task.name, Action.SKIP, progress.reason, facts, progress.items)

    def _decide_open(self, task: Task, progress: TaskProgress, before: str | None) -> TaskPlan:
        never = progress.standing is Standing.NEVER
        if never and self._state.succeeded and not before and task.name not in self._demands:
            return TaskPlan(task.name, Action.SKIP, "it never ran here; the last submission succeeded without it")
        reason = self._demands.get(task.name, progress.reason)
        return TaskPlan(task.name, Action.RUN, reason, items=progress.items)

    def _reason_to_repeat(self, task: Task, before: str | None) -> str | None:
        if task.name in self._demands:
            return self._demands[task.name]
        if task.spec and not task.spec.cache and not self._state.succeeded:
            return _NO_CACHE
        return f"depends on {before}, which runs again; taken over if its inputs stay the same" if before else None

    def _progress_of(self, task: Task) -> TaskProgress:
        if not task.fan_out:
            return of_step(task.name, self._judge)
        started = sorted(step for step in self._state.steps if step.startswith(f"{task.name}."))
        return of_fan_out(task, self._judge, started, self._parameters, self.finished(task))

    def _outputs(self, name: str) -> TaskOutputs | None:
        decision = self.decided[name]
        if decision.facts is None:
            return None
        if decision.facts == conditions.OMITTED:
            return OMITTED
        keys = self._progress[name].ends
        missing = [key for key in keys if key not in self._state.ends]
        self.unread |= set(missing)
        if missing:
            return None
        ends = [self._state.ends[key] for key in keys]
        return outputs_of_items(ends) if self._graph.tasks[name].fan_out else outputs_of_step(ends[0])

    def _is_skipped(self, name: str) -> bool:
        return name in self.decided and self.decided[name].action is Action.SKIP

    def _first_running(self, names: Iterable[str]) -> str | None:
        return min((n for n in names if not self._is_skipped(n)), key=self._graph.position.__getitem__, default=None)

    def _false_condition(self, task: Task) -> str | None:
        """The condition of a task that finished tasks make false for good; None if it may still hold."""
        if not task.waits_for or not all(self._is_skipped(name) for name in task.waits_for):
            return None
        facts = {name: known for name in task.waits_for if (known := self.decided[name].facts) is not None}
        condition = task.body.get("depends") or " && ".join(task.body["dependencies"])
        return condition if conditions.simplify(conditions.parse(condition), facts) is False else None


_PLAIN = "plain step keeps no record"
_NO_CACHE = "cache=False: it runs in every submission"


@dataclass(frozen=True)
class Plan:
    """Decisions in the order of the DAG.

    While ``unread`` names end records, the plan is not final: read them into
    the state and plan again.
    """

    tasks: tuple[TaskPlan, ...]
    finished: Mapping[str, Mapping[str, TaskOutputs]]
    """For each task that runs, what the skipped tasks left that it reads."""
    unread: frozenset[EndKey] = frozenset()

    @cached_property
    def running(self) -> tuple[str, ...]:
        """Names of the tasks that run."""
        return tuple(task.name for task in self.tasks if task.action is Action.RUN)

    @cached_property
    def facts(self) -> conditions.Facts:
        """Results of the skipped tasks, for the conditions of the others."""
        return {task.name: task.facts for task in self.tasks if task.action is Action.SKIP and task.facts is not None}


def plan(pipeline: CompiledPipeline, state: RunState, graph: Graph | None = None) -> Plan:
    """Decide every task of the entry DAG; ``graph`` is that of ``pipeline``, where somebody has made it already.

    Raises:
        UsageError: the DAG cannot be read.
    """
    graph = graph or Graph.of(pipeline)
    judge = cache(state.verdict)
    parameters = parameters_of(pipeline.manifest)
    exported = dict(exporting(pipeline, graph))
    demands = {name: reason for name, reason in state.renewed.items() if name in graph.tasks}
    while True:
        draft = Draft(graph, state, judge, parameters, demands)
        found = {name: reason for name, reason in draft.new_demands(exported) if name not in demands}
        if not found:
            return _plan(graph, draft)
        demands |= found


def _plan(graph: Graph, draft: Draft) -> Plan:
    finished = {name: draft.finished(graph.tasks[name]) for name in draft.running()}
    return Plan(tuple(draft.decided.values()), finished, frozenset(draft.unread))


def renewed(pipeline: CompiledPipeline, wanted: Iterable[str]) -> Mapping[str, str]:
    """``wanted`` tasks and all behind them, in the order of the DAG, each with the reason.

    Raises:
        UsageError: there is no such task.
    """
    roots = list(dict.fromkeys(wanted))
    if not roots:
        return {}
    graph = Graph.of(pipeline)
    for name in roots:
        if name not in graph.tasks:
            known = ", ".join(graph.tasks)
            raise UsageError(f"pipeline {pipeline.name} has no step {name!r} to run from; it has: {known}")
    found = dict.fromkeys(roots, "it is asked to run again")
    for name, task in graph.tasks.items():
        if name not in found and (before := sorted(task.needs & found.keys(), key=graph.position.__getitem__)):
            found[name] = f"depends on {before[0]}, which is asked to run again"
    return {name: found[name] for name in graph.tasks if name in found}


def check_volumes(pipeline: CompiledPipeline, names: Iterable[str]) -> None:
    """Refuse to begin trainings anew within their run where only their programs choose what to go on from.

    Raises:
        UsageError: the checkpoints of one of ``names`` lie on a volume.
    """
    for name in names:
        if volume := pipeline.volume(name):
            raise UsageError(
                f"{name} would start again from the beginning, but its checkpoints lie on the volume {volume}, where "
                "its program goes on from the newest one; `tiphys fork` gives it a lineage of its own"
            )
