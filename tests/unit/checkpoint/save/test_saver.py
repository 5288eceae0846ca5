"""Saves behind the training.

| moment | promise |
|---|---|
| save() returns | the bytes of that moment are what is committed, whatever happens to the state |
| another save is under way | skip: put off to the next step; wait: wait; queue: one may wait |
| storage fails | tried again from the copy, then counted and told; training goes on |
| another attempt took over | the next step raises it |
| no memory for a copy | the training waits for its saves instead |
"""

import dataclasses
import threading
import weakref

import numpy as np
import pytest
from support.builders.lineage import LINEAGE, START_TIMES, claim_of, end_of, ref, write_claim, write_end
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import Clock, open_session, state_at

from tiphys.checkpoint.save import saver as saver_module
from tiphys.checkpoint.save.commit_policy import CheckpointCommitter
from tiphys.checkpoint.save.saver import Saver
from tiphys.checkpoint.settings import CheckpointSettings, SaveInterval
from tiphys.checkpoint.state.serialization import flatten_state
from tiphys.checkpoint.state.shards import plan_shards
from tiphys.errors import FencedError, StoreError
from tiphys.lineage.select import list_commits
from tiphys.lineage.validity import read_manifest
from tiphys.records import CheckpointManifest

PATIENCE_SECONDS = 120


class GatedStore(MemoryStore):
    """Holds every shard back until `open`; ``asked`` is set once one is held."""

    def __init__(self, objects=None):
        super().__init__(objects)
        self.gate = threading.Event()
        self.asked = threading.Event()

    def create(self, key, data, *, sha256=None):
        if "shards/" in key:
            self.asked.set()
            assert self.gate.wait(PATIENCE_SECONDS)
        super().create(key, data, sha256=sha256)


@pytest.fixture
def gated():
    store = GatedStore()
    yield store
    store.gate.set()


def behind(store, **options):
    return open_session(store, asynchronous=True, **options)


def restored(store, attempt=2):
    write_end(store, end_of(attempt - 1))
    return open_session(store, attempt, resume_from=list_commits(store, LINEAGE)[0]).restore(default=state_at(0))


def test_save_returns_while_its_bytes_are_still_on_their_way(gated):
    with behind(gated) as session:
        save = session.save(1, state_at(1))
        assert gated.asked.wait(PATIENCE_SECONDS)
        assert not save.done
        assert save.wait(0) is None
        assert session.last_committed is None
        gated.gate.set()
        assert save.wait(PATIENCE_SECONDS) == ref(1, 1)
        assert session.flush() == ref(1, 1)


def test_arrays_that_change_right_after_save_returned_are_saved_as_they_were(gated):
    state = state_at(3)
    with behind(gated) as session:
        session.save(3, state)
        state["weights"][:] = np.nan
        state["momentum"] += 7
        state["step"] = 99
        gated.gate.set()
    saved = restored(gated)
    assert saved["step"] == 3
    np.testing.assert_array_equal(saved["weights"], state_at(3)["weights"])
    np.testing.assert_array_equal(saved["momentum"], state_at(3)["momentum"])


def test_without_a_copy_the_change_would_be_saved(gated, monkeypatch):
    """The negative twin: the test above must fail where nothing is copied."""
    monkeypatch.setattr(saver_module.StagingBuffers, "stage", lambda self, plans: (plans, []))
    state = state_at(3)
    with behind(gated) as session:
        session.save(3, state)
        state["weights"][:] = 5
        gated.gate.set()
    assert restored(gated)["weights"][0] == 5


def test_the_copies_memory_is_used_again(gated):
    gated.gate.set()
    with behind(gated) as session:
        session.save(1, state_at(1)).wait(PATIENCE_SECONDS)
        session.flush()
        (free,) = session._saver._free
        buffers = [id(buffer) for buffer in free._buffers]
        session.save(2, state_at(2)).wait(PATIENCE_SECONDS)
        session.flush()
        assert [id(buffer) for buffer in free._buffers[1:]] == buffers[1:]  # the first holds the document
    assert restored(gated)["step"] == 2


def test_a_state_that_grows_and_shrinks_is_still_saved_exactly(gated):
    gated.gate.set()
    with behind(gated) as session:
        for step, size in ((1, 10), (2, 10_000), (3, 3)):
            session.save(step, {"step": step, "weights": np.full(size, step)}).wait(PATIENCE_SECONDS)
    saved = restored(gated)
    assert saved["step"] == 3
    assert saved["weights"].tolist() == [3, 3, 3]


def test_a_save_that_is_due_while_another_is_under_way_is_put_off_to_the_next_free_step(gated):
    with behind(gated, when_busy="skip") as session:
        first = session.step(1, state_at(1))
        assert [session.step(step, state_at(step)) for step in (2, 3)] == [None, None]
        assert session.skipped_saves == 2
        gated.gate.set()
        first.wait(PATIENCE_SECONDS)
        session.flush()
        assert session.step(4, state_at(4)).wait(PATIENCE_SECONDS) == ref(1, 4)
    assert list_commits(gated, LINEAGE) == [ref(1, 4), ref(1, 1)]


