"""Starts a run: records it, claims its first submission, creates its Workflow.

The record comes first, so that a start that crashed is completed by `resume_run`. What the
run takes over from others is decided and recorded before its Workflow exists.
"""

import secrets
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tiphys.errors import ConflictError
from tiphys.faults import failpoint
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.records import (
    IdempotencyKeyRecord,
    RunRecord,
    SubmissionBinding,
    SubmissionClaim,
    SubmissionKind,
    check_run_name,
    json_digest,
)
from tiphys.store import RunLayout, Store, claim_run, find_record, open_submission
from tiphys.store.runs import check_name_free_of_leftovers, check_not_deleted
from tiphys_controller.plan.prune import SubmissionIdentity, apply_identity, prune_workflow, workflow_name
from tiphys_controller.plan.step_state import ReusedResult
from tiphys_controller.submit.authored_facts import author_parameters, check_authored_name, read_code_version
from tiphys_controller.submit.idempotency import StartRequest, find_started_run, reserve_run
from tiphys_controller.submit.planner import plan_stored_run
from tiphys_controller.submit.submission import check_workflow_name_free, create_and_bind, recover_created_workflow
from tiphys_controller.submit.submitter import Submitter
from tiphys_controller.submit.takeovers import record_takeovers

# Characters that are hard to confuse. Without vowels they spell no word.
_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
_SUFFIX_LENGTH = 5
_LONGEST_PIPELINE = 57
_NAME_ATTEMPTS = 5


class StartResult(NamedTuple):
    """The first submission of a run. ``created`` is False if an earlier call under the same key sent it."""

    run: str
    submission: int
    workflow_name: str
    uid: str
    created: bool = True
    taken_over: tuple[str, ...] = ()
    """Steps and items of which it takes over a result, each with where it is from: ``prep (run a, attempt 1)``."""


