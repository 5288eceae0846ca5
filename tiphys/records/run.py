"""What a run is, and the Workflow objects made for it."""

from enum import StrEnum
from typing import Any

from pydantic import Field, PositiveInt

from tiphys.records.base import StoredRecord


class RunRecord(StoredRecord):
    """``run.json``: all that is needed to plan and resume the run from storage alone.

    ``workflow`` is the Workflow as submitted; its ``spec.arguments`` hold the
    values that were in force. ``digest`` is the hash of that document.
    """

    run: str
    pipeline: str
    workflow: dict[str, Any]
    digest: str
    parameters: dict[str, str] = {}
    code_version: str | None = None
    parent: str = Field(default="", exclude_if=lambda parent: not parent)
    """The run that this one is a fork of; empty for a run of its own."""
    fresh: tuple[str, ...] = Field(default=(), exclude_if=lambda fresh: not fresh)
    """Steps of a fork that take over neither results nor checkpoints of its parent."""
    key: str = Field(default="", exclude_if=lambda key: not key)
    """Digest of the idempotency key under which it was begun; empty where none was given."""


class WorkflowRecord(StoredRecord):
    """``workflows/<digest>.json``: another Workflow that a run went on with, because its code or parameters changed.

    ``run.json`` stays what it was; the claim of a submission names the one that it was made of.
    """

    run: str
    workflow: dict[str, Any]
    digest: str
    parameters: dict[str, str] = {}
    code_version: str | None = None


class StartKey(StoredRecord):
    """``keys/<digest of the key>.json``: which run was begun under an idempotency key, and with what content.

    Written before anything of that run, so that the same key never begins a second one.
    """

    run: str
    namespace: str
    content: str
    """Digest of everything that was asked for."""


class SubmissionKind(StrEnum):
    """Why a Workflow object was made."""

    ORIGINAL = "original"
    RESUME = "resume"
    FORK = "fork"
    """The first of a run that goes on from another one."""


class SubmissionClaim(StoredRecord):
    """``submissions/<n>.json``: the right to create the n-th Workflow of a run, taken before it is sent.

    ``workflow_name`` is a function of run and n, so that a second create of the
    same submission meets the first one.
    """

    run: str
    submission: int
    kind: SubmissionKind
    workflow_name: str
    namespace: str
    cluster: str = ""
    """Where it is to be sent; empty where the one who claims is that Workflow's own plugin."""
    steps: tuple[str, ...] = ()
    """Names of the steps this submission is to run; empty means all of them."""
    again: tuple[str, ...] = Field(default=(), exclude_if=lambda again: not again)
    """Steps that a person wanted to run again although they were done."""
    fresh_since: dict[str, PositiveInt] = Field(default={}, exclude_if=lambda since: not since)
    """By step: results and checkpoints of this run count from that submission on, and those of other runs never.
    Holds what earlier submissions demanded, too."""
    workflow: str = Field(default="", exclude_if=lambda workflow: not workflow)
    """Digest of the `WorkflowRecord` that it was made of; empty for the Workflow of ``run.json``."""
    key: str = Field(default="", exclude_if=lambda key: not key)
    """Digest of the idempotency key of whoever asked for it; empty where none was given."""


class SubmissionBound(StoredRecord):
    """``submissions/<n>.bound.json``: which live object the n-th submission became."""

    run: str
    submission: int
    cluster: str
    namespace: str
    workflow_name: str
    uid: str


class RunSealed(StoredRecord):
    """``submissions/<n>.end.json``: how the n-th Workflow ended, as its onExit saw it.

    It may be missing: terminate, deletion and crashes skip onExit.
    """

    run: str
    submission: int
    status: str
    message: str = ""


class ItemBound(StoredRecord):
    """``items/<n>/<step id>.json``: which node of submission n is this fan-out item.

    Equal items are interchangeable; the first node to ask takes ordinal 0.
    """

    run: str
    submission: int
    step: str
    instance: str
    """Node name of the step within the workflow, without its attempts."""
    label: str = ""
    """How Argo displays the item, such as ``sweep(1:lr:0.2)``."""
