"""Binds a Workflow to a run and a submission, and a fan-out node to an item.

A run outlives every Workflow made for it. The first call binds the workflow's
uid to a submission, create-only; from then on no other workflow can act for
that submission. A workflow started with plain ``argo submit`` becomes a run the
same way: it is stored before the first reply, so that the run can be resumed
from storage alone.

The index of a fan-out node in Argo changes if a resumed workflow lacks some
items, so an item is identified by its value. Equal values are interchangeable:
the first node to call takes ordinal 0, the next one 1, and each keeps its
ordinal for its submission.
"""

import functools
from collections.abc import Callable, Mapping
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from tiphys.errors import ConflictError, NotFoundError, StoreError, UsageError
from tiphys.faults import failpoint
from tiphys.lineage.fork_history import AncestorRun, read_ancestors
from tiphys.protocol.compiled_workflow import CompiledPipeline, read_workflow_parameters
from tiphys.protocol.execute_api import WorkflowMetadata
from tiphys.protocol.step_spec import CODE_VERSION_ANNOTATION, StepSpec
from tiphys.records import (
    ItemBinding,
    RunRecord,
    SubmissionBinding,
    SubmissionClaim,
    SubmissionKind,
    item_step_id,
    json_digest,
    make_run_name,
)
from tiphys.records.names import MAX_RUN_NAME_CHARACTERS
from tiphys.store import (
    RunLayout,
    Store,
    claim_record,
    claim_run,
    find_record,
    open_submission,
    read_record,
    read_run,
    read_submission_workflow,
)

