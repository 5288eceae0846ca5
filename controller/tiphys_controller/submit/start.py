"""Begin a run: record it, claim its first submission, create its Workflow."""

import secrets
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tiphys.errors import ConflictError, UsageError
from tiphys.faults import failpoint
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest, parameters_of
from tiphys.protocol.step_spec import CODE_VERSION_ANNOTATION, RUN_PARAMETER, SUBMISSION_PARAMETER
from tiphys.records import RunRecord, SubmissionClaim, SubmissionKind, check_run, digest, run_name
from tiphys.store import RunLayout, Store, claim
from tiphys_controller.plan.dag import has_tags, substitute
from tiphys_controller.plan.prune import Identity, identified, workflow_name
from tiphys_controller.submit.submission import check_free, send
from tiphys_controller.submit.submitter import Submitter

# Letters and digits that nobody mistakes for another, and that spell no word.
_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
_SUFFIX_LENGTH = 5
_LONGEST_PIPELINE = 57
_NAME_ATTEMPTS = 5


class Started(NamedTuple):
    """The first submission of a run. ``created`` is False where an earlier call under the same key had sent it."""

    run: str
    submission: int
    workflow_name: str
    uid: str
    created: bool = True


class Origin(NamedTuple):
    """Where a new run comes from: ``parent`` is the run that it is a fork of, ``key`` the digest of its key."""

    parent: str = ""
    key: str = ""
    fresh: tuple[str, ...] = ()
    """Steps that take over nothing from the parent."""


def random_suffix() -> str:
    """Five characters that tell runs of one pipeline apart."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(_SUFFIX_LENGTH))


def start(
    store: Store,
    submitter: Submitter,
    manifest: Manifest,
    run: str | None = None,
    namespace: str = "default",
    suffix: Callable[[], str] = random_suffix,
) -> Started:
    """Start a run of a compiled pipeline.

    Args:
        store: Where the run is kept.
        submitter: Where its Workflow goes.
        manifest: The compiled Workflow.
        run: Name of the run; None: what the author's ``run_name`` makes, else the
            pipeline's name and ``suffix``.
        namespace: Namespace of the Workflow.
        suffix: Gives the random part of a name.

    Raises:
        UsageError: the name is not valid, or not the one that the pipeline
            makes; or Tiphys did not compile the Workflow.
        ConflictError: the run, or a Workflow of its name, exists.
    """
    pipeline = CompiledPipeline.from_manifest(manifest)
    return begin(store, submitter, pipeline, run, namespace, suffix, Origin())


def begin(
    store: Store,
    submitter: Submitter,
    pipeline: CompiledPipeline,
    run: str | None,
    namespace: str,
    suffix: Callable[[], str],
    origin: Origin,
) -> Started:
    """Like `start`, for a run that may go on from another one."""
    record = _recorded(store, submitter, pipeline, run, namespace, suffix, origin)
    failpoint("start.after_record")
    wanted = first_claim(record, submitter.cluster, namespace)
    taken = claim(store, RunLayout(record.run).submission(1), wanted)
    if not taken.won:
        raise ConflictError(f"run {record.run} was submitted by somebody else in this moment; see `tiphys get`")
    live = send(store, submitter, wanted, record.workflow, "start")
    return Started(record.run, 1, live.name, live.uid)


def first_kind(record: RunRecord) -> SubmissionKind:
    """What the first submission of a run is."""
    return SubmissionKind.FORK if record.parent else SubmissionKind.ORIGINAL


def first_claim(record: RunRecord, cluster: str, namespace: str) -> SubmissionClaim:
    """The claim of the first submission of a run."""
    return SubmissionClaim(
        run=record.run,
        submission=1,
        kind=first_kind(record),
        workflow_name=workflow_name(record.run, 1),
        namespace=namespace,
        cluster=cluster,
        fresh_since=dict.fromkeys(record.fresh, 1),
        key=record.key,
    )


def candidate_names(pipeline: CompiledPipeline, run: str | None, suffix: Callable[[], str]) -> Iterator[str]:
    """Names to try for a run: the one that is given or made by its author, else some that nobody is likely to have.

    Raises:
        UsageError: the name is not valid, or not the one that the pipeline makes.
    """
    run = authored_name(pipeline, run) or run
    for _ in range(1 if run else _NAME_ATTEMPTS):
        yield check_run(run or f"{pipeline.name[:_LONGEST_PIPELINE].rstrip('-.')}-{suffix()}")


def run_record(pipeline: CompiledPipeline, run: str, namespace: str, origin: Origin) -> RunRecord:
    """The record of a run of ``pipeline`` under the name ``run``."""
    workflow = identified(pipeline.manifest, Identity(run, 1, workflow_name(run, 1), namespace))
    return RunRecord(
        run=run,
        pipeline=pipeline.name,
        workflow=workflow,
        digest=digest(workflow),
        parameters=own_parameters(workflow),
        code_version=code_version(workflow),
        parent=origin.parent,
        fresh=origin.fresh,
        key=origin.key,
    )


def own_parameters(workflow: Manifest) -> dict[str, str]:
    """Values of the workflow parameters that an author declared."""
    ours = (RUN_PARAMETER, SUBMISSION_PARAMETER)
    return {name: value for name, value in parameters_of(workflow).items() if name not in ours}


def code_version(workflow: Manifest) -> str | None:
    """Commit of the code that a Workflow was compiled from; None if nobody knew it."""
    version: str | None = (workflow["metadata"].get("annotations") or {}).get(CODE_VERSION_ANNOTATION)
    return version


def _recorded(
    store: Store,
    submitter: Submitter,
    pipeline: CompiledPipeline,
    run: str | None,
    namespace: str,
    suffix: Callable[[], str],
    origin: Origin,
) -> RunRecord:
    name = ""
    for name in candidate_names(pipeline, run, suffix):
        check_free(store, submitter, namespace, name, 1)
        wanted = run_record(pipeline, name, namespace, origin)
        if claim(store, RunLayout(name).record, wanted).won:
            return wanted
    raise ConflictError(
        f"{store.url} already has a run {name!r}; choose another name, or go on with it by `tiphys resume {name}`"
    )


def authored_name(pipeline: CompiledPipeline, wanted: str | None) -> str:
    """The name that the author's ``run_name`` makes, which the plugin gets from Argo, too; empty without one."""
    known = {f"workflow.parameters.{name}": value for name, value in parameters_of(pipeline.manifest).items()}
    text = substitute(pipeline.run_name, known.get)
    if has_tags(text):
        raise UsageError(
            f"pipeline {pipeline.name} names its runs {pipeline.run_name!r}, and a parameter in it has no value; "
            "give the parameter"
        )
    name = run_name(text) if text else ""
    if name and wanted not in (None, name):
        raise UsageError(
            f"pipeline {pipeline.name} names its runs itself, and this one {name!r}, not {wanted!r}; leave the name "
            "out, change the parameters that it is made from, or take run_name out of the pipeline"
        )
    return name
