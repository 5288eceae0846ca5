"""Records of a run and of its submissions, the Workflow objects that were created for it.

A run outlives its Workflows. These records hold everything that a resume needs
after a Workflow is deleted.
"""

from enum import StrEnum
from typing import Any, ClassVar

from pydantic import Field, PositiveInt

from tiphys.records.base import StoredRecord
from tiphys.records.names import LOCAL_CLUSTER_PREFIX


class RunRecord(StoredRecord):
    """``run.json``: everything needed to plan and resume the run from storage alone.

    ``workflow`` is the Workflow as submitted; its ``spec.arguments`` hold the
    values of its parameters. ``digest`` is the hash of that document.
    """

    run: str
    pipeline: str
    workflow: dict[str, Any]
    digest: str
    parameters: dict[str, str] = {}
    code_version: str | None = None
    parent: str = Field(default="", exclude_if=lambda parent: not parent)
    """The run that this one is a fork of; empty for a run that is no fork."""
    rerun_steps: tuple[str, ...] = Field(default=(), exclude_if=lambda steps: not steps)
    """Steps, or items of a fan-out, of a fork that reuse neither results nor checkpoints of the parent."""
    key: str = Field(default="", exclude_if=lambda key: not key)
    """Digest of the idempotency key of its creation; empty without one."""

    @property
    def rerun_since(self) -> dict[str, int]:
        """`SubmissionClaim.rerun_since` of its first submission."""
        return dict.fromkeys(self.rerun_steps, 1)


class WorkflowRecord(StoredRecord):
    """``workflows/<digest>.json``: a later Workflow of a run, with changed code or parameters.

    ``run.json`` is not changed. The claim of a submission names the Workflow that it uses.
    """

    run: str
    workflow: dict[str, Any]
    digest: str
    parameters: dict[str, str] = {}
    code_version: str | None = None


class IdempotencyKeyRecord(StoredRecord):
    """``idempotency-keys/<digest>.json``: the run that an idempotency key created, and a digest of the request.

    Written before any record of that run, so that the same key never creates a second run.
    """

    run: str
    namespace: str
    content: str
    """Digest of the whole request."""

    def named_namespaces(self) -> tuple[str, ...]:
        return (self.namespace,)


class SubmissionKind(StrEnum):
    """Why a Workflow object was made."""

    ORIGINAL = "original"
    RESUME = "resume"
    FORK = "fork"
    """The first submission of a fork."""
    DELETION = "deletion"
    """None was made: the run is being deleted, and its claim keeps others from submitting it."""


class SubmissionClaim(StoredRecord):
    """``submissions/<n>.json``: the claim to create the n-th Workflow of a run, written before the creation.

    ``workflow_name`` is a function of run and n, so that a repeated creation of
    the same submission fails with a name conflict.
    """

    run: str
    submission: int
    kind: SubmissionKind
    workflow_name: str
    namespace: str
    cluster: str = ""
    """The target cluster; empty if the plugin of the Workflow itself writes the claim."""
    steps: tuple[str, ...] = ()
    """Names of the steps to run, and step ids of items where the finished ones are left out; empty means all."""
    rerun_roots: tuple[str, ...] = Field(default=(), exclude_if=lambda roots: not roots)
    """Done steps, or items of a fan-out, that the user wants to run again."""
    rerun_since: dict[str, PositiveInt] = Field(default={}, exclude_if=lambda since: not since)
    """By step or item of a fan-out, the first submission of this run whose results and checkpoints count; those of
    other runs do not. Includes the entries of earlier submissions."""
    workflow: str = Field(default="", exclude_if=lambda workflow: not workflow)
    """Digest of its `WorkflowRecord`; empty for the Workflow of ``run.json``."""
    key: str = Field(default="", exclude_if=lambda key: not key)
    """Digest of the idempotency key of the request; empty without one."""

    def named_namespaces(self) -> tuple[str, ...]:
        return () if self.cluster.startswith(LOCAL_CLUSTER_PREFIX) else (self.namespace,)


class SubmissionBinding(StoredRecord):
    """``submissions/<n>.bound.json``: the Workflow object in the cluster that the n-th submission created."""

    run: str
    submission: int
    cluster: str
    namespace: str
    workflow_name: str
    uid: str

    def named_namespaces(self) -> tuple[str, ...]:
        return () if self.cluster.startswith(LOCAL_CLUSTER_PREFIX) else (self.namespace,)


class SubmissionEnd(StoredRecord):
    """``submissions/<n>.end.json``: how the n-th Workflow ended, as its onExit handler or the controller reported it.

    It may be missing: terminate and deletion skip onExit.
    """

    MAX_MESSAGE_CHARACTERS: ClassVar = 1000
    """Length to which a writer cuts the message."""

    run: str
    submission: int
    status: str
    message: str = ""


class ItemBinding(StoredRecord):
    """``items/<n>/<step id>.json``: the node of submission n that runs this fan-out item.

    Equal items are interchangeable; the first node that calls gets ordinal 0.
    """

    run: str
    submission: int
    step: str
    instance: str
    """Node name of the step within the workflow, without its attempts."""
    label: str
    """How Argo displays the item, such as ``sweep(1:lr:0.2)``: with its index in this submission."""
    item: str
    """Its value as Argo substitutes it for ``{{item}}``."""
