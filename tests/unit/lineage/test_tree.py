"""What became of every checkpoint, as it is drawn for people."""

import json
import math

import pytest
from support.builders.lineage import (
    LINEAGE,
    RUN,
    STEP,
    claim_of,
    commit,
    end_of,
    ref,
    write_claim,
    write_end,
    write_run,
)

from tiphys.errors import NotFoundError
from tiphys.lineage.quarantine import quarantine_checkpoint
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.tree import CheckpointStatus, read_lineage_tree
from tiphys.records import AttemptEndOutcome, Cause, Event, SkippedCheckpoint
from tiphys.store import DirectoryStore, LineageLayout, append_events


def statuses(store):
    (lineage,) = read_lineage_tree(RunHistory.for_display(store, RUN)).steps
    return {str(node.ref): node.status for attempt in lineage.attempts for node in attempt.checkpoints}


def test_attempts_and_their_checkpoints_are_listed_with_their_facts(store):
    write_run(store)
    write_claim(store, claim_of(1))
    commit(store, ref(1, 10), metrics={"loss": 0.5}, reason="due")
    commit(store, ref(1, 20), parent=ref(1, 10), reason="sigterm")
    write_end(store, end_of(1, Cause.PREEMPTION, progress=True, message="exit code 75"))
    write_claim(store, claim_of(2, ref(1, 20), submission=2))
    (lineage,) = read_lineage_tree(RunHistory.for_display(store, RUN)).steps
    first, second = lineage.attempts
    assert (lineage.step, lineage.lineage, lineage.note) == (STEP, LINEAGE, "")
    assert (first.outcome, first.cause, first.message) == (AttemptEndOutcome.FAILED, Cause.PREEMPTION, "exit code 75")
    assert first.ended_at >= first.started_at
    assert [(str(node.ref), node.status) for node in first.checkpoints] == [
        ("1-10", CheckpointStatus.COMMITTED),
        ("1-20", CheckpointStatus.COMMITTED),
    ]
    assert first.checkpoints[0].metrics == {"loss": 0.5}
    assert first.checkpoints[0].size_bytes == len(b"weights") + len(b"tree")
    assert first.checkpoints[1].parent == ref(1, 10)
    assert first.checkpoints[1].saved_because == "sigterm"
    assert (second.submission, second.starts_from, second.outcome, second.checkpoints) == (2, ref(1, 20), None, ())


def test_an_attempt_asked_to_stop_shows_its_report(store):
    write_run(store)
    write_claim(store, claim_of(1))
    write_claim(store, claim_of(2))
    card = Event(name="checkpoint.preempted", step=STEP, attempt=1, message="told to stop at step 7", data={"lost": 0})
    other = Event(name="checkpoint.restored", step=STEP, attempt=2, message="attempt 2 resumes")
    append_events(store, RUN, "trainer", [card, other])
    (lineage,) = read_lineage_tree(RunHistory.for_display(store, RUN)).steps
    assert [attempt.preemption for attempt in lineage.attempts] == [card, None]


def test_every_checkpoint_tells_what_its_attempt_had_restored(store):
    write_run(store)
    write_claim(store, claim_of(1))
    write_claim(store, claim_of(2, ref(1, 20)))
    commit(store, ref(2, 30), parent=ref(2, 20), restored=ref(1, 10))
    (lineage,) = read_lineage_tree(RunHistory.for_display(store, RUN)).steps
    assert [node.restored for node in lineage.attempts[1].checkpoints] == [ref(1, 10)]


def test_a_late_commit_is_distinguished(store):
    write_run(store)
    commit(store, ref(1, 10))
    write_claim(store, claim_of(1))
    write_claim(store, claim_of(2, ref(1, 10)))
    commit(store, ref(1, 20))
    assert statuses(store) == {"1-10": CheckpointStatus.COMMITTED, "1-20": CheckpointStatus.LATE}


def test_quarantine_shows_its_reason_and_its_author(store):
    write_run(store)
    write_claim(store, claim_of(1))
    commit(store, ref(1, 10))
    quarantine_checkpoint(store, ref(1, 10), "wrong hash", "restore")
    (lineage,) = read_lineage_tree(RunHistory.for_display(store, RUN)).steps
    (node,) = lineage.attempts[0].checkpoints
    assert (node.status, node.reason) == (CheckpointStatus.QUARANTINED, "wrong hash (by restore)")
    assert node.committed_at and node.quarantined_at


