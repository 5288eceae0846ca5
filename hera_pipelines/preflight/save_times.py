"""Measures the saves of earlier runs of a pipeline, from the manifests of their checkpoints.

A manifest says how long the copy of the state and its upload took. Both must be over before the grace period ends.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from hera_pipelines.preflight.observation import SaveTimes
from hera_pipelines.preflight.subject import PreflightSubject
from tiphys.errors import IntegrityError, NotFoundError
from tiphys.lineage.select import list_commits
from tiphys.lineage.validity import read_manifest
from tiphys.records import CheckpointManifest, CheckpointRef, RunRecord, task_name
from tiphys.store import RunLayout, Store, list_newest_runs, read_run
from tiphys.store.layout import lineage_name
from tiphys.store.runs import read_concurrently

_MAX_NAMES = 10_000
_MAX_RECORDS = 100
_MAX_RUNS = 20
_MAX_SAVES = 50
"""Of one step or item of one run, the newest."""
_MAX_LINEAGES = 5
"""Items of a fan-out whose saves are read in one run."""


def read_save_times(store: Store, subject: PreflightSubject) -> dict[str, SaveTimes]:
    """Saves by step, in up to 20 of the newest runs of the pipeline; steps without any are left out.

    Raises:
        StoreError: storage is unavailable.
    """
    measured = [step.name for step in subject.steps.values() if step.checkpoints is not None]
    if not measured:
        return {}
    runs = _find_runs(store, subject)
    found = {step: list(chain.from_iterable(_read_saves(store, run, step) for run in runs)) for step in measured}
    return {step: summarize_saves(seconds) for step, seconds in found.items() if seconds}


def summarize_saves(seconds: Sequence[float]) -> SaveTimes:
    """Percentiles by nearest rank. ``seconds`` must not be empty."""
    ordered = sorted(seconds)

    def percentile(percent: int) -> float:
        return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]

    return SaveTimes(len(ordered), percentile(50), percentile(99))


def _find_runs(store: Store, subject: PreflightSubject) -> list[str]:
    """The newest runs of the pipeline, among those whose names begin as its runs are named."""
    listed = islice(list_newest_runs(store), _MAX_NAMES)
    names = list(islice((name for name in listed if name.startswith(subject.run_prefix)), _MAX_RECORDS))

    def read(name: str) -> RunRecord | None:
        try:
            return read_run(store, name)
        except (IntegrityError, NotFoundError):
            return None  # `tiphys verify` reports damaged records

    records = [record for record in read_concurrently(read, names) if record]
    own = [record for record in records if record.pipeline == subject.pipeline.name]
    newest = sorted(own, key=lambda record: record.written_at, reverse=True)[:_MAX_RUNS]
    return [record.run for record in newest]


def _read_saves(store: Store, run: str, step: str) -> Iterator[float]:
    """Durations of the saves of a step; of a fan-out, those of its items."""
    lineages = RunLayout(run).lineages
    listed = (prefix.removeprefix(lineages).rstrip("/") for prefix in store.prefixes(lineages))
    step_ids = list(islice((step_id for step_id in listed if task_name(step_id) == step), _MAX_LINEAGES))
    commits = [ref for step_id in step_ids for ref in list_commits(store, lineage_name(run, step_id), _MAX_SAVES)]

    def read(ref: CheckpointRef) -> CheckpointManifest | None:
        try:
            return read_manifest(store, ref)
        except (IntegrityError, NotFoundError):
            return None

    for manifest in read_concurrently(read, commits):
        seconds = manifest.stage_seconds + manifest.upload_seconds if manifest else 0.0
        if seconds > 0 and math.isfinite(seconds):
            yield seconds
