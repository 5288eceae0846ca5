"""The trials of a sweep: what each was given, how far it has come, and which one is the best.

A sweep is a fan-out of one step, and each of its items a step of its own. What
`tiphys sweep` shows and what the step behind a sweep hands on must be the same
choice, so it is made here, once.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from tiphys.lineage.tree import CheckpointNode, Status
from tiphys.records import AttemptEnd, CheckpointRef, Outcome, Output, OutputKind, Record
from tiphys.records.manifest import Metric
from tiphys.store import Attempt


class TrialState(StrEnum):
    """How far a trial has come, as storage tells."""

    WAITING = "Waiting"
    """No attempt has begun: it waits for its turn, or for GPUs."""
    RUNNING = "Running"
    """An attempt is open. If whoever ran it is gone, nobody has said so yet."""
    INTERRUPTED = "Interrupted"
    """Its attempt was ended by a resume, and the next has not begun."""
    FAILED = "Failed"
    """Its last attempt failed; there may be another."""
    DONE = "Done"


class Aim(NamedTuple):
    """What makes one trial better than another."""

    metric: str
    mode: Literal["min", "max"] = "min"

    def better(self, value: float) -> float:
        """A number that is smaller the better ``value`` is; one that is no number is worst."""
        return math.inf if math.isnan(value) else value if self.mode == "min" else -value


class Trial(Record):
    """One trial. ``index`` counts from 0, in the order of the sweep."""

    index: int
    step: str
    """Its step id: what its attempts, checkpoints and outputs lie below."""
    parameters: dict[str, Any]
    """What it was given. An item that is no map, or only known by how Argo displays it, is under ``item``."""
    state: TrialState
    value: Metric | None = None
    """The metric; None where it has recorded none of that name."""
    value_from: str = ""
    """``output``, or the checkpoint that recorded it, as ``attempt-step``."""
    checkpoint: CheckpointRef | None = None
    """The checkpoint that recorded the value; None for an output."""
    attempts: int = 0
    gpu_hours: float = 0.0
    """GPUs times the time between claim and end of each attempt, by the clocks of those who wrote them."""
    message: str = ""
    """How its last attempt ended."""
    outputs: tuple[Output, ...] = ()
    """What it left, if it is done."""
    metrics: tuple[str, ...] = ()
    """Names of the metrics that it has recorded."""


class Sweep(Record):
    """All trials of one fanned-out step."""

    run: str
    step: str
    description: str = ""
    """How the trials came about, seed included, where the author asked for a sweep."""
    metric: str = ""
    mode: Literal["min", "max"] = "min"
    best: str = ""
    """Step id of the best trial that is done; empty while there is none."""
    trials: tuple[Trial, ...] = ()
    """The best first; those without a value last, in the order of the sweep."""
    note: str = ""
    """Why metrics may be missing."""


class Source(NamedTuple):
    """What storage has of one item."""

    attempts: Sequence[Attempt] = ()
    checkpoints: Sequence[CheckpointNode] = ()
    adopted: AttemptEnd | None = None
    """The end of a result of another run that was taken over."""


def trial_of(index: int, step: str, parameters: dict[str, Any], source: Source, aim: Aim | None) -> Trial:
    """What is known of one trial. Pure."""
    last = source.attempts[-1].end if source.attempts else source.adopted
    end = last if last and last.outcome is Outcome.DONE else None
    usable = [node for node in source.checkpoints if node.status is Status.COMMITTED]
    trial = Trial(
        index=index,
        step=step,
        parameters=parameters,
        state=TrialState.DONE if end else _state(source.attempts),
        attempts=len(source.attempts),
        message=last.message if last else "",
        outputs=end.outputs if end else (),
        metrics=tuple(sorted({name for node in usable for name in node.metrics} | _numbers(end).keys())),
    )
    return trial.model_copy(update=_value(usable, _numbers(end), aim)) if aim else trial


def ranked(sweep: Sweep, aim: Aim | None) -> Sweep:
    """The sweep with its trials in order and its best one named. Of equals the first is taken. Pure."""
    if aim is None:
        return sweep

    def place(trial: Trial) -> tuple[bool, float, int]:
        return trial.value is None, math.inf if trial.value is None else aim.better(trial.value), trial.index

    trials = sorted(sweep.trials, key=place)
    finished = (one for one in trials if one.state is TrialState.DONE)
    best = next((one.step for one in finished if one.value is not None and math.isfinite(one.value)), "")
    return sweep.model_copy(update={"metric": aim.metric, "mode": aim.mode, "trials": tuple(trials), "best": best})


def _value(usable: Iterable[CheckpointNode], outputs: Mapping[str, float], aim: Aim) -> dict[str, Any]:
    """An output speaks of what came out in the end; otherwise the best checkpoint that is left counts."""
    if aim.metric in outputs:
        return {"value": outputs[aim.metric], "value_from": "output"}
    recorded = [node for node in usable if aim.metric in node.metrics]
    if not recorded:
        return {}
    best = min(recorded, key=lambda node: aim.better(node.metrics[aim.metric]))
    return {"value": best.metrics[aim.metric], "value_from": str(best.ref), "checkpoint": best.ref}


def _numbers(end: AttemptEnd | None) -> dict[str, float]:
    """Output parameters that are numbers."""
    found: dict[str, float] = {}
    for output in end.outputs if end else ():
        if output.kind is OutputKind.PARAMETER and output.value is not None:
            try:
                found[output.name] = float(output.value)
            except ValueError:
                continue
    return found


def _state(attempts: Sequence[Attempt]) -> TrialState:
    if not attempts:
        return TrialState.WAITING
    end = attempts[-1].end
    if end is None:
        return TrialState.RUNNING
    return TrialState.INTERRUPTED if end.outcome is Outcome.FENCED else TrialState.FAILED


def hours(attempts: Iterable[Attempt], now: datetime) -> float:
    """Time between claim and end of each attempt; one that is open counts until ``now``."""
    spans = [((one.end.written_at if one.end else now) - one.claim.written_at).total_seconds() for one in attempts]
    return sum(max(0.0, span) for span in spans) / 3600
