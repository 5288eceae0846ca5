"""Summaries of runs for people: one line per run, and all details of one run.

The phase of a run is determined in `tiphys_controller.run_phase`.
"""

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from enum import StrEnum
from typing import Literal, NamedTuple

from pydantic import Field

from tiphys.errors import IntegrityError, NotFoundError, UsageError
from tiphys.lineage.restored_starts import find_restored_starts
from tiphys.lineage.select import read_newest_commit
from tiphys.lineage.step_names import StepNames, selects_step
from tiphys.lineage.training_progress import explain_missing_checkpoints, find_report_time, read_training_progress
from tiphys.protocol.compiled_workflow import shown_status
from tiphys.protocol.step_spec import StepKind, StepSpec
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
    list_runs,
    read_all_attempts,
    read_events,
    read_run,
)
from tiphys.store.runs import ALL_ATTEMPTS, read_concurrently
from tiphys.tracking.records import RegistrationReport, list_registrations
from tiphys_controller.plan.decide import PlanAction, TaskPlan
from tiphys_controller.plan.step_state import AttemptId
from tiphys_controller.run_phase import RunPhase, determine_run_phase, look_up_workflow
from tiphys_controller.submit.authored_facts import author_parameters, read_code_version
from tiphys_controller.submit.plan_report import OutputDocument, PlanReport, StepReport, build_plan_report
from tiphys_controller.submit.planner import RunPlan, plan_stored_run
from tiphys_controller.submit.start_checkpoints import add_start_checkpoints
from tiphys_controller.submit.submission import submission_cluster
from tiphys_controller.submit.submitter import Submitter

_READERS = 8
_MAX_OPEN_TRAININGS = 16
_MAX_STARTS = 16
"""Most trainings whose start is looked up, which costs some requests for each."""
_MAX_STARTS_ATTEMPTS = 200
"""Most attempts of a run whose starts are looked up, because all those of a training are read for it."""


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


class StepDetail(StepReport):
    """One task of the pipeline: what a resume would do with it, all its attempts, and what it produced."""

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


def list_run_summaries(store: Store, submitter: Submitter | None = None) -> list[RunSummary]:
    """Summaries of all runs, sorted by name. A run that cannot be read is listed with the reason.

    Args:
        store: The store.
        submitter: Cluster to search for the Workflows of running submissions; None: storage alone.
    """
    names = list(list_runs(store))
    with ThreadPoolExecutor(max_workers=_READERS) as pool:
        return list(pool.map(lambda run: summarize_run(store, run, submitter), names))


class RunOrder(StrEnum):
    """Orders of a list of runs. Equal ones are in the order of their names."""

    NAME = "name"
    ACTIVITY = "activity"
    """The newest first."""
    PIPELINE = "pipeline"
    STATE = "state"


class RunFilter(NamedTuple):
    """Which runs of a list are shown."""

    pipeline: str = ""
    """Empty for all."""
    phases: Collection[RunPhase] = ()
    """Empty for all."""
    since: datetime | None = None
    """Only runs with activity since then; None for all."""

    def accepts(self, summary: RunSummary) -> bool:
        return (
            self.pipeline in ("", summary.pipeline)
            and (not self.phases or summary.phase in self.phases)
            and (self.since is None or (summary.last_activity is not None and summary.last_activity >= self.since))
        )


def sort_runs(summaries: Iterable[RunSummary], order: RunOrder) -> list[RunSummary]:
    """Sort summaries of runs."""
    phases = list(RunPhase)

    def sort_key(summary: RunSummary) -> tuple[float | str, str]:
        match order:
            case RunOrder.ACTIVITY:
                return -summary.last_activity.timestamp() if summary.last_activity else 0.0, summary.run
            case RunOrder.PIPELINE:
                return summary.pipeline, summary.run
            case RunOrder.STATE:
                return float(phases.index(summary.phase)), summary.run
            case RunOrder.NAME:
                return "", summary.run

    return sorted(summaries, key=sort_key)


