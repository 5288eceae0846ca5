"""When to look at the storage of a Workflow's run: a pure decision, so that a busy cluster costs little."""

from datetime import datetime, timedelta
from typing import NamedTuple

from tiphys_controller.kubernetes.seen import SeenWorkflow

AFTER_CHANGE_SECONDS = 3.0
"""Argo changes a Workflow several times within a second."""
WHILE_LIVE_SECONDS = 30.0
"""What a training program tells changes nothing on the Workflow."""
NEWS_LASTS = timedelta(hours=1)
"""The API server forgets Events after an hour; what is older is not told again."""


class Look(NamedTuple):
    """The last look: when, by a monotonic clock, at which state, and whether everything was read and told."""

    at: float
    workflow: SeenWorkflow
    complete: bool


def is_due(workflow: SeenWorkflow, last: Look | None, monotonic: float) -> bool:
    """Whether to look now."""
    if last is None:
        return True
    waited = monotonic - last.at
    if not last.complete or _facts(workflow) != _facts(last.workflow):
        return waited >= AFTER_CHANGE_SECONDS
    return not workflow.finished and waited >= WHILE_LIVE_SECONDS


def is_past(workflow: SeenWorkflow, now: datetime) -> bool:
    """Whether the Workflow was over so long ago that nobody waits for news of it."""
    return (
        workflow.finished and bool(workflow.finished_at) and is_old(datetime.fromisoformat(workflow.finished_at), now)
    )


def is_old(at: datetime, now: datetime) -> bool:
    """Whether this is no news any more."""
    return now - at > NEWS_LASTS


def _facts(workflow: SeenWorkflow) -> SeenWorkflow:
    # Our own annotations change the object, too, and who waits is told other numbers all the time.
    return workflow._replace(annotations={}, waits=dict.fromkeys(workflow.waits, ""))
