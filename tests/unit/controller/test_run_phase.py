"""The phase of a run: sealed ends are known from storage, everything else only where the cluster is seen."""

from typing import Any

import pytest
from tiphys_controller import LiveWorkflow
from tiphys_controller.run_phase import MAX_REASON_CHARACTERS, RunPhase, WorkflowLookup, determine_run_phase

from tiphys.records import SubmissionBinding, SubmissionClaim, SubmissionEnd, SubmissionKind
from tiphys.store import Submission

CLAIM = SubmissionClaim(
    run="r", submission=2, kind=SubmissionKind.RESUME, workflow_name="r-2", namespace="ml", cluster="west"
)
BOUND = SubmissionBinding(run="r", submission=2, cluster="west", namespace="ml", workflow_name="r-2", uid="u")


def sealed(status: str, message: str = "") -> SubmissionEnd:
    return SubmissionEnd(run="r", submission=2, status=status, message=message)


def live(phase: str, running: bool) -> WorkflowLookup:
    return WorkflowLookup(True, LiveWorkflow("r-2", "ml", "u", phase, running))


OUT_OF_SIGHT = WorkflowLookup(False)
GONE = WorkflowLookup(True)
STOPPED = WorkflowLookup(True, LiveWorkflow("r-2", "ml", "u", "Failed", False, stopped=True))


@pytest.mark.parametrize(
    ("end", "seen", "phase", "reason"),
    [
        (None, OUT_OF_SIGHT, RunPhase.UNKNOWN, "submission 2 went to cluster west, and no end is recorded"),
        (None, GONE, RunPhase.INTERRUPTED, "Workflow r-2 is gone, and no end is recorded"),
        (None, live("Running", True), RunPhase.RUNNING, "submission 2 is Workflow r-2 (Running)"),
        (
            None,
            live("Running", False),
            RunPhase.INTERRUPTED,
            "Workflow r-2 is in phase Running, and its engine no longer runs",
        ),
        (None, live("Failed", False), RunPhase.FAILED, "submission 2 failed"),
        (None, live("Succeeded", False), RunPhase.SUCCEEDED, "submission 2 succeeded"),
        (sealed("Succeeded"), OUT_OF_SIGHT, RunPhase.SUCCEEDED, "submission 2 succeeded"),
        (sealed("Succeeded"), GONE, RunPhase.SUCCEEDED, "submission 2 succeeded"),
        (sealed("Failed", "fit: user error"), OUT_OF_SIGHT, RunPhase.FAILED, "submission 2 failed: fit: user error"),
        (
            sealed("Failed", "fit: Stopped with strategy 'Stop'"),
            OUT_OF_SIGHT,
            RunPhase.STOPPED,
            "submission 2 was stopped by a person",
        ),
        (None, STOPPED, RunPhase.STOPPED, "submission 2 was stopped by a person"),
        (sealed("Succeeded", "run: exit code 1"), GONE, RunPhase.SUCCEEDED, "submission 2 succeeded"),
        (
            sealed("Failed", "fit: exit code 1:\n  a\n  b"),
            GONE,
            RunPhase.FAILED,
            "submission 2 failed: fit: exit code 1: a b",
        ),
        (sealed("Error"), OUT_OF_SIGHT, RunPhase.FAILED, "submission 2 error"),
        (sealed("Failed"), live("Running", True), RunPhase.RUNNING, "submission 2 is Workflow r-2 (Running)"),
    ],
)
def test_phase(end: Any, seen: WorkflowLookup, phase: RunPhase, reason: str) -> None:
    assert determine_run_phase(Submission(CLAIM, BOUND, end), seen) == (phase, reason)


def test_a_reason_fits_a_line() -> None:
    _, reason = determine_run_phase(Submission(CLAIM, BOUND, sealed("Failed", "x" * 900)), GONE)
    assert len(reason) == MAX_REASON_CHARACTERS
    assert reason.endswith("x…")


def test_a_run_without_a_submission_was_interrupted() -> None:
    assert determine_run_phase(None, OUT_OF_SIGHT) == (RunPhase.INTERRUPTED, "recorded, but not submitted")