def describe_run(
    store: Store, run: str, submitter: Submitter | None = None, step: str = "", window: slice = ALL_ATTEMPTS
) -> RunDetail:
    """Everything about one run.

    Args:
        store: The store.
        run: Name of the run.
        submitter: Cluster to search for the Workflow of a running submission; None: storage alone.
        step: Name of the only step or item to describe; empty for all.
        window: Attempts that are described, as in `read_all_attempts`.

    Raises:
        NotFoundError: there is no such run, step or item.
        UsageError: Tiphys did not compile its Workflow.
        IntegrityError: a record is damaged.
    """
    damaged: list[DamagedRecord] = []
    attempts = read_all_attempts(store, run, damaged, window)
    run_plan = plan_stored_run(store, run, damaged=damaged)
    selected = run_plan.names.resolve(step) if step else ""
    attempts = {one: tries for one, tries in attempts.items() if selects_step(selected, one)}
    progress = _read_open_progress(store, attempts)
    starts = _read_restored_starts(store, run, attempts, damaged, window)
    registers = any(spec.registration for spec in run_plan.pipeline.steps.values())
    models = list_registrations(store, run, damaged) if registers else []
    summary = _summary(store, run_plan, submitter)
    report = build_plan_report(run_plan, store.url)
    if summary.phase not in (RunPhase.RUNNING, RunPhase.SUCCEEDED) and _can_look_up_starts(summary, report):
        with contextlib.suppress(IntegrityError):  # a resume refuses it, and says why
            report = add_start_checkpoints(store, report)
    record, changed = run_plan.state.record, run_plan.state.workflow is not run_plan.state.record.workflow
    return RunDetail(
        store=store.url,
        summary=summary,
        parent=record.parent,
        parameters=author_parameters(run_plan.state.workflow) if changed else record.parameters,
        code_version=read_code_version(run_plan.state.workflow) if changed else record.code_version,
        submissions=tuple(_submission_detail(one) for one in run_plan.state.submissions),
        steps=tuple(
            _step_detail(store, one, attempts, run_plan, progress, starts, window != ALL_ATTEMPTS)
            for one in report.steps
            if task_name(selected) in ("", one.name)
        ),
        models=tuple(one.report() for one in models if selects_step(selected, one.request.step)),
        damaged=tuple(one.message for one in sorted(damaged)),
    )


def _can_look_up_starts(summary: RunSummary, report: PlanReport) -> bool:
    """Whether few enough trainings are missing, and few enough attempts are there, to find where each would go on."""
    missing = (step for step in report.steps if step.kind == "train" and step.decision == "run")
    trainings = sum(sum(not item.done for item in step.items) or 1 for step in missing)
    return trainings <= _MAX_STARTS and summary.attempts <= _MAX_STARTS_ATTEMPTS


def _read_open_progress(store: Store, attempts: Mapping[str, Sequence[Attempt]]) -> dict[AttemptId, TrainingProgress]:
    """Newest reports of the open attempts of training steps."""
    claims = [one.claim for step in attempts.values() for one in step if one.end is None and one.claim.lineage]

    def read(claim: AttemptClaim) -> TrainingProgress | None:
        return read_training_progress(store, claim.lineage, claim.attempt)

    reports = zip(claims, read_concurrently(read, claims), strict=True)
    return {(claim.step, claim.attempt): report for claim, report in reports if report}


def _read_restored_starts(
    store: Store, run: str, attempts: Mapping[str, Sequence[Attempt]], damaged: list[DamagedRecord], window: slice
) -> dict[AttemptId, CheckpointRef | None]:
    """What the attempts started from that admission gave a checkpoint; costs the events of the run if there are any."""
    continued = [step for step in attempts.values() if any(one.claim.starts_from for one in step)]
    events = read_events(store, run, damaged, window.stop) if continued else ()
    starts = ((step[0].claim.step, find_restored_starts(step, events)) for step in continued)
    return {(step, number): start for step, by_number in starts for number, start in by_number.items()}


def summarize_run(store: Store, run: str, submitter: Submitter | None = None) -> RunSummary:
    """Summary of one run; if it cannot be read, with the reason."""
    try:
        return _summary(store, plan_stored_run(store, run), submitter)
    except (IntegrityError, NotFoundError, UsageError) as error:
        return RunSummary(
            run=run,
            pipeline=_read_pipeline_name(store, run),
            phase=RunPhase.UNKNOWN,
            reason=str(error),
            submissions=0,
            attempts=0,
            steps_done=0,
            steps_total=0,
            last_activity=None,
        )


def _read_pipeline_name(store: Store, run: str) -> str:
    try:
        return read_run(store, run).pipeline
    except (IntegrityError, NotFoundError, UsageError):
        return ""


def _summary(store: Store, run_plan: RunPlan, submitter: Submitter | None) -> RunSummary:
    last = run_plan.state.submissions[-1] if run_plan.state.submissions else None
    lookup = look_up_workflow(last, submitter)
    phase, reason = determine_run_phase(last, lookup)
    steps = run_plan.pipeline.steps
    return RunSummary(
        run=run_plan.state.record.run,
        pipeline=run_plan.pipeline.name,
        phase=phase,
        reason=reason,
        submissions=len(run_plan.state.submissions),
        attempts=sum(len(step.attempts) for step in run_plan.state.steps.values()),
        steps_done=sum(task.name in steps and _is_done(run_plan, task) for task in run_plan.decisions.tasks),
        steps_total=sum(task.name in steps for task in run_plan.decisions.tasks),
        workflow=f"{lookup.live.namespace}/{lookup.live.name}" if lookup.live and lookup.live.running else "",
        last_activity=_last_activity(store, run_plan),
    )


