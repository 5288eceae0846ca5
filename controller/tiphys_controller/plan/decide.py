"""Decides which tasks of the entry DAG the next Workflow runs.

A task runs again if its result is missing or damaged, and so does every task
behind it, because its inputs may change. If those inputs turn out the same, the
admit of a gated step reuses the old result. Of a fan-out without gates only the
missing items run. A plain task keeps no record, so it runs again unless every
task that needs it is finished.

Whether a task must stay can depend on tasks behind it, such as a missing step
that reads a plain one. So `decide_tasks` repeats the pass over the DAG until no
new demand appears; demands only grow, so the loop ends.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, cached_property
from typing import NamedTuple

from tiphys.errors import UsageError, unknown_name_message
from tiphys.protocol.compiled_workflow import CompiledPipeline, find_template, read_workflow_parameters
from tiphys.protocol.depends import (
    DONE_FAN_OUT_RESULTS,
    DONE_RESULTS,
    OMITTED_RESULTS,
    KnownResults,
    parse_depends,
    simplify,
)
from tiphys.protocol.variables import find_variables
from tiphys.recording.bindings import (
    OMITTED_OUTPUTS,
    TaskOutputs,
    collect_fan_out_outputs,
    collect_step_outputs,
    find_references,
    find_unbound_references,
    item_parameters,
)
from tiphys.records import AttemptEnd, task_name
from tiphys_controller.plan.dag import Task, TaskGraph, contains_field, find_reachable_templates, find_template_names
from tiphys_controller.plan.observe import RunState
from tiphys_controller.plan.partial_fan_out import PartialOutputs, can_be_merged, can_read_partly, choose_items
from tiphys_controller.plan.progress import (
    ItemProgress,
    StepStateLookup,
    TaskProgress,
    measure_fan_out_progress,
    measure_step_progress,
)
from tiphys_controller.plan.step_state import AttemptId, StepStatus


def find_exporting_tasks(pipeline: CompiledPipeline, graph: TaskGraph) -> Iterator[tuple[str, str]]:
    """Tasks whose outputs are read where no binding reaches, each with a phrase that names the reader."""
    spec = pipeline.manifest["spec"]
    for reference in find_references(find_template(pipeline.manifest, spec["entrypoint"]).get("outputs") or {}):
        yield reference.task, "the workflow's own outputs read it"
    if not any(variable.names[:2] == ("workflow", "outputs") for variable in find_variables(spec)):
        return
    for name, task in graph.tasks.items():
        used = find_reachable_templates(pipeline.manifest, find_template_names(task.body))
        if any(contains_field(find_template(pipeline.manifest, template), "globalName") for template in used):
            yield name, "it sets outputs of the workflow"


_PLAIN_STEP_REASON = "plain step keeps no record"
_NO_CACHE_REASON = "cache=False: it runs in every submission"


class PlanAction(StrEnum):
    """Whether a task is in the next Workflow."""

    SKIP = "skip"
    RUN = "run"


class TaskPlan(NamedTuple):
    """The decision on one task of the entry DAG.

    ``known_results`` are the results of a skipped task; None if storage does not
    show them, and then no task that runs depends on them.
    """

    name: str
    action: PlanAction
    reason: str
    known_results: frozenset[str] | None = None
    items: tuple[ItemProgress, ...] = ()
    kept_items: tuple[int, ...] | None = None
    """Positions of the items that run; None: all."""

    @property
    def due_steps(self) -> tuple[str, ...]:
        """What of a task that runs is due: the task, or the step ids of the items that run."""
        return (self.name,) if self.kept_items is None else tuple(self.items[item].step for item in self.kept_items)


class PlanningPass:
    """One pass over the DAG: its decisions, and the end records that they still lack."""

    def __init__(
        self,
        graph: TaskGraph,
        state: RunState,
        step_state_of: StepStateLookup,
        parameters: Mapping[str, str],
        demands: Mapping[str, str],
    ) -> None:
        self._graph = graph
        self._state = state
        self._step_state_of = step_state_of
        self._parameters = parameters
        self._demands = demands
        self._progress: dict[str, TaskProgress] = {}
        self.unread_ends: set[AttemptId] = set()
        self.decisions: dict[str, TaskPlan] = {}
        for name, task in graph.tasks.items():
            self.decisions[name] = self._decide(task)

    def running_tasks(self) -> list[str]:
        """Names of the tasks that run, in the order of the DAG."""
        return [name for name, decision in self.decisions.items() if decision.action is PlanAction.RUN]

    def outputs_read_by(self, task: Task) -> dict[str, TaskOutputs]:
        """Outputs of skipped tasks that ``task`` reads; end records not read yet are noted in ``unread_ends``."""
        read_tasks = {reference.task for reference in find_references(task.body)} - {task.name}
        skipped = {name: self._outputs(name) for name in sorted(read_tasks) if self._is_skipped(name)}
        return {name: outputs for name, outputs in skipped.items() if outputs is not None}

    def partial_outputs(self, name: str) -> PartialOutputs | None:
        """Outputs of the finished items of a fan-out of which a part runs; None until their records are read."""
        items, kept = self.decisions[name].items, set(self.decisions[name].kept_items or ())
        done = [position for position in range(len(items)) if position not in kept]
        ends = self._read_ends([(items[position].step, items[position].state.attempt or 0) for position in done])
        if ends is None:
            return None
        spec = self._graph.tasks[name].spec
        found = {position: item_parameters(spec, end) for position, end in zip(done, ends, strict=True)} if spec else {}
        return PartialOutputs(tuple(map(found.get, range(len(items)))))

    def find_demands(self, exported: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        """Skipped tasks that must run after all, each with the reason. Without a running task there are none."""
        running = self.running_tasks()
        yield from self._find_unmergeable()
        for name, decision in self.decisions.items():
            if running and decision.action is PlanAction.SKIP and decision.known_results != OMITTED_RESULTS:
                yield from self._find_task_demands(self._graph.tasks[name], decision, exported)
        for name in running:
            task = self._graph.tasks[name]
            for reference in find_unbound_references(task.body, self.outputs_read_by(task)):
                if self.decisions[reference.task].known_results != OMITTED_RESULTS:
                    yield reference.task, f"done, but {name} reads {reference}, which only a workflow can answer"

    def _find_unmergeable(self) -> Iterator[tuple[str, str]]:
        """Fan-outs of which all items have to run after all, because Argo cannot insert what finished ones have."""
        for name, decision in self.decisions.items():
            if decision.kept_items is not None and self.is_read(name):
                outputs = self.partial_outputs(name)
                if outputs and not all(can_be_merged(item) for item in outputs.items if item is not None):
                    yield name, "an output of a finished item has double braces, which Argo would take for a tag"

    def is_read(self, name: str) -> bool:
        """Whether another task reads outputs of the task ``name``."""
        readers = (self._graph.tasks[reader] for reader in self._graph.dependents[name])
        return any(name in reader.reads for reader in readers)

    def _find_task_demands(
        self, task: Task, decision: TaskPlan, exported: Mapping[str, str]
    ) -> Iterator[tuple[str, str]]:
        if task.spec and not task.spec.cache:
            yield task.name, _NO_CACHE_REASON
        if task.name in exported:
            yield task.name, f"done, but {exported[task.name]}"
        reader = self._first_running(self._graph.dependents[task.name])
        if decision.known_results is None and reader:
            yield task.name, f"{_PLAIN_STEP_REASON if task.spec is None else 'never started'}, and {reader} needs it"

    def _decide(self, task: Task) -> TaskPlan:
        if condition := self._false_condition(task):
            return TaskPlan(task.name, PlanAction.SKIP, f"its condition {condition!r} is false", OMITTED_RESULTS)
        upstream = self._first_running(task.needs)
        if task.spec is None:
            return self._decide_plain(task, upstream)
        progress = self._progress_of(task)
        self._progress[task.name] = progress
        self.unread_ends |= progress.unread_ends
        return self._decide_gated(task, progress, upstream)

    def _decide_plain(self, task: Task, upstream: str | None) -> TaskPlan:
        if task.name in self._demands:
            return TaskPlan(task.name, PlanAction.RUN, self._demands[task.name])
        if upstream:
            return TaskPlan(task.name, PlanAction.RUN, f"depends on {upstream}, which runs again")
        if self._graph.dependents[task.name]:
            return TaskPlan(
                task.name, PlanAction.SKIP, f"{_PLAIN_STEP_REASON}, and everything that needs it is finished"
            )
        if self._state.has_succeeded:
            return TaskPlan(task.name, PlanAction.SKIP, f"{_PLAIN_STEP_REASON}, and the last submission succeeded")
        return TaskPlan(task.name, PlanAction.RUN, _PLAIN_STEP_REASON)

    def _decide_gated(self, task: Task, progress: TaskProgress, upstream: str | None) -> TaskPlan:
        if progress.status is not StepStatus.DONE:
            return self._decide_unfinished(task, progress, upstream)
        if reason := self._rerun_reason(task, upstream):
            return TaskPlan(task.name, PlanAction.RUN, reason, items=progress.items)
        facts = DONE_FAN_OUT_RESULTS if task.is_fan_out else DONE_RESULTS
        return TaskPlan(task.name, PlanAction.SKIP, progress.reason, facts, progress.items)

    def _decide_unfinished(self, task: Task, progress: TaskProgress, upstream: str | None) -> TaskPlan:
        never = progress.status is StepStatus.NEVER_STARTED
        if never and self._state.has_succeeded and not upstream and task.name not in self._demands:
            return TaskPlan(task.name, PlanAction.SKIP, "it never ran here; the last submission succeeded without it")
        kept = self._items_to_run(task, progress, upstream)
        reason = self._demands.get(task.name) or progress.reason + _describe_done_items(task, progress, upstream, kept)
        return TaskPlan(task.name, PlanAction.RUN, reason, items=progress.items, kept_items=kept)

    def _items_to_run(self, task: Task, progress: TaskProgress, upstream: str | None) -> tuple[int, ...] | None:
        """Positions of the missing items, where finished ones can be left out; else None."""
        spec = task.spec
        if spec is None or spec.is_gated or not spec.cache or upstream or task.name in self._demands:
            return None
        readers = (self._graph.tasks[reader] for reader in self._graph.dependents[task.name])
        if not progress.has_all_items or not all(can_read_partly(reader, task.name) for reader in readers):
            return None
        kept = choose_items(progress.items)
        return kept if 0 < len(kept) < len(progress.items) else None

    def _rerun_reason(self, task: Task, upstream: str | None) -> str | None:
        if task.name in self._demands:
            return self._demands[task.name]
        if task.spec and not task.spec.cache and not self._state.has_succeeded:
            return _NO_CACHE_REASON
        if not upstream:
            return None
        is_checked = task.spec is None or task.spec.is_gated
        return f"depends on {upstream}, which runs again" + (
            "; taken over if its inputs stay the same" if is_checked else ""
        )

    def _progress_of(self, task: Task) -> TaskProgress:
        if not task.is_fan_out:
            return measure_step_progress(task.name, self._step_state_of)
        started = sorted(step for step in self._state.steps if step.startswith(f"{task.name}."))
        return measure_fan_out_progress(
            task, self._step_state_of, started, self._parameters, self.outputs_read_by(task)
        )

    def _outputs(self, name: str) -> TaskOutputs | None:
        decision = self.decisions[name]
        if decision.known_results is None:
            return None
        if decision.known_results == OMITTED_RESULTS:
            return OMITTED_OUTPUTS
        ends, task = self._read_ends(self._progress[name].ends), self._graph.tasks[name]
        if ends is None:
            return None
        if task.spec is not None and task.is_fan_out:
            return collect_fan_out_outputs(task.spec, ends)
        return collect_step_outputs(ends[0])

    def _read_ends(self, keys: Sequence[AttemptId]) -> list[AttemptEnd] | None:
        """The ends of attempts; None, and those that are missing are noted in ``unread_ends``, until all are read."""
        missing = {key for key in keys if key not in self._state.ends}
        self.unread_ends |= missing
        return None if missing else [self._state.ends[key] for key in keys]

    def _is_skipped(self, name: str) -> bool:
        return name in self.decisions and self.decisions[name].action is PlanAction.SKIP

    def _first_running(self, names: Iterable[str]) -> str | None:
        return min((n for n in names if not self._is_skipped(n)), key=self._graph.position.__getitem__, default=None)

    def _false_condition(self, task: Task) -> str | None:
        """The task's condition if finished tasks make it false for good; None if it may still hold."""
        if not task.waits_for or not all(self._is_skipped(name) for name in task.waits_for):
            return None
        known_results = {
            name: results for name in task.waits_for if (results := self.decisions[name].known_results) is not None
        }
        condition = task.body.get("depends") or " && ".join(task.body["dependencies"])
        return condition if simplify(parse_depends(condition), known_results) is False else None


