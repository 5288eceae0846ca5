"""How a checkpoint goes: marked, waiting, announced, deleted; and what saves it on the way.

| between two passes | what happens to a marked checkpoint |
|---|---|
| less time than the delay | it waits, and is as good as any other |
| the delay | it goes: manifest, shards, mark |
| a pin, a quarantine, a reference, a newer one barred | it is rescued; its delay begins anew if it expires again |
| the clock jumped | it goes early or late, and never while something refers to it |
| its deletion stopped half way | the next pass finishes it |
"""

from datetime import UTC, datetime, timedelta

import pytest
from support.builders.lineage import LINEAGE, commit, ref
from support.fakes.counting_store import CountingStore
from support.fakes.memory_store import MemoryStore

from tiphys.errors import ConflictError, FencedError, NotFoundError, StoreError, UsageError
from tiphys.lineage.quarantine import quarantine_checkpoint
from tiphys.lineage.retention import delete
from tiphys.lineage.retention.delete import Retention
from tiphys.lineage.retention.policy import list_pins, pin_checkpoint, unpin_checkpoint
from tiphys.lineage.select import list_commits, order_candidates
from tiphys.protocol.step_spec import BestCheckpoints, RetentionPolicy
from tiphys.store import LineageLayout

LAYOUT = LineageLayout(LINEAGE)
DELAY = 600.0
STARTS = {1: None}


class Clock:
    """A time that only moves when told, in both directions."""

    def __init__(self):
        self.now = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)

    def __call__(self):
        return self.now

    def jump(self, seconds):
        self.now += timedelta(seconds=seconds)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store():
    store = MemoryStore()
    for step in (1, 2, 3):
        commit(store, ref(1, step), metrics={"loss": 1 / step})
    return store


def retention(store, clock, keep=None, **options):
    return Retention(store, LINEAGE, keep or RetentionPolicy(last=1, delay_seconds=DELAY), now=clock, **options)


def steps(store):
    return sorted(one.global_step for one in list_commits(store, LINEAGE))


def marks(store):
    found = (LAYOUT.parse_tombstone(info.key) for info in store.list(LAYOUT.all_tombstones))
    return sorted((one.global_step, bool(nonce)) for one, nonce in found)


def test_an_expired_checkpoint_is_marked_and_waits(store, clock):
    assert retention(store, clock).apply(STARTS, ()) == []
    assert (steps(store), marks(store)) == ([1, 2, 3], [(1, False), (2, False)])


def test_a_marked_one_is_as_good_as_any_other(store, clock):
    retention(store, clock).apply(STARTS, ())
    assert order_candidates(list_commits(store, LINEAGE), LINEAGE, STARTS) == (ref(1, 3), ref(1, 2), ref(1, 1))


def test_after_the_delay_it_goes_and_leaves_nothing(store, clock):
    passes = retention(store, clock)
    passes.apply(STARTS, ())
    clock.jump(DELAY / 2)
    assert passes.apply(STARTS, ()) == []
    clock.jump(DELAY)
    assert passes.apply(STARTS, ()) == [ref(1, 1), ref(1, 2)]
    assert sorted(store.objects) == sorted(
        [LAYOUT.manifest(1, 3), *(key for key in store.objects if key.startswith(LAYOUT.shards(1, 3)))]
    )


def test_a_restarted_process_goes_by_the_same_marks(store, clock):
    retention(store, clock).apply(STARTS, ())
    clock.jump(2 * DELAY)
    assert retention(store, clock).apply(STARTS, ()) == [ref(1, 1), ref(1, 2)]


@pytest.mark.parametrize(
    "hold",
    [
        lambda store: pin_checkpoint(store, ref(1, 1), "release"),
        lambda store: quarantine_checkpoint(store, ref(1, 1), "poison", "ana"),
    ],
    ids=["pin", "quarantine"],
)
def test_a_record_rescues_what_was_marked(store, clock, hold):
    passes = retention(store, clock)
    passes.apply(STARTS, ())
    hold(store)
    clock.jump(2 * DELAY)
    assert passes.apply(STARTS, ()) == [ref(1, 2)]
    assert (steps(store), marks(store)) == ([1, 3], [])


def test_a_reference_rescues_what_was_marked(store, clock):
    passes = retention(store, clock)
    passes.apply(STARTS, ())
    clock.jump(2 * DELAY)
    assert passes.apply({1: None, 2: ref(1, 2)}, {ref(1, 2)}) == [ref(1, 1)]
    assert (steps(store), marks(store)) == ([2, 3], [])


