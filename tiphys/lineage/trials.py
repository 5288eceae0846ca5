"""The trials of a sweep: what each was given, how far it has come, and which one is the best.

A sweep is a fan-out of one step, and each of its items a step of its own. What
`tiphys sweep` shows and what the step behind a sweep hands on must be the same
choice, so it is made here, once.

Reading a sweep from storage: which items it has, and what each has left there.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from tiphys.errors import UsageError
from tiphys.lineage.tree import CheckpointNode, LineageTree, Status, tree_of
from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.protocol.fan_out import SWEEP_ANNOTATION, given_by, written_items
from tiphys.records import AdoptedRecord, AttemptEnd, CheckpointRef, ItemBound, Outcome, Output, OutputKind, Record
from tiphys.records.checkpoint import Metric
from tiphys.store import Attempt, RunLayout, Store, all_attempts, read_current_run, read_record
from tiphys.store.layout import parse_adopted, parse_submission
from tiphys.store.runs import concurrently


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


def read_sweep(
    store: Store, run: str, step: str, metric: str | None, mode: Literal["min", "max"] | None, now: datetime
) -> Sweep:
    """Read the sweep of ``run``. Costs a read for each attempt and each checkpoint of it.

    Args:
        store: Storage of the run.
        run: Name of the run.
        step: The fanned-out step; empty: the only one that there is.
        metric: What trials are compared by; None: what the step keeps its best checkpoints by, if anything.
        mode: Which values are better; None: as the step keeps its best checkpoints, otherwise the lowest.
        now: Until when open attempts are counted.

    Raises:
        NotFoundError: there is no such run.
        UsageError: it has no such sweep, or several and ``step`` names none.
    """
    record = read_current_run(store, run)
    pipeline = CompiledPipeline.from_manifest(record.workflow)
    name = _the_sweep(pipeline, step)
    aim = _aim(pipeline, name, metric, mode)
    own = {key: tries for key, tries in all_attempts(store, run).items() if key.partition(".")[0] == name}
    lineages = tree_of(store, record, own, ())
    sources = _sources(own, lineages, _adopted(store, run, name, own))
    items = next(written_items(task) for task in pipeline.tasks() if task["name"] == name)
    if items is None:
        given = _displayed(store, run, name, sources)
    else:
        given = {item.step: given_by(item.text) for item in items}
    gpu = pipeline.steps[name].gpu
    gpus = gpu.gpus if gpu else 0

    def trial(index: int, key: str) -> Trial:
        source = sources.get(key, Source())
        found = trial_of(index, key, given[key], source, aim)
        return found.model_copy(update={"gpu_hours": gpus * hours(source.attempts, now)})

    trials = tuple(trial(index, key) for index, key in enumerate(given))
    notes = sorted({lineage.note for lineage in lineages.steps if lineage.note})
    told = (record.workflow["metadata"].get("annotations") or {}).get(f"{SWEEP_ANNOTATION}{name}", "")
    return ranked(Sweep(run=run, step=name, description=told, trials=trials, note="; ".join(notes)), aim)


def _the_sweep(pipeline: CompiledPipeline, step: str) -> str:
    found = [spec.name for spec in pipeline.steps.values() if spec.fan_out]
    if step in found:
        return step
    known = ", ".join(found) or "none"
    if step:
        raise UsageError(f"pipeline {pipeline.name} has no sweep {step!r}; its fanned-out steps are: {known}")
    if len(found) != 1:
        what = "several sweeps; name one as RUN/STEP" if found else "no sweep, for no step of it is fanned out"
        raise UsageError(f"pipeline {pipeline.name} has {what}; its fanned-out steps are: {known}")
    return found[0]


def _aim(pipeline: CompiledPipeline, step: str, metric: str | None, mode: Literal["min", "max"] | None) -> Aim | None:
    checkpoints = pipeline.steps[step].checkpoints
    kept = checkpoints.keep_best if checkpoints else None
    if metric is None:
        return Aim(kept.metric, kept.order) if kept else None
    return Aim(metric, mode or (kept.order if kept and kept.metric == metric else "min"))


def _sources(
    own: Mapping[str, list[Attempt]], lineages: LineageTree, adopted: Mapping[str, AttemptEnd]
) -> dict[str, Source]:
    checkpoints = {one.step: [node for tried in one.attempts for node in tried.checkpoints] for one in lineages.steps}
    return {step: Source(own.get(step, ()), checkpoints.get(step, ()), adopted.get(step)) for step in {*own, *adopted}}


def _displayed(store: Store, run: str, name: str, steps: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Items that a step made at run time, as Argo displays them, such as ``sweep(1:lr:0.2)``."""
    layout = RunLayout(run)
    keys = [info.key for number in _submissions(store, layout) for info in store.list(layout.items(number))]
    bound = concurrently(lambda key: read_record(store, key, ItemBound), keys)
    labels = {one.step: one.label for one in bound if one.step.partition(".")[0] == name}
    shown = {step: labels.get(step, "").removeprefix(f"{name}(").removesuffix(")") for step in {*steps, *labels}}
    return {step: {"item": shown[step]} for step in sorted(shown, key=lambda step: (shown[step], step))}


def _submissions(store: Store, layout: RunLayout) -> list[int]:
    places = (parse_submission(info.key) for info in store.list(layout.submissions))
    return sorted({place[0] for place in places if place})


def _adopted(store: Store, run: str, name: str, own: Mapping[str, object]) -> dict[str, AttemptEnd]:
    """Ends of other runs that items without an attempt of their own have taken over."""
    layout = RunLayout(run)
    found: dict[str, str] = {}
    for info in store.list(layout.adoptions):
        place = parse_adopted(info.key)
        if place and place[1].partition(".")[0] == name and place[1] not in own:
            found[place[1]] = info.key
    ends = concurrently(lambda key: _source_end(store, key), list(found.values()))
    return dict(zip(found, ends, strict=True))


def _source_end(store: Store, key: str) -> AttemptEnd:
    record = read_record(store, key, AdoptedRecord)
    key = RunLayout(record.source_run).attempt_end(record.source_step, record.source_attempt)
    return read_record(store, key, AttemptEnd)
