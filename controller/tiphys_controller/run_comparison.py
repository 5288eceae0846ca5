"""Compares two runs of one store: what was asked for, what ran, and what came of it.

Steps and fan-out items are matched by their step ids, so an item is compared with
the one of the same value, wherever it stands in its fan-out.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.tree import CheckpointStatus, LineageTree, StepLineage, read_lineage_tree
from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.protocol.drift_policy import DriftClass, read_drift_policy
from tiphys.records import Cause, Record
from tiphys.store import RunLayout, Store
from tiphys_controller.plan.drift import find_drift
from tiphys_controller.runs import RunDetail, describe_run
from tiphys_controller.submit.plan_report import OutputDocument

_Facts = Mapping[tuple[str, str], str]
"""Values by (step id, field)."""


class RunDifference(Record):
    """One value that differs; empty where a run has none."""

    kind: Literal["run", "parameter", "workflow", "outcome", "output", "metric", "version"]
    step: str = ""
    """Id of the step or item; empty for the whole run."""
    name: str = ""
    """Name and value of the step or item for people."""
    field: str
    before: str
    after: str


class RunComparison(OutputDocument):
    """All differences between two runs."""

    kind: Literal["RunComparison"] = "RunComparison"
    before: str
    after: str
    differences: tuple[RunDifference, ...]


def compare_runs(store: Store, before: str, after: str) -> RunComparison:
    """Compare two runs. Costs the reads of `describe_run` and `read_lineage_tree` for each.

    Raises:
        NotFoundError: there is no such run.
        UsageError: Tiphys did not compile one of the Workflows.
        IntegrityError: a record is damaged.
    """
    histories = [RunHistory.for_display(store, run) for run in (before, after)]
    first, second = map(describe_run, histories)
    trees = [read_lineage_tree(history) for history in histories]
    labels = {**_step_labels(second), **_step_labels(first)}
    differences = [
        *_compare("run", _run_facts(first), _run_facts(second)),
        *_compare("parameter", _parameters(first), _parameters(second)),
        *_compare_workflows(*(history.pipeline for history in histories)),
        *_compare("outcome", _outcomes(first), _outcomes(second)),
        *_compare("output", _outputs(first), _outputs(second)),
        *_compare("metric", _metrics(trees[0]), _metrics(trees[1])),
        *_compare("version", _versions(trees[0]), _versions(trees[1])),
    ]
    named = (
        difference.model_copy(update={"name": labels.get(difference.step, difference.step)})
        for difference in differences
    )
    return RunComparison(before=before, after=after, differences=tuple(named))


def _step_labels(detail: RunDetail) -> dict[str, str]:
    attempts = (attempt for step in detail.steps for attempt in step.attempts)
    return {attempt.step: f"{attempt.name} {attempt.item}".rstrip() for attempt in attempts}


def _compare(
    kind: Literal["run", "parameter", "outcome", "output", "metric", "version"], before: _Facts, after: _Facts
) -> Iterator[RunDifference]:
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key, ""), after.get(key, "")
        if old != new:
            yield RunDifference(kind=kind, step=key[0], field=key[1], before=old, after=new)


def _compare_workflows(first: CompiledPipeline, second: CompiledPipeline) -> Iterator[RunDifference]:
    """Fields of the steps that both have: program, image, resources. Parameters are compared by themselves."""
    for found in find_drift(first, second, read_drift_policy(first.manifest)):
        if found.drift is not DriftClass.PARAMETERS:
            yield RunDifference(
                kind="workflow", step=found.step, field=found.place, before=found.before, after=found.after
            )


def _run_facts(detail: RunDetail) -> _Facts:
    return {
        ("", "pipeline"): detail.summary.pipeline,
        ("", "phase"): detail.summary.phase.value,
        ("", "code"): detail.code_version or "",
        ("", "submissions"): str(detail.summary.submissions),
    }


def _parameters(detail: RunDetail) -> _Facts:
    return {("", name): value for name, value in detail.parameters.items()}


def _outcomes(detail: RunDetail) -> _Facts:
    """How the last attempt of each step ended."""
    outcomes = {}
    for attempt in (attempt for step in detail.steps for attempt in step.attempts):
        cause = f" by {Cause(attempt.cause).display_name}" if attempt.cause else ""
        outcomes[attempt.step, "outcome"] = f"{attempt.outcome or 'open'}{cause} in attempt {attempt.attempt}"
    return outcomes


def _outputs(detail: RunDetail) -> _Facts:
    """Output parameters of the last attempt of each step; the keys of artifacts differ between any two runs."""
    data = RunLayout(detail.summary.run).data
    attempts = (attempt for step in detail.steps for attempt in step.attempts)
    return {
        (attempt.step, name): value
        for attempt in attempts
        for name, value in attempt.outputs.items()
        if not value.startswith(data)
    }


def _metrics(tree: LineageTree) -> _Facts:
    return {
        (step.step, name): f"{value:.6g}" for step in tree.steps for name, value in _newest_checkpoint(step)[0].items()
    }


def _versions(tree: LineageTree) -> _Facts:
    return {(step.step, name): text for step in tree.steps for name, text in _newest_checkpoint(step)[1].items()}


def _newest_checkpoint(step: StepLineage) -> tuple[Mapping[str, float], Mapping[str, str]]:
    """Metrics of the newest usable checkpoint of a step, and the versions that it was made with."""
    nodes = [node for attempt in step.attempts for node in attempt.checkpoints]
    usable = [node for node in nodes if node.status is CheckpointStatus.COMMITTED]
    if not usable:
        return {}, {}
    newest = max(usable, key=lambda node: (node.ref.attempt, node.ref.global_step))
    facts = {"commit": newest.facts.git_commit, "image": newest.facts.image, "ranks": str(newest.facts.world_size)}
    return newest.metrics, {**facts, **newest.facts.versions}
