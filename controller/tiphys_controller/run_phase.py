"""Determines the phase of a run from storage and, where it is visible, from its Workflow.

Storage knows how a submission ended only if its Workflow lived to record it.
Where neither storage nor the cluster tells, the phase is Unknown, with the
reason, and is never guessed.
"""

from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from tiphys.protocol.compiled_workflow import STOPPED_STATUS, shown_status
from tiphys.protocol.phases import is_final_workflow_phase
from tiphys.store import Submission
from tiphys_controller.submit.fencing import find_workflow_end
from tiphys_controller.submit.submission import find_workflow, is_bound_workflow, submission_cluster
from tiphys_controller.submit.submitter import LiveWorkflow, Submitter, is_stable_cluster_name

MAX_REASON_CHARACTERS = 240
"""Length to which a reason is cut, which has to fit a line of a list; the attempts have the whole messages."""


class RunPhase(StrEnum):
    """Phase of a run, which may consist of several Workflows."""

    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = STOPPED_STATUS
    """A person stopped its last Workflow. It did not fail."""
    INTERRUPTED = "Interrupted"
    """It does not run, and no end is recorded."""
    UNKNOWN = "Unknown"


ENDED_PHASES = (RunPhase.SUCCEEDED, RunPhase.FAILED, RunPhase.STOPPED)
"""Phases that only a new submission changes."""


class WorkflowLookup(NamedTuple):
    """Result of a search for the Workflow of the last submission.

    ``is_visible`` is False if the submission went to another cluster, or no
    cluster was searched.
    """

    is_visible: bool
    live: LiveWorkflow | None = None


def determine_run_phase(last: Submission | None, lookup: WorkflowLookup) -> tuple[RunPhase, str]:
    """Phase of a run and the reason in one line. ``last`` is its last submission; None without one."""
    if last is None:
        return RunPhase.INTERRUPTED, "recorded, but not submitted"
    number = last.claim.submission
    if lookup.live and lookup.live.running:
        return RunPhase.RUNNING, f"submission {number} is Workflow {lookup.live.name} ({lookup.live.phase})"
    if last.end:
        return _ended_phase(shown_status(last.end.status, last.end.message), number, last.end.message)
    if not lookup.is_visible:
        where = f"cluster {submission_cluster(last)}" if submission_cluster(last) else "an unrecorded cluster"
        return RunPhase.UNKNOWN, f"submission {number} went to {where}, and no end is recorded"
    if lookup.live is None:
        return RunPhase.INTERRUPTED, f"Workflow {last.claim.workflow_name} is gone, and no end is recorded"
    if is_final_workflow_phase(lookup.live.phase):
        return _ended_phase(RunPhase.STOPPED if lookup.live.stopped else lookup.live.phase, number, "")
    return (
        RunPhase.INTERRUPTED,
        f"Workflow {lookup.live.name} is in phase {lookup.live.phase}, and its engine no longer runs",
    )


def _ended_phase(status: str, number: int, message: str) -> tuple[RunPhase, str]:
    if status == RunPhase.SUCCEEDED:  # the message is of tries that failed before one succeeded
        return RunPhase.SUCCEEDED, f"submission {number} succeeded"
    if status == RunPhase.STOPPED:
        return RunPhase.STOPPED, f"submission {number} was stopped by a person"
    reason = " ".join(f"submission {number} {status.lower()}{f': {message}' if message else ''}".split())
    is_long = len(reason) > MAX_REASON_CHARACTERS
    return RunPhase.FAILED, f"{reason[: MAX_REASON_CHARACTERS - 1]}…" if is_long else reason


def look_up_workflow(last: Submission | None, submitter: Submitter | None) -> WorkflowLookup:
    """Search the cluster of ``submitter`` for the Workflow of a submission; None searches nothing."""
    if last is None or submitter is None:
        return WorkflowLookup(is_visible=False)
    is_stable = is_stable_cluster_name(submitter.cluster)
    if is_stable and submission_cluster(last) not in ("", submitter.cluster):
        return WorkflowLookup(is_visible=False)
    live = find_workflow(submitter, last)
    is_bound = live is not None and is_bound_workflow(last, live)
    return WorkflowLookup(is_visible=is_stable or is_bound, live=live if is_bound else None)


def find_last_sign_of_life(last: Submission | None, submitter: Submitter | None) -> datetime | None:
    """When the Workflow of ``last`` was last known to run; None if its end is recorded, or it may still run."""
    if last is None or last.end is not None:
        return None
    lookup = look_up_workflow(last, submitter)
    end = find_workflow_end(last, lookup.live, force=not lookup.is_visible)
    return None if end is None else end.at or (last.binding or last.claim).written_at
