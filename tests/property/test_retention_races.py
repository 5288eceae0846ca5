"""Retention that dies at any call to storage, or meets a pin, another deletion or an attempt at any moment.

| promise | how it is tried |
|---|---|
| what is kept or held stays whole at every moment | death at every call, before and after its effect |
| a deletion that died is finished by the next pass | the survivor comes to the end of an undisturbed pass |
| a pin that was acknowledged holds | every interleaving of a pin's calls with those of a deletion |
| two deletions at once do no more than one | one runs at every call of the other |
"""

import contextlib
import itertools
import threading

import pytest
from support.builders.lineage import LINEAGE, commit, ref
from support.fakes.memory_store import MemoryStore

from tiphys.errors import ConflictError, NotFoundError, StoreFullError
from tiphys.lineage.quarantine import quarantine_checkpoint
from tiphys.lineage.retention.delete import Retention, Tombstones
from tiphys.lineage.retention.policy import list_pins, pin_checkpoint
from tiphys.lineage.select import list_commits
from tiphys.lineage.validity import checkpoint_fault
from tiphys.protocol.step_spec import BestCheckpoints, RetentionPolicy
from tiphys.records import utc_now
from tiphys.store import LineageLayout

LAYOUT = LineageLayout(LINEAGE)
KEEP = RetentionPolicy(last=2, every_steps=4, best=BestCheckpoints(metric="loss", order="min"), delay_seconds=0)
STARTS = {1: None, 2: ref(1, 6)}
STAY = {ref(1, 2), ref(1, 3), ref(1, 4), ref(1, 6), ref(2, 8), ref(2, 9)}
"""Pinned, quarantined, anchor, start of the attempt, and the newest; the best is the last one."""


def lineage():
    store = MemoryStore()
    for attempt, step in [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 6), (1, 7), (2, 8), (2, 9)]:
        commit(store, ref(attempt, step), metrics={"loss": 1 / step})
    store.create(f"{LAYOUT.shards(1, 0)}left", b"by a save that died")
    pin_checkpoint(store, ref(1, 2), "release")
    quarantine_checkpoint(store, ref(1, 3), "poison", "ana")
    return store.objects


def collect(store):
    return Retention(store, LINEAGE, KEEP).collect(STARTS, {ref(1, 6)}).deleted


def torn(objects):
    store = MemoryStore(objects)
    return [fault for one in list_commits(store, LINEAGE) if (fault := checkpoint_fault(store, one))]


def tidy(objects):
    """Nothing is left of what went: neither shards nor marks."""
    store = MemoryStore(objects)
    places = [LAYOUT.parse_shard(info.key) for info in store.list(LAYOUT.all_shards)]
    return set(places) == set(list_commits(store, LINEAGE)) and not any(store.list(LAYOUT.all_tombstones))


class ProcessDied(BaseException):
    """Unlike an error, nothing in the program may handle it."""


class HookedStore(MemoryStore):
    """Calls ``hook(n)`` before its n-th call takes effect, and ``hook(n + 0.5)`` after. Shares its objects."""

    def __init__(self, objects, hook=lambda number: None):
        super().__init__()
        self.objects = objects
        self.calls = 0
        self._hook = hook

    def create(self, key, data, *, sha256=None):
        return self._call(lambda: super(HookedStore, self).create(key, data))

    def delete(self, key):
        return self._call(lambda: super(HookedStore, self).delete(key))

    def read(self, key):
        return self._call(lambda: super(HookedStore, self).read(key))

    def list(self, prefix):
        return self._call(lambda: iter(tuple(super(HookedStore, self).list(prefix))))

    def _call(self, call):
        self.calls += 1
        number = self.calls
        self._hook(number)
        result = call()
        self._hook(number + 0.5)
        return result


GOES = [ref(1, 1), ref(1, 5), ref(1, 7)]
"""What nothing keeps; the last of them is a late commit."""


def calls_of_a_pass():
    store = HookedStore(lineage())
    assert collect(store) == GOES
    return store.calls


def moments():
    return [number / 2 for number in range(2, 2 * calls_of_a_pass() + 2)]


def at(moment, action):
    """A hook that acts once, at that moment, and notes that it did."""
    acted = []

    def hook(number):
        if number == moment and not acted:
            acted.append(number)
            action()

    return hook, acted


def die():
    raise ProcessDied