_SERVER_FIELDS = ("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "selfLink")
_CONTROLLER_LABELS = ("workflows.argoproj.io/phase", "workflows.argoproj.io/completed")


class WorkflowReader(Protocol):
    """The Workflows of one cluster."""

    @property
    def name(self) -> str:
        """Identity of the cluster."""

    def workflow(self, namespace: str, name: str) -> dict[str, Any] | None:
        """The Workflow object; None if there is none.

        Raises:
            StoreError: the cluster did not answer.
        """


class RunBinding(NamedTuple):
    """The run and submission that a workflow is bound to."""

    run: str
    submission: int
    uid: str
    workflow: str
    namespace: str
    pipeline: CompiledPipeline
    rerun_since: Mapping[str, int] = MappingProxyType({})
    """Steps with a requested rerun, each with the first submission whose results count."""
    fork_ancestors: tuple[AncestorRun, ...] = ()
    """The runs that this one was forked from, the nearest first."""

    @property
    def layout(self) -> RunLayout:
        return RunLayout(self.run)


class _LiveWorkflow:
    """The live Workflow object of one call; read on first use, at most once."""

    def __init__(self, cluster: WorkflowReader, metadata: WorkflowMetadata) -> None:
        self.cluster = cluster.name
        self._read = functools.cache(lambda: read_live_workflow(cluster, metadata))

    def manifest(self) -> dict[str, Any]:
        return self._read()


def bind_workflow(
    store: Store,
    cluster: WorkflowReader,
    metadata: WorkflowMetadata,
    run_name: str,
    submission_number: str,
    validate: Callable[[CompiledPipeline], None] | None = None,
) -> RunBinding:
    """Find the run and submission of a workflow, or bind it to a new run.

    ``run_name`` is the name in its parameters, or that the pipeline gives its runs; empty: a new run. An empty
    ``submission_number`` means the first. With ``validate`` the workflow must be live and pass this check before any
    record is read for it.

    Raises:
        ConflictError: the submission belongs to another workflow, or was never claimed.
        NotFoundError: the workflow is not in the cluster, or its run is not in storage.
        UsageError: Tiphys did not compile the workflow.
        StoreError: storage or cluster did not answer.
    """
    live_workflow = _LiveWorkflow(cluster, metadata)
    if validate is not None:
        validate(CompiledPipeline.from_manifest(submitted_manifest(live_workflow.manifest())))
    if run_name:
        run, submission = make_run_name(run_name), _parse_submission_number(submission_number)
        _bind_submission(store, live_workflow, metadata, run, submission)
    else:
        run, submission = _bind_new_run(store, live_workflow, metadata), 1
    record = find_record(store, RunLayout(run).run_record, RunRecord)
    if record is None:
        record = _store_run(store, live_workflow, run) if submission == 1 else read_run(store, run)
    return _build_binding(store, record, submission, metadata)


def read_binding(store: Store, binding: SubmissionBinding) -> RunBinding:
    """The run and submission of a Workflow that is bound.

    Raises:
        NotFoundError: the run is not in storage.
        StoreError: storage did not answer.
    """
    metadata = WorkflowMetadata(name=binding.workflow_name, namespace=binding.namespace, uid=binding.uid)
    return _build_binding(store, read_run(store, binding.run), binding.submission, metadata)


def _build_binding(store: Store, record: RunRecord, submission: int, metadata: WorkflowMetadata) -> RunBinding:
    claim = _read_submission_claim(store, record.run, submission) if submission > 1 or record.parent else None
    return RunBinding(
        record.run,
        submission,
        metadata.uid,
        metadata.name,
        metadata.namespace,
        CompiledPipeline.from_manifest(read_submission_workflow(store, record, claim)),
        claim.rerun_since if claim else {},
        read_ancestors(store, record),
    )


def _read_submission_claim(store: Store, run: str, submission: int) -> SubmissionClaim:
    return read_record(store, RunLayout(run).submission(submission), SubmissionClaim)


def submitted_manifest(workflow: dict[str, Any]) -> dict[str, Any]:
    """A live Workflow object without the fields that API server and Argo's controller added.

    A Workflow made from a WorkflowTemplate has its templates in
    ``status.storedWorkflowTemplateSpec``, where Argo merged them.
    """
    # Shares its parts with ``workflow``: a copy of a Workflow of a megabyte takes ten.
    stored = _stored_template_spec(workflow)
    document = {key: value for key, value in workflow.items() if key != "status"}
    if "workflowTemplateRef" in document.get("spec", {}) and stored:
        document["spec"] = {key: value for key, value in stored.items() if key != "workflowTemplateRef"}
    metadata = {key: value for key, value in workflow.get("metadata", {}).items() if key not in _SERVER_FIELDS}
    if "labels" in metadata:
        metadata["labels"] = {k: v for k, v in metadata["labels"].items() if k not in _CONTROLLER_LABELS}
    return {**document, "metadata": metadata}


def _stored_template_spec(workflow: dict[str, Any]) -> dict[str, Any] | None:
    spec: dict[str, Any] | None = (workflow.get("status") or {}).get("storedWorkflowTemplateSpec")
    return spec


def _bind_submission(
    store: Store, live_workflow: _LiveWorkflow, metadata: WorkflowMetadata, run: str, submission: int
) -> None:
    owner = _bound_uid(store, live_workflow, metadata, run, submission)
    if owner != metadata.uid:
        raise ConflictError(
            f"run {run} has submission {submission} already, and it is another workflow "
            f"({owner or 'of another name'}), as after `argo resubmit`; to continue that run use "
            f"`tiphys resume {run}`, to start a new one from it `tiphys fork {run}`, or choose another run name"
        )


def _bind_new_run(store: Store, live_workflow: _LiveWorkflow, metadata: WorkflowMetadata) -> str:
    short = make_run_name(metadata.name[: MAX_RUN_NAME_CHARACTERS - 6])
    for run in (make_run_name(metadata.name), f"{short}-{metadata.uid[:5].lower()}"):
        if _bound_uid(store, live_workflow, metadata, run, 1) == metadata.uid:
            return run
    raise ConflictError(
        f"the run names made from workflow {metadata.name} are both taken; give the run a name of its own "
        "with the parameter tiphys-run"
    )


def _bound_uid(
    store: Store, live_workflow: _LiveWorkflow, metadata: WorkflowMetadata, run: str, submission: int
) -> str:
    """Uid of the workflow that the submission is bound to; binds this workflow if the submission is free.

    Empty if the submission is claimed for a workflow of another name.
    """
    layout = RunLayout(run)
    binding = find_record(store, layout.submission_binding(submission), SubmissionBinding)
    if binding is not None:
        return binding.uid
    live_workflow.manifest()  # raises unless the workflow is live and compiled by Tiphys
    claim = _claim_submission(store, metadata, run, submission)
    if (claim.workflow_name, claim.namespace) != (metadata.name, metadata.namespace):
        return ""
    failpoint("admit.after_submission_claim")
    new_binding = SubmissionBinding(
        run=run,
        submission=submission,
        cluster=live_workflow.cluster,
        namespace=metadata.namespace,
        workflow_name=metadata.name,
        uid=metadata.uid,
    )
    owner = claim_record(store, layout.submission_binding(submission), new_binding).record.uid
    failpoint("admit.after_bind")
    return owner


def _claim_submission(store: Store, metadata: WorkflowMetadata, run: str, submission: int) -> SubmissionClaim:
    key = RunLayout(run).submission(submission)
    stored = find_record(store, key, SubmissionClaim)
    if stored is None and submission > 1:
        raise ConflictError(
            f"submission {submission} of run {run} was never claimed, so nothing says which steps it may run; "
            f"use `tiphys resume {run}`"
        )
    if stored is None:
        claim = SubmissionClaim(
            run=run,
            submission=submission,
            kind=SubmissionKind.ORIGINAL,
            workflow_name=metadata.name,
            namespace=metadata.namespace,
        )
        stored = open_submission(store, claim).record
    return stored


def read_live_workflow(cluster: WorkflowReader, metadata: WorkflowMetadata) -> dict[str, Any]:
    """The live Workflow object.

    Raises:
        NotFoundError: the workflow is gone.
        UsageError: Tiphys did not compile the workflow.
        StoreError: the cluster did not answer, or Argo has not merged the WorkflowTemplate yet.
    """
    workflow = cluster.workflow(metadata.namespace, metadata.name)
    if workflow is None or workflow.get("metadata", {}).get("uid") != metadata.uid:
        raise NotFoundError(
            f"workflow {metadata.namespace}/{metadata.name} with uid {metadata.uid} is not in cluster {cluster.name}; "
            "it was deleted, or the plugin looks at another cluster"
        )
    if "workflowTemplateRef" in workflow.get("spec", {}) and not _stored_template_spec(workflow):
        # The first task set can be visible a moment before Argo has merged templates and annotations.
        raise StoreError(
            f"Argo has not merged the WorkflowTemplate of {metadata.namespace}/{metadata.name} into the Workflow yet"
        )
    CompiledPipeline.from_manifest(submitted_manifest(workflow))
    return workflow


def _store_run(store: Store, live_workflow: _LiveWorkflow, run: str) -> RunRecord:
    document = submitted_manifest(live_workflow.manifest())
    record = RunRecord(
        run=run,
        pipeline=CompiledPipeline.from_manifest(document).name,
        workflow=document,
        digest=json_digest(document),
        parameters=read_workflow_parameters(document),
        code_version=(document["metadata"].get("annotations") or {}).get(CODE_VERSION_ANNOTATION),
    )
    stored = claim_run(store, record).record
    failpoint("admit.after_run_record")
    return stored


def _parse_submission_number(text: str) -> int:
    if not text:
        return 1
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise UsageError(f"plugin.tiphys.submission is {text!r}; expected a number from 1, or nothing")
    return int(text)


def resolve_step_id(
    store: Store, binding: RunBinding, spec: StepSpec, instance: str, item: str, bound: dict[str, str] | None = None
) -> str:
    """The step id of the node ``instance``, which runs ``item``; without a fan-out it is the name of the step.

    ``bound`` holds the node of each step id that is known to be bound, and gets those that are read. Without it, a
    thousand equal items cost half a million reads.
    """
    if not spec.fan_out:
        return spec.name
    known = {} if bound is None else bound
    prefix = item_step_id(spec.name, item, 0).removesuffix("0")
    for ordinal in count():
        step = f"{prefix}{ordinal}"
        if step not in known:
            known[step] = _bind_item(store, binding, step, instance, item)
        if known[step] == instance:
            return step
    raise AssertionError("there is always a next ordinal")


def _bind_item(store: Store, binding: RunBinding, step: str, instance: str, item: str) -> str:
    key = binding.layout.item(binding.submission, step)
    stored = find_record(store, key, ItemBinding)
    if stored is None:
        binding_record = ItemBinding(
            run=binding.run,
            submission=binding.submission,
            step=step,
            instance=instance,
            label=instance.removeprefix(f"{binding.workflow}."),
            item=item,
        )
        stored = claim_record(store, key, binding_record).record
    return stored.instance
