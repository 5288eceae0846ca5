"""How far the steps of a run have come by its records, without a plan.

| records | step |
|---|---|
| a projection, or an end that is done | done |
| an end that failed | not done, with the message |
| items of a fan-out, which a finished step made | done once each of them is |
| no attempt, of a run that succeeded | done: it had nothing to do |
| a result of another run that was taken over | done |
| an output that is gone | done: only a plan compares outputs with records |
"""

import json
from pathlib import Path

import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.fakes.counting_store import CountingStore
from support.fakes.submitter import FakeSubmitter
from tiphys_controller import describe_run, plan_run, start_run
from tiphys_controller.runs import StepDetail, summarize_run

from tiphys.lineage.run_history import RunHistory
from tiphys.records import ReuseRecord, SubmissionEnd
from tiphys.records.names import item_step_id
from tiphys.store import RunLayout, Store

RUN = "digits-1"
PIPELINE = pipeline_of(gated("prep"), gated("fit", depends="prep"))
MADE = pipeline_of(gated("prep"), gated("fit", depends="prep", withParam="{{tasks.prep.outputs.parameters.all}}"))


@pytest.fixture
def history(store: Store, tmp_path: Path) -> History:
    start_run(store, FakeSubmitter(tmp_path / "cluster"), PIPELINE, RUN)
    return History(store, RUN)


def describe(store: Store, run: str = RUN) -> tuple[StepDetail, ...]:
    return describe_run(RunHistory.for_display(store, run)).steps


@pytest.mark.parametrize("projection", [True, False])
def test_a_step_is_done_by_its_projection_or_its_end(store: Store, history: History, projection: bool) -> None:
    history.done("prep", projection=projection)
    history.failed("fit", message="the node went away")

    prep, fit = describe(store)

    assert (prep.done, prep.reason) == (True, "done in attempt 1")
    assert (fit.done, fit.reason) == (False, "never finished: attempt 1 ended by preemption: the node went away")


def test_a_fan_out_is_done_once_each_item_is_that_a_step_made(store: Store, tmp_path: Path) -> None:
    start_run(store, FakeSubmitter(tmp_path / "cluster"), MADE, RUN)
    history = History(store, RUN)
    history.done("prep", parameters={"all": json.dumps(["a", "b"])})
    history.done(item_step_id("fit", "a", 0))

    _, fit = describe(store)
    assert (fit.done, [(item.name, item.done) for item in fit.items]) == (False, [("fit[0]", True), ("fit[1]", False)])

    history.done(item_step_id("fit", "b", 0))
    assert [step.done for step in describe(store)] == [True, True]


def test_a_run_that_succeeded_did_all_that_it_had_to(store: Store, history: History) -> None:
    history.done("prep")
    end = SubmissionEnd(run=RUN, submission=1, status="Succeeded")
    store.create(RunLayout(RUN).submission_end(1), end.to_bytes())

    summary = summarize_run(RunHistory.for_display(store, RUN))

    assert (summary.steps_done, summary.steps_total) == (2, 2)
    assert describe(store)[1].done


def test_a_result_that_was_taken_over_makes_a_step_done(store: Store, history: History, tmp_path: Path) -> None:
    history.done("prep")
    start_run(store, FakeSubmitter(tmp_path / "cluster"), PIPELINE, "digits-2")
    reuse = ReuseRecord(
        run="digits-2", submission=1, step="prep", step_key="k", source_run=RUN, source_step="prep", source_attempt=1
    )
    store.create(RunLayout("digits-2").reused(1, "prep"), reuse.to_bytes())

    prep, fit = describe(store, "digits-2")

    assert (prep.done, prep.reason) == (True, "taken over from run digits-1, step prep, attempt 1")
    assert (fit.done, fit.reason) == (False, "never started")


def test_only_a_plan_lists_outputs_and_finds_that_one_is_gone(store: Store, history: History) -> None:
    history.done("prep", artifacts={"data": b"x"})
    history.done("fit")
    store.delete(f"{RunLayout(RUN).outputs('prep', 1)}artifacts/data")
    counting = CountingStore(store)

    summary = summarize_run(RunHistory.for_display(counting, RUN))

    assert (summary.steps_done, counting.requests["list"]) == (2, 4)
    assert plan_run(store, RUN).running == ("prep", "fit")
