"""What is known of a run at one moment, as far as a decision needs it.

What holds for all runs of a cluster, whatever their authors asked for.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from tiphys.protocol.auto_resume_policy import AutoResumePolicy
from tiphys.records import Advance, Cause
from tiphys.store import Submission
from tiphys_controller.submit.submission import cluster_of
from tiphys_controller.submit.submitter import LiveWorkflow

_NOTHING = Advance()


RunKey = tuple[str, str]
"""Namespace and name of a run."""


class Standing(StrEnum):
    """Where the last submission of a run stands."""

    RUNS = "runs"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    GONE = "gone"
    """Its Workflow is not there, and nobody has recorded an end."""
    UNSENT = "unsent"
    """It was claimed, or is the first one, and no Workflow was ever made."""
    ELSEWHERE = "elsewhere"
    """It went to another cluster, whose own controller looks after it."""


class Failure(NamedTuple):
    """A step that was given up."""

    step: str
    cause: Cause
    message: str


@dataclass(frozen=True)
class Observed:
    """One look at a run whose last submission is ``submission``; 0 if it has none."""

    run: str
    submission: int
    standing: Standing
    policy: AutoResumePolicy | None = None
    uid: str = ""
    """That of its Workflow; empty where none was bound."""
    told: str = ""
    """How it ended, in words; empty where nobody said."""
    ended_by: str = ""
    """Why a person, and no fault, has ended it; empty if none did."""
    intended: bool = False
    """Whether the next submission was decided on before, by this controller or another."""
    failures: tuple[Failure, ...] = ()
    fruitless: int = 0
    """Automatic resumes in a row that got the run no further."""
    advance: Advance = _NOTHING

    @property
    def next_submission(self) -> int:
        """The number that a resume would use."""
        return max(self.submission, 1) if self.standing is Standing.UNSENT else self.submission + 1

    @property
    def cause(self) -> Cause | None:
        """Why it ended, if its steps say so."""
        return self.failures[0].cause if self.failures else None


def standing_of(last: Submission | None, live: LiveWorkflow | None, cluster: str) -> Standing:
    """Where a run stands.

    Args:
        last: Its last submission; None before the first.
        live: The object that ``cluster`` shows under the name of that submission.
        cluster: The one that was asked.
    """
    if last is None:
        return Standing.UNSENT
    if cluster_of(last) not in ("", cluster):
        return Standing.ELSEWHERE
    if live is not None and (last.bound is None or live.uid == last.bound.uid):
        return Standing.RUNS if live.running else _ended(live.phase)
    if last.end is not None:
        return _ended(last.end.status)
    return Standing.GONE if last.bound else Standing.UNSENT


def _ended(phase: str) -> Standing:
    return Standing.SUCCEEDED if phase == "Succeeded" else Standing.FAILED


class Mode(StrEnum):
    """What the controller does about runs that could go on."""

    OFF = "off"
    DRY_RUN = "dry-run"
    """Nothing, and it tells what it would do."""
    ON = "on"


@dataclass(frozen=True)
class Limits:
    """Brakes that protect the cluster. Times are measured on a clock that never jumps."""

    mode: Mode = Mode.ON
    per_minute: float = 10.0
    """Resumes of all runs together, on average."""
    burst: int = 10
    """So many of them at once after a quiet time."""
    absent_seconds: float = 60.0
    """So long must a Workflow be gone, asked for again, before its run counts as ended."""
    unsent_seconds: float = 120.0
    """So old must a claim be whose Workflow nobody has sent: somebody may be about to."""
    calm_seconds: float = 15.0
    """So long must API server and store have answered everything before a failure is believed."""
    mass: int = 5
    """From so many failures at once on, if they are more than half of all runs, something else is wrong."""
    mass_seconds: float = 60.0
    """So long must no further run have failed then."""
    mass_absent_seconds: float = 1800.0
    """The same where the Workflows are gone: a restored or emptied API server shows none, too."""
    sweep_seconds: float = 300.0
    """How often storage is searched for runs whose end nobody has seen."""
