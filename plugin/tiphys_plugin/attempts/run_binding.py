"""Which run and submission does a workflow belong to?

A run outlives every Workflow made for it, so a workflow has to prove its place:
the first call binds the workflow's uid to a submission, create-only, and from
then on no other workflow can speak for it. What a person started with plain
``argo submit`` becomes a run by the same act: its Workflow is stored before the
first answer, so that it can be resumed from storage alone.

Which item of a fan-out is this node?

The index that Argo shows shifts when a resumed workflow lacks some items, so an
item is known by its value. Equal values are interchangeable: the first node to
ask takes ordinal 0, the next one 1, and each keeps it for its submission.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple

from tiphys.errors import ConflictError, NotFoundError, StoreError, UsageError
from tiphys.faults import failpoint
from tiphys.lineage.fork_history import Ancestor, ancestors
from tiphys.protocol.compiled_workflow import CompiledPipeline, parameters_of
from tiphys.protocol.execute_api import WorkflowMetadata
from tiphys.protocol.operations import Operation, StepOperation, instance_of
from tiphys.protocol.step_spec import CODE_VERSION_ANNOTATION, StepSpec
from tiphys.records import (
    ItemBound,
    RunRecord,
    SubmissionBound,
    SubmissionClaim,
    SubmissionKind,
    digest,
    item_step,
    run_name,
)
from tiphys.records.names import LONGEST_RUN_NAME
from tiphys.store import RunLayout, Store, claim, find_record, read_record, read_run, workflow_of
from tiphys_plugin.cluster.interface import Cluster

_SERVER_FIELDS = ("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "selfLink")
_CONTROLLER_LABELS = ("workflows.argoproj.io/phase", "workflows.argoproj.io/completed")


class Binding(NamedTuple):
    """A workflow in its place."""

    run: str
    submission: int
    uid: str
    workflow: str
    namespace: str
    pipeline: CompiledPipeline
    fresh_since: Mapping[str, int] = MappingProxyType({})
    """Steps that were asked to run again, each with the submission from which on its results count."""
    family: tuple[Ancestor, ...] = ()
    """The runs that this one is a fork of, the nearest first."""

    @property
    def layout(self) -> RunLayout:
        return RunLayout(self.run)


class _Looking:
    """The live Workflow object of one call, read when it is needed, and once."""

    def __init__(self, cluster: Cluster, metadata: WorkflowMetadata) -> None:
        self.cluster = cluster.name
        self._read = functools.cache(lambda: live(cluster, metadata))

    def manifest(self) -> dict[str, Any]:
        return self._read()


def bind(
    store: Store,
    cluster: Cluster,
    metadata: WorkflowMetadata,
    operation: Operation,
    check: Callable[[CompiledPipeline], None] | None = None,
) -> Binding:
    """Find the workflow's place, or give it one.

    With ``check``, the workflow has to be live and to pass it before anything is read for it.

    Raises:
        ConflictError: its place belongs to another workflow, or was never claimed.
        NotFoundError: the workflow is not in the cluster, or its run is not in storage.
        UsageError: Tiphys did not compile the workflow.
    """
    seen = _Looking(cluster, metadata)
    if check is not None:
        check(CompiledPipeline.from_manifest(as_submitted(seen.manifest())))
    if operation.run:
        run, submission = run_name(operation.run), _submission(operation.submission)
        _take(store, seen, metadata, run, submission)
    else:
        run, submission = _take_free_name(store, seen, metadata), 1
    record = find_record(store, RunLayout(run).record, RunRecord)
    if record is None:
        record = _store_run(store, seen, run) if submission == 1 else read_run(store, run)
    held = _claim_of(store, run, submission) if submission > 1 or record.parent else None
    return Binding(
        run,
        submission,
        metadata.uid,
        metadata.name,
        metadata.namespace,
        CompiledPipeline.from_manifest(workflow_of(store, record, held)),
        held.fresh_since if held else {},
        ancestors(store, record),
    )


def _claim_of(store: Store, run: str, submission: int) -> SubmissionClaim:
    return read_record(store, RunLayout(run).submission(submission), SubmissionClaim)


def as_submitted(workflow: dict[str, Any]) -> dict[str, Any]:
    """A live Workflow object without what server and controller added to it.

    A Workflow made from a WorkflowTemplate has its templates in
    ``status.storedWorkflowTemplateSpec``, where Argo merged them.
    """
    document = copy.deepcopy(workflow)
    stored = _merged(document)
    document.pop("status", None)
    if "workflowTemplateRef" in document.get("spec", {}) and stored:
        document["spec"] = {key: value for key, value in stored.items() if key != "workflowTemplateRef"}
    metadata = document.setdefault("metadata", {})
    for field in _SERVER_FIELDS:
        metadata.pop(field, None)
    for label in _CONTROLLER_LABELS:
        metadata.get("labels", {}).pop(label, None)
    return document


def _merged(workflow: dict[str, Any]) -> dict[str, Any] | None:
    found: dict[str, Any] | None = (workflow.get("status") or {}).get("storedWorkflowTemplateSpec")
    return found


def _take(store: Store, seen: _Looking, metadata: WorkflowMetadata, run: str, submission: int) -> None:
    owner = _owner(store, seen, metadata, run, submission)
    if owner != metadata.uid:
        raise ConflictError(
            f"run {run} has submission {submission} already, and it is another workflow "
            f"({owner or 'of another name'}), as after `argo resubmit`; to go on with that run use "
            f"`tiphys resume {run}`, to begin another one from it `tiphys fork {run}`, or choose another run name"
        )


def _take_free_name(store: Store, seen: _Looking, metadata: WorkflowMetadata) -> str:
    short = run_name(metadata.name[: LONGEST_RUN_NAME - 6])
    for run in (run_name(metadata.name), f"{short}-{metadata.uid[:5].lower()}"):
        if _owner(store, seen, metadata, run, 1) == metadata.uid:
            return run
    raise ConflictError(
        f"the run names made from workflow {metadata.name} are both taken; give the run a name of its own "
        "with the parameter tiphys-run"
    )


def _owner(store: Store, seen: _Looking, metadata: WorkflowMetadata, run: str, submission: int) -> str:
    """Uid of the workflow that the submission is bound to, this one if it was free; empty if claimed for another."""
    layout = RunLayout(run)
    bound = find_record(store, layout.submission_bound(submission), SubmissionBound)
    if bound is not None:
        return bound.uid
    seen.manifest()  # only a workflow that lives, and that Tiphys compiled, may take a place
    held = _claimed(store, metadata, run, submission)
    if (held.workflow_name, held.namespace) != (metadata.name, metadata.namespace):
        return ""
    failpoint("admit.after_submission_claim")
    wanted = SubmissionBound(
        run=run,
        submission=submission,
        cluster=seen.cluster,
        namespace=metadata.namespace,
        workflow_name=metadata.name,
        uid=metadata.uid,
    )
    owner = claim(store, layout.submission_bound(submission), wanted).record.uid
    failpoint("admit.after_bind")
    return owner


def _claimed(store: Store, metadata: WorkflowMetadata, run: str, submission: int) -> SubmissionClaim:
    key = RunLayout(run).submission(submission)
    held = find_record(store, key, SubmissionClaim)
    if held is None and submission > 1:
        raise ConflictError(
            f"submission {submission} of run {run} was never claimed, so nothing says which steps it may run; "
            f"use `tiphys resume {run}`"
        )
    if held is None:
        wanted = SubmissionClaim(
            run=run,
            submission=submission,
            kind=SubmissionKind.ORIGINAL,
            workflow_name=metadata.name,
            namespace=metadata.namespace,
        )
        held = claim(store, key, wanted).record
    return held


def live(cluster: Cluster, metadata: WorkflowMetadata) -> dict[str, Any]:
    """The live Workflow object.

    Raises:
        NotFoundError: it is gone.
        UsageError: Tiphys did not compile it.
        StoreError: Argo has not written yet what it is made of.
    """
    workflow = cluster.workflow(metadata.namespace, metadata.name)
    if workflow is None or workflow.get("metadata", {}).get("uid") != metadata.uid:
        raise NotFoundError(
            f"workflow {metadata.namespace}/{metadata.name} with uid {metadata.uid} is not in cluster {cluster.name}; "
            "it was deleted, or the plugin looks at another cluster"
        )
    if "workflowTemplateRef" in workflow.get("spec", {}) and not _merged(workflow):
        # Its first task set can be seen a moment before the templates and annotations that Argo takes over.
        raise StoreError(f"Argo has not put the WorkflowTemplate of {metadata.namespace}/{metadata.name} into it yet")
    CompiledPipeline.from_manifest(as_submitted(workflow))
    return workflow


def _store_run(store: Store, seen: _Looking, run: str) -> RunRecord:
    document = as_submitted(seen.manifest())
    record = RunRecord(
        run=run,
        pipeline=CompiledPipeline.from_manifest(document).name,
        workflow=document,
        digest=digest(document),
        parameters=parameters_of(document),
        code_version=(document["metadata"].get("annotations") or {}).get(CODE_VERSION_ANNOTATION),
    )
    held = claim(store, RunLayout(run).record, record).record
    failpoint("admit.after_run_record")
    return held


def _submission(text: str) -> int:
    if not text:
        return 1
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"plugin.tiphys.submission is {text!r}; expected a number from 1, or nothing")
    return int(text)


def step_id(store: Store, binding: Binding, spec: StepSpec, operation: StepOperation) -> str:
    """The step id of the node that asks; the name of the step if it is not fanned out."""
    if not spec.fan_out:
        return spec.name
    instance = instance_of(operation.node)
    candidates = (item_step(spec.name, operation.item, ordinal) for ordinal in count())
    return next(step for step in candidates if _bound_to(store, binding, step, instance) == instance)


def _bound_to(store: Store, binding: Binding, step: str, instance: str) -> str:
    key = binding.layout.item(binding.submission, step)
    held = find_record(store, key, ItemBound)
    if held is None:
        wanted = ItemBound(
            run=binding.run,
            submission=binding.submission,
            step=step,
            instance=instance,
            label=instance.removeprefix(f"{binding.workflow}."),
        )
        held = claim(store, key, wanted).record
    return held.instance
