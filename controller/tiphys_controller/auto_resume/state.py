"""Types of the automatic resumes: the observation of a run and the cluster's limits.

They live apart from the code that fills them, so that the decision is a pure
function of them.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from tiphys.protocol.auto_resume_policy import AutoResumePolicy
from tiphys.records import Cause, RunProgress
from tiphys.store import Submission
from tiphys_controller.submit.submission import is_bound_workflow, submission_cluster
from tiphys_controller.submit.submitter import LiveWorkflow

_NO_ADVANCE = RunProgress()


RunKey = tuple[str, str]
"""Namespace and name of a run."""


class SubmissionStatus(StrEnum):
    """State of the last submission of a run."""

    RUNNING = "runs"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    WORKFLOW_GONE = "gone"
    """Its Workflow is gone, and no end is recorded."""
    UNSENT = "unsent"
    """Its Workflow was never created; also a run without any submission."""
    OTHER_CLUSTER = "elsewhere"
    """It was submitted to another cluster, whose own controller resumes it."""


class StepFailure(NamedTuple):
    """A step whose newest attempt failed."""

    step: str
    cause: Cause
    message: str


@dataclass(frozen=True)
class RunObservation:
    """State of a run at one moment. ``submission`` is its last submission; 0 if it has none."""

    run: str
    submission: int
    status: SubmissionStatus
    policy: AutoResumePolicy | None = None
    workflow_uid: str = ""
    """Uid of its Workflow; empty before the binding."""
    end_message: str = ""
    """Message of the end record; empty without one."""
    person_reason: str = ""
    """Why the run counts as ended by a person; empty if it does not."""
    is_intended: bool = False
    """Whether a controller has recorded that it is about to make the next submission."""
    failures: tuple[StepFailure, ...] = ()
    fruitless_resumes: int = 0
    """Automatic resumes in a row that made no progress."""
    advance: RunProgress = _NO_ADVANCE

    @property
    def next_submission(self) -> int:
        """The number that a resume would use."""
        return max(self.submission, 1) if self.status is SubmissionStatus.UNSENT else self.submission + 1

    @property
    def cause(self) -> Cause | None:
        """Cause of its first failed step; None without one."""
        return self.failures[0].cause if self.failures else None


def determine_submission_status(last: Submission | None, live: LiveWorkflow | None, cluster: str) -> SubmissionStatus:
    """Status of the last submission of a run.

    ``live`` is what ``cluster``, which was searched, shows under the name of that submission.
    """
    if last is None:
        return SubmissionStatus.UNSENT
    if submission_cluster(last) not in ("", cluster):
        return SubmissionStatus.OTHER_CLUSTER
    if live is not None and is_bound_workflow(last, live):
        return SubmissionStatus.RUNNING if live.running else _final_status(live.phase)
    if last.end is not None:
        return _final_status(last.end.status)
    return SubmissionStatus.WORKFLOW_GONE if last.binding else SubmissionStatus.UNSENT


def _final_status(phase: str) -> SubmissionStatus:
    return SubmissionStatus.SUCCEEDED if phase == "Succeeded" else SubmissionStatus.FAILED


class AutomationMode(StrEnum):
    """Whether the controller carries out its decisions."""

    OFF = "off"
    DRY_RUN = "dry-run"
    """It reports its decisions and does nothing."""
    ON = "on"


@dataclass(frozen=True)
class AutoResumeLimits:
    """Limits on automatic resumes that protect the cluster. Times are measured on a monotonic clock."""

    mode: AutomationMode = AutomationMode.ON
    resumes_per_minute: float = 10.0
    """Average rate of resumes, all runs together."""
    resume_burst: int = 10
    """Largest number of resumes at once after a quiet time."""
    absent_seconds: float = 60.0
    """How long a Workflow must be gone before its run counts as ended."""
    unsent_seconds: float = 120.0
    """How long a claimed submission may lack its Workflow: its claimant may be about to create it."""
    healthy_seconds: float = 15.0
    """How long API server and store must have answered every request before a failure is trusted."""
    mass_failure_count: int = 5
    """Number of simultaneous failures that counts as an outage, if they outnumber the running runs."""
    mass_failure_seconds: float = 60.0
    """Window in which failures count as simultaneous."""
    mass_vanished_seconds: float = 1800.0
    """The same for vanished Workflows: a restored or emptied API server shows none either."""
    sweep_seconds: float = 300.0
    """Interval between searches of storage for runs whose end the watch has missed."""