def _describe_done_items(task: Task, progress: TaskProgress, upstream: str | None, kept: tuple[int, ...] | None) -> str:
    """What becomes of the finished items of a fan-out that runs, as an ending of its reason; empty if there are none.

    Only the gate of an item can compare its inputs once a step before it has run.
    """
    count = sum(item.state.is_done for item in progress.items) if kept is None else len(progress.items) - len(kept)
    if not count:
        return ""
    if kept is None and not (task.spec is not None and task.spec.is_gated and task.spec.cache):
        return f"; {count} done {'runs' if count == 1 else 'run'} again"
    condition = "if the inputs stay the same" if upstream else ""
    return f"; {count} done {'is' if count == 1 else 'are'} taken over {condition}".rstrip()


@dataclass(frozen=True)
class PlanDecisions:
    """Decisions in the order of the DAG.

    While ``unread_ends`` names end records, the decisions are not final: load them
    into the state and decide again.
    """

    tasks: tuple[TaskPlan, ...]
    finished_outputs: Mapping[str, Mapping[str, TaskOutputs]]
    """For each task that runs, the outputs of skipped tasks that it reads."""
    partial_outputs: Mapping[str, PartialOutputs] = field(default_factory=dict)
    """For each fan-out of which a part runs and that others read, the outputs of its finished items."""
    unread_ends: frozenset[AttemptId] = frozenset()

    @cached_property
    def running_tasks(self) -> tuple[str, ...]:
        """Names of the tasks that run."""
        return tuple(task.name for task in self.tasks if task.action is PlanAction.RUN)

    @cached_property
    def due_steps(self) -> tuple[str, ...]:
        """The tasks that run by name, and the items that run by step id where the finished ones are left out."""
        return tuple(step for task in self.tasks if task.action is PlanAction.RUN for step in task.due_steps)

    def is_due(self, step: str) -> bool:
        """Whether a step or item runs, also if it has a result, such as where only a Workflow can answer its reader."""
        return step in self._due or task_name(step) in self._due

    @cached_property
    def _due(self) -> frozenset[str]:
        return frozenset(self.due_steps)

    @cached_property
    def known_results(self) -> KnownResults:
        """Results of the skipped tasks, for the conditions of the others."""
        return {
            task.name: task.known_results
            for task in self.tasks
            if task.action is PlanAction.SKIP and task.known_results is not None
        }


