"""What became of a training that met a fault, from its journal. Pure.

All times are of the nodes' clocks. A fault that did not end the process that it was meant for does not count.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from bench.argo.documents import FINISHED
from bench.samples import significant


class Outcome(StrEnum):
    """How a training ended."""

    RIGHT = "right"
    WRONG = "wrong silently"
    FAILED = "failed"
    UNENDED = "not ended after 5 min"
    """Also where the program has written the right result: no step behind it would begin."""


class Note(NamedTuple):
    """An entry of the journal of `trainer`; ``life`` is one process."""

    seconds: float
    kind: str
    step: int
    life: str
    words: str = ""

    @property
    def pod(self) -> str:
        return self.life.partition(".")[0]

    @property
    def process(self) -> int:
        """Its id in the pod."""
        return int(self.life.partition(".")[2].partition("-")[0])


def read_note(key: str) -> Note:
    """The note of a key without its prefix."""
    nanoseconds, kind, step, pod, process, words = key.split(".")
    return Note(int(nanoseconds) / 1e9, kind, int(step), f"{pod}.{process}", words)


@dataclass(frozen=True)
class History:
    """All that is known of one trial.

    ``target`` is the process that the fault was meant for, empty where it was meant for none; ``evidence`` says what
    was seen of the fault, and is empty if nothing was.
    """

    notes: Sequence[Note]
    phases: Sequence[str]
    evidence: str
    target: str = ""
    actions: Sequence[str] = field(default_factory=tuple)


def happened(history: History) -> bool:
    """Whether the fault met the training before its end."""
    if not history.evidence:
        return False
    own = [note for note in history.notes if note.life == history.target]
    return not history.target or (bool(own) and own[-1].kind not in ("done", "missed"))


def judge(history: History, expected: str) -> dict[str, Any]:
    """Outcome, steps trained again, seconds until the next new step, and actions of a person.

    Args:
        history: Of a fault that `happened`.
        expected: The digest of an undisturbed training.
    """
    steps = [note for note in history.notes if note.kind == "step"]
    results = [note.words for note in history.notes if note.kind == "done" and note.words]
    succeeded = bool(results) and bool(history.phases) and all(phase == "Succeeded" for phase in history.phases)
    if any(phase not in FINISHED for phase in history.phases):
        outcome = Outcome.UNENDED
    elif not succeeded:
        outcome = Outcome.FAILED
    else:
        outcome = Outcome.RIGHT if set(results) == {expected} else Outcome.WRONG
    return {
        "outcome": str(outcome),
        "trained_again": len(steps) - len({note.step for note in steps}),
        "seconds": seconds_without_progress(steps, history.target) if history.target else None,
        "actions": list(history.actions),
        "evidence": history.evidence,
    }


def seconds_without_progress(steps: Iterable[Note], target: str) -> float | None:
    """From the last step of a process to the first one that had not been trained before; None without such a step."""
    ordered = sorted(steps)
    own = [note for note in ordered if note.life == target]
    if not own:
        return None
    new = [note for note in ordered if note.life != target and note.step > own[-1].step]
    return significant(new[0].seconds - own[-1].seconds, 3) if new else None
