"""What the controller decided about a run by itself, so that whoever leads next counts on from there."""

from typing import Literal

from pydantic import Field, NonNegativeInt

from tiphys.records.attempt import Cause
from tiphys.records.base import Record, StoredRecord


class Advance(Record):
    """How far a run has come: what a resume must add to for it not to be fruitless."""

    steps: NonNegativeInt = 0
    """Steps that were finished, items of fan-outs counted one by one."""
    checkpoints: dict[str, int] = {}
    """By training step, the highest global step that it ever committed."""
    on_volumes: NonNegativeInt = 0
    """Attempts that have committed on a volume, which only their pods see."""

    def is_beyond(self, before: "Advance") -> bool:
        """Whether anything was finished or committed that had not been then."""
        further = any(step > before.checkpoints.get(name, -1) for name, step in self.checkpoints.items())
        return further or self.steps > before.steps or self.on_volumes > before.on_volumes


class AutomaticResume(StoredRecord):
    """``automatic/<n>.json``: that the controller was about to make submission n by itself, and why.

    Written before anything of that submission, so that a controller that dies in
    between has used up the try, and none is made that nobody counts.
    """

    run: str
    submission: int
    reason: str
    """In words, for a person."""
    cause: Cause | None = None
    """Why the submission before ended; None if nobody knows."""
    alert: str = Field(default="", exclude_if=lambda alert: not alert)
    """Id of the alert that asked for it; empty where the end of the submission before did."""
    advance: Advance = Advance()
    """How far the run had come."""


class LeftAlone(StoredRecord):
    """``automatic/<n>.left.json``: that submission n was ended by a person, so its run is left alone.

    The Workflow says so only as long as it exists.
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
    """As the sender wrote it: with the fingerprint it is the alert's identity, and nothing is computed from it."""
    labels: dict[str, str] = {}
    summary: str = ""


class AlertTaken(StoredRecord):
    """``alerts/<id>/taken.json``: what the alert is about, fixed when somebody first looked at it.

    An alert is about the submission that was the last one then: whatever is
    done for it is done once, however often it is delivered.
    """

    action: str
    run: str = ""
    """Empty where it names none."""
    submission: NonNegativeInt = 0


class AlertDone(StoredRecord):
    """``alerts/<id>/done.json``: what came of it."""

    outcome: Literal["resumed", "restarted", "forked", "told", "left", "resolved", "unmatched", "refused"]
    message: str
