"""What `verify` makes of runs in odd but lawful states, and of its own trouble."""

import threading

import pytest
from support.builders.compiled_workflows import pipeline_of, ungated
from support.builders.corruption import NEWEST, OLDER, Objects, sound_run
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
from support.fakes.memory_store import MemoryStore
from support.fakes.submitted_workflow import SubmittedWorkflow
from support.fakes.submitter import FakeSubmitter
from tiphys_controller import start_run

from tiphys.errors import NotFoundError, StoreError
from tiphys.lineage.audit import audit
from tiphys.lineage.audit.audit import audit_run, quarantine_damaged
from tiphys.lineage.audit.findings import AuditLayer
from tiphys.lineage.quarantine import list_quarantined, quarantine_checkpoint, read_quarantine_records
from tiphys.records import SubmissionClaim, SubmissionKind
from tiphys.store import DirectoryStore, LineageLayout, RunLayout

LAYOUT = LineageLayout(LINEAGE)


@pytest.fixture(scope="module")
def sound() -> Objects:
    return sound_run(5)


@pytest.fixture
def store(sound) -> MemoryStore:
    return MemoryStore(sound)


def shard_of(store: MemoryStore, checkpoint=NEWEST) -> str:
    prefix = LAYOUT.shards(checkpoint.attempt, checkpoint.global_step)
    return max(key for key in store.objects if key.startswith(prefix))


def flip(store: MemoryStore, key: str) -> None:
    store.objects[key] = bytes([store.objects[key][0] ^ 1]) + store.objects[key][1:]


def test_a_sound_run_is_sound_and_counted(store):
    found = audit_run(store, RUN, deep=True)
    assert found.is_sound
    assert (found.checkpoints, found.attempts) == (3, 2)
    assert found.size_bytes == sum(
        len(data) for key, data in store.objects.items() if RUN in key and ("shards/" in key or "outputs/" in key)
    )


def test_a_flipped_bit_needs_the_bytes_to_be_read(store):
    key = shard_of(store)
    flip(store, key)
    assert (audit_run(store, RUN).is_sound, audit_run(store, RUN).deep) == (True, False)
    [found] = audit_run(store, RUN, deep=True).damage
    assert (found.layer, found.key, found.checkpoint) == (AuditLayer.SHARD, key, NEWEST)
    assert found.damaged_bytes == f"within 0-{len(store.objects[key]) - 1}"
    assert "--quarantine" in found.remedy


def test_missing_bytes_are_named(store):
    key = shard_of(store)
    store.objects[key] = store.objects[key][:5]
    [found] = audit_run(store, RUN).damage
    assert found.damaged_bytes == "from 5"


@pytest.mark.parametrize("damaged_key", [shard_of, lambda store: LAYOUT.manifest(2, 30)])
def test_the_damage_of_a_checkpoint_in_quarantine_is_listed_and_fails_nothing(store, damaged_key):
    flip(store, damaged_key(store))
    quarantine_checkpoint(store, NEWEST, "bad", by="restore")
    found = audit_run(store, RUN, deep=True)
    assert [one.barred for one in found.damage] == [True]
    assert found.is_sound
    assert [(one.checkpoint, one.by) for one in found.quarantined] == [(NEWEST, "restore")]


def test_a_quarantine_record_that_is_damaged_is_a_finding_and_its_checkpoint_stays_barred(store):
    quarantine_checkpoint(store, NEWEST, "bad", by="restore")
    store.objects[LAYOUT.quarantined(2, 30)] = b"garbage"
    found = audit_run(store, RUN)
    assert [one.layer for one in found.damage] == [AuditLayer.QUARANTINE]
    assert not found.is_sound
    assert [one.checkpoint for one in found.quarantined] == [NEWEST]


def test_barring_what_was_found_keeps_attempts_from_it(store):
    flip(store, shard_of(store))
    flip(store, shard_of(store, OLDER))
    found = audit_run(store, RUN, deep=True)
    assert quarantine_damaged(store, found) == [NEWEST, OLDER]
    assert list_quarantined(store, LINEAGE) == {NEWEST, OLDER}
    assert read_quarantine_records(store, LINEAGE)[NEWEST].by == "verify"
    again = audit_run(store, RUN, deep=True)
    assert again.is_sound
    assert quarantine_damaged(store, again) == []


