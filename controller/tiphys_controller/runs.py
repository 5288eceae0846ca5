"""Summaries of runs for people: one line per run, and all details of one run.

The phase of a run is determined in `tiphys_controller.run_phase`.
"""

import contextlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal, NamedTuple

from pydantic import Field

from tiphys.errors import IntegrityError, NotFoundError, UsageError
from tiphys.lineage.restored_starts import find_restored_starts
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.select import read_newest_commit
from tiphys.lineage.step_names import selects_step
from tiphys.lineage.training_progress import explain_missing_checkpoints, find_report_time, read_training_progress
from tiphys.protocol.compiled_workflow import shown_status
from tiphys.protocol.step_spec import StepKind
from tiphys.records import (
    AttemptClaim,
    AttemptEndOutcome,
    CheckpointRef,
    DataVersion,
    FailureEvidence,
    Output,
    Preemption,
    Record,
    Timestamp,
    TrainingProgress,
    task_name,
    utc_now,
)
from tiphys.store import (
    Attempt,
    DamagedRecord,
    Store,
    Submission,
    lineage_name,
)
from tiphys.store.runs import ALL_ATTEMPTS, read_concurrently
from tiphys.tracking.records import RegistrationReport, list_registrations
from tiphys_controller.plan.dag import Task
from tiphys_controller.plan.observe import RecordedProgress, RunState
from tiphys_controller.plan.step_state import AttemptId
from tiphys_controller.run_phase import RunPhase, determine_run_phase, look_up_workflow
from tiphys_controller.submit.authored_facts import author_parameters, read_code_version
from tiphys_controller.submit.plan_report import ItemReport, OutputDocument
from tiphys_controller.submit.submission import submission_cluster
from tiphys_controller.submit.submitter import Submitter

_MAX_OPEN_TRAININGS = 16


class RunSummary(Record):
    """One run. Steps are tasks that Tiphys gates; a fan-out counts as one."""

    run: str
    pipeline: str
    phase: RunPhase
    reason: str
    submissions: int
    attempts: int
    """Attempts of all its steps."""
    steps_done: int
    steps_total: int
    workflow: str = Field(default="", exclude_if=lambda workflow: not workflow)
    """Namespace and name of its Workflow, as ``ml/digits-7xk2p``, while it is seen to run."""
    last_activity: Timestamp | None
    """Time of the newest record, or of the newest report of a training that has not ended, by its writer's clock; None
    if no record could be read."""


class SubmissionDetail(Record):
    """One Workflow of the run. ``status`` is Argo's, or Stopped if a person stopped it; empty while no end is known."""

    submission: int
    kind: str
    workflow_name: str
    namespace: str
    cluster: str
    uid: str
    status: str
    claimed_at: Timestamp
    ended_at: Timestamp | None


class AttemptDetail(Record):
    """One attempt of a step. ``outcome`` is empty while it has no end record."""

    step: str
    name: str = ""
    """Name of the step or item for people, such as ``fit[2]``."""
    item: str = ""
    """Value of the item for people; empty for a step."""
    attempt: int
    submission: int
    outcome: str
    cause: str
    message: str
    evidence: FailureEvidence | None = None
    """Evidence from which its failure was classified; None without any."""
    escalation: str = ""
    """Resources added because of how earlier attempts ended; empty for none."""
    exit_code: int | None
    starts_from: str
    """Checkpoint as ``attempt-step``, prefixed by its lineage if it is of another run; empty for none. It is the one
    that the program could use, which need not be the one that admission chose."""
    unusable_start: str = Field(default="", exclude_if=lambda name: not name)
    """Checkpoint that admission chose and the program could not use, as its bytes were damaged; empty for none."""
    opened_at: Timestamp
    ended_at: Timestamp | None
    nodes: tuple[str, ...] = Field(default=(), exclude_if=lambda nodes: not nodes)
    """The node of each of its pods, by rank, if Tiphys chose them; else that of the pod that ended first, if known."""
    preempted: Preemption | None = Field(default=None, exclude_if=lambda preempted: preempted is None)
    """What a preemption by its queue, or by a failing node, cost."""
    outputs: dict[str, str]
    """Values of parameters and keys of artifacts, by name."""
    training_progress: TrainingProgress | None = Field(default=None, exclude_if=lambda progress: progress is None)
    """Newest report of the program of an open attempt, in its own words."""
    unprotected: str = Field(default="", exclude_if=lambda why: not why)
    """Why a training that reports nothing has no checkpoint, as a clause; empty for all others."""
    data: tuple[DataVersion, ...] = Field(default=(), exclude_if=lambda data: not data)
    """The data that it reads and no step made."""