def _is_done(run_plan: RunPlan, task: TaskPlan) -> bool:
    """Whether its result exists, even if a resume would run it again, as a step without a cache."""
    if task.action is PlanAction.SKIP:
        return True
    if task.items:
        return all(one.item and one.state.is_done for one in task.items)
    return run_plan.state.step_state(task.name).is_done


def _last_activity(store: Store, run_plan: RunPlan) -> datetime:
    state = run_plan.state
    records = [record for submission in state.submissions for record in submission if record is not None]
    moments = [one.written_at for one in (state.record, *records, *state.ends.values())]
    return max([*moments, *_last_reports(store, run_plan)])


def _last_reports(store: Store, run_plan: RunPlan) -> list[datetime]:
    """Times of the newest reports of open trainings; costs a listing for each, of `_MAX_OPEN_TRAININGS` at most."""
    steps, run, now = run_plan.pipeline.steps, run_plan.state.record.run, utc_now()
    opened = [
        step
        for step, _ in run_plan.state.open_attempts
        if (spec := steps.get(task_name(step))) and spec.kind is StepKind.TRAIN
    ]
    found = read_concurrently(lambda one: find_report_time(store, lineage_name(run, one)), opened[:_MAX_OPEN_TRAININGS])
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
    store: Store,
    report: StepReport,
    attempts: dict[str, list[Attempt]],
    run_plan: RunPlan,
    progress: Mapping[AttemptId, TrainingProgress],
    starts: Mapping[AttemptId, CheckpointRef | None],
    is_window: bool,
) -> StepDetail:
    names = run_plan.names
    steps = names.sort(step for step in attempts if selects_step(report.name, step))
    spec = run_plan.pipeline.steps.get(report.name)
    step_attempts: Sequence[Attempt] = [attempt for step in steps for attempt in attempts[step]]
    details = (_attempt_detail(store, attempt, spec, names, progress, starts) for attempt in step_attempts)
    results = {step: (f"attempt {attempts[step][-1].claim.attempt}", attempts[step][-1].end) for step in steps}
    reused = {step: found for step, found in run_plan.state.reused.items() if selects_step(report.name, step)}
    results |= {step: (found.source, found.end) for step, found in reused.items()}
    outputs = (
        _step_output(names.name(step), source, output)
        for step in names.sort(results)
        for source, end in (results[step],)
        if end is not None and end.outcome is AttemptEndOutcome.DONE
        for output in end.outputs
    )
    listed = (len(one.attempts) for step, one in run_plan.state.steps.items() if task_name(step) == report.name)
    others = max(0, sum(listed) - len(step_attempts)) if is_window else 0
    taken_over = {names.name(step): reused[step].source for step in names.sort(reused)}
    return StepDetail(
        **dict(report), attempts=tuple(details), other_attempts=others, outputs=tuple(outputs), taken_over=taken_over
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
        size_bytes=sum(one.size for one in output.objects),
        sha256=output.objects[0].sha256 if len(output.objects) == 1 else "",
    )


def _attempt_detail(
    store: Store,
    attempt: Attempt,
    spec: StepSpec | None,
    names: StepNames,
    progress: Mapping[AttemptId, TrainingProgress],
    starts: Mapping[AttemptId, CheckpointRef | None],
) -> AttemptDetail:
    key, chosen = (attempt.claim.step, attempt.claim.attempt), attempt.claim.starts_from
    end, reported, start = attempt.end, progress.get(key), starts.get(key, chosen)

    def has_commit() -> bool:
        return read_newest_commit(store, attempt.claim.lineage, attempt.claim.attempt) is not None

    return AttemptDetail(
        step=attempt.claim.step,
        name=names.name(attempt.claim.step),
        item=names.value(attempt.claim.step),
        attempt=attempt.claim.attempt,
        submission=attempt.claim.submission,
        outcome=end.outcome_name if end else "",
        cause=end.cause.value if end and end.cause else "",
        message=end.message if end else "",
        evidence=end.evidence if end else None,
        escalation=attempt.claim.escalation.explanation if attempt.claim.escalation else "",
        exit_code=end.exit_code if end else None,
        starts_from=start.relative_to(attempt.claim.lineage) if start else "",
        unusable_start=chosen.relative_to(attempt.claim.lineage) if chosen and chosen != start else "",
        opened_at=attempt.claim.written_at,
        ended_at=end.ended_at if end else None,
        nodes=attempt.claim.nodes or ((end.evidence.node,) if end and end.evidence and end.evidence.node else ()),
        preempted=end.preempted if end else None,
        outputs={output.name: output.key if output.value is None else output.value for output in end.outputs}
        if end
        else {},
        training_progress=reported,
        unprotected=""
        if spec is None or reported
        else explain_missing_checkpoints(spec, attempt.claim.written_at, utc_now(), end, has_commit),
        data=attempt.claim.data,
    )
