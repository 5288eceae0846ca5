"""The phase of a run: sealed ends are known from storage, everything else only where the cluster is seen."""

from typing import Any

import pytest
from tiphys_controller import LiveWorkflow
from tiphys_controller.runs import Phase, Seen, phase_of

from tiphys.records import RunSealed, SubmissionBound, SubmissionClaim, SubmissionKind
from tiphys.store import Submission

CLAIM = SubmissionClaim(
    run="r", submission=2, kind=SubmissionKind.RESUME, workflow_name="r-2", namespace="ml", cluster="west"
)
BOUND = SubmissionBound(run="r", submission=2, cluster="west", namespace="ml", workflow_name="r-2", uid="u")


def sealed(status: str, message: str = "") -> RunSealed:
    return RunSealed(run="r", submission=2, status=status, message=message)


def live(phase: str, running: bool) -> Seen:
    return Seen(True, LiveWorkflow("r-2", "ml", "u", phase, running))


OUT_OF_SIGHT = Seen(False)
GONE = Seen(True)
STANDS = "Workflow r-2 stands at Running, and nothing runs it any more"


@pytest.mark.parametrize(
    ("end", "seen", "phase", "reason"),
    [
        (None, OUT_OF_SIGHT, Phase.UNKNOWN, "submission 2 went to cluster west and has not said that it ended"),
        (None, GONE, Phase.INTERRUPTED, "Workflow r-2 is gone, and never said how it ended"),
        (None, live("Running", True), Phase.RUNNING, "submission 2 is Workflow r-2 (Running)"),
        (
            None,
            live("Running", False),
            Phase.INTERRUPTED,
            "Workflow r-2 stands at Running, and nothing runs it any more",
        ),
        (None, live("Failed", False), Phase.FAILED, "submission 2 failed"),
        (None, live("Succeeded", False), Phase.SUCCEEDED, "submission 2 succeeded"),
        (sealed("Succeeded"), OUT_OF_SIGHT, Phase.SUCCEEDED, "submission 2 succeeded"),
        (sealed("Succeeded"), GONE, Phase.SUCCEEDED, "submission 2 succeeded"),
        (sealed("Failed", "fit: user error"), OUT_OF_SIGHT, Phase.FAILED, "submission 2 failed: fit: user error"),
        (sealed("Error"), OUT_OF_SIGHT, Phase.FAILED, "submission 2 error"),
        (sealed("Failed"), live("Running", True), Phase.RUNNING, "submission 2 is Workflow r-2 (Running)"),
    ],
)
def test_phase(end: Any, seen: Seen, phase: Phase, reason: str) -> None:
    assert phase_of(Submission(CLAIM, BOUND, end), seen) == (phase, reason)


def test_a_run_without_a_submission_was_interrupted() -> None:
    assert phase_of(None, OUT_OF_SIGHT) == (Phase.INTERRUPTED, "recorded and never submitted")
