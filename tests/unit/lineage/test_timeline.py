"""One list of sentences, made of the records themselves."""

from datetime import UTC, datetime, timedelta

import pytest
from support.builders.lineage import RUN, STEP, claim_of, commit, end_of, ref, write_claim, write_end, write_run

from tiphys.errors import NotFoundError
from tiphys.lineage.quarantine import quarantine_checkpoint
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.timeline import read_timeline
from tiphys.lineage.tree import read_lineage_tree
from tiphys.records import (
    AttemptEndOutcome,
    Cause,
    Event,
    SubmissionBinding,
    SubmissionClaim,
    SubmissionEnd,
    SubmissionKind,
)
from tiphys.store import DirectoryStore, RunLayout, append_events

LAYOUT = RunLayout(RUN)
START = datetime(2026, 1, 1, tzinfo=UTC)


def minute(number):
    return START + timedelta(minutes=number)


def at(number, record):
    return record.model_copy(update={"written_at": minute(number)})


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path)


def messages(store, name):
    return [event.message for event in read_timeline(RunHistory.for_display(store, RUN)) if event.name == name]


def test_the_events_of_a_preempted_run_are_in_order(store):
    write_run(store, written_at=minute(0))
    claim = SubmissionClaim(
        run=RUN, submission=1, kind=SubmissionKind.ORIGINAL, workflow_name="wf-1", namespace="default"
    )
    store.create(LAYOUT.submission(1), at(1, claim).to_bytes())
    bound = SubmissionBinding(
        run=RUN, submission=1, cluster="local", namespace="default", workflow_name="wf-1", uid="u"
    )
    store.create(LAYOUT.submission_binding(1), at(1, bound).to_bytes())
    write_claim(store, at(2, claim_of(1)))
    commit(store, ref(1, 10), metrics={"loss": 0.5}, written_at=minute(3))
    write_end(store, at(4, end_of(1, Cause.PREEMPTION, progress=True, message="exit code 75")))
    write_claim(store, at(5, claim_of(2, ref(1, 10))))
    restored = Event(name="checkpoint.restored", at=minute(6), step=STEP, attempt=2, message="resumes")
    append_events(store, RUN, "trainer", [restored])
    write_end(store, at(7, end_of(2, outcome=AttemptEndOutcome.DONE)))
    store.create(LAYOUT.submission_end(1), at(8, SubmissionEnd(run=RUN, submission=1, status="Succeeded")).to_bytes())
    assert [(event.name, event.message) for event in read_timeline(RunHistory.for_display(store, RUN))] == [
        ("run.submitted", f"run {RUN} of pipeline digits was submitted"),
        ("submission.bound", "submission 1 (original) runs as workflow wf-1 on local"),
        ("attempt.started", "attempt 1 of fit starts from the beginning"),
        ("checkpoint.committed", "checkpoint 10 of attempt 1 was committed"),
        ("attempt.ended", "attempt 1 of fit ended as failed (preemption): exit code 75"),
        ("attempt.started", "attempt 2 of fit starts from checkpoint 10 of attempt 1"),
        ("checkpoint.restored", "resumes"),
        ("attempt.ended", "attempt 2 of fit ended as done"),
        ("step.done", "step fit is done"),
        ("submission.ended", "submission 1 ended as Succeeded"),
    ]


def test_damaged_records_are_events_and_hide_no_others(store):
    write_run(store, written_at=minute(0))
    write_claim(store, at(1, claim_of(1)))
    store.create(LAYOUT.attempt_end(STEP, 1), b"{garbage")
    store.create(LAYOUT.submission(1), b"{garbage")
    store.create(f"{LAYOUT.events}000000001.json", b"{garbage")

    damaged = messages(store, "record.damaged")

    assert [next(key for key in message.split() if "control/" in key) for message in damaged] == [
        LAYOUT.attempt_end(STEP, 1),
        f"{LAYOUT.events}000000001.json",
        LAYOUT.submission(1),
    ]
    assert "how it ended is not known" in messages(store, "attempt.ended")[0]


def test_a_damaged_end_record_does_not_hide_its_lineage(store):
    write_run(store, written_at=minute(0))
    write_claim(store, at(1, claim_of(1)))
    store.create(LAYOUT.attempt_end(STEP, 1), b"{garbage")

    tree = read_lineage_tree(RunHistory.for_display(store, RUN))

    assert [one.attempt for one in tree.steps[0].attempts] == [1]
    assert [LAYOUT.attempt_end(STEP, 1) in message for message in tree.damaged] == [True]


def test_events_are_ordered_by_their_time_wherever_they_were_found(store):
    write_run(store, written_at=minute(0))
    early = Event(name="a.b", at=minute(-60), message="an hour before")
    append_events(store, RUN, "plugin", [early])
    assert [event.name for event in read_timeline(RunHistory.for_display(store, RUN))] == [
        "a.b",
        "run.submitted",
    ]


def test_an_end_that_is_recorded_late_comes_before_later_events(store):
    write_run(store, written_at=minute(0))
    write_claim(store, at(1, claim_of(1, step="prepare")))
    end = end_of(1, outcome=AttemptEndOutcome.DONE)
    write_end(store, at(9, end.model_copy(update={"step": "prepare", "last_alive_at": minute(2)})))
    write_claim(store, at(3, claim_of(1)))
    events = [(event.name, event.step) for event in read_timeline(RunHistory.for_display(store, RUN))]
    assert events[1:] == [
        ("attempt.started", "prepare"),
        ("attempt.ended", "prepare"),
        ("step.done", "prepare"),
        ("attempt.started", STEP),
    ]


def test_an_attempt_that_was_fenced_ends_with_its_fence(store):
    write_run(store, written_at=minute(0))
    write_claim(store, at(1, claim_of(1)))
    fenced = end_of(1, outcome=AttemptEndOutcome.FENCED).model_copy(update={"last_alive_at": minute(2)})
    write_end(store, at(9, fenced))
    assert [
        event.at for event in read_timeline(RunHistory.for_display(store, RUN)) if event.name == "attempt.ended"
    ] == [minute(9)]


def test_a_step_without_checkpoints_starts_from_nowhere_in_particular(store):
    write_run(store)
    write_claim(store, claim_of(1, step="preprocess").model_copy(update={"lineage": ""}))
    assert messages(store, "attempt.started") == ["attempt 1 of preprocess starts"]


def test_quarantine_and_late_commits_are_in_the_timeline(store):
    write_run(store)
    write_claim(store, claim_of(1))
    write_claim(store, claim_of(2))
    commit(store, ref(1, 10), written_at=minute(1))
    commit(store, ref(2, 5), written_at=minute(2))
    quarantine_checkpoint(store, ref(2, 5), "wrong hash", "restore")
    assert messages(store, "checkpoint.quarantined") == [
        "checkpoint 5 of attempt 2 was quarantined: wrong hash (by restore)"
    ]
    assert "too late" in messages(store, "checkpoint.committed")[0]
    assert "too late" not in messages(store, "checkpoint.committed")[1]


def test_an_unknown_run_is_an_error(store):
    with pytest.raises(NotFoundError):
        read_timeline(RunHistory.for_display(store, RUN))
