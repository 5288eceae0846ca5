"""Trials of a sweep: parameters, state, metric, and the best trial.

A sweep is a fan-out of one step, and each item is one trial. `tiphys sweep` and
`tiphys.lineage.best` must choose the same best trial, so both use this module.
`read_sweep` collects the items of a sweep and their records from storage;
`build_trial` and `rank_trials` are pure.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from tiphys.errors import UsageError
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.tree import CheckpointNode, CheckpointStatus, LineageTree, build_lineage_tree
from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.protocol.fan_out import SWEEP_ANNOTATION, parse_item_parameters
from tiphys.records import (
    AttemptEnd,
    AttemptEndOutcome,
    CheckpointRef,
    Output,
    OutputKind,
    Record,
    ReuseRecord,
    task_name,
)
from tiphys.records.checkpoint import Metric
from tiphys.store import Attempt, Store, read_attempt_end, read_record
from tiphys.store.layout import parse_reused
from tiphys.store.runs import read_concurrently


class TrialState(StrEnum):
    """State of a trial according to storage."""

    WAITING = "Waiting"
    """No attempt has started: the trial waits for Argo or for GPUs."""
    RUNNING = "Running"
    """An attempt has no end record. Its pod may be lost without a record of that."""
    INTERRUPTED = "Interrupted"
    """A resume ended its attempt, and the next has not started."""
    FAILED = "Failed"
    """Its last attempt failed; there may be another."""
    DONE = "Done"


class Objective(NamedTuple):
    """The metric by which trials are compared."""

    metric: str
    mode: Literal["min", "max"] = "min"

    def sort_value(self, value: float) -> float:
        """Sort key of ``value``: lower is better, and NaN is worst."""
        return math.inf if math.isnan(value) else value if self.mode == "min" else -value


class Trial(Record):
    """One trial. ``index`` counts from 0, in the order of the sweep."""

    index: int
    step: str
    """Its step id."""
    name: str = ""
    """Its name for people, such as ``fit[2]``."""
    parameters: dict[str, Any]
    """Its parameters. An item that is no map is stored under ``item``."""
    state: TrialState
    value: Metric | None = None
    """Value of the metric; None if the trial recorded none."""
    value_from: str = ""
    """``output``, or the checkpoint that recorded it, as ``attempt-step``."""
    checkpoint: CheckpointRef | None = None
    """The checkpoint that recorded the value; None for an output."""
    attempts: int = 0
    gpu_hours: float = 0.0
    """GPUs times the time between claim and `AttemptEnd.ended_at` of each attempt, by the clocks of their writers."""
    message: str = ""
    """How its last attempt ended."""
    outputs: tuple[Output, ...] = ()
    """Its outputs, if it is done."""
    metrics: tuple[str, ...] = ()
    """Names of its recorded metrics."""


class SweepReport(Record):
    """All trials of one fanned-out step."""

    run: str
    step: str
    description: str = ""
    """How the trials were chosen, seed included; empty for a fan-out without a declared sweep."""
    metric: str = ""
    mode: Literal["min", "max"] = "min"
    best: str = ""
    """Step id of the best finished trial; empty if there is none."""
    trials: tuple[Trial, ...] = ()
    """The best first; trials without a value last, in the order of the sweep."""
    note: str = ""
    """Why metrics may be missing."""


class TrialRecords(NamedTuple):
    attempts: Sequence[Attempt] = ()
    checkpoints: Sequence[CheckpointNode] = ()
    reused_end: AttemptEnd | None = None
    """The end of the reused attempt of another run."""


def build_trial(
    index: int, step: str, parameters: dict[str, Any], records: TrialRecords, objective: Objective | None
) -> Trial:
    """Combine the records of one trial. Pure."""
    last = records.attempts[-1].end if records.attempts else records.reused_end
    end = last if last and last.outcome is AttemptEndOutcome.DONE else None
    usable = [node for node in records.checkpoints if node.status is CheckpointStatus.COMMITTED]
    trial = Trial(
        index=index,
        step=step,
        parameters=parameters,
        state=TrialState.DONE if end else _trial_state(records.attempts),
        attempts=len(records.attempts),
        message=last.message if last else "",
        outputs=end.outputs if end else (),
        metrics=tuple(sorted({name for node in usable for name in node.metrics} | _numeric_outputs(end).keys())),
    )
    return trial.model_copy(update=_objective_value(usable, _numeric_outputs(end), objective)) if objective else trial


def rank_trials(sweep: SweepReport, objective: Objective | None) -> SweepReport:
    """Sort the trials and name the best one; the first of equal trials wins. Pure."""
    if objective is None:
        return sweep

    def sort_key(trial: Trial) -> tuple[bool, float, int]:
        return trial.value is None, math.inf if trial.value is None else objective.sort_value(trial.value), trial.index

    trials = sorted(sweep.trials, key=sort_key)
    finished = (trial for trial in trials if trial.state is TrialState.DONE)
    best = next((trial.step for trial in finished if trial.value is not None and math.isfinite(trial.value)), "")
    return sweep.model_copy(
        update={"metric": objective.metric, "mode": objective.mode, "trials": tuple(trials), "best": best}
    )


def _objective_value(
    usable: Iterable[CheckpointNode], outputs: Mapping[str, float], objective: Objective
) -> dict[str, Any]:
    """The value of the objective: an output of that name, otherwise the value of the best stored checkpoint."""
    if objective.metric in outputs:
        return {"value": outputs[objective.metric], "value_from": "output"}
    recorded = [node for node in usable if objective.metric in node.metrics]
    if not recorded:
        return {}
    best = min(recorded, key=lambda node: objective.sort_value(node.metrics[objective.metric]))
    return {"value": best.metrics[objective.metric], "value_from": str(best.ref), "checkpoint": best.ref}


def _numeric_outputs(end: AttemptEnd | None) -> dict[str, float]:
    """Output parameters that are numbers, by name."""
    values: dict[str, float] = {}
    for output in end.outputs if end else ():
        if output.kind is OutputKind.PARAMETER and output.value is not None:
            try:
                values[output.name] = float(output.value)
            except ValueError:
                continue
    return values


def _trial_state(attempts: Sequence[Attempt]) -> TrialState:
    if not attempts:
        return TrialState.WAITING
    end = attempts[-1].end
    if end is None:
        return TrialState.RUNNING
    return TrialState.INTERRUPTED if end.outcome is AttemptEndOutcome.FENCED else TrialState.FAILED


def attempt_hours(attempts: Iterable[Attempt], now: datetime) -> float:
    """Total hours between claim and end of the attempts; an open attempt counts until ``now``."""
    spans = [(end.ended_at if end else now) - claim.written_at for claim, end in attempts]
    return sum(max(0.0, span.total_seconds()) for span in spans) / 3600


def read_sweep(
    history: RunHistory, step: str, metric: str | None, mode: Literal["min", "max"] | None, now: datetime
) -> SweepReport:
    """Read the sweep of a run. Costs a read for each of its attempts and checkpoints.

    An empty ``step`` means the only sweep. Without ``metric`` and ``mode`` those of the step's best checkpoints count,
    or else the order ``min``. ``now`` ends the time of open attempts.

    Raises:
        NotFoundError: the store has no such run.
        UsageError: the run has no such sweep, or has several and ``step`` is empty.
    """
    pipeline, names = history.pipeline, history.names
    name = _resolve_sweep_step(pipeline, step)
    objective = _read_objective(pipeline, name, metric, mode)
    own = history.read_attempts(step=name)
    lineages = build_lineage_tree(history, own)
    sources = _trial_records(own, lineages, _read_reused_ends(history, name, own))
    texts = {item.step_id: item.text for item in names.items(name)}
    parameters = {step: parse_item_parameters(texts.get(step, "")) for step in names.sort(texts or sources)}
    gpu = pipeline.steps[name].gpu
    gpus = gpu.gpus if gpu else 0

    def read_trial(index: int, key: str) -> Trial:
        source = sources.get(key, TrialRecords())
        trial = build_trial(index, key, parameters[key], source, objective)
        hours = gpus * attempt_hours(source.attempts, now)
        return trial.model_copy(update={"name": names.name(key), "gpu_hours": hours})

    trials = tuple(read_trial(index, key) for index, key in enumerate(parameters))
    notes = {lineage.note for lineage in lineages.steps if lineage.note} | {*history.damaged}
    note = "; ".join(sorted(notes))
    description = (history.workflow["metadata"].get("annotations") or {}).get(f"{SWEEP_ANNOTATION}{name}", "")
    sweep = SweepReport(run=history.run, step=name, description=description, trials=trials, note=note)
    return rank_trials(sweep, objective)


def _resolve_sweep_step(pipeline: CompiledPipeline, step: str) -> str:
    fan_outs = [spec.name for spec in pipeline.steps.values() if spec.fan_out]
    if step in fan_outs:
        return step
    names = ", ".join(fan_outs) or "none"
    if step:
        raise UsageError(f"pipeline {pipeline.name} has no sweep {step!r}; its fanned-out steps are: {names}")
    if len(fan_outs) != 1:
        problem = "several sweeps; name one as RUN/STEP" if fan_outs else "no sweep, because none of its steps fans out"
        raise UsageError(f"pipeline {pipeline.name} has {problem}; its fanned-out steps are: {names}")
    return fan_outs[0]


def _read_objective(
    pipeline: CompiledPipeline, step: str, metric: str | None, mode: Literal["min", "max"] | None
) -> Objective | None:
    checkpoints = pipeline.steps[step].checkpoints
    kept = checkpoints.keep_best if checkpoints else None
    if metric is None:
        return Objective(kept.metric, kept.order) if kept else None
    return Objective(metric, mode or (kept.order if kept and kept.metric == metric else "min"))


def _trial_records(
    own: Mapping[str, list[Attempt]], lineages: LineageTree, adopted: Mapping[str, AttemptEnd]
) -> dict[str, TrialRecords]:
    checkpoints = {
        lineage.step: [node for attempt in lineage.attempts for node in attempt.checkpoints]
        for lineage in lineages.steps
    }
    return {
        step: TrialRecords(own.get(step, ()), checkpoints.get(step, ()), adopted.get(step)) for step in {*own, *adopted}
    }


def _read_reused_ends(history: RunHistory, name: str, own: Mapping[str, object]) -> dict[str, AttemptEnd]:
    """Ends of other runs that items without own attempts reuse, by step id."""
    keys: dict[str, str] = {}
    for info in history.store.list(history.layout.all_reused):
        parsed = parse_reused(info.key)
        if parsed and task_name(parsed.step) == name and parsed.step not in own:
            keys[parsed.step] = info.key
    ends = read_concurrently(lambda key: _read_reused_end(history.store, key), list(keys.values()))
    return dict(zip(keys, ends, strict=True))


def _read_reused_end(store: Store, key: str) -> AttemptEnd:
    record = read_record(store, key, ReuseRecord)
    return read_attempt_end(store, record.source_run, record.source_step, record.source_attempt)