def random_suffix() -> str:
    """Five random characters that distinguish the runs of a pipeline."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(_SUFFIX_LENGTH))


class NewRun(NamedTuple):
    """What a run begins with."""

    pipeline: CompiledPipeline
    name: str | None
    """None: the pipeline's ``run_name``, or else the pipeline's name and ``suffix``."""
    namespace: str
    suffix: Callable[[], str] = random_suffix
    parent: str = ""
    """The run that it is forked from; empty for none."""
    rerun_steps: tuple[str, ...] = ()
    """Steps that reuse nothing of the parent."""
    key: str = ""
    """Digest of its idempotency key; empty without one."""


def start_run(
    store: Store,
    submitter: Submitter,
    manifest: Manifest,
    run: str | None = None,
    namespace: str = "default",
    suffix: Callable[[], str] = random_suffix,
    key: str | None = None,
) -> StartResult:
    """Start a run of a compiled pipeline; returns its first submission.

    Args:
        store: Store of the run.
        submitter: Cluster that gets its Workflow.
        manifest: The compiled Workflow.
        run: Name of the run; None: the pipeline's ``run_name``, or else the
            pipeline's name and ``suffix``.
        namespace: Namespace of the Workflow.
        suffix: Returns the random part of a name.
        key: Idempotency key: all calls under one key start one run and return it.

    Raises:
        UsageError: the key is not valid, the name is not or differs from the pipeline's
            ``run_name``, or Tiphys did not compile the Workflow.
        ConflictError: the run, or a Workflow of its name, exists without this key, the key was used
            for another request, or the run was begun for another cluster.
    """
    pipeline = CompiledPipeline.from_manifest(manifest)
    digest = json_digest({"workflow": manifest, "run": run or "", "namespace": namespace})
    request = StartRequest(key, digest, f"{run or 'a run'} of pipeline {pipeline.name}")
    return begin_run(store, submitter, NewRun(pipeline, run, namespace, suffix), request)


def begin_run(store: Store, submitter: Submitter, new: NewRun, request: StartRequest) -> StartResult:
    """Like `start_run`, for a run that may be a fork. ``request`` counts if it has a key."""
    if request.key is not None:
        return _begin_run_once(store, submitter, new, request)
    record = _record_run(store, submitter, new)
    failpoint("start.after_record")
    if new.parent:  # a deletion claims its run before it looks for forks, so one of the two sees the other
        check_not_deleted(store, new.parent)
    claim = build_first_claim(record, submitter.cluster, new.namespace)
    if not open_submission(store, claim).is_ours:
        raise ConflictError(
            f"another process submitted run {record.run} at the same time; see `tiphys get {record.run}`"
        )
    return submit_first(store, submitter, record, claim)


def submit_first(store: Store, submitter: Submitter, record: RunRecord, claim: SubmissionClaim) -> StartResult:
    """Create the first Workflow of a recorded run, without the steps of which it takes over a result.

    Raises:
        ConflictError: another Workflow is bound to the submission.
    """
    workflow, taken_over = record.workflow, tuple[str, ...]()
    pipeline = CompiledPipeline.from_manifest(workflow)
    if record.parent or any(spec.share for spec in pipeline.steps.values()):
        run_plan = plan_stored_run(store, record.run, takes_over=True)
        record_takeovers(store, record.run, claim.submission, run_plan.taken_over)
        failpoint("start.after_takeover")
        # Also what an earlier call, which crashed, has recorded.
        reused = {step: found for step, found in run_plan.state.reused.items() if not run_plan.decisions.is_due(step)}
        if reused:
            identity = SubmissionIdentity(record.run, claim.submission, claim.workflow_name, claim.namespace)
            workflow = prune_workflow(run_plan.pipeline, run_plan.decisions, store.artifact_key, identity)
            taken_over = tuple(
                _describe_takeover(run_plan.names.name(step), reused[step]) for step in run_plan.names.sort(reused)
            )
    live = create_and_bind(store, submitter, claim, workflow, "start")
    return StartResult(record.run, claim.submission, live.name, live.uid, taken_over=taken_over)


def _describe_takeover(name: str, reused: ReusedResult) -> str:
    source = f"run {reused.end.run}, attempt {reused.end.attempt}" if reused.end else reused.source
    return f"{name} ({source})"


def first_submission_kind(record: RunRecord) -> SubmissionKind:
    """Kind of the first submission of a run."""
    return SubmissionKind.FORK if record.parent else SubmissionKind.ORIGINAL


def build_first_claim(record: RunRecord, cluster: str, namespace: str) -> SubmissionClaim:
    """The claim of the first submission of a run."""
    return SubmissionClaim(
        run=record.run,
        submission=1,
        kind=first_submission_kind(record),
        workflow_name=workflow_name(record.run, 1),
        namespace=namespace,
        cluster=cluster,
        rerun_since=record.rerun_since,
        key=record.key,
    )


def candidate_run_names(new: NewRun) -> Iterator[str]:
    """Names to try for a run: the given or authored one, else several with a random suffix.

    Raises:
        UsageError: the name is not valid, or differs from the pipeline's ``run_name``.
    """
    name = check_authored_name(new.pipeline, new.name) or new.name
    for _ in range(1 if name else _NAME_ATTEMPTS):
        yield check_run_name(name or f"{new.pipeline.name[:_LONGEST_PIPELINE].rstrip('-.')}-{new.suffix()}")


def build_run_record(new: NewRun, run: str) -> RunRecord:
    """The record of a run under the name ``run``."""
    identity = SubmissionIdentity(run, 1, workflow_name(run, 1), new.namespace)
    workflow = apply_identity(new.pipeline.manifest, identity)
    return RunRecord(
        run=run,
        pipeline=new.pipeline.name,
        workflow=workflow,
        digest=json_digest(workflow),
        parameters=author_parameters(workflow),
        code_version=read_code_version(workflow),
        parent=new.parent,
        rerun_steps=new.rerun_steps,
        key=new.key,
    )


def _record_run(store: Store, submitter: Submitter, new: NewRun) -> RunRecord:
    name = ""
    for name in candidate_run_names(new):
        check_workflow_name_free(store, submitter, new.namespace, name, 1)
        check_name_free_of_leftovers(store, name)
        record = build_run_record(new, name)
        if claim_run(store, record).is_ours:
            return record
    raise ConflictError(
        f"{store.url} already has a run {name!r}; choose another name, or continue it with `tiphys resume {name}`"
    )


def _begin_run_once(store: Store, submitter: Submitter, new: NewRun, request: StartRequest) -> StartResult:
    new = new._replace(key=request.key_digest)
    reservation = find_started_run(store, request)
    if reservation is None:
        try:
            name = _find_free_name(store, submitter, new)
        except ConflictError:  # the same request, sent twice at once, may have taken the name since
            reservation = find_started_run(store, request)
            if reservation is None:
                raise
        else:
            reservation = reserve_run(store, request, name, new.namespace)
    failpoint("start.after_key")
    record = _claim_run_record(store, new, reservation)
    claim = build_first_claim(record, submitter.cluster, new.namespace)
    existing = open_submission(store, claim).record
    binding = find_record(store, RunLayout(record.run).submission_binding(1), SubmissionBinding)
    if binding is not None:
        return StartResult(record.run, 1, binding.workflow_name, binding.uid, created=False)
    if existing.cluster not in ("", submitter.cluster):
        raise ConflictError(
            f"run {record.run} was begun under this key for cluster {existing.cluster} and may run there; cluster "
            f"{submitter.cluster} does not show it. Repeat the call there, or use `tiphys resume {record.run} --force`"
        )
    if live := recover_created_workflow(store, submitter, existing):
        return StartResult(record.run, 1, live.name, live.uid, created=False)
    return submit_first(store, submitter, record, existing)


def _find_free_name(store: Store, submitter: Submitter, new: NewRun) -> str:
    name = ""
    for name in candidate_run_names(new):
        check_workflow_name_free(store, submitter, new.namespace, name, 1)
        if find_record(store, RunLayout(name).run_record, RunRecord) is None:
            check_name_free_of_leftovers(store, name)
            return name
    raise _name_taken_error(store, name)


def _claim_run_record(store: Store, new: NewRun, reservation: IdempotencyKeyRecord) -> RunRecord:
    record = build_run_record(new._replace(namespace=reservation.namespace), reservation.run)
    existing = claim_run(store, record).record
    if existing.key != new.key:
        raise _name_taken_error(store, reservation.run)
    failpoint("start.after_record")
    if new.parent:
        check_not_deleted(store, new.parent)
    return existing


def _name_taken_error(store: Store, name: str) -> ConflictError:
    return ConflictError(
        f"{store.url} already has a run {name!r}, which was not begun under this key; choose another name, or continue "
        f"it with `tiphys resume {name}`"
    )