@pytest.mark.parametrize(("unit", "rule"), [("steps", "wait"), ("seconds", "skip")])
def test_a_save_under_way_is_waited_for_by_steps_and_skipped_by_seconds_unless_set(unit, rule):
    settings = CheckpointSettings("r-1", "fit", 1, LINEAGE, "memory://", "memory://", save_every=SaveInterval(5, unit))
    assert settings.busy_rule == rule
    assert dataclasses.replace(settings, when_busy="queue").busy_rule == "queue"


def test_a_save_may_wait_for_the_save_under_way(gated):
    with behind(gated, when_busy="queue") as session:
        saves = [session.step(step, state_at(step)) for step in (1, 2)]
        assert session._saver.is_busy
        assert session.skipped_saves == 0
        gated.gate.set()
        assert [save.wait(PATIENCE_SECONDS) for save in saves] == [ref(1, 1), ref(1, 2)]
    assert read_manifest(gated, ref(1, 2)).parent == ref(1, 1)


def test_training_that_would_rather_wait_waits(gated):
    with behind(gated, when_busy="wait") as session:
        first = session.step(1, state_at(1))
        threading.Timer(0.05, gated.gate.set).start()
        second = session.step(2, state_at(2))
        assert first.done
        assert second.wait(PATIENCE_SECONDS) == ref(1, 2)
        assert session.skipped_saves == 0


def test_a_save_that_fails_is_tried_again_from_its_copy(monkeypatch, capsys):
    store, refusals = MemoryStore(), []
    monkeypatch.setattr(saver_module, "PAUSES_SECONDS", (0.0, 0.0))

    def refuse_twice(operation, key):
        if "manifests/" in key and operation == "create" and len(refusals) < 2:
            refusals.append(key)
            return True
        return False

    store.refuses = refuse_twice
    state = state_at(1)
    with behind(store) as session:
        save = session.save(1, state)
        state["weights"][:] = 0
        assert save.wait(PATIENCE_SECONDS) == ref(1, 1)
        assert session.failed_saves == 0
    assert len(refusals) == 2
    np.testing.assert_array_equal(restored(store)["weights"], state_at(1)["weights"])
    first, second, last = [line for line in capsys.readouterr().err.splitlines() if "step 1 is" in line]
    assert first.startswith("tiphys: step 1 is not saved yet: ")
    assert first.endswith("; the next try follows in 0 s")
    assert second == first
    assert last == "tiphys: step 1 is saved, after saves had failed"


def test_a_save_that_fails_for_good_is_counted_and_the_next_one_is_saved(monkeypatch):
    store = MemoryStore()
    monkeypatch.setattr(saver_module, "PAUSES_SECONDS", (0.0,))
    store.refuses = lambda operation, key: "shards/" in key
    with behind(store) as session:
        assert session.save(1, state_at(1)).wait(PATIENCE_SECONDS) is None
        assert session.failed_saves == 1
        store.refuses = lambda operation, key: False
        assert session.save(2, state_at(2)).wait(PATIENCE_SECONDS) == ref(1, 2)


def test_a_fenced_attempt_learns_it_at_its_next_step(gated):
    with pytest.raises(SystemExit) as exit_, behind(gated) as session:
        save = session.step(1, state_at(1))
        write_end(gated, end_of(1))
        write_claim(gated, claim_of(2, None))
        gated.gate.set()
        assert save.wait(PATIENCE_SECONDS) is None
        session.flush()
    assert exit_.value.code == 76
    assert list_commits(gated, LINEAGE) == []


def test_a_fenced_attempt_whose_training_is_over_ends_with_76_too(gated):
    with pytest.raises(SystemExit) as exit_, behind(gated) as session:
        session.step(1, state_at(1))
        write_end(gated, end_of(1))
        gated.gate.set()
    assert exit_.value.code == 76


