"""Plans a run in storage, as it is or under a changed Workflow.

The planner reads the listings, decides, reads the end records on which the
decision depends, and decides again until none is missing.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from tiphys.errors import IntegrityError, UsageError
from tiphys.lineage.fork_history import read_ancestors
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.step_names import StepNames
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.protocol.drift_policy import DriftPolicy, override_drift_actions, read_drift_policy
from tiphys.protocol.fan_out import FanOutItem
from tiphys.records import AttemptEnd, RunRecord, WorkflowRecord, json_digest, task_name
from tiphys.store import Store, Submission
from tiphys.store.outputs import list_confirmed_outputs
from tiphys_controller.plan.dag import TaskGraph
from tiphys_controller.plan.decide import PlanAction, PlanDecisions, decide_tasks, find_rerun_steps
from tiphys_controller.plan.drift import (
    CONDITION,
    DriftFinding,
    InstalledVersionLookup,
    find_changed_steps,
    find_drift,
    find_version_drift,
)
from tiphys_controller.plan.observe import RunState, load_ends, load_run_state, reload_damaged_outputs
from tiphys_controller.plan.prune import SubmissionIdentity, apply_identity, workflow_name
from tiphys_controller.plan.step_state import ReusedResult
from tiphys_controller.plan.takeover import TakeoverSearch
from tiphys_controller.submit.authored_facts import author_parameters, check_authored_name, read_code_version


class WorkflowChange(NamedTuple):
    """A changed Workflow for a resume or a fork.

    ``workflow`` is compiled, with its parameters; None: that of the last submission.
    ``drift_actions`` override the pipeline's drift actions, by drift class. ``installed_version``
    looks up package versions on the machine that runs the programs; None if unknown.
    """

    workflow: Manifest | None = None
    drift_actions: Mapping[str, str] = {}
    installed_version: InstalledVersionLookup | None = None

    def drift_policy(self, before: CompiledPipeline) -> DriftPolicy:
        """Drift policy of the pipeline, with the overrides.

        Raises:
            UsageError: an override names an unknown class or action.
        """
        return override_drift_actions(read_drift_policy(before.manifest), self.drift_actions)

    def compare_with(
        self, before: CompiledPipeline, run: str, forking: bool = False
    ) -> tuple[CompiledPipeline, tuple[DriftFinding, ...], Mapping[str, str]]:
        """Compare with the previous pipeline.

        Returns:
            The new pipeline, the differences, and by step why its result may be outdated.

        Raises:
            UsageError: the Workflow is of another pipeline or store, or yields another run name.
        """
        policy = self.drift_policy(before)
        if self.workflow is None:
            return before, (), {}
        after = CompiledPipeline.from_manifest(self.workflow)
        for what, old, new in (("pipeline", before.name, after.name), ("store", before.store, after.store)):
            if old.rstrip("/") != new.rstrip("/"):
                raise UsageError(
                    f"run {run} is of the {what} {old}, and this Workflow of {new}; give a Workflow of {old}"
                )
        if not forking:
            check_authored_name(after, run)
        findings = find_drift(before, after, policy)
        return after, findings, find_changed_steps(before, after, findings)


def check_workflow_digest(record: RunRecord) -> None:
    """Check that the Workflow in ``run.json`` is the one that was recorded.

    Raises:
        IntegrityError: the Workflow was changed.
    """
    if json_digest(record.workflow) != record.digest:
        raise IntegrityError(
            f"the Workflow in run.json of run {record.run} was changed after it was written, its digest does not "
            "match; restore the object, or begin a new run"
        )


def recorded_namespace(record: RunRecord) -> str:
    """Namespace of the Workflow in ``run.json``."""
    return (record.workflow.get("metadata") or {}).get("namespace") or "default"


def build_workflow_record(record: RunRecord, manifest: Manifest) -> WorkflowRecord:
    """The record of a changed Workflow, as stored with the run of ``record``."""
    identity = SubmissionIdentity(record.run, 1, workflow_name(record.run, 1), recorded_namespace(record))
    workflow = apply_identity(manifest, identity)
    return WorkflowRecord(
        run=record.run,
        workflow=workflow,
        digest=json_digest(workflow),
        parameters=author_parameters(workflow),
        code_version=read_code_version(workflow),
    )


class RunPlan(NamedTuple):
    """A final plan, with the pipeline and the state it was made from."""

    history: RunHistory
    pipeline: CompiledPipeline
    state: RunState
    decisions: PlanDecisions
    graph: TaskGraph
    names: StepNames
    seconds: float
    """Time to plan, storage included."""
    rerun_roots: tuple[str, ...] = ()
    """Steps or items to run again by request, now or in a claim that was not carried out yet."""
    rerun_steps: tuple[str, ...] = ()
    """`rerun_roots` and all steps that depend on them; their earlier results do not count."""
    drift: tuple[DriftFinding, ...] = ()
    """Differences between the Workflow of the last submission and the changed one."""

    @property
    def taken_over(self) -> Mapping[str, AttemptEnd]:
        """Results that the next submission takes over and has to record, by step id."""
        return {step: end for step, end in self.state.taken_over.items() if not self.decisions.is_due(step)}

    @property
    def last_submission(self) -> Submission | None:
        """The last submission of the run; None before the first."""
        return self.state.submissions[-1] if self.state.submissions else None


def plan_stored_run(
    store: Store,
    run: str,
    rerun: Sequence[str] = (),
    change: WorkflowChange | None = None,
    is_fork: bool = False,
    *,
    takes_over: bool = False,
) -> RunPlan:
    """Plan a run.

    Args:
        store: Store of the run.
        run: Name of the run.
        rerun: Names of steps or items to run again although they are done, with all steps that depend on them.
        change: A changed Workflow; None: that of the last submission.
        is_fork: The plan is for a fork of this run.
        takes_over: Look, too, for results under the step keys of steps that would run: of the run, of those that it
            was forked from, and shared ones. Costs a few requests for each.

    Raises:
        NotFoundError: there is no such run, step or item.
        UsageError: Tiphys did not compile its Workflow, or the changed Workflow does not fit.
        IntegrityError: a record is damaged.
    """
    begin, history = time.monotonic(), RunHistory(store, run)
    state = load_run_state(history)
    try:
        before = CompiledPipeline.from_manifest(state.workflow)
        after, drift, outdated = (before, (), {}) if change is None else change.compare_with(before, run, is_fork)
        names = history.build_names(after)
        roots = [names.resolve(step) for step in rerun] or (() if is_fork else _find_unsent_rerun(state))
        rerun_steps = find_rerun_steps(after, roots)
        graph = TaskGraph.from_pipeline(after)
        state, decisions = _decide_until_read(
            history, graph, after, replace(state, rerun_reasons={**outdated, **rerun_steps})
        )
        if takes_over:
            conditions = {finding.step: finding.place for finding in drift if finding.place == CONDITION}
            state, decisions = _take_over(history, graph, after, state, decisions, {**rerun_steps, **conditions})
        _check_rerun_roots(decisions, roots)
        if change is not None and change.installed_version is not None:
            resumed = _find_resumed_trainings(after, state, decisions, rerun_steps)
            drift += tuple(
                find_version_drift(store, run, resumed, change.installed_version, change.drift_policy(before))
            )
    except UsageError as error:
        raise UsageError(f"run {run} cannot be planned: {error}") from error
    _name_items(names, decisions)
    seconds = time.monotonic() - begin
    return RunPlan(history, after, state, decisions, graph, names, seconds, tuple(roots), tuple(rerun_steps), drift)


def _name_items(names: StepNames, decisions: PlanDecisions) -> None:
    """Name the items that the plan has resolved from the outputs of finished steps."""
    for task in decisions.tasks:
        if task.items and all(item.item for item in task.items):
            names.add_items(task.name, [FanOutItem(item.step, item.item) for item in task.items])


def _find_resumed_trainings(
    pipeline: CompiledPipeline, state: RunState, decisions: PlanDecisions, rerun_steps: Collection[str]
) -> list[str]:
    """Training steps that resume from a checkpoint in the store. Checkpoints on volumes cannot be read here."""
    specs = [
        pipeline.steps[name] for name in decisions.running_tasks if name in pipeline.steps and name not in rerun_steps
    ]
    return [
        spec.name
        for spec in specs
        if spec.checkpoints and not pipeline.checkpoint_volume_url(spec.name) and spec.name in state.steps
    ]


def _find_unsent_rerun(state: RunState) -> Sequence[str]:
    """Reruns of an unbound claim, which the next resume carries out."""
    last = state.submissions[-1] if state.submissions else None
    return last.claim.rerun_roots if last and last.binding is None else ()


def _check_rerun_roots(decisions: PlanDecisions, roots: Sequence[str]) -> None:
    for task in decisions.tasks:
        of_task = [root for root in roots if task_name(root) == task.name]
        if unknown := set(of_task) - {task.name, *(item.step for item in task.items)}:
            raise UsageError(f"{task.name} has no item {min(unknown)} to run again")
        if of_task and task.action is PlanAction.SKIP:
            raise UsageError(f"{of_task[0]} is to run again and would not: {task.reason}")


def _take_over(
    history: RunHistory,
    graph: TaskGraph,
    pipeline: CompiledPipeline,
    state: RunState,
    decisions: PlanDecisions,
    excluded: Mapping[str, str],
) -> tuple[RunState, PlanDecisions]:
    """Decide again with each result that a step takes over, since that makes the inputs of others known."""
    claim = state.submissions[-1].claim if state.submissions else None
    since = claim.rerun_since if claim else state.record.rerun_since
    store = history.store
    search = TakeoverSearch(store, pipeline, graph, read_ancestors(store, state.record), since, excluded)
    while found := search.find(state, decisions):
        reused = {step: _reused_result(store, state, step, end) for step, end in found.items()}
        state = replace(
            state,
            rerun_reasons={**_find_unchecked_steps(graph, state, found), **state.rerun_reasons},
            taken_over={**state.taken_over, **found},
            reused={**state.reused, **reused},
            ends={**state.ends, **{(step, reused[step].attempt): end for step, end in found.items()}},
        )
        state, decisions = _decide_until_read(history, graph, pipeline, state)
    return state, decisions


def _find_unchecked_steps(graph: TaskGraph, state: RunState, found: Mapping[str, AttemptEnd]) -> Mapping[str, str]:
    """Finished steps behind those that take over another result than they had, each with the reason.

    Their results may rest on other inputs, so they run again or take over a result themselves.
    """
    changed = {task_name(step) for step, end in found.items() if not state.is_current_result(step, end)}
    if not changed:
        return {}
    recorded = {task_name(step) for step in {*state.steps, *state.reused} if state.step_state(step).has_result}
    return {
        dependent: f"depends on {name}, which takes over another result"
        for name in sorted(changed)
        for dependent in graph.dependents[name]
        if dependent in recorded or graph.tasks[dependent].spec is None
    }


def _reused_result(store: Store, state: RunState, step: str, end: AttemptEnd) -> ReusedResult:
    is_own = (end.run, end.step) == (state.record.run, step)
    where = "" if is_own else f"run {end.run}, step {end.step}, "
    return ReusedResult(
        source=f"{where}attempt {end.attempt}",
        attempt=end.attempt if is_own else 0,
        end=end,
        listed=list_confirmed_outputs(store, end),
    )


def _decide_until_read(
    history: RunHistory, graph: TaskGraph, pipeline: CompiledPipeline, state: RunState
) -> tuple[RunState, PlanDecisions]:
    state = reload_damaged_outputs(history, load_ends(history, state, state.unverified_ends))
    decisions = decide_tasks(pipeline, state, graph)
    while decisions.unread_ends:
        state = load_ends(history, state, decisions.unread_ends)
        decisions = decide_tasks(pipeline, state, graph)
    return state, decisions
