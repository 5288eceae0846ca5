"""What retention may remove after the saves of a training program, and in which order.

| checkpoint | removed |
|---|---|
| among the newest keep_last valid ones | never |
| older | yes, manifest first |
| what this attempt was told to start from, or restored | not by this attempt |
| quarantined | never: it is evidence |
| anything, while fewer than keep_last valid ones would remain | never |
| late commits, shards without a manifest | once they are older than what is kept |
"""

import pytest
from support.builders.lineage import LINEAGE, claim_of, commit, ref, write_claim
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import newest_shards, open_session, state_at, train

from tiphys.lineage.quarantine import quarantine_checkpoint
from tiphys.lineage.retention.delete import Retention
from tiphys.lineage.select import list_commits
from tiphys.protocol.step_spec import RetentionPolicy
from tiphys.store import LineageLayout

LAYOUT = LineageLayout(LINEAGE)


@pytest.fixture
def store():
    return MemoryStore()


def steps(store):
    return sorted((c.attempt, c.global_step) for c in list_commits(store, LINEAGE))


def shards(store):
    found = {LAYOUT.parse_shard(key) for key in store.objects if key.startswith(LAYOUT.all_shards)}
    return sorted((c.attempt, c.global_step) for c in found)


def test_the_newest_are_kept_and_the_bytes_of_the_others_go_too(store):
    train(store, 5, keep_last=2)
    assert steps(store) == shards(store) == [(1, 4), (1, 5)]


def test_without_a_number_everything_is_kept(store):
    train(store, 5)
    assert len(steps(store)) == 5


def test_the_start_of_an_attempt_outlives_its_own_commits(store):
    train(store, 3, keep_last=2)
    train(store, 7, 2, resume_from=ref(1, 3), keep_last=2)
    assert steps(store) == [(1, 3), (2, 6), (2, 7)]


def test_the_next_attempt_lets_it_go(store):
    train(store, 3, keep_last=2)
    write_claim(store, claim_of(2, ref(1, 3)))
    train(store, 7, 2, keep_last=2)
    write_claim(store, claim_of(3, ref(2, 7)))
    train(store, 9, 3, keep_last=2)
    assert steps(store) == shards(store) == [(2, 7), (3, 8), (3, 9)]


def test_quarantined_checkpoints_stay_as_evidence_and_do_not_count(store):
    train(store, 3, keep_last=3)
    quarantine_checkpoint(store, ref(1, 2), "poison", "ana")
    with open_session(store, keep_last=2) as session:
        session.save(4, state_at(4))
        assert steps(store) == [(1, 2), (1, 3), (1, 4)]
        session.save(5, state_at(5))
    assert steps(store) == shards(store) == [(1, 2), (1, 4), (1, 5)]


def test_a_checkpoint_that_lost_a_shard_does_not_count_as_one_that_is_kept(store):
    train(store, 3)
    del store.objects[newest_shards(store, 1, 3)[0]]
    open_session(store, keep_last=2).save(4, state_at(4))
    assert steps(store) == [(1, 2), (1, 3), (1, 4)]


def test_checkpoints_stay_while_too_few_valid_ones_would_remain(store):
    train(store, 3)
    for step in (2, 3):
        del store.objects[newest_shards(store, 1, step)[0]]
    open_session(store, keep_last=3).save(4, state_at(4))
    assert steps(store) == [(1, 1), (1, 2), (1, 3), (1, 4)]


def test_late_commits_go_once_they_are_older_than_what_is_kept(store):
    commit(store, ref(1, 1))
    write_claim(store, claim_of(1))
    write_claim(store, claim_of(2, ref(1, 1)))
    commit(store, ref(1, 9))
    with open_session(store, 2, keep_last=2) as session:
        session.save(2, state_at(2))
        assert steps(store) == [(1, 1), (1, 9), (2, 2)]
        session.save(3, state_at(3))
    assert steps(store) == [(1, 1), (2, 2), (2, 3)]


def test_shards_without_a_manifest_are_swept_but_never_newer_ones(store):
    store.create(f"{LAYOUT.shards(1, 1)}00000-left.json", b"left by a save that died")
    store.create(f"{LAYOUT.shards(1, 9)}00000-next.json", b"somebody is about to commit this")
    store.create(f"{LAYOUT.all_shards}README", b"not a shard")
    train(store, 3, keep_last=1)
    assert f"{LAYOUT.shards(1, 1)}00000-left.json" not in store.objects
    assert f"{LAYOUT.shards(1, 9)}00000-next.json" in store.objects
    assert f"{LAYOUT.all_shards}README" in store.objects


def test_shards_without_a_manifest_are_swept_once_and_counted(store):
    for step in (1, 2, 4):
        commit(store, ref(1, step))
    store.create(f"{LAYOUT.shards(1, 3)}00000-left.json", b"left")
    retention = Retention(store, LINEAGE, RetentionPolicy(last=2, delay_seconds=0))
    assert [retention.collect({1: None}, set()).orphan_bytes for _ in range(2)] == [4, 0]
    assert shards(store) == [(1, 2), (1, 4)]


def test_the_manifest_goes_before_its_shards(store):
    train(store, 2)
    deleted = []
    store.refuses = lambda operation, key: bool(operation == "delete" and deleted.append(key))
    open_session(store, keep_last=1).save(3, state_at(3))
    one = ["manifests", "shards", "shards", "tombstones", "tombstones"]
    assert [key.split("/")[4] for key in deleted] == [*one, *one]


def test_storage_that_refuses_to_delete_does_not_stop_the_training(store, capsys):
    train(store, 2)
    store.refuses = lambda operation, key: operation == "delete"
    assert open_session(store, keep_last=1).save(3, state_at(3)).wait() == ref(1, 3)
    assert "old checkpoints could not be removed" in capsys.readouterr().err


def test_a_checkpoint_once_verified_is_not_looked_at_again(store):
    train(store, 3)
    retention = Retention(store, LINEAGE, RetentionPolicy(last=2, delay_seconds=0))
    retention.apply({1: None}, set())
    read = []
    store.refuses = lambda operation, key: bool(operation == "read" and read.append(key))
    retention.apply({1: None}, set())
    assert read == []
