"""Checkpoints on a volume that the plugin does not see: claims name no start, the program finds it out.

| attempts before | start |
|---|---|
| the last one committed | its newest |
| the last one died before any commit | what the one before would give |
| an older one committed after the last one had committed elsewhere | not that one |
| everything of the last one is corrupt | what it had restored |
| the same, and its pod had been made a second time | what the first of its pods had restored |
"""

import pytest
from support.builders.lineage import LINEAGE, RUN, STEP, claim_of, commit, ref, write_claim, write_run
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import newest_shards, open_session, state_at, train

from tiphys.lineage.quarantine import list_quarantined
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.select import infer_starts, infer_starts_from_volume, list_commits
from tiphys.lineage.tree import CheckpointStatus, read_lineage_tree
from tiphys.lineage.validity import read_manifest
from tiphys.store import DirectoryStore, LineageLayout, RunLayout

PROGRESS = RunLayout(RUN).progress(STEP, 1)


@pytest.fixture
def runs():
    return MemoryStore()


@pytest.fixture
def volume():
    return MemoryStore(url="memory://volume")


def attempt(runs, volume, number, total, **options):
    """One attempt, claimed without a start as the plugin does, that trains to step ``total``."""
    write_claim(runs, claim_of(number))
    train(runs, total, number, checkpoints=volume, **options)


def start_of(runs, volume, number):
    write_claim(runs, claim_of(number))
    return open_session(runs, number, checkpoints=volume).restore(default=state_at(0))["step"]


def test_the_next_attempt_goes_on_from_the_newest_commit(runs, volume):
    attempt(runs, volume, 1, 3)
    assert start_of(runs, volume, 2) == 3
    assert not any(key.startswith("data/lineages/") for key in runs.objects)


def test_attempts_that_left_nothing_are_passed_through(runs, volume):
    attempt(runs, volume, 1, 3)
    write_claim(runs, claim_of(2))
    write_claim(runs, claim_of(3))
    assert start_of(runs, volume, 4) == 3


def test_manifests_say_what_their_attempt_had_restored(runs, volume):
    attempt(runs, volume, 1, 3)
    attempt(runs, volume, 2, 5)
    assert [read_manifest(volume, ref(2, step)).restored for step in (4, 5)] == [ref(1, 3)] * 2


def test_a_late_commit_loses_against_an_attempt_that_has_gone_on(runs, volume):
    attempt(runs, volume, 1, 3)
    attempt(runs, volume, 2, 4)
    commit(volume, ref(1, 9))
    assert start_of(runs, volume, 3) == 4


def test_a_corrupt_last_attempt_falls_back_to_its_own_start_and_not_to_a_late_commit(runs, volume):
    attempt(runs, volume, 1, 3)
    attempt(runs, volume, 2, 4)
    commit(volume, ref(1, 9))
    del volume.objects[newest_shards(volume, 2, 4)[0]]
    assert start_of(runs, volume, 3) == 3
    assert list_quarantined(volume, LINEAGE) == {ref(2, 4)}


def test_a_pod_that_was_made_again_hides_nothing_of_what_its_attempt_began_from(runs, volume):
    attempt(runs, volume, 1, 3)
    attempt(runs, volume, 2, 4)
    for total in (5, 6):
        train(runs, total, 2, checkpoints=volume)
    commit(volume, ref(1, 9))
    for step in (4, 5, 6):
        del volume.objects[newest_shards(volume, 2, step)[0]]
    assert start_of(runs, volume, 3) == 3


def test_an_attempt_that_began_anew_is_not_led_back_to_others(runs, volume):
    write_claim(runs, claim_of(1))
    attempt(runs, volume, 2, 2)
    commit(volume, ref(1, 9))
    for step in (1, 2):
        del volume.objects[newest_shards(volume, 2, step)[0]]
    assert start_of(runs, volume, 3) == 0


