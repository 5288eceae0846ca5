"""Which checkpoint an attempt starts from.

| attempts and their commits | chosen |
|---|---|
| nothing committed | the beginning |
| the newest attempt committed | its newest |
| the newest attempt died before any commit | what it started from |
| an older attempt committed after a newer one had started elsewhere | not that one |
| the newest is quarantined, incomplete, damaged or foreign | the one before, and why |
"""

import pytest
from support.builders.lineage import LINEAGE, attempts_of, commit, ref
from support.fakes.counting_store import CountingStore

from tiphys.lineage.quarantine import list_quarantined, quarantine_checkpoint, read_quarantine_reason
from tiphys.lineage.select import choose_checkpoint, list_commits, order_candidates, shorten_skipped, starts_from_claims
from tiphys.records import SkippedCheckpoint
from tiphys.store import DirectoryStore, LineageLayout

LAYOUT = LineageLayout(LINEAGE)


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path)


def candidates(store, *starts):
    return order_candidates(list_commits(store, LINEAGE), LINEAGE, starts_from_claims(attempts_of(*starts)))


def test_without_any_commit_it_is_the_beginning(store):
    assert choose_checkpoint(store, LINEAGE, attempts_of(None)) == (None, ())
    assert choose_checkpoint(store, LINEAGE, []) == (None, ())


def test_the_newest_commit_of_the_newest_attempt_wins(store):
    for step in (10, 20, 100):
        commit(store, ref(1, step))
    choice = choose_checkpoint(store, LINEAGE, attempts_of(None))
    assert choice.checkpoint == ref(1, 100)
    assert choice.skipped == ()


def test_a_newer_attempt_at_an_earlier_step_beats_an_older_attempt_further_on(store):
    commit(store, ref(1, 10))
    commit(store, ref(1, 90))
    commit(store, ref(2, 20))
    assert candidates(store, None, ref(1, 10)) == (ref(2, 20), ref(1, 10))


def test_attempts_that_died_before_any_commit_lead_back_to_what_they_started_from(store):
    """Counting back by one attempt would lose every checkpoint here."""
    commit(store, ref(1, 10))
    start = ref(1, 10)
    assert choose_checkpoint(store, LINEAGE, attempts_of(None, start, start, start)).checkpoint == start


def test_a_late_commit_is_never_chosen(store):
    commit(store, ref(1, 10))
    commit(store, ref(1, 20))  # after attempt 2 had been told to start from 10
    assert candidates(store, None, ref(1, 10)) == (ref(1, 10),)


def test_a_late_first_commit_is_not_chosen_either(store):
    commit(store, ref(1, 10))
    assert choose_checkpoint(store, LINEAGE, attempts_of(None, None)).checkpoint is None


def test_a_quarantined_checkpoint_gives_way_to_the_one_before(store):
    commit(store, ref(1, 10))
    commit(store, ref(1, 20))
    quarantine_checkpoint(store, ref(1, 20), "shard 0 has the wrong hash", "restore")
    choice = choose_checkpoint(store, LINEAGE, attempts_of(None))
    assert choice.checkpoint == ref(1, 10)
    assert [s.checkpoint for s in choice.skipped] == [ref(1, 20)]
    assert choice.skipped[0].reason == "quarantined by restore: shard 0 has the wrong hash"


def test_an_older_quarantined_checkpoint_is_not_called_skipped(store):
    for step in (10, 20, 30):
        commit(store, ref(1, step))
    quarantine_checkpoint(store, ref(1, 20), "poison", "ana")
    assert choose_checkpoint(store, LINEAGE, attempts_of(None)) == (ref(1, 30), ())


def damage_missing_shard(store):
    commit(store, ref(1, 20))
    store.delete(f"{LAYOUT.shards(1, 20)}0")


def damage_truncated_shard(store):
    manifest = commit(store, ref(1, 20))
    store.delete(manifest.shards[0].key)
    store.create(manifest.shards[0].key, b"weigh")


def damage_garbage_manifest(store):
    store.create(LAYOUT.manifest(1, 20), b"\0garbage")


def damage_empty_manifest(store):
    store.create(LAYOUT.manifest(1, 20), b"")


def damage_no_shards(store):
    commit(store, ref(1, 20), shards=())


def damage_doubled_shard(store):
    manifest = commit(store, ref(1, 21))
    store.delete(LAYOUT.manifest(1, 21))
    commit(store, ref(1, 20), shards=(manifest.shards[0], manifest.shards[0]))


def damage_other_step(store):
    commit(store, ref(1, 20), global_step=21)


def damage_other_lineage(store):
    commit(store, ref(1, 20), lineage="other/fit")


def damage_foreign_shards(store):
    older = commit(store, ref(1, 5))
    commit(store, ref(1, 20), shards=older.shards)


