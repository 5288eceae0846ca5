"""What a run is, and the Workflow objects made for it."""

from enum import StrEnum
from typing import Any

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


class SubmissionKind(StrEnum):
    """Why a Workflow object was made."""

    ORIGINAL = "original"
    RESUME = "resume"


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