def test_the_delay_of_a_rescued_one_begins_anew(store, clock):
    passes = retention(store, clock)
    passes.apply(STARTS, ())
    pin_checkpoint(store, ref(1, 1), "release")
    passes.apply(STARTS, ())
    unpin_checkpoint(store, ref(1, 1), "release")
    clock.jump(DELAY)
    store.objects.pop(LAYOUT.tombstone(1, 2))
    assert passes.apply(STARTS, ()) == []
    assert marks(store) == [(1, False), (2, False)]


def test_the_checkpoint_before_a_quarantined_newest_one_is_needed_again(store, clock):
    passes = retention(store, clock)
    passes.apply(STARTS, ())
    quarantine_checkpoint(store, ref(1, 3), "poison", "ana")
    clock.jump(2 * DELAY)
    assert passes.apply(STARTS, ()) == [ref(1, 1)]
    assert steps(store) == [2, 3]


def test_a_clock_that_jumps_ahead_deletes_early_and_nothing_that_is_held(store, clock):
    pin_checkpoint(store, ref(1, 1), "release")
    passes = retention(store, clock)
    passes.apply(STARTS, ())
    clock.jump(10 * 365 * 24 * 3600)
    assert passes.apply(STARTS, ()) == [ref(1, 2)]
    assert steps(store) == [1, 3]


def test_a_clock_that_jumps_back_deletes_late(store, clock):
    passes = retention(store, clock)
    passes.apply(STARTS, ())
    clock.jump(-10 * 365 * 24 * 3600)
    passes.apply(STARTS, ())
    clock.jump(5 * DELAY)
    assert passes.apply(STARTS, ()) == []
    assert steps(store) == [1, 2, 3]


def test_without_a_delay_no_clock_has_a_say(store, clock):
    retention(store, clock).apply(STARTS, ())
    clock.jump(-10 * 365 * 24 * 3600)
    assert retention(store, clock, RetentionPolicy(last=1, delay_seconds=0)).apply(STARTS, ()) == [ref(1, 1), ref(1, 2)]


def test_a_reference_that_appears_after_the_announcement_is_seen(store, clock):
    """A pin, a quarantine and a claim, written while the deletion had begun."""
    keep = RetentionPolicy(last=1, delay_seconds=0)
    commit(store, ref(1, 4))
    pins, announced = [], []

    def recheck():
        announced.extend(step for step, announcement in marks(store) if announcement)
        quarantine_checkpoint(store, ref(1, 2), "poison", "ana")
        with pytest.raises(ConflictError, match="another process was about to delete checkpoint 1-1") as caught:
            pin_checkpoint(store, ref(1, 1), "release")
        pins.append(caught)
        return {ref(1, 3)}

    passes = retention(store, clock, keep, recheck=recheck)
    assert passes.apply(STARTS, ()) == []
    assert (announced, len(pins), steps(store)) == ([1, 2, 3], 1, [1, 2, 3, 4])
    assert not any(announcement for _, announcement in marks(store))


def test_a_pin_that_came_too_late_goes_with_a_later_pass(store, clock, monkeypatch):
    refusals, delete = [], store.delete

    def pin_late(key):
        if key == LAYOUT.manifest(1, 1):
            with pytest.raises(ConflictError) as caught:
                pin_checkpoint(store, ref(1, 1), "release")
            refusals.append(caught)
        delete(key)

    keep = RetentionPolicy(last=1, delay_seconds=0)
    monkeypatch.setattr(store, "delete", pin_late)
    assert retention(store, clock, keep).apply(STARTS, ()) == [ref(1, 1), ref(1, 2)]
    assert (len(refusals), list_pins(store, LINEAGE)) == (1, {ref(1, 1): ("release",)})

    pin_checkpoint(store, ref(1, 3), "newest")
    retention(store, clock, keep).apply(STARTS, ())
    assert list_pins(store, LINEAGE) == {ref(1, 3): ("newest",)}


def test_a_checkpoint_that_is_committed_and_marked_during_a_pass_keeps_its_shards(store, clock):
    def meanwhile(operation, key):
        if (operation, key) == ("list", LAYOUT.all_tombstones):
            store.refuses = lambda operation, key: False
            commit(store, ref(1, 4))
            store.create(LAYOUT.tombstone(1, 4), b"of another pass")
        return False

    store.refuses = meanwhile
    retention(store, clock).apply(STARTS, ())
    assert steps(store) == [1, 2, 3, 4]
    assert any(store.list(LAYOUT.shards(1, 4)))


