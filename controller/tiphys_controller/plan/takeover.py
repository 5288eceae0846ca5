"""Finds results that a Workflow takes over before it exists, by the step keys of steps whose inputs are known.

A step without a gate runs when its Workflow has it. So what may be taken over is decided
here: results of the run under earlier inputs, of the runs it was forked from, and shared
ones. The inputs of a step are known if all that it takes from others is finished; the key
is the one that the recorder or admit would compute.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tiphys.errors import IntegrityError, UsageError
from tiphys.lineage.fork_history import AncestorRun, find_rerun_submission
from tiphys.protocol.compiled_workflow import (
    FAN_OUT_FIELDS,
    CompiledPipeline,
    Manifest,
    contains_tags,
    substitute_tags,
)
from tiphys.protocol.fan_out import assign_item_ids, item_documents, item_values, item_variables
from tiphys.protocol.step_spec import StepSpec
from tiphys.recording.bindings import bind_references
from tiphys.recording.known_inputs import find_known_inputs, workflow_parameter_values
from tiphys.recording.reusable_results import ResultSource, iter_reusable_results
from tiphys.recording.step_key import StepInputs, compute_step_key
from tiphys.records import AttemptEnd, AttemptEndOutcome
from tiphys.store import DamagedRecord, Store, find_output_fault, read_step_attempts
from tiphys.store.outputs import list_confirmed_outputs
from tiphys.store.runs import read_concurrently
from tiphys_controller.plan.dag import Task, TaskGraph
from tiphys_controller.plan.decide import PlanAction, PlanDecisions, TaskPlan
from tiphys_controller.plan.observe import RunState
from tiphys_controller.plan.step_state import StepStatus


class _Candidate(NamedTuple):
    """A step, or an item, that would run and whose inputs are known."""

    step: str
    spec: StepSpec
    inputs: StepInputs


class TakeoverSearch:
    """Looks for results that the steps of one run may take over.

    ``ancestors`` are the runs that it was forked from, the nearest first; ``rerun_since`` is the first submission whose
    results count, by step; ``excluded`` steps and items were asked to run again.
    """

    def __init__(
        self,
        store: Store,
        pipeline: CompiledPipeline,
        graph: TaskGraph,
        ancestors: tuple[AncestorRun, ...] = (),
        rerun_since: Mapping[str, int] | None = None,
        excluded: Mapping[str, str] | None = None,
    ) -> None:
        self._store = store
        self._pipeline = pipeline
        self._graph = graph
        self._ancestors = ancestors
        self._rerun_since = rerun_since or {}
        self._excluded = excluded or {}
        self._parameters = workflow_parameter_values(pipeline)
        self._searched: set[str] = set()

    def find(self, state: RunState, decisions: PlanDecisions) -> dict[str, AttemptEnd]:
        """The results that steps can take over which run by ``decisions``, by step id; none was found before.

        Raises:
            StoreError: storage did not answer.
        """
        candidates = [
            candidate
            for plan in decisions.tasks
            if plan.action is PlanAction.RUN
            for candidate in self._candidates(self._graph.tasks[plan.name], plan, decisions)
            if candidate.step not in self._searched and self._may_exist(candidate, state)
        ]
        # Each result that is found makes inputs of later steps known, so `find` is called until nothing new is found.
        self._searched |= {candidate.step for candidate in candidates}
        found = read_concurrently(lambda candidate: self._search(candidate, state), candidates)
        return {candidate.step: end for candidate, end in zip(candidates, found, strict=True) if end is not None}

    def _candidates(self, task: Task, plan: TaskPlan, decisions: PlanDecisions) -> Iterator[_Candidate]:
        spec = task.spec
        running = set(decisions.running_tasks)
        if spec is None or not spec.cache or task.name in self._excluded or task.needs & running:
            return
        try:
            body = self._bind(task.body, decisions, task.name)
            if not task.is_fan_out:
                if (inputs := find_known_inputs(self._pipeline, spec, body, self._parameters)) is not None:
                    yield _Candidate(spec.name, spec, inputs)
                return
            if contains_tags({field: body[field] for field in FAN_OUT_FIELDS if field in body}):
                return
            done = {item.step for item in plan.items if item.state.is_done}
            for item, document in zip(assign_item_ids(task.name, item_values(body)), item_documents(body), strict=True):
                if item.step_id in done or item.step_id in self._excluded:
                    continue
                filled = substitute_tags(body.get("arguments") or {}, item_variables(document)[1].get)
                if (
                    inputs := find_known_inputs(
                        self._pipeline, spec, {**body, "arguments": filled}, self._parameters, item.text
                    )
                ) is not None:
                    yield _Candidate(item.step_id, spec, inputs)
        except UsageError:  # Argo reports invalid items when it runs the task
            return

    def _bind(self, body: Manifest, decisions: PlanDecisions, name: str) -> Manifest:
        bound = bind_references(body, decisions.finished_outputs.get(name, {}), self._store.artifact_key)
        filled: Manifest = substitute_tags(bound, self._parameters.get)
        return filled

    def _may_exist(self, candidate: _Candidate, state: RunState) -> bool:
        """Whether anything can have a result of this step, by what the plan has read."""
        step, listing = candidate.step, state.steps.get(candidate.step)
        if self._ancestors or candidate.spec.share or listing is None:
            return bool(self._ancestors or candidate.spec.share)
        known = state.step_state(step)
        damaged = {known.attempt} if known.status is StepStatus.DAMAGED else set()
        ends = {attempt: state.ends.get((step, attempt)) for attempt in listing.ended_attempts - damaged}
        return any(end is None or end.outcome is AttemptEndOutcome.DONE for end in ends.values())

    def _search(self, candidate: _Candidate, state: RunState) -> AttemptEnd | None:
        store, run = self._store, state.record.run
        key = compute_step_key(store, candidate.spec, candidate.inputs)
        damaged = list[DamagedRecord]()
        listing = state.steps.get(candidate.step)
        attempts = read_step_attempts(store, run, candidate.step, damaged) if listing else []
        since = find_rerun_submission(self._rerun_since, candidate.step)
        source = ResultSource(run, len(state.submissions) + 1, since, () if since else self._ancestors)
        results = iter_reusable_results(store, candidate.spec, candidate.step, key.key, attempts, source, damaged)
        try:
            return next((end for end, _ in results if not _is_damaged(store, end)), None)
        except IntegrityError:
            return None


def _is_damaged(store: Store, end: AttemptEnd) -> bool:
    return find_output_fault(end, list_confirmed_outputs(store, end)) is not None