def decide_tasks(pipeline: CompiledPipeline, state: RunState, graph: TaskGraph | None = None) -> PlanDecisions:
    """Decide every task of the entry DAG.

    ``graph`` has the tasks of ``pipeline``; None builds it.

    Raises:
        UsageError: the DAG cannot be read.
    """
    graph = graph or TaskGraph.from_pipeline(pipeline)
    step_state_of = cache(state.step_state)
    parameters = read_workflow_parameters(pipeline.manifest)
    exported = dict(find_exporting_tasks(pipeline, graph))
    names = graph.tasks.keys() - state.taken_over_tasks  # the states of their items say which of them run
    demands = {name: reason for name, reason in state.rerun_reasons.items() if name in names}
    while True:
        planning_pass = PlanningPass(graph, state, step_state_of, parameters, demands)
        new_demands = {name: reason for name, reason in planning_pass.find_demands(exported) if name not in demands}
        if not new_demands:
            return _collect_decisions(graph, planning_pass)
        demands |= new_demands


def _collect_decisions(graph: TaskGraph, planning_pass: PlanningPass) -> PlanDecisions:
    finished = {name: planning_pass.outputs_read_by(graph.tasks[name]) for name in planning_pass.running_tasks()}
    partial = {
        name: outputs
        for name, decision in planning_pass.decisions.items()
        if decision.kept_items is not None
        and planning_pass.is_read(name)
        and (outputs := planning_pass.partial_outputs(name)) is not None
    }
    return PlanDecisions(
        tuple(planning_pass.decisions.values()), finished, partial, frozenset(planning_pass.unread_ends)
    )


