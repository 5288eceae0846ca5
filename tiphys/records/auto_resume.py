"""Records of automatic resumes and of alerts.

The controller stores each of its decisions about a run, so that its next leader
continues with the same counts and back-off.
"""

from typing import Literal

from pydantic import Field, NonNegativeInt

from tiphys.records.attempt import Cause
from tiphys.records.base import Record, StoredRecord


class RunProgress(Record):
    """Progress of a run. A resume that does not increase it is fruitless."""

    steps: NonNegativeInt = 0
    """Finished steps; each item of a fan-out counts."""
    checkpoints: dict[str, int] = {}
    """Highest committed global step, by training step."""
    on_volumes: NonNegativeInt = 0
    """Attempts that committed on a volume, whose checkpoints only their pods can read."""

    def is_ahead_of(self, earlier: "RunProgress") -> bool:
        """Whether the run finished a step or committed a checkpoint since ``earlier``."""
        further = any(step > earlier.checkpoints.get(name, -1) for name, step in self.checkpoints.items())
        return further or self.steps > earlier.steps or self.on_volumes > earlier.on_volumes


class AutoResumeRecord(StoredRecord):
    """``auto-resumes/<n>.json``: the controller's intent to create submission n, and the reason.

    Written before any other record of that submission. A controller that dies
    afterwards has used up the resume, so that every automatic submission counts.
    """

    run: str
    submission: int
    reason: str
    """The reason as a sentence."""
    cause: Cause | None = None
    """Why the previous submission ended; None if unknown."""
    alert: str = Field(default="", exclude_if=lambda alert: not alert)
    """Id of the alert that caused the resume; empty if the end of the previous submission did."""
    advance: RunProgress = RunProgress()
    """Progress of the run before the resume."""


class ManualStopRecord(StoredRecord):
    """``auto-resumes/<n>.manual-stop.json``: a person ended submission n, so the controller does not resume its run.

    A separate record, because the Workflow that shows it may be deleted.
    """

    run: str
    submission: int
    reason: str


AlertStatus = Literal["firing", "resolved"]


class AlertRecord(StoredRecord):
    """``alerts/<id>/firing.json`` or ``resolved.json``: one alert, as it was first delivered."""

    name: str
    status: AlertStatus
    fingerprint: str
    starts_at: str
    """Verbatim from the sender. Together with the fingerprint it identifies the alert; it is never parsed."""
    labels: dict[str, str] = {}
    summary: str = ""


class AlertClaimRecord(StoredRecord):
    """``alerts/<id>/claim.json``: the run and submission of an alert, fixed when it is first processed.

    An alert applies to the submission that is the last one at that moment.
    Repeated deliveries therefore lead to one action. Which action that is follows from the administrator's rules.
    """

    run: str = ""
    """Empty if the alert names no run."""
    submission: NonNegativeInt = 0


class AlertResultRecord(StoredRecord):
    """``alerts/<id>/result.json``: the outcome of an alert."""

    outcome: Literal["resumed", "restarted", "forked", "told", "left", "resolved", "unmatched", "refused"]
    message: str
