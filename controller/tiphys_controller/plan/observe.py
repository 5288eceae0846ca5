"""Reads the state of a run from storage, without asking any cluster.

A few listings show attempts and sizes of outputs, so no request is made per
output. Only records that the listings leave in doubt are read.

A step whose result a submission reused opens no attempt. So reuse records are
read, too: by its attempts alone, a plan would run a step again that another run
has finished, or take its last attempt where an older one was reused.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import NamedTuple

from tiphys.errors import IntegrityError, NotFoundError
from tiphys.lineage.run_history import RunHistory
from tiphys.protocol.compiled_workflow import FAN_OUT_FIELDS, Manifest, read_template_specs, read_workflow_parameters
from tiphys.protocol.fan_out import FanOutItem
from tiphys.recording.bindings import TaskOutputs, collect_fan_out_outputs, collect_step_outputs, find_references
from tiphys.records import AttemptClaim, AttemptEnd, ReuseRecord, RunRecord, SubmissionKind, task_name
from tiphys.store import Submission, find_attempt_end, read_record
from tiphys.store.outputs import confirm_outputs, hash_object, list_confirmed_outputs
from tiphys.store.runs import deletion_message, read_concurrently
from tiphys.store.workflow_layout import output_origins, parse_output_origin, workflow_outputs
from tiphys_controller.plan.dag import Task, TaskGraph
from tiphys_controller.plan.listing import RunListing
from tiphys_controller.plan.progress import TaskProgress, measure_fan_out_progress, measure_step_progress
from tiphys_controller.plan.step_state import (
    AttemptId,
    ReusedResult,
    StepListing,
    StepState,
    StepStatus,
    determine_reused_state,
    determine_step_state,
)


def read_reused_results(
    history: RunHistory, listing: RunListing, steps: Mapping[str, StepListing], *, with_outputs: bool
) -> dict[str, ReusedResult]:
    """Look up the reused results that decide for their steps; where the last attempt decides, there is none.

    Each lookup costs one read, and up to three more requests if the last attempt is not the reused one.

    Raises:
        IntegrityError: a record is damaged.
    """
    candidates = [
        (step, submission)
        for step, submission in sorted(listing.last_reuse.items())
        if (submission, step, steps[step].last_attempt) not in listing.reused_attempts
    ]
    results = read_concurrently(
        lambda candidate: _read_reuse(history, *candidate, steps[candidate[0]].last_attempt, with_outputs), candidates
    )
    return {step: reused for (step, _), reused in zip(candidates, results, strict=True) if reused}


def _read_reuse(
    history: RunHistory, step: str, submission: int, last_attempt: int, with_outputs: bool
) -> ReusedResult | None:
    store, layout = history.store, history.layout
    try:
        record = read_record(store, layout.reused(submission, step), ReuseRecord)
    except IntegrityError as error:
        source = f"what the record of submission {submission} names"
        return ReusedResult(source, 0, None, {}, str(error))
    is_own = (record.source_run, record.source_step) == (history.run, step)
    if is_own and record.source_attempt == last_attempt:
        return None
    # The submission that reuses a result opens no attempt afterwards; a later submission may.
    if last_attempt and read_record(store, layout.attempt(step, last_attempt), AttemptClaim).submission > submission:
        return None
    where = "" if is_own else f"run {record.source_run}, step {task_name(record.source_step)}, "
    damage = ""
    try:
        end = find_attempt_end(store, record.source_run, record.source_step, record.source_attempt)
    except IntegrityError as error:
        end, damage = None, str(error)
    listed = list_confirmed_outputs(store, end) if end is not None and with_outputs else None
    return ReusedResult(
        source=f"{where}attempt {record.source_attempt}",
        attempt=record.source_attempt if is_own else 0,
        end=end,
        damage=damage,
        listed=listed,
    )


_READERS = 16


@dataclass(frozen=True)
class RunState:
    """State of one run in storage. ``ends`` and ``damaged_ends`` hold the end records read so far."""

    record: RunRecord
    submissions: tuple[Submission, ...] = ()
    steps: Mapping[str, StepListing] = field(default_factory=dict)
    """By step id."""
    reused: Mapping[str, ReusedResult] = field(default_factory=dict)
    """Steps whose result was reused, and is not that of their last attempt."""
    ends: Mapping[AttemptId, AttemptEnd] = field(default_factory=dict)
    damaged_ends: Mapping[AttemptId, str] = field(default_factory=dict)
    """End records that cannot be read, each with its key, what is damaged, and what to do."""
    workflow: Manifest = field(default_factory=dict)
    """The Workflow of the last submission, before pruning."""
    last_reuse: Mapping[str, int] = field(default_factory=dict)
    """The last submission that reused a result, by step id."""
    rerun_reasons: Mapping[str, str] = field(default_factory=dict)
    """Steps, or items of a fan-out, to run again although they are done, by step id, each with the reason."""
    taken_over: Mapping[str, AttemptEnd] = field(default_factory=dict)
    """Results that the next submission takes over because their step keys are those of its steps, by step id."""

    def step_state(self, step: str) -> StepState:
        """State of one step."""
        recorded, name = self._recorded_state(step), task_name(step)
        if not recorded.is_done or step in self.taken_over:
            return recorded
        if reason := self.rerun_reasons.get(step) or self.rerun_reasons.get(name):
            return StepState(StepStatus.MISSING, reason, recorded.attempt)
        since = max(self.last_due_submission.get(due, 0) for due in (name, step))
        if since <= self.last_reuse.get(step, 0):
            return recorded
        return self._check_age(step, recorded, since)

    def is_current_result(self, step: str, end: AttemptEnd) -> bool:
        """Whether ``end`` is the result that a step has had until now: the one that it took over, or its last."""
        if (reused := self.reused.get(step)) is not None and reused.end is not None:
            return (reused.end.run, reused.end.step, reused.end.attempt) == (end.run, end.step, end.attempt)
        last = self.steps[step].last_attempt if step in self.steps else 0
        return (self.record.run, step, last) == (end.run, end.step, end.attempt)

    @cached_property
    def taken_over_tasks(self) -> frozenset[str]:
        """Tasks of which the next submission takes over the result, or the result of an item."""
        return frozenset(map(task_name, self.taken_over))

    @cached_property
    def last_due_submission(self) -> Mapping[str, int]:
        """By step or item, the last submission that was to run it. Older results may rest on changed inputs."""
        return {step: submission.claim.submission for submission in self.submissions for step in submission.claim.steps}

    def _check_age(self, step: str, recorded: StepState, since: int) -> StepState:
        end = self.ends.get((step, recorded.attempt)) if recorded.attempt else None
        if end is None and recorded.attempt:
            return replace(recorded, status=StepStatus.UNREAD)
        if end is not None and end.submission >= since:
            return recorded
        if self.has_succeeded and since == self.submissions[-1].claim.submission:
            return StepState(StepStatus.NEVER_STARTED, f"submission {since} succeeded without it", recorded.attempt)
        reason = f"its result is older than submission {since}, which was to run it or to check it against its inputs"
        return StepState(StepStatus.MISSING, reason, recorded.attempt)

    def _recorded_state(self, step: str) -> StepState:
        if (reused := self.reused.get(step)) is not None:
            return determine_reused_state(reused)
        listing = self.steps.get(step)
        if listing is not None and (damage := self.damaged_ends.get((step, listing.last_attempt))) is not None:
            return StepState(StepStatus.DAMAGED, f"damaged: {damage}", listing.last_attempt)
        return determine_step_state(step, listing, self.ends)

    @property
    def unverified_ends(self) -> list[AttemptId]:
        """End records that decide their step, because no projection verifies its last attempt."""
        listed = ((step, listing) for step, listing in self.steps.items() if step not in self.reused)
        return sorted(
            (step, attempts.last_attempt)
            for step, attempts in listed
            if attempts.last_attempt in attempts.ended_attempts and not attempts.is_verified
        )

    @property
    def has_damaged_outputs(self) -> bool:
        """Whether an end record names outputs that are not listed as they were recorded."""
        return any(self._recorded_state(step).status is StepStatus.DAMAGED for step, _ in self.unverified_ends)

    @property
    def open_attempts(self) -> list[AttemptId]:
        """Last attempts without an end record, by step."""
        last = (
            (step, max(listing.attempts), listing.ended_attempts)
            for step, listing in self.steps.items()
            if listing.attempts
        )
        return sorted((step, attempt) for step, attempt, ended in last if attempt not in ended)

    @property
    def has_succeeded(self) -> bool:
        """Whether the last submission recorded that it succeeded."""
        last = self.submissions[-1].end if self.submissions else None
        return last is not None and last.status == "Succeeded"


def load_run_state(history: RunHistory, *, with_outputs: bool = True) -> RunState:
    """Read the state of a run from its listings.

    ``with_outputs``: list outputs, to compare them with the records. Without, for displays, what the records say
    counts, and a run may have any number of objects.

    Raises:
        NotFoundError: there is no such run, or its deletion was begun.
        IntegrityError: a record is damaged.
    """
    layout, listing = history.layout, RunListing()
    prefixes = (layout.done_markers, layout.all_reused, *((layout.all_outputs,) if with_outputs else ()))
    with ThreadPoolExecutor(max_workers=_READERS) as pool:
        # Independent requests run in parallel: the listings of ten thousand steps have dozens of pages.
        parts = (lambda: history.record, lambda: history.submissions, lambda: history.attempt_numbers)
        reading: list[Future[object]] = [pool.submit(part) for part in parts]
        reading += [pool.submit(lambda prefix: listing.add(history.store.list(prefix)), prefix) for prefix in prefixes]
        for part in reading:
            part.result()
    last = history.last_submission
    if last is not None and last.claim.kind is SubmissionKind.DELETION:
        raise NotFoundError(deletion_message(history.store, history.run))
    if with_outputs:
        _list_pod_outputs(history, listing)
    steps = listing.build_steps(history.attempt_numbers, with_outputs=with_outputs)
    reused = read_reused_results(history, listing, steps, with_outputs=with_outputs)
    return RunState(
        record=history.record,
        submissions=history.submissions,
        steps=steps,
        reused=reused,
        ends={(step, result.attempt): result.end for step, result in reused.items() if result.end},
        workflow=history.workflow,
        last_reuse=listing.last_reuse,
    )


def load_ends(history: RunHistory, state: RunState, attempts: Iterable[AttemptId]) -> RunState:
    """Return ``state`` with the end records of ``attempts``; those that cannot be read are in ``damaged_ends``.

    Raises:
        ObjectMissingError: an end record was deleted since it was listed.
    """
    keys = sorted(set(attempts) - state.ends.keys() - state.damaged_ends.keys())

    def read(key: AttemptId) -> AttemptEnd | str:
        try:
            return history.read_end(*key)
        except IntegrityError as error:
            return str(error)

    found = dict(zip(keys, read_concurrently(read, keys), strict=True))
    return replace(
        state,
        ends={**state.ends, **{key: end for key, end in found.items() if not isinstance(end, str)}},
        damaged_ends={**state.damaged_ends, **{key: end for key, end in found.items() if isinstance(end, str)}},
    )


class RecordedProgress(NamedTuple):
    """How far the steps of a run have come by its records, for people.

    It is no plan: outputs are not compared with the records, and what the readers of a step need plays no part.
    """

    graph: TaskGraph
    state: RunState
    steps: Mapping[str, TaskProgress]
    """By name; without plain tasks, which keep no record."""

    @classmethod
    def read(cls, history: RunHistory) -> "RecordedProgress":
        """Read the progress of a run, and name the items of its fan-outs.

        Raises:
            NotFoundError: there is no such run, or its deletion was begun.
            UsageError: Tiphys did not compile its Workflow.
            IntegrityError: a record is damaged.
        """
        state = load_run_state(history, with_outputs=False)
        state, graph = load_ends(history, state, state.unverified_ends), TaskGraph.from_pipeline(history.pipeline)
        while True:
            state, steps = _measure_steps(history, state, graph)
            unread = [end for step in steps.values() for end in step.unread_ends]
            if not unread:
                break
            state = load_ends(history, state, unread)
        for name, step in steps.items():
            if step.has_all_items:
                history.names.add_items(name, [FanOutItem(item.step, item.item) for item in step.items])
        return cls(graph, state, steps)

    def is_done(self, name: str) -> bool:
        """Whether the result of a step is recorded, or its run succeeded without it."""
        step = self.steps[name]
        if self.state.has_succeeded and (step.status is StepStatus.NEVER_STARTED or step.items):
            return all(item.state.is_done for item in step.items)
        return step.status is StepStatus.DONE


def _measure_steps(history: RunHistory, state: RunState, graph: TaskGraph) -> tuple[RunState, dict[str, TaskProgress]]:
    """Measure each step in topological order; loads the end records from whose outputs items are made."""
    parameters, progress = read_workflow_parameters(history.workflow), dict[str, TaskProgress]()
    for name, task in graph.tasks.items():
        if task.spec is not None and not task.is_fan_out:
            progress[name] = measure_step_progress(name, state.step_state)
        elif task.spec is not None:
            found = {source: progress[source] for source in _find_item_sources(task) & progress.keys()}
            sources = {source: step.ends for source, step in found.items() if step.status is StepStatus.DONE}
            state = load_ends(history, state, chain.from_iterable(sources.values()))
            outputs = {source: _collect_outputs(graph.tasks[source], state, ends) for source, ends in sources.items()}
            known = {source: of_source for source, of_source in outputs.items() if of_source is not None}
            started = sorted(step for step in state.steps if step.startswith(f"{name}."))
            progress[name] = measure_fan_out_progress(task, state.step_state, started, parameters, known)
    return state, progress


def _find_item_sources(task: Task) -> set[str]:
    """Tasks from whose outputs the items of a fan-out are made."""
    return {reference.task for reference in find_references({field: task.body.get(field) for field in FAN_OUT_FIELDS})}


def _collect_outputs(task: Task, state: RunState, ends: Sequence[AttemptId]) -> TaskOutputs | None:
    """Outputs of a finished step; None if one of its end records is damaged."""
    if not all(end in state.ends for end in ends) or task.spec is None:
        return None
    found = [state.ends[end] for end in ends]
    return collect_fan_out_outputs(task.spec, found) if task.is_fan_out else collect_step_outputs(found[0])


def reload_damaged_outputs(history: RunHistory, state: RunState) -> RunState:
    """Return ``state`` with the outputs listed again if an end record names outputs that were not listed.

    A step that ended during the listings may be listed without its outputs, which were written before its record.
    Outputs that were written again are read: those with the recorded bytes count as unchanged.
    """
    if not state.has_damaged_outputs:
        return state
    store, listing = history.store, RunListing()
    listing.add(store.list(history.layout.all_outputs))
    _list_pod_outputs(history, listing)
    outputs = listing.outputs
    for step, attempt in state.unverified_ends:
        if (end := state.ends.get((step, attempt))) is not None:
            names = {info.key: name for name, info in outputs[step][attempt].items()}
            listed = {info.key: info for info in outputs[step][attempt].values()}
            confirmed = confirm_outputs(end, listed, partial(hash_object, store))
            outputs[step][attempt] = {names[key]: info for key, info in confirmed.items()}
    steps = {step: replace(step_state, outputs=outputs.get(step, {})) for step, step_state in state.steps.items()}
    return replace(state, steps=steps)


def _list_pod_outputs(history: RunHistory, listing: RunListing) -> None:
    """Add what steps without a gate stored below the uids of the Workflows, each to the attempt that its pod was."""
    store, templates = history.store, (history.workflow.get("spec") or {}).get("templates") or []
    if not any(spec.artifacts and not spec.is_gated for _, spec in read_template_specs(templates)):
        return

    def read(uid: str) -> None:
        listed = (parse_output_origin(info.key) for info in store.list(output_origins(uid)))
        origins = {origin.pod: origin for origin in listed if origin is not None and origin.run == history.run}
        listing.add_pod_outputs(store.list(workflow_outputs(uid)) if origins else (), origins)

    read_concurrently(
        read, [submission.binding.uid for submission in history.submissions if submission.binding is not None]
    )