def test_damaged_records_and_outputs_bar_no_checkpoint(store):
    store.objects[RunLayout(RUN).attempt_end(STEP, 1)] = b""
    flip(store, next(key for key in store.objects if key.startswith(RunLayout(RUN).all_outputs)))
    found = audit_run(store, RUN, deep=True)
    assert {one.layer for one in found.damage} == {AuditLayer.END, AuditLayer.OUTPUT}
    assert quarantine_damaged(store, found) == []


def test_only_the_step_that_was_asked_for_is_looked_at(store):
    flip(store, shard_of(store))
    assert not audit_run(store, RUN, STEP, deep=True).is_sound
    with pytest.raises(NotFoundError, match="no step 'other'"):
        audit_run(store, RUN, "other")


def test_a_missing_run_is_named_with_similar_names(store):
    with pytest.raises(NotFoundError, match="did you mean digits-1"):
        audit_run(store, "digits-11")


def test_a_run_whose_own_record_is_damaged_is_still_looked_at(store):
    flip(store, RunLayout(RUN).run_record)
    store.objects[RunLayout(RUN).attempt(STEP, 1)] = b""
    assert [one.layer for one in audit_run(store, RUN).damage] == [AuditLayer.RUN, AuditLayer.CLAIM]


def test_a_workflow_that_was_changed_in_its_record_is_noticed(store):
    key = RunLayout(RUN).run_record
    store.objects[key] = store.objects[key].replace(b'"entrypoint": "main"', b'"entrypoint": "fork"')
    [found] = audit_run(store, RUN).damage
    assert "its digest does not match" in found.fault


@pytest.mark.parametrize(
    ("digest", "stored", "missing"),
    [("", None, []), ("a" * 64, None, [True]), ("a" * 64, b"garbage", [False])],
)
def test_the_changed_workflow_of_a_submission_has_to_be_there(store, digest, stored, missing):
    claim = SubmissionClaim(
        run=RUN, submission=2, kind=SubmissionKind.RESUME, workflow_name="w-2", namespace="ml", workflow=digest
    )
    store.create(RunLayout(RUN).submission(2), claim.to_bytes())
    if stored is not None:
        store.create(RunLayout(RUN).workflow(digest), stored)
    found = audit_run(store, RUN)
    assert [one.key for one in found.damage] == [RunLayout(RUN).workflow(digest)] * len(missing)
    assert ["it is missing" in one.fault for one in found.damage] == missing
    assert found.is_sound == (missing == [])


def test_missing_records_of_attempts_before_the_newest_are_found():
    store = MemoryStore()
    write_run(store)
    for attempt in (1, 3):
        write_claim(store, claim_of(attempt))
    found = audit_run(store, RUN)
    layout, fault = RunLayout(RUN), "it is missing, although attempt 3 was opened after it"
    missing = [layout.attempt_end(STEP, 1), layout.attempt(STEP, 2), layout.attempt_end(STEP, 2)]
    assert sorted((one.key, one.fault) for one in found.damage) == sorted((key, fault) for key in missing)
    assert not found.is_sound


def test_checkpoints_of_an_attempt_that_runs_are_sound():
    store = MemoryStore()
    write_run(store)
    write_claim(store, claim_of(1))
    commit(store, ref(1, 10))
    store.create(f"{LAYOUT.shards(1, 20)}00000-abc.json", b"a save that is under way")
    assert audit_run(store, RUN, deep=True).is_sound


def test_a_checkpoint_that_retention_removed_is_not_missed(store):
    for key in [key for key in store.objects if LAYOUT.parse_checkpoint(key) == OLDER or "shards/000000001-" in key]:
        store.delete(key)
    store.delete(LAYOUT.manifest(1, 10))
    assert audit_run(store, RUN, deep=True).is_sound


