"""Retention of a run from outside: its own policy, what a running program refers to, and what cannot be seen."""

from datetime import timedelta

import pytest
from support.builders.lineage import LINEAGE, RUN, STEP, claim_of, commit, ref, write_claim, write_run
from support.fakes.memory_store import MemoryStore

from tiphys.errors import NotFoundError
from tiphys.lineage.retention.gc import RetentionAction, UnreachableLineage, iter_run_lineages
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.select import list_commits
from tiphys.protocol.step_spec import RetentionPolicy
from tiphys.records import utc_now
from tiphys.store import DirectoryStore, LineageLayout

LAYOUT = LineageLayout(LINEAGE)
AT_ONCE = RetentionPolicy(last=1, delay_seconds=0)


@pytest.fixture
def store():
    store = MemoryStore()
    write_run(store)
    write_claim(store, claim_of(1))
    for step in range(1, 6):
        commit(store, ref(1, step))
    return store


def lineage(store, keep=None):
    [found] = iter_run_lineages(RunHistory(store, RUN), lambda policy: keep or policy)
    return found


def actions(account):
    return {str(fate.checkpoint): fate.action.value for fate in account.decisions}


def test_the_policy_is_that_of_the_step_unless_the_call_says_otherwise(store):
    found = lineage(store)
    assert (found.step, found.lineage, found.keep) == (STEP, LINEAGE, RetentionPolicy(last=3))
    assert lineage(store, AT_ONCE).keep == AT_ONCE


def test_to_foresee_writes_nothing_and_says_what_then_happens(store):
    store.create(f"{LAYOUT.shards(1, 0)}left", b"by a save that died")
    before = dict(store.objects)
    foreseen = lineage(store, AT_ONCE).preview()
    assert store.objects == before
    done = lineage(store, AT_ONCE).collect()
    assert (
        actions(foreseen) == actions(done) == {"1-5": "keep", **dict.fromkeys(["1-4", "1-3", "1-2", "1-1"], "delete")}
    )
    assert foreseen.freed_bytes == done.freed_bytes == 4 * len(b"weights" + b"tree") + len(b"by a save that died")
    assert foreseen.orphan_bytes == done.orphan_bytes == len(b"by a save that died")
    assert sum(map(len, before.values())) > sum(map(len, store.objects.values()))
    assert list_commits(store, LINEAGE) == [ref(1, 5)]


def test_the_first_pass_marks_and_the_next_waits(store):
    first = lineage(store).collect()
    assert actions(first) == {
        **dict.fromkeys(["1-5", "1-4", "1-3"], "keep"),
        **dict.fromkeys(["1-2", "1-1"], "mark"),
    }
    waiting = [fate for fate in lineage(store).collect().decisions if fate.action is RetentionAction.WAIT]
    assert [fate.checkpoint for fate in waiting] == [ref(1, 2), ref(1, 1)]
    marks = {fate.checkpoint: fate.marked_at for fate in first.decisions}
    assert [fate.marked_at for fate in waiting] == [marks[ref(1, 2)], marks[ref(1, 1)]], "each tells what is on record"
    assert all(fate.marked_at for fate in waiting)
    tomorrow, delay = utc_now() + timedelta(days=1), timedelta(seconds=RetentionPolicy(last=3).delay_seconds)
    assert [first.find_due_time(fate, tomorrow) for fate in waiting] == [fate.marked_at + delay for fate in waiting]
    assert {first.find_due_time(fate, tomorrow) for fate in first.decisions[:3]} == {None}


def test_the_start_of_the_newest_attempt_stays(store):
    write_claim(store, claim_of(2, ref(1, 2)))
    commit(store, ref(2, 9))
    account = lineage(store, AT_ONCE).collect()
    assert list_commits(store, LINEAGE) == [ref(2, 9), ref(1, 2)]
    reasons = {fate.checkpoint: fate.reasons for fate in account.decisions}
    assert reasons[ref(1, 2)] == ("attempt 2 started from it",)


def test_the_checkpoint_that_the_newest_attempt_restored_instead_stays(store):
    write_claim(store, claim_of(2, ref(1, 5)))
    commit(store, ref(2, 9), restored=ref(1, 4))
    lineage(store, AT_ONCE).collect()
    assert list_commits(store, LINEAGE) == [ref(2, 9), ref(1, 5), ref(1, 4)]


def test_a_claim_that_came_after_the_first_look_is_seen_before_anything_is_deleted(store):
    """The next attempt is opened while the command runs."""
    looks = []

    def opens_an_attempt(operation, key):
        if operation == "create" and key.startswith(LAYOUT.all_tombstones) and not looks:
            looks.append(key)
            write_claim(store, claim_of(2, ref(1, 3)))
        return False

    store.refuses = opens_an_attempt
    lineage(store, AT_ONCE).collect()
    assert looks
    assert list_commits(store, LINEAGE) == [ref(1, 5), ref(1, 3)]


def test_a_run_that_keeps_all_is_left_as_it_is(store):
    before = dict(store.objects)
    [found] = iter_run_lineages(RunHistory(store, RUN), lambda policy: None)
    assert {fate.reasons for fate in found.collect().decisions} == {("all are kept",)}
    assert store.objects == before


def test_a_damaged_manifest_is_no_obstacle_and_counts_for_nothing(store):
    store.objects[LAYOUT.manifest(1, 5)] = b"garbage"
    lineage(store, AT_ONCE).collect()
    assert list_commits(store, LINEAGE) == [ref(1, 5), ref(1, 4)]


def test_on_a_volume_manifests_say_what_attempts_started_from(tmp_path):
    store, volume = DirectoryStore(tmp_path / "runs"), DirectoryStore(tmp_path / "volume")
    write_run(store, checkpoint_store=volume.url)
    for number in (1, 2):
        write_claim(store, claim_of(number))
    for step in (1, 2, 3):
        commit(volume, ref(1, step))
    commit(volume, ref(2, 7), restored=ref(1, 2))
    account = lineage(store, AT_ONCE).collect()
    assert actions(account) == {"2-7": "keep", "1-3": "delete", "1-2": "keep", "1-1": "delete"}
    assert list_commits(volume, LINEAGE) == [ref(2, 7), ref(1, 2)]


def test_a_volume_that_is_not_here_is_named(tmp_path):
    store = DirectoryStore(tmp_path / "runs")
    write_run(store, checkpoint_store=(tmp_path / "absent").as_uri())
    write_claim(store, claim_of(1))
    found = lineage(store)
    assert isinstance(found, UnreachableLineage)
    assert "absent" in found.reason


def test_a_run_that_is_not_there_is_an_error(store):
    with pytest.raises(NotFoundError, match="has no run 'other'"):
        list(iter_run_lineages(RunHistory(store, "other"), lambda policy: policy))
