"""Arrays that only updates change are copied beside the next step.

| the program | outcome |
|---|---|
| encloses its updates | save() returns before the copy, the next update waits for it |
| saves for the first time | all is copied at once, and the next update looks whether anything has changed |
| changes an array elsewhere | all is copied at once from then on; a save under way is dropped, the next step saved |
| holds arrays that nothing changes | they are copied late from the first save on, and nothing waits for that |
| saves within an update, or holds small arrays or memory of others | copied at once |
| saves while another save is under way | the update copies |
| finds no memory for the copy | the save fails, as no part of it may be missing |
"""

import threading
import time

import numpy as np
import pytest
from support.builders.lineage import LINEAGE, end_of, ref, write_end
from support.fakes.memory_store import MemoryStore
from support.processes.polling import until
from support.stories.sessions import open_session

from tiphys.checkpoint.save.overlap import MIN_BYTES, LatePiece
from tiphys.checkpoint.settings import SaveInterval
from tiphys.checkpoint.state.arrays import FrozenMemory, find_owner, freeze
from tiphys.errors import UsageError
from tiphys.lineage.select import list_commits
from tiphys.lineage.validity import read_manifest

PATIENCE_SECONDS = 120
SIZE = MIN_BYTES // 8 * 3


class Held:
    """Holds back whoever copies late, until `release`; ``paths`` were copied late."""

    def __init__(self, monkeypatch):
        self._released = threading.Event()
        self.paths = []
        copy = LatePiece.is_copied_exactly

        def copy_late(piece):
            assert self._released.wait(PATIENCE_SECONDS)
            self.paths.append(piece.path)
            return copy(piece)

        monkeypatch.setattr(LatePiece, "is_copied_exactly", copy_late)

    def release(self):
        self._released.set()

    def release_soon(self):
        """While the training waits, unless it is slower than that."""
        threading.Timer(0.1, self.release).start()

    def release_once_awaited(self, session):
        """While the training waits, however slow it is."""
        late = session._saver.overlap._late

        def release():
            until(lambda: late._awaited_at, PATIENCE_SECONDS)
            self.release()

        threading.Thread(target=release).start()


@pytest.fixture
def held(monkeypatch):
    found = Held(monkeypatch)
    yield found
    found.release()


def state_of(step):
    return {"step": step, "weights": np.full(SIZE, float(step)), "moments": np.full((3, SIZE), step), "few": np.ones(3)}


def update(session, state):
    with session.updating():
        state["weights"] += 1
        state["moments"] += 1
        state["few"][:] = state["step"]
    state["step"] += 1


def begin(session, store, steps=2):
    """Train some steps, after which the session trusts the program; return its state."""
    state = state_of(0)
    for _ in range(steps):
        update(session, state)
        session.save(state["step"], state)
    return state


def restored(store, step=None):
    """The state of the newest commit, or of ``step``."""
    (start,) = [found for found in list_commits(store, LINEAGE) if step in (None, found.global_step)][:1]
    write_end(store, end_of(1))
    return open_session(store, 2, resume_from=start).restore(default=state_of(0))


def check(saved, step):
    assert saved["step"] == step
    np.testing.assert_array_equal(saved["weights"], np.full(SIZE, float(step)))
    np.testing.assert_array_equal(saved["moments"], np.full((3, SIZE), step))


def test_a_save_returns_before_its_arrays_are_copied_and_the_next_update_waits(held):
    store = MemoryStore()
    with open_session(store, asynchronous=True, when_busy="queue") as session:
        state = begin(session, store)
        assert held.paths == []
        held.release_soon()
        update(session, state)
        assert sorted(set(held.paths)) == ["state.moments", "state.weights"]
    check(restored(store), 2)


def test_the_first_save_is_copied_at_once(held):
    store = MemoryStore()
    with open_session(store, asynchronous=True) as session:
        state = begin(session, store, steps=1)
        state["weights"][:] = np.nan
        assert session.flush() == ref(1, 1)
    check(restored(store), 1)
    assert held.paths == []


def test_without_updates_each_save_is_copied_at_once(held):
    store, state = MemoryStore(), state_of(0)
    with open_session(store, asynchronous=True) as session:
        for step in range(1, 4):
            state["weights"] += 1
            state["moments"] += 1
            state["step"] += 1
            session.save(step, state)
        state["weights"][:] = 0
    check(restored(store), 3)
    assert held.paths == []


def test_arrays_that_change_between_the_first_save_and_the_next_update_are_copied_at_once_for_good(held, capsys):
    store = MemoryStore()
    with open_session(store, asynchronous=True) as session:
        state = begin(session, store, steps=1)
        state["moments"][1, -1] += 1  # a single element
        for _ in range(3):
            update(session, state)
            session.save(state["step"], state)
        assert session.failed_saves == 0
    assert held.paths == []
    error = capsys.readouterr().err
    assert error.count("state.moments changed after the call that saved it and before the next update") == 1
    assert [found.global_step for found in list_commits(store, LINEAGE)] == [4, 3, 2, 1]


def test_arrays_that_change_while_they_are_copied_are_never_committed_and_the_next_step_is_saved(held, capsys):
    store = MemoryStore()
    with open_session(store, asynchronous=True) as session:
        state = begin(session, store)
        state["weights"] *= 0.5
        held.release()
        update(session, state)
        state["weights"][:] = state["step"]
        assert session.step(3, state).wait() == ref(1, 3)
        assert session.failed_saves == 1
    assert [found.global_step for found in list_commits(store, LINEAGE)] == [3, 1]
    check(restored(store), 3)
    error = capsys.readouterr().err
    assert "step 2 could not be saved: state.weights changed while it was copied" in error
    assert error.count("each save stops the training") == 1