class StepOutput(Record):
    """One output of a step or item that is done, as its end record has it."""

    step: str
    """Name of the step or item for people, such as ``fit[2]``."""
    source: str
    """The attempt that wrote it; also its run and step if it was taken over."""
    name: str
    key: str
    """Key of its object, or the prefix of a directory."""
    directory: bool
    value: str | None
    """The text of a parameter; None for an artifact."""
    objects: int
    size_bytes: int
    """Size of all its objects."""
    sha256: str
    """Digest of its object; empty unless it has exactly one."""


class StepDetail(Record):
    """One task of the pipeline: how far it has come, its attempts, and what it produced.

    What a resume would do with it, `tiphys_controller.submit.plan_report.PlanReport` says.
    """

    name: str
    kind: Literal["step", "train", "plain"]
    done: bool
    """Whether its result is recorded, even if a resume would run it again, as a step without a cache."""
    reason: str
    """Why it is done or not, in words."""
    needs: tuple[str, ...] = Field(default=(), exclude_if=lambda needs: not needs)
    """Names of the tasks that must end before it starts, sorted."""
    items: tuple[ItemReport, ...] = ()
    attempts: tuple[AttemptDetail, ...] = ()
    other_attempts: int = Field(default=0, exclude_if=lambda count: not count)
    """Attempts outside of the window that was asked for; ``outputs`` lacks theirs."""
    outputs: tuple[StepOutput, ...] = Field(default=(), exclude_if=lambda outputs: not outputs)
    """Outputs of its newest attempts, or of the result that it took over; empty while these are not done."""
    taken_over: dict[str, str] = Field(default={}, exclude_if=lambda sources: not sources)
    """Where its result comes from, or that of each item that did not run, by the name of the step or item."""

    @property
    def total_attempts(self) -> int:
        return len(self.attempts) + self.other_attempts


class RunDetail(OutputDocument):
    """Everything that storage holds about one run."""

    kind: Literal["Run"] = "Run"
    store: str
    summary: RunSummary
    parent: str = Field(default="", exclude_if=lambda parent: not parent)
    """Run that this one was forked from; empty for none."""
    parameters: dict[str, str]
    code_version: str | None
    submissions: tuple[SubmissionDetail, ...]
    steps: tuple[StepDetail, ...]
    models: tuple[RegistrationReport, ...] = Field(default=(), exclude_if=lambda models: not models)
    """Models that its steps register in MLflow, complete or pending."""
    damaged: tuple[str, ...] = Field(default=(), exclude_if=lambda damaged: not damaged)
    """Records that cannot be read, each with its key, what is damaged, and what to do."""


def describe_run(
    history: RunHistory, submitter: Submitter | None = None, step: str = "", window: slice = ALL_ATTEMPTS
) -> RunDetail:
    """Everything about one run, by its records.

    ``submitter`` is the cluster to search for the Workflow of a running submission, None: storage alone. ``step`` names
    the only step or item to describe, and ``window`` the attempts, as in `select_attempts`.

    Raises:
        NotFoundError: there is no such run, step or item.
        UsageError: Tiphys did not compile its Workflow.
        IntegrityError: a record is damaged.
    """
    progress = RecordedProgress.read(history)
    selected = history.names.resolve(step) if step else ""
    attempts = history.read_attempts(window, selected)
    describer = _AttemptDescriber(history, _read_open_reports(history.store, attempts), _find_starts(history, attempts))
    registers = any(spec.registration for spec in history.pipeline.steps.values())
    damaged: list[DamagedRecord] = []
    models = list_registrations(history.store, history.run, damaged) if registers else []
    record, changed = history.record, history.workflow is not history.record.workflow
    steps = tuple(
        _step_detail(progress, task, attempts, describer, window != ALL_ATTEMPTS)
        for task in progress.graph.tasks.values()
        if task_name(selected) in ("", task.name)
    )
    return RunDetail(
        store=history.store.url,
        summary=_summary(history, progress, submitter),
        parent=record.parent,
        parameters=author_parameters(history.workflow) if changed else record.parameters,
        code_version=read_code_version(history.workflow) if changed else record.code_version,
        submissions=tuple(map(_submission_detail, history.submissions)),
        steps=steps,
        models=tuple(model.report() for model in models if selects_step(selected, model.request.step)),
        damaged=tuple(damage.message for damage in sorted({*history.damaged_records, *damaged})),
    )


