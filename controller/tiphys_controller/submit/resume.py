"""Resumes a run from storage alone.

The order of writes makes a resume safe against crashes and races: record what
the last Workflow shows and nobody has recorded, fence the open attempts, claim
the next submission, record what it takes over, create its Workflow, bind it. Every
write is create-only. A fence and a late finish write the same end record, so
the first of them decides; if a step finished first, the run is planned again.
A claim whose Workflow was never created is completed by the next resume.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from tiphys.errors import ConflictError, IntegrityError, NotFoundError, ObjectExistsError, StoreError, TiphysError
from tiphys.faults import failpoint
from tiphys.lineage.run_history import RunHistory
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.records import (
    AttemptEndOutcome,
    Event,
    SubmissionClaim,
    SubmissionEnd,
    SubmissionKind,
    task_name,
)
from tiphys.store import (
    RunLayout,
    Store,
    Submission,
    append_events,
    claim_record,
    end_submission,
    open_submission,
    pass_over_end,
    read_submissions,
)
from tiphys.store.runs import deletion_message
from tiphys_controller.plan.decide import check_rerun_volumes
from tiphys_controller.plan.drift import check_drift_allowed, format_drift
from tiphys_controller.plan.observe import load_ends
from tiphys_controller.plan.prune import SubmissionIdentity, prune_workflow, workflow_name
from tiphys_controller.plan.step_state import AttemptId
from tiphys_controller.submit.fencing import fence_attempts, find_workflow_end
from tiphys_controller.submit.idempotency import digest_idempotency_key
from tiphys_controller.submit.plan_report import PlanRefusal, PlanReport, build_plan_report
from tiphys_controller.submit.planner import (
    RunPlan,
    WorkflowChange,
    build_workflow_record,
    check_workflow_digest,
    plan_stored_run,
    recorded_namespace,
)
from tiphys_controller.submit.start import first_submission_kind
from tiphys_controller.submit.submission import (
    NextSubmission,
    check_workflow_name_free,
    choose_next_submission,
    create_and_bind,
    find_workflow,
    is_bound_workflow,
    recover_created_workflow,
    submission_cluster,
)
from tiphys_controller.submit.submitter import LiveWorkflow, Submitter, is_stable_cluster_name
from tiphys_controller.submit.takeovers import record_live_workflow, record_takeovers


class ResumeRequest(NamedTuple):
    """What a resume shall do beyond running what is missing.

    ``rerun`` are steps to run again, ``key`` is the digest of an idempotency key;
    both may be empty. ``workflow`` is the digest of a changed Workflow; None
    keeps that of the last submission.
    """

    rerun: tuple[str, ...] = ()
    key: str = ""
    workflow: str | None = None

    def is_satisfied_by(self, claimed: SubmissionClaim) -> bool:
        """Whether a claimed submission does all that this request names. A plain resume names nothing."""
        return self.rerun in ((), claimed.rerun_roots) and self.workflow in (None, claimed.workflow)

    def check_unsent_claim(self, next_submission: NextSubmission, force: bool) -> NextSubmission:
        """Return ``next_submission`` if its claim satisfies this request; with ``force``, else the number after it.

        The newer claim fences the skipped submission, even if its Workflow is created late.

        Raises:
            ConflictError: the submission was claimed for another request.
        """
        claimed = next_submission.unsent_claim
        if claimed is None or self.is_satisfied_by(claimed):
            return next_submission
        if force:
            return NextSubmission(claimed.submission + 1, claimed.namespace)
        due = ", ".join(dict.fromkeys(map(task_name, claimed.steps)))
        raise ConflictError(
            f"submission {claimed.submission} of run {claimed.run} was claimed and never sent; it runs {due}, which "
            f"this request does not match. Send it with `tiphys resume {claimed.run}`, or skip it with --force"
        )


def claim_submission(
    store: Store, submitter: Submitter, run_plan: RunPlan, request: ResumeRequest, next_submission: NextSubmission
) -> SubmissionClaim:
    """Claim the next submission of a run; the claim records the whole request.

    Raises:
        ConflictError: another process claimed the submission first.
        NotFoundError: the run is being deleted.
    """
    record, previous_claim = run_plan.state.record, run_plan.last_submission.claim if run_plan.last_submission else None
    run, since = record.run, (previous_claim or record).rerun_since
    claim = SubmissionClaim(
        run=run,
        submission=next_submission.submission,
        kind=SubmissionKind.RESUME if next_submission.submission > 1 else first_submission_kind(record),
        workflow_name=workflow_name(run, next_submission.submission),
        namespace=next_submission.namespace,
        cluster=submitter.cluster,
        steps=run_plan.decisions.due_steps,
        rerun_roots=run_plan.rerun_roots,
        rerun_since={**since, **dict.fromkeys(run_plan.rerun_steps, next_submission.submission)},
        workflow=request.workflow
        if request.workflow is not None
        else previous_claim.workflow
        if previous_claim
        else "",
        key=request.key,
    )
    existing, is_ours = open_submission(store, claim)
    if not is_ours and existing.kind is SubmissionKind.DELETION:
        raise NotFoundError(deletion_message(store, run))
    if not is_ours:
        raise ConflictError(
            f"another process resumes run {run}: submission {next_submission.submission} was claimed at "
            f"{existing.written_at:%H:%M:%S} "
            f"UTC for cluster {existing.cluster or 'unknown'} as Workflow {existing.namespace}/{existing.workflow_name}"
        )
    return claim


def build_resumed_event(
    run_plan: RunPlan,
    claimed: SubmissionClaim,
    workflow: LiveWorkflow,
    fenced: tuple[str, ...],
    passed_over: tuple[str, ...],
) -> Event:
    """Event of a resume, for people and dashboards."""
    running = run_plan.decisions.running_tasks
    skipped = [task.name for task in run_plan.decisions.tasks if task.name not in running]
    message = f"submission {claimed.submission} runs {', '.join(running)}"
    if skipped:
        message += f"; finished before: {', '.join(skipped)}"
    if run_plan.drift:
        message += f"; changed: {', '.join(dict.fromkeys(finding.drift.value for finding in run_plan.drift))}"
    if claimed.rerun_roots:
        message += f"; rerun on request: {', '.join(map(run_plan.names.name, claimed.rerun_roots))}"
    if passed_over:
        message += f"; damaged records passed over: {', '.join(passed_over)}"
    data = {
        "submission": claimed.submission,
        "workflow": workflow.name,
        "run": list(running),
        "skipped": skipped,
        "fenced": list(fenced),
        "again": list(claimed.rerun_roots),
        "passed_over": list(passed_over),
        "drift": [format_drift(finding) for finding in run_plan.drift],
    }
    return Event(name="run.resumed", message=message, data=data)


def plan_run(
    store: Store, run: str, rerun: Sequence[str] = (), change: WorkflowChange | None = None, *, force: bool = False
) -> PlanReport:
    """Plan a run and write nothing; the plan says whether `resume_run` will refuse it.

    ``rerun`` and ``change`` are as in `resume_run`. ``force``: the resume may pass over damaged end records.

    Raises:
        NotFoundError: there is no such run.
        UsageError: Tiphys did not compile its Workflow, or a step does not exist.
        IntegrityError: a record is damaged, so that there is no plan.
    """
    return _report_plan(store, plan_stored_run(store, run, rerun, change, takes_over=True), force=force)


def _report_plan(store: Store, run_plan: RunPlan, *, force: bool) -> PlanReport:
    report = build_plan_report(run_plan, store.url)
    try:
        _check_plan(store, run_plan, force=force)
    except TiphysError as error:
        if isinstance(error, StoreError):
            raise
        return report.model_copy(update={"refusal": PlanRefusal(message=str(error), exit_code=error.exit_code)})
    return report


def _check_plan(store: Store, run_plan: RunPlan, *, force: bool) -> tuple[AttemptId, ...]:
    """Check all that storage shows about a resume; returns the damaged end records to pass over.

    Raises:
        UsageError: the run cannot be pruned, or a rerun would resume from checkpoints on a volume.
        ConflictError: the drift policy forbids a change.
        IntegrityError: a record is damaged, and may not be passed over.
    """
    check_rerun_volumes(run_plan.pipeline, run_plan.rerun_steps)
    if not run_plan.decisions.running_tasks:
        return ()
    _prune_for(store, run_plan, NextSubmission(len(run_plan.state.submissions) + 1, "default"))
    check_workflow_digest(run_plan.state.record)
    check_drift_allowed(run_plan.drift, run_plan.state.record.run, is_fork=False)
    return _find_damaged_ends(run_plan, force)


class ResumeResult(NamedTuple):
    """Outcome of a resume. ``submission`` is None if nothing was submitted."""

    run: str
    plan: PlanReport
    submission: int | None = None
    workflow_name: str = ""
    uid: str = ""
    fenced: tuple[str, ...] = ()
    """Fenced attempts of the previous submission, as ``step/attempt``."""
    passed_over: tuple[str, ...] = ()
    """Keys of damaged end records whose steps run again."""
    created: bool = True
    """False if an earlier call under the same key submitted it."""


def resume_run(
    store: Store,
    submitter: Submitter,
    run: str,
    force: bool = False,
    dry_run: bool = False,
    namespace: str = "",
    rerun: Sequence[str] = (),
    key: str | None = None,
    change: WorkflowChange | None = None,
    *,
    is_recorded: bool = False,
    gone_cluster: str = "",
) -> ResumeResult:
    """Submit the missing steps of a run, once.

    Nothing is submitted if nothing is missing. After a crash between claim and
    create, the next resume uses the claimed number.

    Args:
        store: Store of the run.
        submitter: Cluster that gets the next Workflow.
        run: Name of the run.
        force: Resume although the last submission may still be running, and pass over damaged end records.
        dry_run: Plan as `plan_run` does, and write nothing.
        namespace: Namespace of the run's first Workflow in this cluster; empty: as recorded.
        rerun: Steps to run again although they are done, with all steps that depend on them; their damaged end
            records are passed over.
        key: Idempotency key: all calls under one key make one submission and return it.
        change: A changed Workflow; None: that of the last submission.
        is_recorded: The caller has just recorded the steps of the last Workflow.
        gone_cluster: Name of a cluster that runs nothing any more; empty if none is known.

    Raises:
        NotFoundError: there is no such run.
        UsageError: the run cannot be pruned, a step does not exist, or the key is not valid.
        ConflictError: the run is still running, another process resumes it, or the drift policy forbids a change.
        IntegrityError: a record is damaged.
    """
    if not dry_run and not is_recorded:
        record_live_workflow(store, submitter, run, RunHistory(store, run).last_submission)
    run_plan = plan_stored_run(store, run, rerun, change, takes_over=True)
    check_rerun_volumes(run_plan.pipeline, run_plan.rerun_steps)
    request = ResumeRequest(
        run_plan.rerun_roots if rerun else (),
        "" if key is None else digest_idempotency_key(key),
        _changed_workflow_digest(run_plan, change),
    )
    if earlier := _find_earlier_result(store, run_plan, request):
        return earlier
    try:
        options = _ResumeOptions(request, change, force, dry_run, namespace, gone_cluster)
        return _submit_missing(store, submitter, run_plan, options)
    except ConflictError:
        # A call under the same key may have been faster. Its submission tells, so the run is not planned again.
        if request.key:
            state = replace(run_plan.state, submissions=tuple(read_submissions(store, run)))
            if earlier := _find_earlier_result(store, run_plan._replace(state=state), request):
                return earlier
        raise


class _ResumeOptions(NamedTuple):
    """Arguments of a resume beside the run."""

    request: ResumeRequest
    change: WorkflowChange | None
    force: bool
    dry_run: bool
    namespace: str
    gone_cluster: str


def _changed_workflow_digest(run_plan: RunPlan, change: WorkflowChange | None) -> str | None:
    """Digest of the changed Workflow, empty for that of ``run.json``; None without a change."""
    if change is None or change.workflow is None:
        return None
    digest = build_workflow_record(run_plan.state.record, change.workflow).digest
    return "" if digest == run_plan.state.record.digest else digest


def _find_earlier_result(store: Store, run_plan: RunPlan, request: ResumeRequest) -> ResumeResult | None:
    """Result of an earlier call under the same key, if its submission was bound or has a successor."""
    for submission in run_plan.state.submissions if request.key else ():
        if submission.answers(request.key) and (submission.binding or submission is not run_plan.last_submission):
            uid = submission.binding.uid if submission.binding else ""
            plan = build_plan_report(run_plan, store.url)
            return ResumeResult(
                run_plan.state.record.run,
                plan,
                submission.claim.submission,
                submission.claim.workflow_name,
                uid,
                created=False,
            )
    return None


def _submit_missing(store: Store, submitter: Submitter, run_plan: RunPlan, options: _ResumeOptions) -> ResumeResult:
    run, request = run_plan.state.record.run, options.request
    if not run_plan.decisions.running_tasks:
        if not options.dry_run:
            _end_without_workflow(store, submitter, run_plan.last_submission, options.gone_cluster)
        return ResumeResult(run, build_plan_report(run_plan, store.url))
    if options.dry_run:
        return ResumeResult(run, _report_plan(store, run_plan, force=options.force))
    damaged_ends = _check_plan(store, run_plan, force=options.force)  # before the first write
    if recovered := _recover_unbound_workflow(store, submitter, run_plan, request):
        claimed = run_plan.state.submissions[-1].claim
        _join_claim(store, claimed, request)
        report = build_plan_report(run_plan, store.url)
        return ResumeResult(run, report, claimed.submission, recovered.name, recovered.uid)
    live = find_workflow(submitter, run_plan.last_submission) if run_plan.last_submission else None
    next_submission = _choose_submission(store, submitter, run_plan, options, live)
    workflow_end = find_workflow_end(run_plan.last_submission, live, force=options.force)
    fenced = fence_attempts(store, run, run_plan.state.open_attempts, workflow_end)
    failpoint("resume.after_fence")
    for damaged in damaged_ends:
        pass_over_end(store, run, *damaged, _describe_command(request, options.force))
    if any(end.outcome is AttemptEndOutcome.DONE for end in fenced):
        run_plan = plan_stored_run(store, run, request.rerun, options.change, takes_over=True)
        if not run_plan.decisions.running_tasks:
            return ResumeResult(run, build_plan_report(run_plan, store.url))
    if options.change is not None and options.change.workflow is not None and request.workflow:
        record = build_workflow_record(run_plan.state.record, options.change.workflow)
        claim_record(store, RunLayout(run).workflow(record.digest), record)
        failpoint("resume.after_workflow")
    if next_submission.unsent_claim:
        claimed = next_submission.unsent_claim
        _join_claim(store, claimed, request)
    else:
        claimed = claim_submission(store, submitter, run_plan, request, next_submission)
    record_takeovers(store, run, claimed.submission, run_plan.taken_over)
    created = create_and_bind(store, submitter, claimed, _prune_for(store, run_plan, next_submission), "resume")
    fenced_names = tuple(f"{end.step}/{end.attempt}" for end in fenced if end.outcome is AttemptEndOutcome.FENCED)
    passed_over = tuple(RunLayout(run).attempt_end(*damaged) for damaged in damaged_ends)
    append_events(
        store, run, "controller", [build_resumed_event(run_plan, claimed, created, fenced_names, passed_over)]
    )
    return ResumeResult(
        run,
        build_plan_report(run_plan, store.url),
        claimed.submission,
        created.name,
        created.uid,
        fenced_names,
        passed_over=passed_over,
    )


def _join_claim(store: Store, claimed: SubmissionClaim, request: ResumeRequest) -> None:
    """Record that a claim under another key, or none, answers this request: it may not be answered twice."""
    if request.key not in ("", claimed.key):
        with contextlib.suppress(ObjectExistsError):
            store.create(RunLayout(claimed.run).submission_key(claimed.submission, request.key), b"")
        failpoint("resume.after_join")


def _end_without_workflow(store: Store, submitter: Submitter, last: Submission | None, gone_cluster: str) -> None:
    """Record the end of a submission without a Workflow, once all steps are done; no exit handler will.

    Its Workflow was deleted, or lost with its cluster, after its last step. Or it was claimed and never sent, as by a
    resume by force that was killed, and the one before it finished the run.
    """
    if last is None or last.end is not None:
        return
    cluster = last.binding.cluster if last.binding else last.claim.cluster
    if cluster != gone_cluster:
        is_visible = cluster == submitter.cluster and is_stable_cluster_name(submitter.cluster)
        live = find_workflow(submitter, last) if is_visible else None
        if not is_visible or (live is not None and (last.binding is None or is_bound_workflow(last, live))):
            return
    message = "its Workflow was gone" if last.binding else "it was never sent, and is not needed any more"
    message += ": all steps were done"
    run, submission = last.claim.run, last.claim.submission
    end = SubmissionEnd(run=run, submission=submission, status="Succeeded", message=message)
    end_submission(store, end, may_be_resumed=False)


def _find_damaged_ends(run_plan: RunPlan, force: bool) -> tuple[AttemptId, ...]:
    """Damaged end records of the steps to run, which ``force`` or a requested rerun of their step passes over.

    The service reads all attempts of a step that runs, so all of them are read where records may be passed over.

    Raises:
        IntegrityError: a record may not be passed over.
    """
    allowed = {step for step in run_plan.state.steps if _may_pass_over(run_plan, step, force)}
    ends = [(step, attempt) for step in allowed for attempt in run_plan.state.steps[step].ended_attempts]
    damaged = load_ends(run_plan.history, run_plan.state, ends).damaged_ends
    refused = [damage for (step, _), damage in sorted(damaged.items()) if step not in allowed]
    if refused:
        run = run_plan.state.record.run
        more = f" ({len(refused) - 1} more in `tiphys verify {run}`)" if len(refused) > 1 else ""
        raise IntegrityError(f"{refused[0]}{more}")
    return tuple(sorted(damaged))


def _may_pass_over(run_plan: RunPlan, step: str, force: bool) -> bool:
    """Whether a step or item runs, and damaged records of it may be passed over."""
    task = task_name(step)
    is_requested = force or step in run_plan.rerun_steps or task in run_plan.rerun_steps
    return is_requested and task in run_plan.decisions.running_tasks


def _describe_command(request: ResumeRequest, force: bool) -> str:
    options = ["--force"] * force + [f"--from {step}" for step in request.rerun]
    return f"`tiphys resume {' '.join(options)}`"


def _recover_unbound_workflow(
    store: Store, submitter: Submitter, run_plan: RunPlan, request: ResumeRequest
) -> LiveWorkflow | None:
    """Bind a running Workflow whose creator crashed before binding it; None if there is none.

    None also if the Workflow does not satisfy the request: it must end before the next submission.
    """
    last = run_plan.last_submission
    if last is None or last.binding or submission_cluster(last) not in ("", submitter.cluster):
        return None
    live = recover_created_workflow(store, submitter, last.claim)
    return live if live and live.running and request.is_satisfied_by(last.claim) else None


def _choose_submission(
    store: Store, submitter: Submitter, run_plan: RunPlan, options: _ResumeOptions, live: LiveWorkflow | None
) -> NextSubmission:
    namespace = options.namespace or recorded_namespace(run_plan.state.record)
    next_submission = choose_next_submission(
        run_plan.last_submission, live, submitter.cluster, namespace, options.force, options.gone_cluster
    )
    next_submission = options.request.check_unsent_claim(next_submission, options.force)
    if next_submission.unsent_claim is None:
        check_workflow_name_free(
            store, submitter, next_submission.namespace, run_plan.state.record.run, next_submission.submission
        )
    return next_submission


def _prune_for(store: Store, run_plan: RunPlan, next_submission: NextSubmission) -> Manifest:
    run = run_plan.state.record.run
    name = (
        next_submission.unsent_claim.workflow_name
        if next_submission.unsent_claim
        else workflow_name(run, next_submission.submission)
    )
    return prune_workflow(
        run_plan.pipeline,
        run_plan.decisions,
        store.artifact_key,
        SubmissionIdentity(run, next_submission.submission, name, next_submission.namespace),
    )