def test_a_damaged_manifest_is_shown_and_does_not_stop_the_picture(store):
    write_run(store)
    write_claim(store, claim_of(1))
    commit(store, ref(1, 10))
    store.create(LineageLayout(LINEAGE).manifest(1, 20), b"garbage")
    (lineage,) = read_lineage_tree(RunHistory.for_display(store, RUN)).steps
    assert statuses(store) == {"1-10": CheckpointStatus.COMMITTED, "1-20": CheckpointStatus.DAMAGED}
    assert "not a valid CheckpointManifest" in lineage.attempts[0].checkpoints[1].reason


def test_a_checkpoint_that_admission_skipped_is_shown_as_damaged(store):
    write_run(store)
    write_claim(store, claim_of(1))
    commit(store, ref(1, 10))
    commit(store, ref(1, 20))
    skipped = (SkippedCheckpoint(checkpoint=ref(1, 20), reason="shard 0 is missing"),)
    write_claim(store, claim_of(2, ref(1, 10)).model_copy(update={"skipped": skipped}))
    (lineage,) = read_lineage_tree(RunHistory.for_display(store, RUN)).steps
    assert statuses(store)["1-20"] is CheckpointStatus.DAMAGED
    assert lineage.attempts[0].checkpoints[1].reason == "shard 0 is missing"


def test_a_checkpoint_that_retention_removed_is_known_from_the_attempt_that_started_from_it(store):
    write_run(store)
    write_claim(store, claim_of(1))
    write_claim(store, claim_of(2, ref(1, 10)))
    assert statuses(store) == {"1-10": CheckpointStatus.REMOVED}


def test_steps_without_checkpoints_are_left_out(store):
    write_run(store)
    write_claim(store, claim_of(1, step="preprocess").model_copy(update={"lineage": ""}))
    assert read_lineage_tree(RunHistory.for_display(store, RUN)).steps == ()


def test_checkpoints_on_a_volume_of_their_own_are_read_there(store, tmp_path):
    volume = DirectoryStore(tmp_path / "volume")
    write_run(store, checkpoint_store=volume.url)
    write_claim(store, claim_of(1))
    commit(volume, ref(1, 10))
    assert statuses(store) == {"1-10": CheckpointStatus.COMMITTED}


def test_a_volume_that_is_not_mounted_here_is_said_and_attempts_are_still_shown(store, tmp_path):
    write_run(store, checkpoint_store=f"file://{tmp_path}/elsewhere")
    write_claim(store, claim_of(1))
    (lineage,) = read_lineage_tree(RunHistory.for_display(store, RUN)).steps
    assert len(lineage.attempts) == 1
    assert "elsewhere" in lineage.note
    assert not (tmp_path / "elsewhere").exists()


def test_an_unknown_run_is_an_error_that_names_the_near_one(store):
    write_run(store)
    with pytest.raises(NotFoundError, match=RUN):
        read_lineage_tree(RunHistory.for_display(store, "digits-2"))


def test_metrics_that_json_has_no_number_for_are_text_in_it(store):
    write_run(store)
    write_claim(store, claim_of(1))
    commit(store, ref(1, 10), metrics={"loss": math.inf, "accuracy": math.nan})
    found = read_lineage_tree(RunHistory.for_display(store, RUN))
    text = json.dumps(found.model_dump(mode="json"), allow_nan=False)
    assert '"loss": "inf"' in text
    assert '"accuracy": "nan"' in text
    (node,) = type(found).model_validate_json(text).steps[0].attempts[0].checkpoints
    assert node.metrics["loss"] == math.inf


def test_the_tree_survives_json(store):
    write_run(store)
    write_claim(store, claim_of(1))
    commit(store, ref(1, 10), metrics={"loss": 1.5})
    found = read_lineage_tree(RunHistory.for_display(store, RUN))
    assert type(found).model_validate_json(found.to_bytes()) == found
