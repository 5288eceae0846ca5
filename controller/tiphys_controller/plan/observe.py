"""Reads the state of a run from storage, without asking any cluster.

A few listings show attempts and sizes of outputs, so no request is made per
output. Only records that the listings leave in doubt are read.

A step whose result a submission reused opens no attempt. So reuse records are
read, too: by its attempts alone, a plan would run a step again that another run
has finished, or take its last attempt where an older one was reused.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

from tiphys.errors import IntegrityError, NotFoundError
from tiphys.protocol.compiled_workflow import Manifest, read_template_specs
from tiphys.records import AttemptClaim, AttemptEnd, ReuseRecord, RunRecord, SubmissionKind, task_name
from tiphys.store import (
    DamagedRecord,
    RunLayout,
    Store,
    Submission,
    find_attempt_end,
    read_attempt_end,
    read_record,
    read_run,
    read_submission_workflow,
    read_submissions,
)
from tiphys.store.outputs import confirm_outputs, hash_object, list_confirmed_outputs
from tiphys.store.runs import deletion_message, read_concurrently
from tiphys.store.workflow_layout import output_origins, parse_output_origin, workflow_outputs
from tiphys_controller.plan.listing import RunListing
from tiphys_controller.plan.step_state import (
    AttemptId,
    ReusedResult,
    StepListing,
    StepState,
    StepStatus,
    determine_reused_state,
    determine_step_state,
)


class ReusedResultLookup(NamedTuple):
    """``reused`` is None if the last attempt of the step decides. ``requests`` is what the lookup cost."""

    reused: ReusedResult | None
    requests: int


def read_reused_results(
    store: Store, run: str, listing: RunListing, steps: Mapping[str, StepListing]
) -> dict[str, ReusedResultLookup]:
    """Look up the reused results that decide for their steps, except where the keys show that the last attempt does.

    Each lookup costs one read, and up to three more requests if the last attempt is not the reused one.

    Raises:
        IntegrityError: a record is damaged.
    """
    candidates = [
        (step, submission)
        for step, submission in sorted(listing.last_reuse.items())
        if (submission, step, steps[step].last_attempt) not in listing.reused_attempts
    ]
    layout = RunLayout(run)
    lookups = read_concurrently(
        lambda candidate: _read_reuse(store, layout, *candidate, steps[candidate[0]]), candidates
    )
    return {step: lookup for (step, _), lookup in zip(candidates, lookups, strict=True)}


def _read_reuse(
    store: Store, layout: RunLayout, step: str, submission: int, listing: StepListing
) -> ReusedResultLookup:
    try:
        record = read_record(store, layout.reused(submission, step), ReuseRecord)
    except IntegrityError as error:
        source = f"what the record of submission {submission} names"
        return ReusedResultLookup(ReusedResult(source, 0, None, {}, str(error)), 1)
    last = listing.last_attempt
    is_own = (record.source_run, record.source_step) == (layout.run, step)
    if is_own and record.source_attempt == last:
        return ReusedResultLookup(None, 1)
    if not last:
        return ReusedResultLookup(_read_reused_result(store, record, is_own), 3)
    # The submission that reuses a result opens no attempt afterwards; a later submission may.
    later = read_record(store, layout.attempt(step, last), AttemptClaim).submission > submission
    return ReusedResultLookup(None, 2) if later else ReusedResultLookup(_read_reused_result(store, record, is_own), 4)


def _read_reused_result(store: Store, record: ReuseRecord, is_own: bool) -> ReusedResult:
    where = "" if is_own else f"run {record.source_run}, step {task_name(record.source_step)}, "
    damage = ""
    try:
        end = find_attempt_end(store, record.source_run, record.source_step, record.source_attempt)
    except IntegrityError as error:
        end, damage = None, str(error)
    listed = list_confirmed_outputs(store, end) if end is not None else {}
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
    requests: int = 0
    """Requests made to storage; a listing counts as one, whatever its number of pages."""
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
        return {step: one.claim.submission for one in self.submissions for step in one.claim.steps}

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
            (step, one.last_attempt)
            for step, one in listed
            if one.last_attempt in one.ended_attempts and not one.is_verified
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


def load_run_state(store: Store, run: str, damaged: list[DamagedRecord] | None = None) -> RunState:
    """Read the state of a run from its listings. For displays, damaged records of submissions go to ``damaged``.

    Raises:
        NotFoundError: there is no such run, or its deletion was begun.
        IntegrityError: a record is damaged.
    """
    layout = RunLayout(run)
    with ThreadPoolExecutor(max_workers=_READERS) as pool:
        # Independent requests run in parallel: the listings of ten thousand steps have dozens of pages.
        reading, submitting = pool.submit(read_run, store, run), pool.submit(read_submissions, store, run, damaged)
        listing = RunListing()
        prefixes = (layout.attempts, layout.done_markers, layout.all_reused, layout.all_outputs)
        listings = [pool.submit(lambda prefix: listing.add(store.list(prefix)), prefix) for prefix in prefixes]
        record, submissions = reading.result(), tuple(submitting.result())
        for added in listings:
            added.result()
    if submissions and submissions[-1].claim.kind is SubmissionKind.DELETION:
        raise NotFoundError(deletion_message(store, run))
    workflow = read_submission_workflow(store, record, submissions[-1].claim if submissions else None)
    uids = _workflows_with_outputs(workflow, submissions)
    _list_pod_outputs(store, run, uids, listing)
    steps = listing.build_steps()
    submission_reads = sum(1 + (one.binding is not None) + (one.end is not None) for one in submissions)
    lookups = read_reused_results(store, run, listing, steps)
    reused = {step: lookup.reused for step, lookup in lookups.items() if lookup.reused}
    return RunState(
        record=record,
        submissions=submissions,
        steps=steps,
        reused=reused,
        ends={(step, result.attempt): result.end for step, result in reused.items() if result.end},
        requests=1
        + 1
        + submission_reads
        + len(prefixes)
        + 2 * len(uids)
        + sum(lookup.requests for lookup in lookups.values())
        + (workflow is not record.workflow),
        workflow=workflow,
        last_reuse=listing.last_reuse,
    )


def load_ends(store: Store, state: RunState, attempts: Iterable[AttemptId]) -> RunState:
    """Return ``state`` with the end records of ``attempts``; those that cannot be read are in ``damaged_ends``.

    Raises:
        ObjectMissingError: an end record was deleted since it was listed.
    """
    keys = sorted(set(attempts) - state.ends.keys() - state.damaged_ends.keys())

    def read(key: AttemptId) -> AttemptEnd | str:
        try:
            return read_attempt_end(store, state.record.run, *key)
        except IntegrityError as error:
            return str(error)

    found = dict(zip(keys, read_concurrently(read, keys), strict=True))
    return replace(
        state,
        ends={**state.ends, **{key: end for key, end in found.items() if not isinstance(end, str)}},
        damaged_ends={**state.damaged_ends, **{key: end for key, end in found.items() if isinstance(end, str)}},
        requests=state.requests + len(keys),
    )


def reload_damaged_outputs(store: Store, state: RunState) -> RunState:
    """Return ``state`` with the outputs listed again if an end record names outputs that were not listed.

    A step that ended during the listings may be listed without its outputs, which were written before its record.
    Outputs that were written again are read: those with the recorded bytes count as unchanged.
    """
    if not state.has_damaged_outputs:
        return state
    listing = RunListing().add(store.list(RunLayout(state.record.run).all_outputs))
    uids = _workflows_with_outputs(state.workflow, state.submissions)
    _list_pod_outputs(store, state.record.run, uids, listing)
    outputs = listing.outputs
    for step, attempt in state.unverified_ends:
        if (end := state.ends.get((step, attempt))) is not None:
            names = {info.key: name for name, info in outputs[step][attempt].items()}
            listed = {info.key: info for info in outputs[step][attempt].values()}
            confirmed = confirm_outputs(end, listed, partial(hash_object, store))
            outputs[step][attempt] = {names[key]: info for key, info in confirmed.items()}
    steps = {step: replace(one, outputs=outputs.get(step, {})) for step, one in state.steps.items()}
    return replace(state, steps=steps, requests=state.requests + 1 + 2 * len(uids))


def _workflows_with_outputs(workflow: Manifest, submissions: Iterable[Submission]) -> list[str]:
    """Uids of the Workflows of a run below which steps without a gate have stored artifacts."""
    templates = (workflow.get("spec") or {}).get("templates") or []
    if not any(spec.artifacts and not spec.is_gated for _, spec in read_template_specs(templates)):
        return []
    return [one.binding.uid for one in submissions if one.binding is not None]


def _list_pod_outputs(store: Store, run: str, uids: Iterable[str], listing: RunListing) -> None:
    """Add the outputs that lie below the uids of Workflows to ``listing``, each to the attempt that its pod was."""

    def read(uid: str) -> None:
        listed = (parse_output_origin(info.key) for info in store.list(output_origins(uid)))
        origins = {one.pod: one for one in listed if one is not None and one.run == run}
        listing.add_pod_outputs(store.list(workflow_outputs(uid)) if origins else (), origins)

    read_concurrently(read, list(uids))
