"""What people see of a store: a line per run, and everything about one run."""

import hashlib
from datetime import UTC, datetime, timedelta

import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.builders.lineage import claim_of
from support.fakes.submitter import FakeSubmitter
from tiphys_controller import RunPhase, describe_run, list_run_summaries, start_run
from tiphys_controller.run_search import RunFilter, RunOrder, sort_runs
from tiphys_controller.runs import RunSummary

from tiphys.errors import NotFoundError
from tiphys.lineage.run_history import RunHistory
from tiphys.protocol.step_spec import StepKind
from tiphys.records import (
    AttemptEnd,
    AttemptEndOutcome,
    CheckpointRef,
    Event,
    ReuseRecord,
    SubmissionEnd,
    TrainingProgress,
)
from tiphys.records.names import item_step_id
from tiphys.store import LineageLayout, RunLayout, Store, append_events, lineage_name

PIPELINE = pipeline_of(gated("prep"), gated("fit", depends="prep"), parameters={"lr": "0.1"})


def test_a_run_is_summed_up_from_storage(store: Store, submitter: FakeSubmitter) -> None:
    run = start_run(store, submitter, PIPELINE, "digits-1").run
    History(store, run).done("prep")

    [row] = list_run_summaries(store)

    assert (row.run, row.pipeline, row.submissions, row.steps_done, row.steps_total) == ("digits-1", "digits", 1, 1, 2)
    assert row.phase is RunPhase.UNKNOWN
    assert row.last_activity is not None