def test_an_undisturbed_pass_leaves_what_should_stay_and_nothing_of_the_rest():
    objects = lineage()
    assert collect(HookedStore(objects)) == GOES
    assert set(list_commits(MemoryStore(objects), LINEAGE)) == STAY
    assert torn(objects) == []
    assert tidy(objects)


def test_a_death_at_any_moment_harms_nothing_that_stays_and_the_next_pass_comes_to_the_same_end():
    for moment in moments():
        objects = lineage()
        hook, acted = at(moment, die)
        with pytest.raises(ProcessDied):
            collect(HookedStore(objects, hook))
        assert acted == [moment]
        assert set(list_commits(MemoryStore(objects), LINEAGE)) >= STAY, moment
        assert torn(objects) == [], moment
        collect(HookedStore(objects))
        assert set(list_commits(MemoryStore(objects), LINEAGE)) == STAY, moment
        assert torn(objects) == [], moment
        assert tidy(objects), moment


def test_the_checker_notices_shards_that_go_before_their_manifest(monkeypatch):
    """Planted bug."""

    def shards_first(self, due, starts_from, protected):
        for one in due:
            self._remove_shards(one)
            self._store.delete(LAYOUT.manifest(one.attempt, one.global_step))
        return due

    monkeypatch.setattr(Retention, "_delete", shards_first)
    with pytest.raises(AssertionError):
        test_a_death_at_any_moment_harms_nothing_that_stays_and_the_next_pass_comes_to_the_same_end()


def test_deletions_at_the_same_time_remove_no_more_than_a_single_one():
    for moment in moments():
        objects = lineage()
        hook, acted = at(moment, lambda objects=objects: collect(HookedStore(objects)))
        collect(HookedStore(objects, hook))
        assert acted == [moment]
        assert set(list_commits(MemoryStore(objects), LINEAGE)) == STAY, moment
        collect(HookedStore(objects))
        assert tidy(objects), moment


def test_a_deletion_that_waits_while_another_dies_does_no_more_than_one():
    """One dies at some moment, the other goes on from each of a few of its own."""
    all_of_them, deaths = moments(), 0
    for first, second in itertools.product(all_of_them[::7], all_of_them[::5]):
        objects = lineage()
        dies, died = at(second, die)
        dying = HookedStore(objects, dies)

        def other(store=dying):
            with contextlib.suppress(ProcessDied):  # a pass that begins late has fewer calls to die at
                collect(store)

        hook, acted = at(first, other)
        collect(HookedStore(objects, hook))
        assert acted == [first]
        deaths += len(died)
        assert set(list_commits(MemoryStore(objects), LINEAGE)) >= STAY, (first, second)
        assert torn(objects) == [], (first, second)
        collect(HookedStore(objects))
        assert set(list_commits(MemoryStore(objects), LINEAGE)) == STAY, (first, second)
        assert tidy(objects), (first, second)
    assert deaths > 100


class Turns:
    """Two threads take turns at their calls to storage, as ``order`` says; then the rest as it comes."""

    def __init__(self, order):
        self._order = list(order)
        self._changed = threading.Condition()
        self._ended = set()

    def take(self, who):
        with self._changed:
            assert self._changed.wait_for(lambda: self._next() in (who, None), timeout=60)
            if self._order:
                self._order.pop(0)
            self._changed.notify_all()

    def end(self, who):
        with self._changed:
            self._ended.add(who)
            self._changed.notify_all()

    def _next(self):
        while self._order and self._order[0] in self._ended:
            self._order.pop(0)
        return self._order[0] if self._order else None


def two_checkpoints():
    """The first of which goes."""
    store = MemoryStore()
    for step in (5, 6):
        commit(store, ref(1, step), data=(b"weights",))
    return store.objects


def collect_all_but_one(store):
    return Retention(store, LINEAGE, RetentionPolicy(last=1, delay_seconds=0)).collect({1: None}, ()).deleted


def pin_against_deletion(order):
    """What came of a pin of a checkpoint that is being deleted, and whether it is whole in the end."""
    objects, turns, outcome = two_checkpoints(), Turns(order), []

    def pinning():
        try:
            pin_checkpoint(
                HookedStore(objects, lambda number: turns.take("pin") if number % 1 == 0 else None), ref(1, 5), "late"
            )
            outcome.append("pinned")
        except (NotFoundError, ConflictError) as error:
            outcome.append(type(error).__name__)
        finally:
            turns.end("pin")

    thread = threading.Thread(target=pinning)
    thread.start()
    try:
        collect_all_but_one(HookedStore(objects, lambda number: turns.take("gc") if number % 1 == 0 else None))
    finally:
        turns.end("gc")
        thread.join(timeout=60)
    store = MemoryStore(objects)
    whole = ref(1, 5) in list_commits(store, LINEAGE) and checkpoint_fault(store, ref(1, 5)) is None
    return outcome[0], whole, ref(1, 5) in list_pins(store, LINEAGE)