def test_a_fenced_attempt_deletes_nothing_and_takes_its_announcements_back(store, clock):
    def recheck():
        raise FencedError("attempt 2 exists")

    assert retention(store, clock, RetentionPolicy(last=1, delay_seconds=0), recheck=recheck).apply(STARTS, ()) == []
    assert steps(store) == [1, 2, 3]
    assert not any(announcement for _, announcement in marks(store))


def test_an_announcement_of_another_process_is_left_alone_while_the_checkpoint_is_there(store, clock):
    """He may be about to delete: only he knows whether he has looked."""
    key = LAYOUT.deletion_notice(1, 1, "beef")
    store.create(key, b"{}")
    pin_checkpoint(store, ref(1, 2), "release")
    retention(store, clock).apply(STARTS, {ref(1, 1)})
    assert key in store.objects
    retention(store, clock, RetentionPolicy(last=1, delay_seconds=0)).apply(STARTS, ())
    assert key not in store.objects


def test_a_damaged_mark_costs_a_delay_and_not_the_retention(store, clock):
    store.create(LAYOUT.tombstone(1, 1), b"garbage")
    passes = retention(store, clock)
    assert passes.plan(STARTS, ()).marked == {ref(1, 1): None}
    assert store.objects[LAYOUT.tombstone(1, 1)] == b"garbage"
    passes.apply(STARTS, ())
    clock.jump(2 * DELAY)
    assert passes.apply(STARTS, ()) == [ref(1, 1), ref(1, 2)]


def test_a_deletion_that_died_after_the_manifest_is_finished(store, clock):
    retention(store, clock).apply(STARTS, ())
    store.delete(LAYOUT.manifest(1, 1))
    retention(store, clock).apply(STARTS, ())
    assert marks(store) == [(2, False)]
    assert not any(key.startswith(LAYOUT.shards(1, 1)) for key in store.objects)


def test_a_pass_after_a_commit_does_only_so_much(clock):
    store = MemoryStore()
    for step in range(1, 42):
        commit(store, ref(1, step))
    passes = retention(store, clock, RetentionPolicy(last=1, delay_seconds=0))
    assert [len(passes.apply(STARTS, ())) for _ in range(4)] == [16, 16, 8, 0]
    assert steps(store) == [41]


def test_a_pass_over_more_than_a_request_lists_serves_as_many_commits(clock, monkeypatch):
    monkeypatch.setattr(delete, "_COMMITS_PER_REQUEST", 9)
    monkeypatch.setattr(delete, "_MAX_PER_PASS", 2)
    memory = MemoryStore()
    store = CountingStore(memory)
    passes = retention(store, clock, RetentionPolicy(last=1, every_steps=2, delay_seconds=0))
    passed, gone = [], []
    for step in range(1, 51):
        commit(memory, ref(1, step))
        passes.trust(ref(1, step))
        store.requests.clear()
        gone += passes.apply(STARTS, ())
        if store.requests:
            passed.append(step)
    assert passed[:20] == [*range(1, 18), 18, 20, 22], "two commits once the policy keeps ten"
    assert passed[-2:] == [47, 50], "three once it keeps twenty"
    assert steps(memory) == [*range(2, 51, 2)]
    assert gone == [ref(1, step) for step in range(1, 50, 2)]


def test_anchors_and_the_best_outlive_the_others(clock):
    store = MemoryStore()
    for step, loss in enumerate([0.9, 0.1, 0.5, float("nan"), 0.3, 0.2, 0.7, 0.6], start=1):
        commit(store, ref(1, step), metrics={"loss": loss})
    keep = RetentionPolicy(
        last=1, every_steps=3, best=BestCheckpoints(metric="loss", order="min", count=2), delay_seconds=0
    )
    retention(store, clock, keep).apply(STARTS, ())
    assert steps(store) == [2, 3, 6, 8]


def test_a_trusted_one_is_kept_as_best_by_what_its_manifest_says(clock):
    store = MemoryStore()
    passes = retention(
        store, clock, RetentionPolicy(last=1, best=BestCheckpoints(metric="loss", order="min"), delay_seconds=0)
    )
    for step, loss in enumerate([0.9, 0.1, 0.5], start=1):
        commit(store, ref(1, step), metrics={"loss": loss})
        passes.trust(ref(1, step))
        passes.apply(STARTS, ())
    assert steps(store) == [2, 3]