def _read_open_reports(store: Store, attempts: Mapping[str, Sequence[Attempt]]) -> dict[AttemptId, TrainingProgress]:
    """Newest reports of the open attempts of training steps."""
    opened = (attempt.claim for step in attempts.values() for attempt in step if attempt.end is None)
    claims = [claim for claim in opened if claim.lineage]

    def read(claim: AttemptClaim) -> TrainingProgress | None:
        return read_training_progress(store, claim.lineage, claim.attempt)

    reports = zip(claims, read_concurrently(read, claims), strict=True)
    return {(claim.step, claim.attempt): report for claim, report in reports if report}


def _find_starts(
    history: RunHistory, attempts: Mapping[str, Sequence[Attempt]]
) -> dict[AttemptId, CheckpointRef | None]:
    """What the attempts started from that admission gave a checkpoint; costs the events of the run if there are any."""
    continued = [step for step in attempts.values() if any(attempt.claim.starts_from for attempt in step)]
    starts = ((step[0].claim.step, find_restored_starts(step, history.events)) for step in continued)
    return {(step, number): start for step, by_number in starts for number, start in by_number.items()}


def summarize_run(history: RunHistory, submitter: Submitter | None = None) -> RunSummary:
    """Summary of one run; if it cannot be read, or a record is damaged, with the reason."""
    try:
        summary = _summary(history, RecordedProgress.read(history), submitter)
        if not history.damaged:
            return summary
        reason = history.damaged[0]
    except (IntegrityError, NotFoundError, UsageError) as error:
        reason = str(error)
    pipeline = ""
    with contextlib.suppress(IntegrityError, NotFoundError, UsageError):
        pipeline = history.record.pipeline
    return RunSummary(
        run=history.run,
        pipeline=pipeline,
        phase=RunPhase.UNKNOWN,
        reason=reason,
        submissions=0,
        attempts=0,
        steps_done=0,
        steps_total=0,
        last_activity=None,
    )


def _summary(history: RunHistory, progress: RecordedProgress, submitter: Submitter | None) -> RunSummary:
    lookup = look_up_workflow(history.last_submission, submitter)
    phase, reason = determine_run_phase(history.last_submission, lookup)
    return RunSummary(
        run=history.run,
        pipeline=history.pipeline.name,
        phase=phase,
        reason=reason,
        submissions=len(history.submissions),
        attempts=sum(len(numbers.claimed) for numbers in history.attempt_numbers.values()),
        steps_done=sum(map(progress.is_done, progress.steps)),
        steps_total=len(progress.steps),
        workflow=f"{lookup.live.namespace}/{lookup.live.name}" if lookup.live and lookup.live.running else "",
        last_activity=_last_activity(history, progress.state),
    )


def _last_activity(history: RunHistory, state: RunState) -> datetime:
    records = [record for submission in history.submissions for record in submission.records if record is not None]
    moments = [written.written_at for written in (history.record, *records, *state.ends.values())]
    return max([*moments, *_last_reports(history, state)])


def _last_reports(history: RunHistory, state: RunState) -> list[datetime]:
    """Times of the newest reports of open trainings; costs a listing for each, of `_MAX_OPEN_TRAININGS` at most."""
    now = utc_now()
    opened = [
        step
        for step, _ in state.open_attempts
        if (spec := history.pipeline.steps.get(task_name(step))) and spec.kind is StepKind.TRAIN
    ]
    found = read_concurrently(
        lambda step: find_report_time(history.store, lineage_name(history.run, step)), opened[:_MAX_OPEN_TRAININGS]
    )
    return [min(moment, now) for moment in found if moment is not None]


def _submission_detail(submission: Submission) -> SubmissionDetail:
    return SubmissionDetail(
        submission=submission.claim.submission,
        kind=submission.claim.kind.value,
        workflow_name=submission.claim.workflow_name,
        namespace=submission.claim.namespace,
        cluster=submission_cluster(submission),
        uid=submission.binding.uid if submission.binding else "",
        status=shown_status(submission.end.status, submission.end.message) if submission.end else "",
        claimed_at=submission.claim.written_at,
        ended_at=submission.end.written_at if submission.end else None,
    )


