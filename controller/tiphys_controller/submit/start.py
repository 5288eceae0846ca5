"""Starts a run: records it, claims its first submission, creates its Workflow.

The record comes first, so that a start that crashed is completed by `resume_run`.
"""

import secrets
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tiphys.errors import ConflictError, UsageError
from tiphys.faults import failpoint
from tiphys.protocol.compiled_workflow import (
    CompiledPipeline,
    Manifest,
    contains_tags,
    read_workflow_parameters,
    substitute_tags,
)
from tiphys.protocol.step_spec import CODE_VERSION_ANNOTATION, RUN_PARAMETER, SUBMISSION_PARAMETER
from tiphys.records import RunRecord, SubmissionClaim, SubmissionKind, check_run_name, json_digest, make_run_name
from tiphys.store import RunLayout, Store, claim_record, claim_run
from tiphys.store.runs import check_name_free_of_leftovers, check_not_deleted
from tiphys_controller.plan.prune import SubmissionIdentity, apply_identity, workflow_name
from tiphys_controller.submit.submission import check_workflow_name_free, create_and_bind
from tiphys_controller.submit.submitter import Submitter

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


class RunOrigin(NamedTuple):
    """Origin of a new run: the run it was forked from, and the digest of its idempotency key; both may be empty."""

    parent: str = ""
    key: str = ""
    rerun_steps: tuple[str, ...] = ()
    """Steps that reuse nothing of the parent."""


def random_suffix() -> str:
    """Five random characters that distinguish the runs of a pipeline."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(_SUFFIX_LENGTH))


def start_run(
    store: Store,
    submitter: Submitter,
    manifest: Manifest,
    run: str | None = None,
    namespace: str = "default",
    suffix: Callable[[], str] = random_suffix,
) -> StartResult:
    """Start a run of a compiled pipeline.

    Args:
        store: Store of the run.
        submitter: Cluster that gets its Workflow.
        manifest: The compiled Workflow.
        run: Name of the run; None: the pipeline's ``run_name``, or else the
            pipeline's name and ``suffix``.
        namespace: Namespace of the Workflow.
        suffix: Returns the random part of a name.

    Raises:
        UsageError: the name is not valid or differs from the pipeline's
            ``run_name``, or Tiphys did not compile the Workflow.
        ConflictError: the run, or a Workflow of its name, exists.
    """
    pipeline = CompiledPipeline.from_manifest(manifest)
    return begin_run(store, submitter, pipeline, run, namespace, suffix, RunOrigin())


def begin_run(
    store: Store,
    submitter: Submitter,
    pipeline: CompiledPipeline,
    run: str | None,
    namespace: str,
    suffix: Callable[[], str],
    origin: RunOrigin,
) -> StartResult:
    """Like `start_run`, for a run that may be a fork."""
    record = _record_run(store, submitter, pipeline, run, namespace, suffix, origin)
    failpoint("start.after_record")
    if origin.parent:  # a deletion claims its run before it looks for forks, so one of the two sees the other
        check_not_deleted(store, origin.parent)
    claim = build_first_claim(record, submitter.cluster, namespace)
    claimed = claim_record(store, RunLayout(record.run).submission(1), claim)
    if not claimed.is_ours:
        raise ConflictError(
            f"another process submitted run {record.run} at the same time; see `tiphys get {record.run}`"
        )
    live = create_and_bind(store, submitter, claim, record.workflow, "start")
    return StartResult(record.run, 1, live.name, live.uid)


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


def candidate_run_names(pipeline: CompiledPipeline, run: str | None, suffix: Callable[[], str]) -> Iterator[str]:
    """Names to try for a run: the given or authored one, else several with a random suffix.

    Raises:
        UsageError: the name is not valid, or differs from the pipeline's ``run_name``.
    """
    run = check_authored_name(pipeline, run) or run
    for _ in range(1 if run else _NAME_ATTEMPTS):
        yield check_run_name(run or f"{pipeline.name[:_LONGEST_PIPELINE].rstrip('-.')}-{suffix()}")


def build_run_record(pipeline: CompiledPipeline, run: str, namespace: str, origin: RunOrigin) -> RunRecord:
    """The record of a run of ``pipeline`` under the name ``run``."""
    workflow = apply_identity(pipeline.manifest, SubmissionIdentity(run, 1, workflow_name(run, 1), namespace))
    return RunRecord(
        run=run,
        pipeline=pipeline.name,
        workflow=workflow,
        digest=json_digest(workflow),
        parameters=author_parameters(workflow),
        code_version=read_code_version(workflow),
        parent=origin.parent,
        rerun_steps=origin.rerun_steps,
        key=origin.key,
    )


def author_parameters(workflow: Manifest) -> dict[str, str]:
    """Values of the workflow parameters that an author declared."""
    tiphys_parameters = (RUN_PARAMETER, SUBMISSION_PARAMETER)
    return {name: value for name, value in read_workflow_parameters(workflow).items() if name not in tiphys_parameters}


def read_code_version(workflow: Manifest) -> str | None:
    """Commit of the code that a Workflow was compiled from; None if not recorded."""
    version: str | None = (workflow["metadata"].get("annotations") or {}).get(CODE_VERSION_ANNOTATION)
    return version


def _record_run(
    store: Store,
    submitter: Submitter,
    pipeline: CompiledPipeline,
    run: str | None,
    namespace: str,
    suffix: Callable[[], str],
    origin: RunOrigin,
) -> RunRecord:
    name = ""
    for name in candidate_run_names(pipeline, run, suffix):
        check_workflow_name_free(store, submitter, namespace, name, 1)
        check_name_free_of_leftovers(store, name)
        record = build_run_record(pipeline, name, namespace, origin)
        if claim_run(store, record).is_ours:
            return record
    raise ConflictError(
        f"{store.url} already has a run {name!r}; choose another name, or continue it with `tiphys resume {name}`"
    )


def check_authored_name(pipeline: CompiledPipeline, requested_name: str | None) -> str:
    """The name that the pipeline's ``run_name`` yields; empty without one. The plugin gets the same name from Argo.

    Raises:
        UsageError: a parameter in it has no value, or ``requested_name`` differs from it.
    """
    values = {
        f"workflow.parameters.{name}": value for name, value in read_workflow_parameters(pipeline.manifest).items()
    }
    text = substitute_tags(pipeline.run_name, values.get)
    if contains_tags(text):
        raise UsageError(
            f"pipeline {pipeline.name} names its runs {pipeline.run_name!r}, and a parameter in it has no value; "
            "set the parameter"
        )
    name = make_run_name(text) if text else ""
    if name and requested_name not in (None, name):
        raise UsageError(
            f"pipeline {pipeline.name} names its runs itself, and this one {name!r}, not {requested_name!r}; "
            "leave the name "
            "out, change the parameters that it is made from, or take run_name out of the pipeline"
        )
    return name