def test_a_checkpoint_that_retention_removes_meanwhile_is_not_damaged(store, monkeypatch):
    check = audit.check_bytes

    def removed(wanted, **options):
        for key in [key for key in store.objects if "shards/000000001-000000000000010/" in key]:
            store.delete(key)
        store.delete(LAYOUT.manifest(1, 10))
        return check(wanted, **options)

    monkeypatch.setattr("tiphys.lineage.audit.audit.check_bytes", removed)
    assert audit_run(store, RUN, deep=True).is_sound


def test_the_checkpoint_that_the_newest_attempt_is_to_start_from_has_to_be_there(store):
    write_claim(store, claim_of(3, NEWEST))
    store.delete(LAYOUT.manifest(2, 30))
    found = audit_run(store, RUN).damage
    assert [(one.layer, one.checkpoint) for one in found] == [(AuditLayer.MANIFEST, NEWEST)]


def test_a_shard_damaged_on_the_way_is_read_again(store, monkeypatch):
    chunks, seen = store.chunks, set()

    def flaky(key, size_bytes):
        data = b"".join(chunks(key, size_bytes))
        first = key not in seen
        seen.add(key)
        yield data[:-1] + b"?" if first else data

    monkeypatch.setattr(store, "chunks", flaky)
    assert audit_run(store, RUN, deep=True).is_sound


def test_storage_that_does_not_answer_says_nothing_about_the_run(store):
    store.refuses = lambda operation, key: "shards/" in key and operation == "read"
    with pytest.raises(StoreError):
        audit_run(store, RUN, deep=True)


def test_an_interruption_ends_all_threads(store, monkeypatch):
    reading, ended = threading.Event(), []

    def endless(key, size_bytes):
        try:
            while True:
                reading.set()
                yield b"x"
        finally:
            ended.append(key)

    def interrupted(futures):
        assert reading.wait(120)
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "chunks", endless)
    monkeypatch.setattr(audit, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        audit_run(store, RUN, deep=True, threads=2)
    assert ended
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("verify")]


def test_every_byte_is_reported_once(store):
    total, counted, lock = [], [], threading.Lock()

    def advance(count: int) -> None:
        with lock:
            counted.append(count)

    found = audit_run(store, RUN, deep=True, threads=3, on_total_bytes=total.append, on_bytes_read=advance)
    assert [sum(counted)] == total == [found.size_bytes]


def test_checkpoints_on_a_volume_are_read_there_or_noted(tmp_path):
    volume = DirectoryStore(tmp_path / "volume")
    store = MemoryStore()
    write_run(store, checkpoint_store=volume.url)
    write_claim(store, claim_of(1))
    write_end(store, end_of(1))
    write_claim(store, claim_of(2).model_copy(update={"lineage": ""}))  # by a Workflow without checkpoints
    commit(volume, ref(1, 10))
    assert audit_run(store, RUN, deep=True).checkpoints == 1
    (tmp_path / "volume").rename(tmp_path / "elsewhere")
    found = audit_run(store, RUN)
    assert found.is_sound
    assert "cannot be read from this machine" in found.notes[0]


@pytest.fixture
def in_pods(tmp_path):
    """A run whose only step has no gate, and its artifact below the uid of the Workflow."""
    store = MemoryStore()
    submitter = FakeSubmitter(tmp_path)
    start_run(store, submitter, pipeline_of(ungated("prep", parameters=("n",), artifacts=("data",))), RUN)
    flow = SubmittedWorkflow.of(store, submitter, RUN)
    flow.run_task("prep", {"n": "5"}, {"data": b"1,2,3"})
    return store, f"{flow.folder('prep')}data"


def test_the_outputs_of_a_step_without_a_gate_are_found_where_they_are(in_pods):
    store, _ = in_pods
    found = audit_run(store, RUN, deep=True)
    assert (found.is_sound, found.attempts, found.size_bytes) == (True, 1, len(b"1,2,3"))


def test_damage_of_the_outputs_of_a_step_without_a_gate_is_found(in_pods):
    store, key = in_pods
    flip(store, key)
    assert audit_run(store, RUN).is_sound
    [found] = audit_run(store, RUN, deep=True).damage
    assert (found.layer, found.key) == (AuditLayer.OUTPUT, key)
    del store.objects[key]
    [found] = audit_run(store, RUN).damage
    assert (found.layer, found.key) == (AuditLayer.OUTPUT, key)
