"""What differs between two runs, item by item, and nothing that differs between any two."""

import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.builders.lineage import claim_of, commit, write_claim
from support.fakes.submitter import FakeSubmitter
from tiphys_controller import start_run
from tiphys_controller.run_comparison import compare_runs

from tiphys.errors import NotFoundError
from tiphys.protocol.step_spec import StepKind
from tiphys.records import CheckpointRef, Provenance
from tiphys.records.names import item_step_id
from tiphys.store import Store, lineage_name


def started(store: Store, submitter: FakeSubmitter, run: str, items: list[str], lr: str) -> History:
    pipeline = pipeline_of(
        gated("fit", kind=StepKind.TRAIN), gated("sweep", withItems=items), parameters={"lr": lr, "seed": "1"}
    )
    start_run(store, submitter, pipeline, run)
    return History(store, run)


def differences(store: Store) -> list[tuple[str, str, str, str, str]]:
    found = compare_runs(store, "one", "two").differences
    return [(one.kind, one.name, one.field, one.before, one.after) for one in found]


def test_runs_of_one_workflow_with_equal_ends_do_not_differ(store: Store, submitter: FakeSubmitter) -> None:
    for run in ("one", "two"):
        started(store, submitter, run, ["a"], "0.1").done("fit", parameters={"loss": "0.5"}, artifacts={"model": b"m"})
    assert differences(store) == []


def test_parameters_outcomes_outputs_metrics_and_versions_are_compared(store: Store, submitter: FakeSubmitter) -> None:
    for run, lr, loss, numpy in (("one", "0.1", "0.5", "2.1.0"), ("two", "0.3", "0.4", "2.2.0")):
        history = started(store, submitter, run, ["a"], lr)
        lineage = lineage_name(run, "fit")
        write_claim(store, claim_of(1, step="fit").model_copy(update={"run": run, "lineage": lineage}))
        history.finish("fit", parameters={"loss": loss})
        ref = CheckpointRef(lineage=lineage, attempt=1, global_step=10)
        commit(store, ref, metrics={"accuracy": float(lr)}, facts=Provenance(versions={"numpy": numpy}))
        history.done(item_step_id("sweep", "a", 0)) if run == "one" else history.failed(item_step_id("sweep", "a", 0))
    assert differences(store) == [
        ("parameter", "", "lr", "0.1", "0.3"),
        ("outcome", "sweep[0] a", "outcome", "done in attempt 1", "failed by preemption in attempt 1"),
        ("output", "fit", "loss", "0.5", "0.4"),
        ("metric", "fit", "accuracy", "0.1", "0.3"),
        ("version", "fit", "numpy", "2.1.0", "2.2.0"),
    ]


def test_items_are_matched_by_value(store: Store, submitter: FakeSubmitter) -> None:
    started(store, submitter, "one", ["a", "b"], "0.1").done(item_step_id("sweep", "b", 0))
    started(store, submitter, "two", ["b"], "0.1").done(item_step_id("sweep", "b", 0), attempt=2)
    outcomes = [one for one in differences(store) if one[0] == "outcome"]
    assert outcomes == [("outcome", "sweep[1] b", "outcome", "done in attempt 1", "done in attempt 2")]


def test_a_run_that_is_not_there_is_named(store: Store, submitter: FakeSubmitter) -> None:
    started(store, submitter, "one", ["a"], "0.1")
    with pytest.raises(NotFoundError, match="two"):
        compare_runs(store, "one", "two")
