"""Reading a sweep from storage: which items it has, and what each has left there."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Literal

from tiphys.errors import UsageError
from tiphys.lineage.tree import LineageTree, tree_of
from tiphys.lineage.trials import Aim, Source, Sweep, Trial, hours, ranked, trial_of
from tiphys.protocol.fan_out import SWEEP_ANNOTATION, given_by, written_items
from tiphys.protocol.pipeline import CompiledPipeline
from tiphys.records import AdoptedRecord, AttemptEnd, ItemBound
from tiphys.store import Attempt, RunLayout, Store, all_attempts, read_current_run, read_record
from tiphys.store.layout import parse_adopted, parse_submission
from tiphys.store.runs import concurrently


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
