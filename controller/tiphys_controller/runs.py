"""What lies in a store, for people: a line per run, and everything about one run.

In which phase is a run? Storage knows how a submission ended only if the Workflow lived to say so.

What is not known is called unknown, with the reason. Whoever can see the
cluster, such as the local engine, makes more of it known.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from enum import StrEnum
from typing import Literal, NamedTuple

from pydantic import Field

from tiphys.errors import IntegrityError, NotFoundError, UsageError
from tiphys.records import Evidence, Record, Timestamp
from tiphys.store import Attempt, Store, Submission, all_attempts, list_runs, read_run
from tiphys_controller.plan.decide import Action, TaskPlan
from tiphys_controller.submit.plan_report import Document, StepReport, report_of
from tiphys_controller.submit.planner import Planned, planned
from tiphys_controller.submit.start import code_version, own_parameters
from tiphys_controller.submit.submission import cluster_of, place
from tiphys_controller.submit.submitter import LiveWorkflow, Submitter, is_known


class Phase(StrEnum):
    """Of a run, which is more than one Workflow."""

    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    INTERRUPTED = "Interrupted"
    """It does not run, and never said that it ended."""
    UNKNOWN = "Unknown"


class Seen(NamedTuple):
    """What the cluster at hand says of the last submission.

    ``visible`` is False where the submission went to another cluster, or none
    was asked.
    """

    visible: bool
    live: LiveWorkflow | None = None


def phase_of(last: Submission | None, seen: Seen) -> tuple[Phase, str]:
    """The phase of a run and the reason in words. ``last`` is its last submission."""
    if last is None:
        return Phase.INTERRUPTED, "recorded and never submitted"
    number = last.claim.submission
    if seen.live and seen.live.running:
        return Phase.RUNNING, f"submission {number} is Workflow {seen.live.name} ({seen.live.phase})"
    if last.end:
        return _sealed(last.end.status, number, last.end.message)
    if not seen.visible:
        where = f"cluster {cluster_of(last)}" if cluster_of(last) else "a cluster nobody wrote down"
        return Phase.UNKNOWN, f"submission {number} went to {where} and has not said that it ended"
    if seen.live is None:
        return Phase.INTERRUPTED, f"Workflow {last.claim.workflow_name} is gone, and never said how it ended"
    if seen.live.phase in ("Succeeded", "Failed", "Error"):
        return _sealed(seen.live.phase, number, "")
    return Phase.INTERRUPTED, f"Workflow {seen.live.name} stands at {seen.live.phase}, and nothing runs it any more"


def _sealed(status: str, number: int, message: str) -> tuple[Phase, str]:
    phase = Phase.SUCCEEDED if status == "Succeeded" else Phase.FAILED
    return phase, f"submission {number} {status.lower()}{f': {message}' if message else ''}"


_READERS = 8


class RunSummary(Record):
    """One run. Steps are tasks that Tiphys gates; a fan-out counts as one."""

    run: str
    pipeline: str
    phase: Phase
    reason: str
    submissions: int
    steps_done: int
    steps_total: int
    last_activity: Timestamp | None
    """The newest record that was read, by its writer's clock; None if none could be read."""


class SubmissionDetail(Record):
    """One Workflow of the run. ``status`` is empty while it has not said that it ended."""

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
    """One try of a step. ``outcome`` is empty while nobody has ended it."""

    step: str
    attempt: int
    submission: int
    outcome: str
    cause: str
    message: str
    evidence: Evidence | None = None
    """What its end was judged by; None where it has none, or was not judged."""
    escalation: str = ""
    """What it was given because of how attempts before it had ended."""
    exit_code: int | None
    starts_from: str
    """The checkpoint, as ``attempt-step``, with its lineage before it if it is of another run; empty for none."""
    opened_at: Timestamp
    ended_at: Timestamp | None
    outputs: dict[str, str]
    """Values of parameters, and keys of artifacts."""


class StepDetail(StepReport):
    """One task of the pipeline: what a resume would do with it, and all tries so far."""

    attempts: tuple[AttemptDetail, ...] = ()


class RunDetail(Document):
    """Everything that storage says of one run."""

    kind: Literal["Run"] = "Run"
    store: str
    summary: RunSummary
    parent: str = Field(default="", exclude_if=lambda parent: not parent)
    """The run that this one is a fork of."""
    parameters: dict[str, str]
    code_version: str | None
    submissions: tuple[SubmissionDetail, ...]
    steps: tuple[StepDetail, ...]


def runs_table(store: Store, submitter: Submitter | None = None) -> list[RunSummary]:
    """All runs, by name. A run that cannot be read is listed with the reason.

    Args:
        store: The store.
        submitter: A cluster that may know more of the runs sent to it.
    """
    names = list(list_runs(store))
    with ThreadPoolExecutor(max_workers=_READERS) as pool:
        return list(pool.map(lambda run: _row(store, run, submitter), names))


