"""The report card of a SIGTERM: what was tried in the time that was left, and what came of it. Pure."""

from dataclasses import dataclass
from typing import Any

from tiphys.checkpoint.landing import Choice
from tiphys.records import CheckpointRef


@dataclass(frozen=True)
class ReportCard:
    """What happened between SIGTERM and the end of the program."""

    choice: Choice
    global_step: int
    """The step that the training had completed when it came by."""
    state_bytes: int
    grace_seconds: float | None
    noticed_seconds: float
    """From SIGTERM until the training came by."""
    staged_seconds: float
    """From SIGTERM until the newest state was on its way, or was given up."""
    ended_seconds: float
    """From SIGTERM until the commit, or until there was no more time to wait for it."""
    bytes_per_second: float | None
    committed: CheckpointRef | None
    """What was committed since SIGTERM."""
    newest_step: int
    """Step of the newest checkpoint there is; 0 if there is none."""

    @property
    def steps_lost(self) -> int:
        """Steps that are trained again."""
        return self.global_step - self.newest_step

    @property
    def spare_seconds(self) -> float | None:
        """Between the end and the kill; None when nobody said how long the grace period is."""
        return None if self.grace_seconds is None else self.grace_seconds - self.ended_seconds

    def message(self) -> str:
        """For a person who reads the log or the lineage."""
        again = f"{self.steps_lost} {'step is' if self.steps_lost == 1 else 'steps are'} trained again"
        if not self.steps_lost:
            spare = "" if self.spare_seconds is None else f", {self.spare_seconds:.1f} s before the kill"
            outcome = f"it was committed {self.ended_seconds:.1f} s after SIGTERM{spare}"
        elif self.choice is Choice.LEAVE:
            outcome = f"there was no time to save its {self.state_bytes:,} bytes; {again}"
        elif self.committed:
            outcome = f"there was time for the save under way, of step {self.newest_step}; {again}"
        else:
            outcome = f"nothing was committed within {self.ended_seconds:.1f} s; {again}"
        return f"told to stop at step {self.global_step}: {outcome}"

    def data(self) -> dict[str, Any]:
        """For a program; seconds count from SIGTERM."""
        return {
            "choice": self.choice.value,
            "global_step": self.global_step,
            "state_bytes": self.state_bytes,
            "grace_seconds": self.grace_seconds,
            "noticed_seconds": round(self.noticed_seconds, 3),
            "staged_seconds": round(self.staged_seconds, 3),
            "ended_seconds": round(self.ended_seconds, 3),
            "spare_seconds": None if self.spare_seconds is None else round(self.spare_seconds, 3),
            "bytes_per_second": self.bytes_per_second and round(self.bytes_per_second),
            "committed": str(self.committed) if self.committed else None,
            "steps_lost": self.steps_lost,
        }