def every_order():
    """Where, among the calls of the deletion, each of the three calls of the pin falls."""
    written = []
    store = HookedStore(two_checkpoints(), lambda number: written.append((number, len(store.objects))))
    assert collect_all_but_one(store) == [ref(1, 5)]
    most = max(size for _, size in written)
    announced = int(next(number for number, size in written if size == most))
    for places in itertools.combinations_with_replacement(range(announced - 2, store.calls + 1), 3):
        order, done = [], 0
        for place in places:
            order += ["gc"] * (place - done) + ["pin"]
            done = place
        yield order


def check_every_order():
    outcomes = set()
    for order in every_order():
        outcome, whole, pinned = pin_against_deletion(order)
        assert outcome != "pinned" or (whole and pinned), order
        assert outcome != "NotFoundError" or (not whole and not pinned), order
        outcomes.add(outcome)
    return outcomes


def test_a_pin_that_was_acknowledged_holds_however_it_meets_a_deletion():
    assert check_every_order() == {"pinned", "ConflictError", "NotFoundError"}


class FullStore(HookedStore):
    """Takes ``places`` marks and announcements, and one more for each object that goes; others still find room."""

    def __init__(self, objects, hook=lambda number: None, places=0):
        super().__init__(objects, hook)
        self.places = places

    def create(self, key, data, *, sha256=None):
        if key.startswith(LAYOUT.all_tombstones):
            if self.places < 1:
                raise StoreFullError("no space left")
            self.places -= 1
        super().create(key, data)

    def delete(self, key):
        self.places += key in self.objects
        super().delete(key)


def make_room(store):
    keep = RetentionPolicy(last=1, delay_seconds=600)
    return Retention(store, LINEAGE, keep).make_room({1: None}, (), ref(1, 9))


def marked():
    """Two checkpoints, of which the first is marked."""
    objects = two_checkpoints()
    Tombstones(HookedStore(objects), LINEAGE, utc_now).mark(ref(1, 5))
    return objects


def test_full_store_takes_an_announcement_in_the_place_of_the_mark():
    objects = marked()
    assert make_room(FullStore(objects)) == 1
    assert list_commits(MemoryStore(objects), LINEAGE) == [ref(1, 6)]
    assert tidy(objects)


def test_full_store_that_takes_some_announcements_loses_those_checkpoints_alone():
    objects = marked()
    commit(HookedStore(objects), ref(1, 7), data=(b"weights",))
    assert make_room(FullStore(objects, places=1)) == 1
    assert list_commits(MemoryStore(objects), LINEAGE) == [ref(1, 7), ref(1, 6)]


def test_full_store_without_room_for_an_announcement_loses_nothing():
    objects = two_checkpoints()
    with pytest.raises(StoreFullError):
        make_room(FullStore(objects))
    assert list_commits(MemoryStore(objects), LINEAGE) == [ref(1, 6), ref(1, 5)]
    assert torn(objects) == []


def test_a_pin_that_was_acknowledged_holds_whenever_it_meets_a_full_store():
    outcomes = set()
    for moment in itertools.count(2):
        objects, came = marked(), []

        def pin(objects=objects, came=came):
            try:
                pin_checkpoint(HookedStore(objects), ref(1, 5), "late")
                came.append("pinned")
            except (NotFoundError, ConflictError) as error:
                came.append(type(error).__name__)

        hook, acted = at(moment / 2, pin)
        make_room(FullStore(objects, hook))
        if not acted:
            break
        store = MemoryStore(objects)
        if came == ["pinned"]:
            assert ref(1, 5) in list_pins(store, LINEAGE), moment
            assert ref(1, 5) in list_commits(store, LINEAGE), moment
        assert torn(objects) == [], moment
        outcomes.update(came)
    assert outcomes == {"pinned", "ConflictError", "NotFoundError"}


def test_the_checker_notices_a_deletion_that_is_not_announced(monkeypatch):
    """Planted bug: then a pin can come between the last look and the deletion, and nobody notices."""
    monkeypatch.setattr(Tombstones, "announce_deletion", lambda self, refs: refs)
    with pytest.raises(AssertionError):
        check_every_order()