def find_rerun_steps(pipeline: CompiledPipeline, roots_wanted: Iterable[str]) -> Mapping[str, str]:
    """The requested tasks or items, and all tasks that depend on them, in the order of the DAG, each with the reason.

    Raises:
        UsageError: there is no such task.
    """
    roots = list(dict.fromkeys(roots_wanted))
    if not roots:
        return {}
    graph = TaskGraph.from_pipeline(pipeline)
    for root in roots:
        if task_name(root) not in graph.tasks:
            raise UsageError(unknown_name_message(f"pipeline {pipeline.name}", "step", root, graph.tasks))
    reasons = dict.fromkeys(roots, "it is asked to run again")
    for name, task in graph.tasks.items():
        upstream = sorted(task.needs & set(map(task_name, reasons)), key=graph.position.__getitem__)
        if name not in reasons and upstream:
            cause = "is asked to run again" if upstream[0] in roots else "runs again"
            reasons[name] = f"depends on {upstream[0]}, which {cause}"
    return dict(sorted(reasons.items(), key=lambda rerun: graph.position[task_name(rerun[0])]))


def check_rerun_volumes(pipeline: CompiledPipeline, names: Iterable[str]) -> None:
    """Refuse a rerun of trainings with checkpoints on a volume: their programs would resume from the newest one.

    Raises:
        UsageError: the checkpoints of one of ``names`` lie on a volume.
    """
    for name in names:
        if volume := pipeline.checkpoint_volume_url(task_name(name)):
            raise UsageError(
                f"{name} would start again from the beginning, but its checkpoints lie on the volume {volume}, where "
                "its program resumes from the newest one; `tiphys fork` gives it a lineage of its own"
            )
