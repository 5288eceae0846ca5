"""What holds for all runs of a cluster, whatever their authors asked for."""

from dataclasses import dataclass
from enum import StrEnum


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
