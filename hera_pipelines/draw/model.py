"""What there is to draw: one lane per attempt, one dot per checkpoint.

Drawing reads this and nothing of storage, so that pictures are tested without
records; `hera_pipelines.draw.reading` makes it from them.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from tiphys.lineage import Status


class Ending(StrEnum):
    """How an attempt ended."""

    DONE = "done"
    FAILED = "failed"
    FENCED = "fenced"
    OPEN = "open"
    """No end is recorded: it runs, or whoever ran it is gone."""


class Place(NamedTuple):
    """Names a checkpoint within its lineage."""

    attempt: int
    global_step: int


@dataclass(frozen=True)
class Dot:
    """One checkpoint. ``facts`` are short lines for whoever looks closer."""

    place: Place
    status: Status = Status.COMMITTED
    metrics: str = ""
    facts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lane:
    """One attempt. ``origin`` is the checkpoint of this lineage that it started from; None means from none."""

    attempt: int
    submission: int
    origin: Place | None
    ending: Ending
    message: str
    dots: tuple[Dot, ...]
    report: str = ""
    """What became of its grace period, if it was told to stop."""
    fork: str = ""
    """The checkpoint of another run that it started from, in words; empty for none."""

    @property
    def start(self) -> str:
        """What it started from, in words."""
        if self.origin is not None:
            return f"from step {self.origin.global_step} of attempt {self.origin.attempt}"
        return f"from {self.fork}" if self.fork else "from scratch"


@dataclass(frozen=True)
class Lineage:
    """The checkpoints of one training step of a run."""

    run: str
    step: str
    lanes: tuple[Lane, ...]
    note: str = ""
    """Why checkpoints may be missing."""
    item: str = ""
    """What this item of a fan-out was given."""

    @property
    def title(self) -> str:
        """The step, and for an item what people know it by."""
        return f"{self.step}  {self.item}" if self.item else self.step