def test_an_error_of_the_worker_reaches_the_training(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("a bug")

    session = behind(MemoryStore())
    monkeypatch.setattr(session._committer, "commit", broken)
    session.save(1, state_at(1)).wait(PATIENCE_SECONDS)
    with pytest.raises(ZeroDivisionError):
        session.step(2, state_at(2))


def test_without_memory_for_a_copy_the_training_waits_for_its_saves(monkeypatch, capsys):
    def none_left(self, plans):
        raise MemoryError

    store = MemoryStore()
    monkeypatch.setattr(saver_module.StagingBuffers, "stage", none_left)
    with behind(store) as session:
        assert session.save(1, state_at(1)).done
        assert session.save(2, state_at(2)).done
    assert list_commits(store, LINEAGE) == [ref(1, 2), ref(1, 1)]
    assert capsys.readouterr().err.count("no memory for a copy") == 1


def test_leaving_the_session_waits_for_what_is_under_way(gated):
    with behind(gated) as session:
        session.save(1, state_at(1))
        threading.Timer(0.05, gated.gate.set).start()
    assert list_commits(gated, LINEAGE) == [ref(1, 1)]


def test_a_program_that_ends_itself_does_not_lose_the_save_under_way(gated):
    with pytest.raises(SystemExit), behind(gated) as session:
        session.save(1, state_at(1))
        threading.Timer(0.05, gated.gate.set).start()
        raise SystemExit(0)
    assert list_commits(gated, LINEAGE) == [ref(1, 1)]


def test_a_training_that_waits_for_its_turn_hears_that_it_is_to_stop(gated):
    """The save under way never ends, and the grace period does."""
    clock = Clock()
    session = behind(gated, when_busy="wait", grace_seconds=30, clock=clock)
    with pytest.raises(SystemExit) as exit_, session:
        session.step(1, state_at(1))
        assert gated.asked.wait(PATIENCE_SECONDS)

        def tell():
            session._stop.request()
            clock.advance(29.5)

        threading.Timer(0.05, tell).start()
        session.step(2, state_at(2))
    assert exit_.value.code == 75
    assert list_commits(gated, LINEAGE) == []


def test_an_error_in_the_training_does_not_lose_the_save_under_way(gated):
    with pytest.raises(ZeroDivisionError), behind(gated) as session:
        session.save(1, state_at(1))
        threading.Timer(0.05, gated.gate.set).start()
        raise ZeroDivisionError
    assert list_commits(gated, LINEAGE) == [ref(1, 1)]


def test_a_session_that_is_over_holds_neither_memory_nor_a_thread():
    store = MemoryStore()
    with behind(store) as session:
        session.save(1, {"weights": np.zeros(1 << 20)})
        session.flush()
        (staging_,) = session._saver._free
        worker = session._saver._worker
        gone = weakref.ref(staging_)
        del staging_
    worker.join(PATIENCE_SECONDS)
    assert not worker.is_alive()
    assert gone() is None


def test_the_same_step_is_saved_once_even_while_it_is_under_way(gated):
    with behind(gated) as session:
        assert session.save(1, state_at(1)) is session.save(1, state_at(1))
        gated.gate.set()


def test_a_state_may_be_a_function_that_is_called_at_the_first_step_and_when_a_save_is_due():
    store, made = MemoryStore(), []

    def make():
        made.append(1)
        return state_at(10)

    with behind(store, every=SaveInterval(10, "steps")) as session:
        for step in range(1, 11):
            session.step(step, make)
    assert made == [1, 1]
    assert restored(store)["step"] == 10


class RecordingCommitter(CheckpointCommitter):
    """Commits nothing: raises ``errors`` one after another, then succeeds; records each call of the saver."""

    def __init__(self, errors=()):
        self.calls = []
        self._errors = list(errors)

    def commit(self, draft, shards, uploader):
        self.calls.append(("commit", draft.global_step))
        if self._errors:
            raise self._errors.pop(0)
        return draft

    def publish(self, manifest):
        raise AssertionError("the saver commits shards and manifest together")

    def on_committed(self, manifest):
        self.calls.append(("on_committed", manifest.global_step))

    def on_failed(self, global_step, error):
        self.calls.append(("on_failed", global_step, str(error)))


def draft_of(step):
    return CheckpointManifest(
        lineage=LINEAGE, run="r-1", step="fit", attempt=1, global_step=step, shards=(), began=START_TIMES
    )


def run_one_save(sink, asynchronous=True):
    saver = Saver(sink, asynchronous=asynchronous)
    save = saver.start(draft_of(7), plan_shards(flatten_state(state_at(7))))
    checkpoint = save.wait(PATIENCE_SECONDS)
    assert saver.wait(PATIENCE_SECONDS)
    return saver, checkpoint


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_sink_commits_a_save_and_then_acknowledges_it(asynchronous):
    sink = RecordingCommitter()
    _, checkpoint = run_one_save(sink, asynchronous)
    assert checkpoint == ref(1, 7)
    assert sink.calls == [("commit", 7), ("on_committed", 7)]


def test_the_sink_hears_of_a_failure_once_and_only_after_the_last_try(monkeypatch):
    monkeypatch.setattr(saver_module, "PAUSES_SECONDS", (0.0,))
    sink = RecordingCommitter([StoreError("first"), StoreError("second")])
    _, checkpoint = run_one_save(sink)
    assert checkpoint is None
    assert sink.calls == [("commit", 7), ("commit", 7), ("on_failed", 7, "second")]


def test_a_fenced_save_is_neither_retried_nor_reported_as_failed():
    sink = RecordingCommitter([FencedError("attempt 2 exists")])
    saver, checkpoint = run_one_save(sink)
    assert checkpoint is None
    assert sink.calls == [("commit", 7)]
    with pytest.raises(FencedError, match="attempt 2 exists"):
        saver.raise_error()


def test_a_committed_save_counts_even_if_its_acknowledgement_is_fenced():
    class FencedAfterwards(RecordingCommitter):
        def on_committed(self, manifest):
            raise FencedError("attempt 2 exists")

    saver, checkpoint = run_one_save(FencedAfterwards())
    assert checkpoint == ref(1, 7)
    with pytest.raises(FencedError):
        saver.raise_error()