DAMAGES = {
    damage_missing_shard: "is missing",
    damage_truncated_shard: "has 5 bytes, the manifest says 7",
    damage_garbage_manifest: "is not a valid CheckpointManifest",
    damage_empty_manifest: "is not a valid CheckpointManifest",
    damage_no_shards: "names no shards",
    damage_doubled_shard: "or a shard twice",
    damage_other_step: "is that of checkpoint 1-21",
    damage_other_lineage: "of other/fit",
    damage_foreign_shards: "belongs to another checkpoint",
}


@pytest.mark.parametrize(("damage", "words"), DAMAGES.items())
def test_an_incomplete_checkpoint_is_skipped_with_its_reason(store, damage, words):
    commit(store, ref(1, 10))
    damage(store)
    choice = choose_checkpoint(store, LINEAGE, attempts_of(None))
    assert choice.checkpoint == ref(1, 10)
    assert [s.checkpoint for s in choice.skipped] == [ref(1, 20)]
    assert words in choice.skipped[0].reason


def test_training_begins_anew_with_all_reasons_where_no_checkpoint_is_valid(store):
    for step in (10, 20):
        commit(store, ref(1, step))
        store.delete(f"{LAYOUT.shards(1, step)}0")
    choice = choose_checkpoint(store, LINEAGE, attempts_of(None))
    assert choice.checkpoint is None
    assert len(choice.skipped) == 2


def test_a_checkpoint_removed_between_listing_and_reading_is_passed_over(store):
    class Vanishing(CountingStore):
        def read(self, key):
            store.delete(key)
            return super().read(key)

    commit(store, ref(1, 10))
    choice = choose_checkpoint(Vanishing(store), LINEAGE, attempts_of(None))
    assert choice.checkpoint is None
    assert "was removed" in choice.skipped[0].reason


def test_the_choice_costs_four_requests_however_many_checkpoints_there_are(store):
    for step in range(40):
        commit(store, ref(1, step))
    counting = CountingStore(store)
    choose_checkpoint(counting, LINEAGE, attempts_of(None))
    assert counting.requests == {"list": 3, "read": 1}


def test_the_choice_lists_no_further_than_the_checkpoint_that_it_takes(store):
    rows = []

    class Listing(CountingStore):
        def list(self, prefix):
            for info in super().list(prefix):
                rows.append(info.key)
                yield info

    for step in range(40):
        commit(store, ref(1, step))
        if step not in (10, 37):
            quarantine_checkpoint(store, ref(1, step), "poison", "ana")
    assert choose_checkpoint(Listing(store), LINEAGE, attempts_of(None)).checkpoint == ref(1, 37)
    assert [sum(key.startswith(prefix) for key in rows) for prefix in (LAYOUT.manifests, LAYOUT.all_quarantined)] == [
        3,
        3,
    ]


def test_a_chain_does_not_leave_its_lineage_and_ends_in_a_circle():
    commits = [ref(1, 10), ref(2, 20)]
    assert order_candidates(commits, LINEAGE, {1: None, 2: ref(1, 10, "other/fit")}) == (ref(2, 20),)
    assert order_candidates(commits, LINEAGE, {1: ref(2, 20), 2: ref(1, 10)}) == (ref(2, 20), ref(1, 10))
    assert order_candidates(commits, LINEAGE, {2: ref(2, 20)}) == (ref(2, 20),)


def test_the_first_reason_for_a_quarantine_stands(store):
    quarantine_checkpoint(store, ref(1, 10), "bad hash", "restore")
    quarantine_checkpoint(store, ref(1, 10), "I dislike it", "ana")
    assert read_quarantine_reason(store, ref(1, 10)) == "quarantined by restore: bad hash"
    assert list_quarantined(store, LINEAGE) == {ref(1, 10)}
    assert read_quarantine_reason(store, ref(1, 10)) == "quarantined by restore: bad hash"
    assert read_quarantine_reason(store, ref(1, 11)) == "not quarantined"


def test_keys_that_name_no_checkpoint_are_ignored(store):
    commit(store, ref(1, 10))
    store.create(f"{LAYOUT.manifests}README", b"hello")
    store.create(f"{LAYOUT.all_quarantined}README", b"hello")
    assert choose_checkpoint(store, LINEAGE, attempts_of(None)) == (ref(1, 10), ())


def test_record_of_20000_skipped_checkpoints_is_small_and_says_how_many_there_are():
    skipped = [SkippedCheckpoint(checkpoint=ref(1, step), reason="é" * 3000) for step in range(20_000)]
    kept = shorten_skipped(skipped)
    assert [skip.checkpoint for skip in kept] == [skip.checkpoint for skip in skipped[:20]]
    assert kept[-1].reason.endswith("; so are 19980 older ones, which `tiphys lineage` lists")
    assert sum("older ones" in skip.reason for skip in kept) == 1
    assert sum(len(skip.to_bytes()) for skip in kept) < 32 << 10
    few = skipped[:20]
    assert [skip.reason for skip in shorten_skipped(few)] == ["é" * 500] * 20
