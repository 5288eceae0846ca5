"""Finds results that a Workflow takes over before it exists, by the step keys of steps whose inputs are known.

A step without a gate runs when its Workflow has it. So what may be taken over is decided
here: results of the run under earlier inputs, of the runs it was forked from, and shared
ones. The inputs of a step are known if all that it takes from others is finished; the key
is the one that the recorder or admit would compute.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tiphys.errors import IntegrityError, UsageError
from tiphys.lineage.fork_history import AncestorRun, find_rerun_submission
from tiphys.protocol.compiled_workflow import (
    FAN_OUT_FIELDS,
    CompiledPipeline,
    Manifest,
    contains_tags,
    find_template,
    read_workflow_parameters,
    substitute_tags,
)
from tiphys.protocol.fan_out import assign_item_ids, go_json, item_documents, item_values, item_variables
from tiphys.protocol.operations import PLUGIN_BODY_KEY
from tiphys.protocol.step_spec import ITEM_PARAMETER, StepSpec
from tiphys.recording.reusable_results import ResultSource, iter_reusable_results
from tiphys.recording.step_key import StepInputs, compute_step_key, workflow_parameters_used
from tiphys.records import AttemptEnd, AttemptEndOutcome
from tiphys.store import DamagedRecord, Store, find_output_fault, read_step_attempts
from tiphys.store.outputs import list_confirmed_outputs
from tiphys.store.runs import read_concurrently
from tiphys_controller.plan.bindings import bind_references
from tiphys_controller.plan.dag import Task, TaskGraph
from tiphys_controller.plan.decide import PlanAction, PlanDecisions, TaskPlan
from tiphys_controller.plan.observe import RunState
from tiphys_controller.plan.step_state import StepStatus

_WORKFLOW_PARAMETER = "workflow.parameters."


class _Candidate(NamedTuple):
    """A step, or an item, that would run and whose inputs are known."""

    step: str
    spec: StepSpec
    inputs: StepInputs


class TakeoverSearch:
    """Looks for results that the steps of one run may take over.

    Args:
        store: Store of the run.
        pipeline: The Workflow of the next submission.
        graph: Its tasks.
        ancestors: The runs that it was forked from, the nearest first.
        rerun_since: First submission whose results count, by step.
        excluded: Steps and items that were asked to run again.
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
        parameters = read_workflow_parameters(pipeline.manifest)
        self._parameters = {f"{_WORKFLOW_PARAMETER}{name}": value for name, value in parameters.items()}
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
                if (inputs := self._inputs(spec, body, "")) is not None:
                    yield _Candidate(spec.name, spec, inputs)
                return
            if contains_tags({field: body[field] for field in FAN_OUT_FIELDS if field in body}):
                return
            done = {item.step for item in plan.items if item.state.is_done}
            for item, document in zip(assign_item_ids(task.name, item_values(body)), item_documents(body), strict=True):
                if item.step_id in done or item.step_id in self._excluded:
                    continue
                filled = substitute_tags(body.get("arguments") or {}, item_variables(document)[1].get)
                if (inputs := self._inputs(spec, {**body, "arguments": filled}, item.text)) is not None:
                    yield _Candidate(item.step_id, spec, inputs)
        except UsageError:  # Argo reports invalid items when it runs the task
            return

    def _bind(self, body: Manifest, decisions: PlanDecisions, name: str) -> Manifest:
        bound = bind_references(body, decisions.finished_outputs.get(name, {}), self._store.artifact_key)
        filled: Manifest = substitute_tags(bound, self._parameters.get)
        return filled

    def _inputs(self, spec: StepSpec, body: Manifest, item: str) -> StepInputs | None:
        """The inputs of a step; None if one of them is made at run time."""
        template = find_template(self._pipeline.manifest, body["template"])
        declared = template.get("inputs") or {}
        arguments = body.get("arguments") or {}
        given = {one["name"]: one.get("value") for one in arguments.get("parameters") or []}
        values: dict[str, str] = {}
        for one in declared.get("parameters") or []:
            value = given.get(one["name"])
            value = next((v for v in (value, one.get("value"), one.get("default")) if v is not None), None)
            if value is None:
                return None
            values[one["name"]] = _argo_text(value)
        values.pop(ITEM_PARAMETER, None)
        values |= {
            f"{_WORKFLOW_PARAMETER}{name}": self._parameters.get(f"{_WORKFLOW_PARAMETER}{name}", "")
            for name in self._parameters_used(spec, template)
        }
        artifacts = self._artifacts(declared.get("artifacts") or [], arguments.get("artifacts") or [])
        filled = substitute_tags(values, self._parameters.get)
        if contains_tags(filled) or artifacts is None or contains_tags(artifacts):
            return None
        return StepInputs(filled, artifacts, item)

    def _parameters_used(self, spec: StepSpec, template: Manifest) -> list[str]:
        if not spec.is_gated:
            return workflow_parameters_used(template)
        names = (name for name in self._admit_inputs(spec.name) if name.startswith(_WORKFLOW_PARAMETER))
        return [name.removeprefix(_WORKFLOW_PARAMETER) for name in names]

    def _admit_inputs(self, step: str) -> Mapping[str, str]:
        for template in self._pipeline.manifest["spec"]["templates"]:
            body: Manifest = (template.get("plugin") or {}).get(PLUGIN_BODY_KEY) or {}
            if (body.get("op"), body.get("step")) == ("admit", step):
                return body.get("inputs") or {}
        return {}

    def _artifacts(self, declared: Sequence[Manifest], arguments: Sequence[Manifest]) -> list[dict[str, Any]] | None:
        """The input artifacts with their locations; None if one is made at run time."""
        given = {one["name"]: one for one in arguments}
        artifacts = []
        for one in declared:
            argument = given.get(one["name"], {})
            if "from" in argument or "fromExpression" in argument:
                return None
            artifacts.append({**one, **argument})
        filled: list[dict[str, Any]] = substitute_tags(artifacts, self._parameters.get)
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


def _argo_text(value: Any) -> str:
    """The text that Argo reads from a value of YAML (``AnyString``): ``1.0`` is ``1``."""
    return value if isinstance(value, str) else go_json(value)