def test_a_damaged_manifest_does_not_keep_the_rest_from_being_used(runs, volume):
    attempt(runs, volume, 1, 3)
    attempt(runs, volume, 2, 4)
    volume.objects[LineageLayout(LINEAGE).manifest(2, 4)] = b"garbage"
    assert start_of(runs, volume, 3) == 3


def test_the_newest_manifest_says_what_its_attempt_started_from_whatever_became_of_older_ones(volume):
    for checkpoint, restored in ((ref(1, 3), None), (ref(1, 9), None), (ref(2, 4), ref(1, 3)), (ref(2, 5), ref(1, 3))):
        commit(volume, checkpoint, restored=restored)
    volume.objects[LineageLayout(LINEAGE).manifest(2, 4)] = b"garbage"
    assert infer_starts_from_volume(volume, LINEAGE, (1, 2)) == {1: None, 2: ref(1, 3)}


def test_retention_keeps_what_the_attempt_started_from(runs, volume):
    attempt(runs, volume, 1, 3)
    attempt(runs, volume, 2, 6, keep_last=2)
    assert list_commits(volume, LINEAGE) == [ref(2, 6), ref(2, 5), ref(1, 3)]


def test_the_run_learns_of_the_first_commit_and_nothing_else(runs, volume):
    attempt(runs, volume, 1, 3)
    write_claim(runs, claim_of(2))
    assert [key for key in runs.objects if "/progress/" in key] == [PROGRESS]


def test_an_attempt_that_committed_nothing_leaves_no_note(runs, volume):
    attempt(runs, volume, 1, 0)
    volume.refuses = lambda operation, key: operation == "create"
    attempt(runs, volume, 2, 3)
    assert not any("/progress/" in key for key in runs.objects)


def test_a_note_that_could_not_be_stored_is_left_at_the_next_save(runs, volume, capsys):
    write_claim(runs, claim_of(1))
    session = open_session(runs, checkpoints=volume)
    runs.refuses = lambda operation, key: operation == "create"
    assert session.save(1, state_at(1)).wait() == ref(1, 1)
    assert PROGRESS not in runs.objects
    assert "the progress marker of this attempt could not be stored" in capsys.readouterr().err
    runs.refuses = lambda operation, key: False
    session.save(2, state_at(2))
    assert PROGRESS in runs.objects


def test_a_restarted_process_of_the_attempt_meets_its_own_note(runs, volume):
    attempt(runs, volume, 1, 2)
    train(runs, 4, 1, checkpoints=volume)
    assert list_commits(volume, LINEAGE)[0] == ref(1, 4)


def test_without_a_volume_no_note_is_needed(runs):
    train(runs, 3)
    assert not any("/progress/" in key for key in runs.objects)


def test_the_tree_infers_the_same_starts(tmp_path, runs):
    store, volume = DirectoryStore(tmp_path / "runs"), DirectoryStore(tmp_path / "volume")
    write_run(store, checkpoint_store=volume.url)
    attempt(store, volume, 1, 2)
    attempt(store, volume, 2, 3)
    write_claim(store, claim_of(3))
    (lineage,) = read_lineage_tree(RunHistory(store, RUN)).steps
    assert [node.starts_from for node in lineage.attempts] == [None, ref(1, 2), ref(2, 3)]
    assert {c.status for node in lineage.attempts for c in node.checkpoints} == {CheckpointStatus.COMMITTED}


def test_an_attempt_that_tells_only_of_itself_counts_as_one_that_left_nothing():
    restored = {1: None, 2: ref(2, 3)}
    assert infer_starts([ref(2, 4), ref(1, 2)], LINEAGE, [1, 2], restored) == {1: None, 2: ref(1, 2)}


def test_inference_is_independent_of_the_order_of_attempts():
    commits = [ref(3, 5), ref(1, 3), ref(1, 2)]
    expected = {1: None, 2: ref(1, 3), 3: ref(1, 2), 4: ref(3, 5)}
    restored = {1: None, 3: ref(1, 2)}
    assert infer_starts(commits, LINEAGE, [4, 2, 3, 1], restored) == expected