def describe(store: Store, run: str, submitter: Submitter | None = None) -> RunDetail:
    """Everything about one run.

    Raises:
        NotFoundError: there is no such run.
        UsageError: Tiphys did not compile its Workflow.
        IntegrityError: a record is damaged.
    """
    found = planned(store, run)
    attempts = all_attempts(store, run)
    record, changed = found.state.record, found.state.workflow is not found.state.record.workflow
    return RunDetail(
        store=store.url,
        summary=_summary(found, submitter),
        parent=record.parent,
        parameters=own_parameters(found.state.workflow) if changed else record.parameters,
        code_version=code_version(found.state.workflow) if changed else record.code_version,
        submissions=tuple(_submission(one) for one in found.state.submissions),
        steps=tuple(_step(report, attempts) for report in report_of(found, store.url).steps),
    )


def _row(store: Store, run: str, submitter: Submitter | None) -> RunSummary:
    try:
        return _summary(planned(store, run), submitter)
    except (IntegrityError, NotFoundError, UsageError) as error:
        return RunSummary(
            run=run,
            pipeline=_pipeline(store, run),
            phase=Phase.UNKNOWN,
            reason=str(error),
            submissions=0,
            steps_done=0,
            steps_total=0,
            last_activity=None,
        )


def _pipeline(store: Store, run: str) -> str:
    try:
        return read_run(store, run).pipeline
    except (IntegrityError, NotFoundError, UsageError):
        return ""


def _summary(found: Planned, submitter: Submitter | None) -> RunSummary:
    last = found.state.submissions[-1] if found.state.submissions else None
    phase, reason = phase_of(last, _seen(last, submitter))
    steps = found.pipeline.steps
    return RunSummary(
        run=found.state.record.run,
        pipeline=found.pipeline.name,
        phase=phase,
        reason=reason,
        submissions=len(found.state.submissions),
        steps_done=sum(task.name in steps and _is_done(found, task) for task in found.plan.tasks),
        steps_total=sum(task.name in steps for task in found.plan.tasks),
        last_activity=_last_activity(found),
    )


def _is_done(found: Planned, task: TaskPlan) -> bool:
    """Whether its result is there, even if another submission would make it again, as of a step without a cache."""
    if task.action is Action.SKIP:
        return True
    if task.items:
        return all(one.item and one.verdict.done for one in task.items)
    return found.state.verdict(task.name).done


def _seen(last: Submission | None, submitter: Submitter | None) -> Seen:
    if last is None or submitter is None:
        return Seen(visible=False)
    known = is_known(submitter.cluster)
    if known and cluster_of(last) not in ("", submitter.cluster):
        return Seen(visible=False)
    live = submitter.find(*place(last))
    same = live is not None and (last.bound is None or live.uid == last.bound.uid)
    return Seen(visible=known or same, live=live if same else None)


def _last_activity(found: Planned) -> datetime:
    records = [record for submission in found.state.submissions for record in submission if record is not None]
    return max(one.written_at for one in (found.state.record, *records, *found.state.ends.values()))


def _submission(one: Submission) -> SubmissionDetail:
    return SubmissionDetail(
        submission=one.claim.submission,
        kind=one.claim.kind.value,
        workflow_name=one.claim.workflow_name,
        namespace=one.claim.namespace,
        cluster=cluster_of(one),
        uid=one.bound.uid if one.bound else "",
        status=one.end.status if one.end else "",
        claimed_at=one.claim.written_at,
        ended_at=one.end.written_at if one.end else None,
    )


def _step(report: StepReport, attempts: dict[str, list[Attempt]]) -> StepDetail:
    own = [step for step in attempts if step.partition(".")[0] == report.name]
    tries: Sequence[Attempt] = [attempt for step in sorted(own) for attempt in attempts[step]]
    return StepDetail(**dict(report), attempts=tuple(_attempt(one) for one in tries))


def _attempt(one: Attempt) -> AttemptDetail:
    end = one.end
    return AttemptDetail(
        step=one.claim.step,
        attempt=one.claim.attempt,
        submission=one.claim.submission,
        outcome=end.outcome.value if end else "",
        cause=end.cause.value if end and end.cause else "",
        message=end.message if end else "",
        evidence=end.evidence if end else None,
        escalation=one.claim.escalation.words if one.claim.escalation else "",
        exit_code=end.exit_code if end else None,
        starts_from=one.claim.starts_from.within(one.claim.lineage) if one.claim.starts_from else "",
        opened_at=one.claim.written_at,
        ended_at=end.written_at if end else None,
        outputs={output.name: output.key if output.value is None else output.value for output in end.outputs}
        if end
        else {},
    )