@pytest.mark.parametrize(
    "keep",
    [
        RetentionPolicy(last=1000),
        RetentionPolicy(last=1, every_steps=1),
        RetentionPolicy(last=1, best=BestCheckpoints(metric="loss", order="min", count=1000)),
    ],
    ids=["last", "every", "best"],
)
def test_a_pass_over_a_thousand_checkpoints_costs_four_listings(clock, keep):
    memory = MemoryStore()
    for step in range(1, 1001):
        commit(memory, ref(1, step), data=(b"x",), metrics={"loss": 1.0})
    store = CountingStore(memory)
    passes = retention(store, clock, keep)
    passes.apply(STARTS, ())
    store.requests.clear()
    assert passes.apply(STARTS, ()) == []
    assert dict(store.requests) == {"list": 4}
    assert len(list_commits(memory, LINEAGE)) == 1000


def test_a_pass_that_deletes_one_of_many_costs_no_more_for_the_others(clock):
    memory = MemoryStore()
    for step in range(1, 301):
        commit(memory, ref(1, step), data=(b"x", b"y"))
    store = CountingStore(memory)
    passes = retention(store, clock, RetentionPolicy(last=300, delay_seconds=0))
    passes.apply(STARTS, ())
    commit(memory, ref(1, 301))
    passes.trust(ref(1, 301))
    store.requests.clear()
    assert passes.apply(STARTS, ()) == [ref(1, 1)]
    # Twice four to look; then mark and announcement, and the shards and both records of the one that goes.
    assert dict(store.requests) == {"list": 10, "create": 2, "delete": 5}


def test_retention_without_a_policy_deletes_nothing(store, clock):
    before = dict(store.objects)
    assert Retention(store, LINEAGE, None, now=clock).apply(STARTS, ()) == []
    assert store.objects == before


def test_a_pin_is_one_of_many_and_each_is_taken_away_by_its_name(store):
    pin_checkpoint(store, ref(1, 1), "a")
    pin_checkpoint(store, ref(1, 1), "b-2.x_y")
    pin_checkpoint(store, ref(1, 1), "a")
    assert list_pins(store, LINEAGE) == {ref(1, 1): ("a", "b-2.x_y")}
    unpin_checkpoint(store, ref(1, 1), "a")
    assert list_pins(store, LINEAGE) == {ref(1, 1): ("b-2.x_y",)}
    with pytest.raises(NotFoundError, match=r"has no pin 'a'; its pins are: b-2\.x_y"):
        unpin_checkpoint(store, ref(1, 1), "a")
    with pytest.raises(NotFoundError, match="it has none"):
        unpin_checkpoint(store, ref(1, 2), "a")


def test_a_missing_checkpoint_cannot_be_pinned(store):
    with pytest.raises(NotFoundError, match="has no checkpoint 1-9"):
        pin_checkpoint(store, ref(1, 9), "release")
    assert list_pins(store, LINEAGE) == {}


@pytest.mark.parametrize("name", ["", "a/b", "..", "-a", "ü", "x" * 101, "a b"])
def test_a_name_that_cannot_be_a_key_is_refused(store, name):
    with pytest.raises(UsageError, match="is not valid"):
        pin_checkpoint(store, ref(1, 1), name)


def test_storage_that_fails_at_the_last_look_deletes_nothing(store, clock):
    passes = retention(store, clock, RetentionPolicy(last=1, delay_seconds=0))
    looks = []
    store.refuses = lambda operation, key: key == LAYOUT.all_pins and bool(looks.append(key) or len(looks) == 2)
    with pytest.raises(StoreError):
        passes.apply(STARTS, ())
    assert (steps(store), marks(store)) == ([1, 2, 3], [(1, False), (2, False)])
    assert passes.apply(STARTS, ()) == [ref(1, 1), ref(1, 2)]


def test_a_mark_of_another_pass_that_deletes_at_the_same_time_stops_neither(store, clock):
    """The other pass marks first, and its mark is gone, with the checkpoint, before this one can read it."""
    passes = retention(store, clock, RetentionPolicy(last=1, delay_seconds=0))
    first = LAYOUT.tombstone(1, 1)

    def other_pass(operation, key):
        if (operation, key) == ("create", first) and first not in store.objects:
            store.objects[first] = b"of the other"
        elif (operation, key) == ("read", first):
            store.objects.pop(first, None)
        return False

    store.refuses = other_pass
    passes.apply(STARTS, ())
    assert (steps(store), marks(store)) == ([3], [])