def test_a_dropped_save_is_followed_by_one_that_is_not_due(held):
    store = MemoryStore()
    with open_session(store, asynchronous=True, every=SaveInterval(600, "seconds")) as session:
        state = begin(session, store)
        state["weights"] *= 0.5
        held.release()
        update(session, state)
        session.flush()  # a save that is under way would put the next one off
        assert session.step(3, state).wait() == ref(1, 3)
        update(session, state)
        assert session.step(4, state) is None


def test_a_save_within_an_update_is_copied_at_once(held):
    store = MemoryStore()
    with open_session(store, asynchronous=True) as session:
        state = begin(session, store)
        held.release_soon()
        with session.updating():
            state["weights"] += 1
            state["moments"] += 1
            state["step"] += 1
            held.paths.clear()
            session.save(3, state)
            state["weights"] += 1
        assert session.flush() == ref(1, 3)
    check(restored(store), 3)
    assert held.paths == []


def test_memory_that_is_not_an_arrays_own_is_copied_at_once(held):
    store, content = MemoryStore(), bytes(4 * MIN_BYTES)
    with open_session(store, asynchronous=True) as session:
        for step in range(1, 4):
            with session.updating():
                pass
            session.save(step, {"step": step, "content": np.frombuffer(content, dtype=np.uint8)})
    assert held.paths == []


def frozen_state(step):
    return {name: freeze(part) if isinstance(part, np.ndarray) else part for name, part in state_of(step).items()}


def test_arrays_that_nothing_changes_are_copied_late_and_neither_updates_nor_steps_wait(held):
    store = MemoryStore()
    with open_session(store, asynchronous=True, every=SaveInterval(600, "seconds")) as session:
        session.save(1, frozen_state(1))
        with session.updating():
            session.step(2, frozen_state(2))
        assert held.paths == []
        held.release()
        assert session.flush() == ref(1, 1)
    assert sorted(set(held.paths)) == ["state.moments", "state.weights"]
    check(restored(store), 1)


def test_a_step_with_arrays_that_nothing_changes_may_be_given_again_while_it_is_copied(held):
    store = MemoryStore()
    with open_session(store, asynchronous=True) as session:
        session.step(1, frozen_state(1))
        held.release_soon()
        session.save(1, frozen_state(1))
        with pytest.raises(UsageError, match="given for several states"):
            session.save(1, frozen_state(2) | {"step": 1})
    check(restored(store), 1)


def test_frozen_arrays_keep_their_form_and_memory():
    for array in (np.zeros((3, 4)).T, np.zeros((), np.int32), np.zeros((0, 2)), np.arange(8)[::2]):
        frozen = freeze(array)
        assert (frozen.dtype, frozen.shape) == (array.dtype, array.shape)
        assert isinstance(find_owner(frozen[...]), FrozenMemory)
        assert not array.size or (np.shares_memory(frozen, array) and frozen.strides == array.strides)


def test_arrays_that_share_memory_come_back_as_they_were(held):
    store = MemoryStore()
    with open_session(store, asynchronous=True) as session:
        matrix = np.zeros((64, SIZE // 32))
        state = {"matrix": matrix, "view": matrix.T, "row": matrix[3]}
        for step in range(1, 4):
            with session.updating():
                matrix += 1
            session.save(step, state)
            held.release_soon()
        with session.updating():
            matrix += 1
    assert held.paths
    saved = open_session(store, 2, resume_from=ref(1, 3)).restore(default=state)
    np.testing.assert_array_equal(saved["view"], np.full((SIZE // 32, 64), 3.0))
    saved["row"][:] = 7
    assert saved["matrix"][3, 0] == 7


def test_saves_without_an_update_between_them_are_both_exact(held):
    store = MemoryStore()
    with open_session(store, asynchronous=True, when_busy="queue") as session:
        state = begin(session, store)
        state["step"] = 3
        held.release_soon()
        session.save(3, state)
        update(session, state)
    assert [found.global_step for found in list_commits(store, LINEAGE)] == [3, 2, 1]
    assert restored(store, step=2)["step"] == 2


def test_a_step_that_is_given_again_is_compared_with_its_whole_copy(held):
    store = MemoryStore()
    with open_session(store, asynchronous=True) as session:
        state = begin(session, store)
        held.release()
        assert session.save(2, state).wait() == ref(1, 2)
    assert session.failed_saves == 0


def test_while_another_save_is_under_way_the_update_copies(monkeypatch):
    store, gate = MemoryStore(), threading.Event()
    create = store.create

    def create_later(key, data, **options):
        assert "shards/" not in key or gate.wait(PATIENCE_SECONDS)
        create(key, data, **options)

    store.create = create_later
    with open_session(store, asynchronous=True, when_busy="queue") as session:
        state = begin(session, store)
        update(session, state)
        gate.set()
    check(restored(store), 2)


def test_a_copy_that_finds_no_memory_fails_its_save(held, monkeypatch):
    store = MemoryStore()
    with open_session(store, asynchronous=True) as session:
        state = begin(session, store, steps=1)
        update(session, state)

        def fail(piece):
            raise MemoryError

        monkeypatch.setattr(LatePiece, "is_copied_exactly", fail)
        save = session.save(2, state)
        assert save.wait() is None
        assert session.failed_saves == 1
        assert session.flush() == ref(1, 1)


def test_the_wait_of_an_update_counts_as_the_stall_of_its_save(held):
    store = MemoryStore()
    waits = []
    with open_session(store, asynchronous=True) as session:
        session._saver.overlap._on_wait = waits.append
        state = begin(session, store)
        held.release_once_awaited(session)
        before = time.perf_counter()
        update(session, state)
        waited = time.perf_counter() - before
    (wait,) = waits
    assert 0 < wait <= waited
    assert read_manifest(store, ref(1, 2)).stage_seconds >= wait