def test_a_training_that_reports_is_activity(
    store: Store, submitter: FakeSubmitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = start_run(store, submitter, pipeline_of(gated("fit", kind=StepKind.TRAIN)), "digits-1")
    History(store, started.run).opened("fit")
    layout, now = LineageLayout(lineage_name(started.run, "fit")), datetime.now(UTC)
    for minutes in (10, 90):
        at = now + timedelta(minutes=minutes)
        report = layout.training_progress_report(1, int(at.timestamp() * 1000))
        store.create(report, TrainingProgress(global_step=minutes).to_bytes())
    monkeypatch.setattr("tiphys_controller.runs.utc_now", lambda: now + timedelta(minutes=20))

    [row] = list_run_summaries(store, submitter)

    assert (row.attempts, row.last_activity) == (1, now + timedelta(minutes=20)), "its clock is ahead"
    submitter.end(started.workflow_name, "Failed")
    assert list_run_summaries(store, submitter)[0].last_activity == row.last_activity, (
        "no end of the attempt is recorded"
    )


def test_a_step_is_done_although_a_resume_would_run_it_again(store: Store, submitter: FakeSubmitter) -> None:
    """As `validate` of the ready pipeline: without a cache, so that it and what hangs on it would run."""
    first = gated("prep", cache=False)
    run = start_run(store, submitter, pipeline_of(first, gated("fit", depends="prep"), gated("end")), "digits-1").run
    history = History(store, run)
    history.done("prep")
    history.done("fit")

    [row] = list_run_summaries(store)

    assert (row.steps_done, row.steps_total) == (2, 3)


def test_an_item_that_is_not_done_leaves_its_step_open(store: Store, submitter: FakeSubmitter) -> None:
    run = start_run(store, submitter, pipeline_of(gated("fit", withItems=["a", "b"])), "digits-1").run
    History(store, run).done(item_step_id("fit", "a", 0))

    assert list_run_summaries(store)[0].steps_done == 0


def test_the_cluster_at_hand_knows_more(store: Store, submitter: FakeSubmitter) -> None:
    started = start_run(store, submitter, PIPELINE, "digits-1")
    assert list_run_summaries(store, submitter)[0].phase is RunPhase.RUNNING

    submitter.end(started.workflow_name, "Running")
    assert list_run_summaries(store, submitter)[0].phase is RunPhase.INTERRUPTED


NOW = datetime(2030, 1, 10, tzinfo=UTC)


def summary(run: str, pipeline: str, phase: RunPhase, days: int | None) -> RunSummary:
    return RunSummary(
        run=run,
        pipeline=pipeline,
        phase=phase,
        reason="",
        submissions=1,
        attempts=1,
        steps_done=0,
        steps_total=1,
        last_activity=None if days is None else NOW - timedelta(days=days),
    )


SUMMARIES = [
    summary("c", "digits", RunPhase.FAILED, 1),
    summary("a", "words", RunPhase.SUCCEEDED, 5),
    summary("b", "digits", RunPhase.RUNNING, 2),
    summary("d", "", RunPhase.UNKNOWN, None),
]


@pytest.mark.parametrize(
    ("wanted", "runs"),
    [
        (RunFilter(), "cabd"),
        (RunFilter(pipeline="digits"), "cb"),
        (RunFilter(phases=[RunPhase.FAILED, RunPhase.UNKNOWN]), "cd"),
        (RunFilter(since=NOW - timedelta(days=2)), "cb"),
        (RunFilter("digits", [RunPhase.RUNNING], NOW - timedelta(days=1)), ""),
    ],
)
def test_runs_are_filtered_by_all_that_is_wanted(wanted: RunFilter, runs: str) -> None:
    assert "".join(one.run for one in SUMMARIES if wanted.accepts(one)) == runs


@pytest.mark.parametrize(
    ("order", "runs"),
    [
        (RunOrder.NAME, "abcd"),
        (RunOrder.ACTIVITY, "cbad"),
        (RunOrder.PIPELINE, "dbca"),
        (RunOrder.STATE, "bacd"),
    ],
)
def test_runs_are_sorted(order: RunOrder, runs: str) -> None:
    assert "".join(one.run for one in sort_runs(SUMMARIES, order)) == runs


def test_a_run_of_another_cluster_has_an_unknown_phase(store: Store, submitter: FakeSubmitter) -> None:
    start_run(store, submitter, PIPELINE, "digits-1")
    elsewhere = FakeSubmitter(submitter.folder, cluster="east")

    assert list_run_summaries(store, elsewhere)[0].phase is RunPhase.UNKNOWN


def test_a_workflow_that_took_the_name_is_not_the_runs(store: Store, submitter: FakeSubmitter) -> None:
    submitter.delete(start_run(store, submitter, PIPELINE, "digits-1").workflow_name)
    submitter.create({"metadata": {"name": "digits-1", "namespace": "default", "uid": "another"}})

    assert list_run_summaries(store, submitter)[0].phase is RunPhase.INTERRUPTED


def test_a_damaged_run_does_not_hide_the_others(store: Store, submitter: FakeSubmitter) -> None:
    start_run(store, submitter, PIPELINE, "digits-1")
    store.create(RunLayout("digits-2").run_record, b"{garbage")

    good, bad = list_run_summaries(store)

    assert (good.run, good.steps_total) == ("digits-1", 2)
    assert (bad.run, bad.phase, bad.steps_total) == ("digits-2", RunPhase.UNKNOWN, 0)
    assert "run.json is not a valid RunRecord" in bad.reason


def test_an_empty_store_has_no_runs(store: Store) -> None:
    assert list_run_summaries(store) == []


def test_a_run_is_described_with_its_steps_attempts_and_outputs(store: Store, submitter: FakeSubmitter) -> None:
    run = start_run(store, submitter, PIPELINE, "digits-1").run
    history = History(store, run)
    history.failed("prep", 1, message="node went away")
    history.done("prep", 2, parameters={"n": "5"}, artifacts={"data": b"x"})
    sealed = SubmissionEnd(run=run, submission=1, status="Failed")
    store.create(history.layout.submission_end(1), sealed.to_bytes())

    detail = describe_run(RunHistory.for_display(store, run))

    assert detail.summary.phase is RunPhase.FAILED
    assert detail.parameters == {"lr": "0.1"}
    [submission] = detail.submissions
    assert (submission.cluster, submission.uid, submission.status) == ("west", "uid-of-digits-1", "Failed")
    prep, fit = detail.steps
    assert (prep.done, prep.reason, fit.done, fit.reason, fit.attempts) == (
        True,
        "done in attempt 2",
        False,
        "never started",
        (),
    )
    assert [(a.attempt, a.outcome, a.cause, a.message) for a in prep.attempts] == [
        (1, "failed", "preemption", "node went away"),
        (2, "done", "", ""),
    ]
    assert prep.attempts[1].outputs == {"n": "5", "data": f"{history.layout.outputs('prep', 2)}artifacts/data"}


def test_outputs_are_those_of_the_newest_attempt_or_of_the_result_that_was_taken_over(
    store: Store, submitter: FakeSubmitter
) -> None:
    first, second = (start_run(store, submitter, PIPELINE, name).run for name in ("digits-1", "digits-2"))
    history = History(store, first)
    history.done("prep", 1, artifacts={"data": b"old"})
    history.done("prep", 2, parameters={"n": "5"}, artifacts={"data": b"xyz"})
    history.failed("fit")
    reuse = ReuseRecord(
        run=second, submission=1, step="prep", step_key="k", source_run=first, source_step="prep", source_attempt=2
    )
    store.create(RunLayout(second).reused(1, "prep"), reuse.to_bytes())

    steps = [describe_run(RunHistory.for_display(store, run)).steps[0] for run in (first, second)]

    own, taken = (step.outputs for step in steps)
    assert [step.taken_over for step in steps] == [{}, {"prep": "run digits-1, step prep, attempt 2"}]
    assert [(one.source, one.name, one.value, one.size_bytes, one.sha256) for one in own] == [
        ("attempt 2", "n", "5", 1, hashlib.sha256(b"5").hexdigest()),
        ("attempt 2", "data", None, 3, hashlib.sha256(b"xyz").hexdigest()),
    ]
    assert [(one.source, one.key) for one in taken] == [("run digits-1, step prep, attempt 2", one.key) for one in own]
    assert describe_run(RunHistory.for_display(store, first)).steps[1].outputs == ()


def test_items_that_were_taken_over_stand_beside_those_that_ran(store: Store, submitter: FakeSubmitter) -> None:
    sweep = pipeline_of(gated("sweep", withItems=["a", "b"]))
    first, second = (start_run(store, submitter, sweep, name).run for name in ("digits-1", "digits-2"))
    taken, own = (item_step_id("sweep", item, 0) for item in ("a", "b"))
    History(store, first).done(taken)
    History(store, second).done(own)
    reuse = ReuseRecord(
        run=second, submission=1, step=taken, step_key="k", source_run=first, source_step=taken, source_attempt=1
    )
    store.create(RunLayout(second).reused(1, taken), reuse.to_bytes())

    [step] = describe_run(RunHistory.for_display(store, second)).steps

    assert [attempt.name for attempt in step.attempts] == ["sweep[1]"]
    assert step.taken_over == {"sweep[0]": "run digits-1, step sweep, attempt 1"}


def test_damaged_records_do_not_hide_the_others(store: Store, submitter: FakeSubmitter) -> None:
    run = start_run(store, submitter, PIPELINE, "digits-1").run
    history = History(store, run)
    history.failed("prep", 1)
    history.done("prep", 2)
    history.failed("fit")
    damaged = [
        history.layout.attempt("prep", 1),
        history.layout.attempt_end("prep", 2),
        history.layout.attempt_end("fit", 1),
        history.layout.submission_binding(1),
    ]
    for key in damaged:
        store.delete(key)
        store.create(key, b"{garbage")

    detail = describe_run(RunHistory.for_display(store, run))
    [row] = list_run_summaries(store)

    assert [key for key in damaged if any(key in message for message in detail.damaged)] == damaged
    prep, fit = detail.steps
    assert [(a.attempt, a.outcome) for a in (*prep.attempts, *fit.attempts)] == [(2, "failed"), (1, "failed")]
    assert damaged[2] in fit.attempts[0].message
    assert damaged[3] in row.reason


def open_attempt(store: Store, run: str, attempt: int, start: CheckpointRef | None = None) -> None:
    """An attempt of the training that no record has ended."""
    claim = claim_of(attempt, start, run=run, step="fit")
    store.create(RunLayout(run).attempt("fit", attempt), claim.to_bytes())


def test_an_open_attempt_of_a_training_shows_its_newest_report(store: Store, submitter: FakeSubmitter) -> None:
    run = start_run(store, submitter, PIPELINE, "digits-1").run
    History(store, run).done("prep")
    lineage = lineage_name(run, "fit")
    for attempt in (1, 2):
        open_attempt(store, run, attempt)
        report = TrainingProgress(global_step=attempt * 100, total_steps=500)
        store.create(LineageLayout(lineage).training_progress_report(attempt, 1), report.to_bytes())
    end = AttemptEnd(run=run, step="fit", attempt=1, submission=1, outcome=AttemptEndOutcome.FENCED)
    store.create(RunLayout(run).attempt_end("fit", 1), end.to_bytes())

    [first, second] = describe_run(RunHistory.for_display(store, run)).steps[1].attempts

    assert first.training_progress is None
    assert second.training_progress is not None
    assert (second.training_progress.global_step, second.training_progress.total_steps) == (200, 500)


def test_an_attempt_started_from_what_its_program_could_use(store: Store, submitter: FakeSubmitter) -> None:
    run = start_run(store, submitter, PIPELINE, "digits-1").run
    lineage = lineage_name(run, "fit")
    chosen = CheckpointRef(lineage=lineage, attempt=1, global_step=6)
    for attempt, start in ((1, None), (2, chosen), (3, chosen), (4, chosen)):
        open_attempt(store, run, attempt, start)
    reports = [("skipped", 2, "1-6"), ("skipped", 2, "1-4"), ("skipped", 3, "1-6"), ("restored", 3, "1-4")]
    events = [
        Event(name=f"checkpoint.{name}", step="fit", attempt=attempt, message="", data={"checkpoint": checkpoint})
        for name, attempt, checkpoint in reports
    ]
    append_events(store, run, "trainer", events)

    attempts = describe_run(RunHistory.for_display(store, run)).steps[1].attempts

    assert [(one.starts_from, one.unusable_start) for one in attempts] == [
        ("", ""),
        ("", "1-6"),
        ("1-4", "1-6"),
        ("1-6", ""),
    ]


def test_an_unknown_run_is_named(store: Store) -> None:
    with pytest.raises(NotFoundError, match="digits-9"):
        describe_run(RunHistory.for_display(store, "digits-9"))