def _step_detail(
    progress: RecordedProgress,
    task: Task,
    attempts: Mapping[str, Sequence[Attempt]],
    describer: "_AttemptDescriber",
    is_window: bool,
) -> StepDetail:
    names = describer.history.names
    steps = names.sort(step for step in attempts if selects_step(task.name, step))
    step_attempts: Sequence[Attempt] = [attempt for step in steps for attempt in attempts[step]]
    results = {step: (f"attempt {attempts[step][-1].claim.attempt}", attempts[step][-1].end) for step in steps}
    reused = {step: found for step, found in progress.state.reused.items() if selects_step(task.name, step)}
    results |= {step: (found.source, found.end) for step, found in reused.items()}
    outputs = (
        _step_output(names.name(step), source, output)
        for step in names.sort(results)
        for source, end in (results[step],)
        if end is not None and end.outcome is AttemptEndOutcome.DONE
        for output in end.outputs
    )
    listed = (len(listing.attempts) for step, listing in progress.state.steps.items() if task_name(step) == task.name)
    others = max(0, sum(listed) - len(step_attempts)) if is_window else 0
    made = progress.steps.get(task.name)
    return StepDetail(
        name=task.name,
        kind="plain" if task.spec is None else task.spec.kind.value,
        done=made is not None and progress.is_done(task.name),
        reason="plain step keeps no record" if made is None else made.reason,
        needs=tuple(sorted(task.needs)),
        items=tuple(
            ItemReport(
                step=item.step,
                name=names.name(item.step),
                item=item.item,
                done=item.state.is_done,
                reason=item.state.reason,
            )
            for item in (made.items if made else ())
        ),
        attempts=tuple(map(describer.describe, step_attempts)),
        other_attempts=others,
        outputs=tuple(outputs),
        taken_over={names.name(step): reused[step].source for step in names.sort(reused)},
    )


def _step_output(step: str, source: str, output: Output) -> StepOutput:
    return StepOutput(
        step=step,
        source=source,
        name=output.name,
        key=output.key,
        directory=output.directory,
        value=output.value,
        objects=len(output.objects),
        size_bytes=sum(stored_object.size for stored_object in output.objects),
        sha256=output.objects[0].sha256 if len(output.objects) == 1 else "",
    )


class _AttemptDescriber(NamedTuple):
    """Describes attempts of one run."""

    history: RunHistory
    reports: Mapping[AttemptId, TrainingProgress]
    """Newest reports of open attempts."""
    starts: Mapping[AttemptId, CheckpointRef | None]
    """What attempts really started from that admission gave a checkpoint."""

    def describe(self, attempt: Attempt) -> AttemptDetail:
        claim, end, names = attempt.claim, attempt.end, self.history.names
        spec, chosen = self.history.pipeline.steps.get(task_name(claim.step)), claim.starts_from
        reported = self.reports.get((claim.step, claim.attempt))
        start = self.starts.get((claim.step, claim.attempt), chosen)

        def has_commit() -> bool:
            return read_newest_commit(self.history.store, claim.lineage, claim.attempt) is not None

        return AttemptDetail(
            step=claim.step,
            name=names.name(claim.step),
            item=names.value(claim.step),
            attempt=claim.attempt,
            submission=claim.submission,
            outcome=end.outcome_name if end else "",
            cause=end.cause.value if end and end.cause else "",
            message=end.message if end else "",
            evidence=end.evidence if end else None,
            escalation=claim.escalation.explanation if claim.escalation else "",
            exit_code=end.exit_code if end else None,
            starts_from=start.relative_to(claim.lineage) if start else "",
            unusable_start=chosen.relative_to(claim.lineage) if chosen and chosen != start else "",
            opened_at=claim.written_at,
            ended_at=end.ended_at if end else None,
            nodes=claim.nodes or ((end.evidence.node,) if end and end.evidence and end.evidence.node else ()),
            preempted=end.preempted if end else None,
            outputs={output.name: output.key if output.value is None else output.value for output in end.outputs}
            if end
            else {},
            training_progress=reported,
            unprotected=""
            if spec is None or reported
            else explain_missing_checkpoints(spec, claim.written_at, utc_now(), end, has_commit),
            data=claim.data,
        )
