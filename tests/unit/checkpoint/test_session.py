"""What a training program sees of its checkpoints.

| moment | promise |
|---|---|
| outside of Tiphys, in a step without checkpoints | nothing is restored or saved, which one line says |
| restore | the newest valid one; what does not match is quarantined, told, and passed over |
| step | saves when due; after SIGTERM saves and exits 75 |
| storage fails at a save | told and counted, training goes on |
| storage fails at restore | exit 69, to be tried again |
| a newer attempt, or an end of this one | nothing is committed, exit 76 |
"""

import dataclasses
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
from support.builders.lineage import LINEAGE, RUN, claim_of, end_of, ref, resealed, write_claim, write_end
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import Clock, admitted, newest_shards, open_session, state_at, train

from tiphys import checkpoint
from tiphys.checkpoint.settings import SaveInterval
from tiphys.checkpoint.telemetry.events import log_once
from tiphys.errors import FencedError, IntegrityError, NotFoundError, StoreError, UsageError
from tiphys.lineage.quarantine import list_quarantined
from tiphys.lineage.select import list_commits
from tiphys.lineage.validity import read_manifest
from tiphys.store import DirectoryStore, LineageLayout, read_events

LAYOUT = LineageLayout(LINEAGE)


def events(store):
    return [(event.name, event.message) for event in read_events(store, RUN)]


def flip(store, key):
    data = bytearray(store.objects[key])
    data[len(data) // 2] ^= 1
    store.objects[key] = bytes(data)


def test_outside_of_tiphys_a_session_does_nothing():
    before = signal.getsignal(signal.SIGTERM)
    with checkpoint.session(environ={}) as session:
        default = {"step": 0}
        assert session.restore(default=default) is default
        assert session.restore() is None
        assert session.step(1, default) is None
        assert session.save(1, default) is None
        assert (session.should_stop, session.last_committed, session.failed_saves) == (False, None, 0)
        assert signal.getsignal(signal.SIGTERM) is before


INSIDE = {"TIPHYS_RUN": "zahlen-1", "TIPHYS_STEP": "füllen"}


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({}, "outside of a Tiphys step nothing is restored or saved"),
        (INSIDE, "step 'füllen' keeps no checkpoints, so nothing is restored or saved and each attempt starts from"),
        (INSIDE | {"TIPHYS_SAVE_EVERY": "600s"}, "tiphys-exec keeps the files of step 'füllen', so a session in its"),
    ],
    ids=["outside", "none", "below tiphys-exec"],
)
def test_session_that_keeps_nothing_says_so_once_and_in_the_first_rank(environ, sentence, capsys):
    log_once.cache_clear()
    checkpoint.session(environ=environ | {"RANK": "1"})
    assert capsys.readouterr().err == ""
    for _ in range(2):
        checkpoint.session(environ=environ | {"RANK": "0"})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tiphys: {sentence}")


def test_inside_tiphys_the_environment_is_enough(tmp_path):
    environ = {
        "TIPHYS_STORE": str(tmp_path / "runs"),
        "TIPHYS_CHECKPOINT_STORE": str(tmp_path / "volume"),
        "TIPHYS_RUN": RUN,
        "TIPHYS_STEP": "fit",
        "TIPHYS_ATTEMPT": "1",
        "TIPHYS_LINEAGE": LINEAGE,
        "TIPHYS_SAVE_EVERY": "1 steps",
    }
    (tmp_path / "volume").mkdir()
    admitted(DirectoryStore(tmp_path / "runs"), 1)
    with checkpoint.session(environ=environ) as session:
        session.restore(default=state_at(0))
        assert session.step(1, state_at(1)).wait() == ref(1, 1)
    with checkpoint.session(environ=environ) as session:
        assert session.restore()["step"] == 1
    assert (tmp_path / "volume" / "data" / "lineages").is_dir()
    assert (tmp_path / "runs" / "control" / "runs").is_dir()
    assert not (tmp_path / "runs" / "data" / "lineages").exists()


@pytest.mark.parametrize(("mounted", "missing"), [("runs", "volume"), ("volume", "runs")])
def test_a_volume_that_is_not_mounted_is_an_error_before_the_first_step(tmp_path, mounted, missing):
    (tmp_path / mounted).mkdir()
    environ = {
        "TIPHYS_STORE": str(tmp_path / "runs"),
        "TIPHYS_CHECKPOINT_STORE": f"file://{tmp_path}/volume",
        "TIPHYS_RUN": RUN,
        "TIPHYS_STEP": "fit",
        "TIPHYS_ATTEMPT": "1",
        "TIPHYS_LINEAGE": LINEAGE,
    }
    with pytest.raises(NotFoundError, match="volume is mounted"):
        checkpoint.session(environ=environ)
    assert not (tmp_path / missing).exists()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'numpy'", name="numpy"), "need numpy, which this image lacks"),
        (ImportError("libstdc++.so.6: cannot open shared object file"), "NumPy, which says libstdc\\+\\+.so.6: cannot"),
    ],
)
def test_an_image_that_cannot_save_arrays_names_the_missing_package(monkeypatch, error, said):
    class Refusing:
        def find_spec(self, name, path=None, target=None):
            if name == "tiphys.checkpoint.tracked_session":
                raise error

    monkeypatch.delitem(sys.modules, "tiphys.checkpoint.tracked_session")
    monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
    environ = {"TIPHYS_STORE": "s3://ml-runs/tiphys", "TIPHYS_RUN": RUN, "TIPHYS_STEP": "fit", "TIPHYS_ATTEMPT": "1"}
    with pytest.raises(UsageError, match=said):
        checkpoint.session(environ={**environ, "TIPHYS_LINEAGE": LINEAGE})


def test_storage_out_of_reach_at_the_start_asks_to_be_tried_again(tmp_path, monkeypatch, capsys):
    def dead(url, must_exist):
        raise StoreError(f"{url} did not answer")

    monkeypatch.setattr(sys.modules["tiphys.checkpoint.settings"], "open_store", dead)
    environ = {
        "TIPHYS_STORE": "s3://ml-runs/tiphys",
        "TIPHYS_RUN": RUN,
        "TIPHYS_STEP": "fit",
        "TIPHYS_ATTEMPT": "1",
        "TIPHYS_LINEAGE": LINEAGE,
    }
    with pytest.raises(SystemExit) as exit_:
        checkpoint.session(environ=environ)
    assert exit_.value.code == 69
    assert "s3://ml-runs/tiphys did not answer" in capsys.readouterr().err


def test_a_store_that_does_not_hold_the_attempt_is_not_trusted_to_fence_it(store):
    session = open_session(store, admit=False)
    with pytest.raises(NotFoundError, match="does not hold attempt 1 of digits-1/fit"):
        session.restore(default=state_at(0))
    with pytest.raises(NotFoundError, match="check TIPHYS_STORE"):
        session.save(1, state_at(1))
    assert list_commits(store, LINEAGE) == []


def test_without_any_checkpoint_the_default_comes_back_as_it_is(store):
    default = state_at(0)
    assert open_session(store).restore(default=default) is default


def test_a_restored_state_is_the_saved_one_and_may_be_changed(store):
    train(store, 3)
    state = open_session(store, 2, resume_from=ref(1, 3)).restore(default=state_at(0))
    assert state["rng"] == state_at(3)["rng"]
    np.testing.assert_array_equal(state["weights"], state_at(3)["weights"])
    state["weights"] += 1


def test_a_restore_is_reported(store):
    train(store, 3)
    open_session(store, 2, resume_from=ref(1, 3)).restore()
    assert events(store) == [("checkpoint.restored", "attempt 2 resumes from step 3 (checkpoint 3 of attempt 1)")]


def test_a_corrupt_checkpoint_is_quarantined_reported_and_passed_over(store, capsys):
    train(store, 3)
    key = newest_shards(store, 1, 3)[1]
    flip(store, key)
    session = open_session(store, 2, resume_from=ref(1, 3))
    assert session.restore(default=state_at(0))["step"] == 2
    assert list_quarantined(store, LINEAGE) == {ref(1, 3)}
    (name, message), (_, second) = events(store)
    assert name == "checkpoint.skipped"
    assert message.startswith(f"checkpoint 3 of attempt 1 is corrupt: shard {key} has sha256 ")
    assert message.endswith("; using checkpoint 2 of attempt 1")
    assert second == "attempt 2 resumes from step 2 (checkpoint 2 of attempt 1)"
    assert message in capsys.readouterr().err


def test_program_that_never_restores_is_told_once(store, capsys):
    log_once.cache_clear()
    for _ in range(2):
        with open_session(store) as session:
            session.step(1, state_at(1))
    assert capsys.readouterr().err.count("the program has not called restore(), so the next attempt") == 1
    train(MemoryStore(), 1)
    assert "restore()" not in capsys.readouterr().err


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("shift", [0, 1], ids=["equal", "other"])
def test_a_step_that_its_attempt_has_in_quarantine_stays_there_and_the_next_step_is_saved(
    store, shift, asynchronous, capsys
):
    """As after a restart in the pod: the number of the attempt is the same."""
    every = SaveInterval(3, "steps")
    train(store, 6, every=every)
    flip(store, newest_shards(store, 1, 6)[1])
    with open_session(store, admit=False, every=every, asynchronous=asynchronous) as session:
        assert session.restore(default=state_at(0))["step"] == 3
        for step in range(4, 12):
            session.step(step, state_at(step) | {"weights": state_at(step)["weights"] + shift})
            session.flush()
    assert [commit.global_step for commit in list_commits(store, LINEAGE)] == [9, 7, 6, 3]
    assert list_quarantined(store, LINEAGE) == {ref(1, 6)}
    assert session.failed_saves == 1
    error = capsys.readouterr().err
    assert "step 6 could not be saved" in error
    assert "the next step can be saved" in error
    assert "next try follows" not in error


def test_the_next_attempt_does_not_read_a_quarantined_checkpoint_again(store):
    train(store, 3)
    flip(store, newest_shards(store, 1, 3)[1])
    open_session(store, 2, resume_from=ref(1, 3)).restore()
    store.refuses = lambda operation, key: operation == "read" and "000003/" in key
    assert open_session(store, 2, resume_from=ref(1, 3)).restore()["step"] == 2


def test_training_begins_anew_where_no_checkpoint_is_valid_and_says_so(store):
    train(store, 2)
    for step in (1, 2):
        del store.objects[newest_shards(store, 1, step)[0]]
    default = state_at(0)
    assert open_session(store, 2, resume_from=ref(1, 2)).restore(default=default) is default
    assert [message.rpartition("; ")[2] for _, message in events(store)] == ["starting from the beginning"] * 2


def test_bytes_that_were_wrong_only_on_the_way_do_not_condemn_a_checkpoint(store):
    class Flaky(MemoryStore):
        damaged = False

        def chunks(self, key, size_bytes=8 << 20):
            for chunk in super().chunks(key, size_bytes):
                yield chunk if self.damaged else bytes(len(chunk))
                self.damaged = True

    train(store, 2)
    flaky = Flaky(store.objects)
    assert open_session(flaky, 2, resume_from=ref(1, 2)).restore()["step"] == 2
    assert flaky.damaged
    assert list_quarantined(flaky, LINEAGE) == set()


def test_storage_that_does_not_answer_condemns_nothing_and_asks_to_be_tried_again(store):
    train(store, 2)
    store.refuses = lambda operation, key: "shards/" in key
    with pytest.raises(SystemExit) as exit_, open_session(store, 2, resume_from=ref(1, 2)) as session:
        session.restore()
    assert exit_.value.code == 69
    store.refuses = lambda operation, key: False
    assert list_quarantined(store, LINEAGE) == set()


def test_a_checkpoint_of_another_framework_is_refused_not_condemned(store):
    train(store, 1)
    key = LAYOUT.manifest(1, 1)
    store.objects[key] = resealed(store.objects[key], framework="abacus")
    with pytest.raises(UsageError, match="abacus"):
        open_session(store, 2, resume_from=ref(1, 1)).restore()
    assert list_quarantined(store, LINEAGE) == set()


def test_a_default_that_cannot_be_saved_is_refused_at_the_start(store):
    with pytest.raises(UsageError, match=r"state\.optimizer\.fn: function cannot be saved"):
        open_session(store).restore(default={"optimizer": {"fn": lambda: None}})


def test_saves_are_due_by_steps(store):
    with open_session(store, every=SaveInterval(10, "steps")) as session:
        saved = [step for step in range(1, 31) if session.step(step, state_at(step))]
    assert saved == [10, 20, 30]


def test_saves_are_due_by_time(store):
    clock = Clock()
    saved = []
    with open_session(store, every=SaveInterval(60, "seconds"), clock=clock) as session:
        for step in range(1, 8):
            clock.advance(25)
            if session.step(step, state_at(step)):
                saved.append(step)
    assert saved == [3, 6]


def test_a_save_that_was_asked_for_resets_what_is_due(store):
    with open_session(store, every=SaveInterval(10, "steps")) as session:
        assert session.save(9, state_at(9)).wait() == ref(1, 9)
        assert session.step(10, state_at(10)).wait() == ref(1, 10)
    assert [read_manifest(store, r).reason for r in list_commits(store, LINEAGE)] == ["due", "asked"]


def test_a_manifest_tells_where_its_checkpoint_came_from(store):
    train(store, 2)
    with open_session(store, 2, resume_from=ref(1, 2)) as session:
        session.restore()
        session.step(3, state_at(3), metrics={"loss": np.float32(0.5), "bad": float("nan")})
        session.step(4, state_at(4))
    third, fourth = (read_manifest(store, ref(2, step)) for step in (3, 4))
    assert (third.parent, fourth.parent) == (ref(1, 2), ref(2, 3))
    assert third.metrics["loss"] == 0.5
    assert np.isnan(third.metrics["bad"])
    assert (third.run, third.step, third.framework) == (RUN, "fit", "numpy")


def test_saving_the_same_step_again_changes_nothing(store):
    with open_session(store) as session:
        first = session.save(5, state_at(5)).wait()
        before = dict(store.objects)
        assert session.step(5, state_at(5)) is None
        assert session.save(5, state_at(5)).wait() == first
    assert store.objects == before


NUMBER_WITH_SEVERAL_STATES = "global_step 5 was given for several states"


def test_a_different_state_of_a_saved_step_is_refused(store):
    with open_session(store) as session:
        first = session.save(5, state_at(5)).wait()
        for again in (session.save, session.step):
            with pytest.raises(UsageError, match=f"{NUMBER_WITH_SEVERAL_STATES}, of which the first is saved"):
                again(5, state_at(6))
    assert list_commits(store, LINEAGE) == [first]


def test_a_different_state_is_refused_also_while_the_first_one_is_being_saved(store):
    gate = threading.Event()

    class Gated(MemoryStore):
        def create(self, key, data, *, sha256=None):
            assert "shards/" not in key or gate.wait(120)
            super().create(key, data, sha256=sha256)

    with open_session(Gated(store.objects), asynchronous=True) as session:
        save = session.save(5, state_at(5))
        assert session.save(5, state_at(5)) is save
        with pytest.raises(UsageError, match=NUMBER_WITH_SEVERAL_STATES):
            session.save(5, lambda: state_at(6))
        gate.set()
        assert save.wait() == ref(1, 5)


def test_a_number_that_counts_something_else_is_refused_before_the_first_save_is_due(store):
    with open_session(store, every=SaveInterval(600, "seconds")) as session:
        session.step(5, state_at(1))
        session.step(5, state_at(2))
        with pytest.raises(UsageError, match=f"{NUMBER_WITH_SEVERAL_STATES}, and only one can be saved"):
            session.step(5, state_at(3))


def test_a_step_whose_save_failed_may_be_saved_with_another_state(store):
    store.refuses = lambda operation, key: "shards/" in key
    with open_session(store) as session:
        assert session.save(5, state_at(5)).wait() is None
        store.refuses = lambda operation, key: False
        assert session.save(5, state_at(6)).wait() == ref(1, 5)
    assert open_session(store, 2, resume_from=ref(1, 5)).restore()["step"] == 6


def test_a_signal_does_not_end_a_program_as_if_the_state_of_a_repeated_step_were_saved(store):
    with open_session(store, grace_seconds=30) as session:
        session.step(5, state_at(5))
        session._stop.request()
        with pytest.raises(UsageError, match="the others would be lost"):
            session.step(5, state_at(6))


@pytest.mark.parametrize(
    "number", [-1, 10**15, 2**200, True, 1.0, float("nan"), "1", None, np.float64(1), np.bool(True)]
)
def test_a_number_that_no_checkpoint_can_have_is_refused_at_the_call(store, number):
    with open_session(store) as session:
        for call in (session.step, session.save, lambda number, _: session.report(number)):
            with pytest.raises(UsageError, match="is not a whole number from 0 to 999999999999999"):
                call(number, state_at(1))
    assert list_commits(store, LINEAGE) == []


@pytest.mark.parametrize("number", [0, 7, np.int64(7), np.uint8(7), 10**15 - 1])
def test_whole_numbers_of_python_and_numpy_are_steps(store, number):
    with open_session(store) as session:
        assert session.save(number, state_at(1)).wait().global_step == number
    assert open_session(store, 2, resume_from=ref(1, int(number))).restore()["step"] == 1


def test_the_first_state_is_refused_at_the_first_step_although_no_save_is_due(store):
    for state in ({"f": print}, lambda: {"f": print}):
        with open_session(store, every=SaveInterval(600, "seconds")) as session:
            session.restore(default={"f": None})
            with pytest.raises(UsageError, match=r"state\.f: builtin_function_or_method cannot be saved"):
                session.step(1, state)


class CallableModel:
    """As a module of PyTorch, which is no function that returns a state although it can be called."""

    def __call__(self, batch):
        return batch

    def load_state_dict(self, state):
        raise AssertionError


def test_model_as_the_state_is_refused_with_how_to_pass_it(store):
    for state in (CallableModel(), {"model": CallableModel()}):
        with open_session(store) as session, pytest.raises(UsageError, match=r"for PyTorch pass capture\(model"):
            session.step(1, state)


@dataclasses.dataclass
class Evaluation:
    loss: float


def test_a_class_that_appears_later_in_the_training_is_restored(store):
    with open_session(store) as session:
        state = session.restore(default={"history": []})
        state["history"].append(Evaluation(0.5))
        session.step(1, state)
    restored = open_session(store, 2, resume_from=ref(1, 1)).restore(default={"history": []})
    assert restored == {"history": [Evaluation(0.5)]}


def test_a_class_that_no_restore_would_find_is_refused_at_the_first_step(store):
    @dataclasses.dataclass
    class Local:
        loss: float

    with open_session(store, every=SaveInterval(600, "seconds")) as session:
        session.restore(default={"best": None})
        with pytest.raises(UsageError, match=r"state\.best: the class .*Local cannot be found"):
            session.step(1, {"best": Local(0.5)})
    with open_session(store, 2) as session:
        session.restore(default={"best": Local(0.0)})
        session.step(1, {"best": Local(0.5)})


def test_a_restarted_process_of_the_same_attempt_meets_its_own_commit(store):
    train(store, 1)
    before = dict(store.objects)
    assert open_session(store).save(1, state_at(1)).wait() == ref(1, 1)
    assert store.objects == before


def test_other_content_for_a_committed_step_does_not_replace_it(store):
    train(store, 1)
    session = open_session(store)
    assert session.save(1, state_at(7)).wait() is None
    assert session.failed_saves == 1
    assert open_session(store).restore()["step"] == 1


def test_steps_that_go_backwards_are_refused(store):
    with open_session(store) as session:
        session.save(5, state_at(5))
        with pytest.raises(UsageError, match="global_step 4 was given after 5"):
            session.save(4, state_at(4))


def test_program_that_begins_anew_after_a_restore_is_told_to_go_on_with_what_was_restored(store):
    train(store, 3)
    with open_session(store, 2, resume_from=ref(1, 3)) as session:
        session.restore(state_at(0))  # its result is not used
        with pytest.raises(UsageError, match=r"given after restore\(\) had returned the state of step 3; go on with"):
            session.step(1, state_at(1))
        session.step(4, state_at(4))
    assert list_commits(store, LINEAGE)[0] == ref(2, 4)


def test_second_session_of_a_program_says_that_it_goes_on_from_the_first(store, capsys):
    train(store, 3)
    with open_session(store) as session:
        assert session.restore(state_at(0))["step"] == 3
    assert "step 3, saved by an earlier session of this attempt; if the program trains" in capsys.readouterr().err
    again = {"TIPHYS_RESTARTED_AFTER": "user_error 1 0.0"}
    with open_session(store, incarnation=2, environ=again) as session:  # the program was started again in its pod
        session.restore(state_at(0))
    with open_session(store, 2, resume_from=ref(1, 3)) as session:
        session.restore(state_at(0))
    assert "earlier session" not in capsys.readouterr().err


@pytest.mark.parametrize("call", ["none", "report", "step", "save", "restored"])
def test_session_without_a_step_says_that_it_has_saved_nothing(store, capsys, call):
    if call == "restored":
        train(store, 3)
        capsys.readouterr()
    with open_session(store, 2, resume_from=ref(1, 3) if call == "restored" else None) as session:
        session.restore(state_at(0))
        if call in ("report", "step", "save"):
            getattr(session, call)(1, *([] if call == "report" else [state_at(1)]))
    said = "without a call of step() or save(), so it has saved nothing" in capsys.readouterr().err
    assert said is (call in ("none", "report"))


@pytest.mark.parametrize("value", ["low", 10**400])
def test_metrics_that_are_no_numbers_are_refused(store, value):
    with pytest.raises(UsageError, match="metrics must be numbers"):
        open_session(store).save(1, state_at(1), metrics={"loss": value})


def test_a_full_disk_does_not_stop_the_training(store, capsys):
    store.refuses = lambda operation, key: operation == "create" and "shards/" in key
    with open_session(store, every=SaveInterval(10, "steps")) as session:
        assert session.step(10, state_at(10)).wait() is None
        assert session.step(11, state_at(11)) is None
        assert session.failed_saves == 1
        assert session.last_committed is None
        store.refuses = lambda operation, key: False
        assert session.step(20, state_at(20)).wait() == ref(1, 20)
    ((name, message),) = events(store)
    assert name == "checkpoint.save_failed"
    assert "step 10 could not be saved" in message
    assert "no space left" in message
    assert message in capsys.readouterr().err


def test_a_manifest_that_cannot_be_written_commits_nothing_and_the_next_save_does(store):
    store.refuses = lambda operation, key: operation == "create" and "manifests/" in key
    with open_session(store) as session:
        assert session.step(1, state_at(1)).wait() is None
        store.refuses = lambda operation, key: False
        assert session.step(2, state_at(2)).wait() == ref(1, 2)
    assert list_commits(store, LINEAGE) == [ref(1, 2)]


def test_events_that_cannot_be_stored_do_not_stop_the_training(store, capsys):
    train(store, 1)
    store.refuses = lambda operation, key: "events/" in key
    assert open_session(store, 2, resume_from=ref(1, 1)).restore()["step"] == 1
    assert "the events above could not be stored" in capsys.readouterr().err


def test_a_damaged_record_among_the_events_does_not_stop_the_training(store, capsys, monkeypatch):
    def damaged(*_):
        raise IntegrityError("not a valid EventBatch")

    train(store, 1)
    monkeypatch.setattr("tiphys.checkpoint.telemetry.events.append_events", damaged)
    assert open_session(store, 2, resume_from=ref(1, 1)).restore()["step"] == 1
    assert "could not be stored: not a valid EventBatch" in capsys.readouterr().err


def test_shards_with_foreign_bytes_under_our_name_are_not_trusted(store):
    train(store, 1)
    key = newest_shards(store, 1, 1)[1]
    del store.objects[LAYOUT.manifest(1, 1)]
    flip(store, key)
    session = open_session(store)
    assert session.save(1, state_at(1)).wait() is None
    assert list_commits(store, LINEAGE) == []


def test_an_attempt_that_was_replaced_commits_nothing_and_exits_76(store, capsys):
    with pytest.raises(SystemExit) as exit_, open_session(store) as session:
        session.step(1, state_at(1))
        write_claim(store, claim_of(2, ref(1, 1)))
        session.step(2, state_at(2))
    assert exit_.value.code == 76
    assert isinstance(exit_.value.__cause__, FencedError)
    assert list_commits(store, LINEAGE) == [ref(1, 1)]
    assert "attempt 2 exists" in capsys.readouterr().err


def test_an_attempt_whose_end_is_recorded_commits_nothing(store):
    write_claim(store, claim_of(1))
    write_end(store, end_of(1))
    with pytest.raises(FencedError, match="its end is recorded"):
        open_session(store).save(1, state_at(1))
    assert list_commits(store, LINEAGE) == []


def test_an_attempt_that_was_replaced_restores_nothing(store):
    write_claim(store, claim_of(2))
    with pytest.raises(FencedError):
        open_session(store, 1).restore()


def test_ends_and_claims_of_older_attempts_do_not_fence(store):
    write_claim(store, claim_of(1))
    write_end(store, end_of(1))
    write_claim(store, claim_of(2))
    store.create("control/runs/digits-1/attempts/fit/notes.txt", b"")
    assert open_session(store, 2).save(1, state_at(1)).wait() == ref(2, 1)


def test_the_start_in_the_claim_outweighs_a_late_commit(store):
    train(store, 2)
    write_claim(store, claim_of(2, ref(1, 1)))
    assert open_session(store, 2, resume_from=ref(1, 1)).restore()["step"] == 1


def test_sigterm_saves_at_the_next_step_and_exits_75(store, capsys):
    with pytest.raises(SystemExit) as exit_, open_session(store, every=SaveInterval(100, "steps")) as session:
        assert session.step(1, state_at(1)) is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert session.should_stop
        session.step(2, state_at(2))
    assert exit_.value.code == 75
    assert read_manifest(store, ref(1, 2)).reason == "sigterm"
    assert "the newest checkpoint is checkpoint 2 of attempt 1" in capsys.readouterr().err


def test_sigterm_tells_how_much_of_the_grace_period_was_spent(store, capsys):
    clock = Clock()
    with pytest.raises(SystemExit), open_session(store, clock=clock, grace_seconds=30.0) as session:
        os.kill(os.getpid(), signal.SIGTERM)
        clock.advance(12)
        os.kill(os.getpid(), signal.SIGTERM)
        session.step(1, state_at(1))
    assert "stopped by SIGTERM 12.0 s ago (grace period 30 s)" in capsys.readouterr().err


def test_a_second_sigterm_does_not_interrupt_the_save(store):
    with pytest.raises(SystemExit) as exit_, open_session(store, every=SaveInterval(100, "steps")) as session:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        session.step(2, state_at(2))
    assert exit_.value.code == 75
    assert list_commits(store, LINEAGE) == [ref(1, 2)]


def test_sigterm_during_a_due_save_exits_right_after_it(store):
    store.refuses = lambda operation, key: os.kill(os.getpid(), signal.SIGTERM) if "manifests/" in key else False
    with pytest.raises(SystemExit) as exit_, open_session(store) as session:
        session.step(1, state_at(1))
    assert exit_.value.code == 75
    assert session.last_committed == ref(1, 1)


def test_a_save_that_fails_after_sigterm_still_exits_75_and_says_so(store, capsys):
    store.refuses = lambda operation, key: operation == "create" and "shards/" in key
    with pytest.raises(SystemExit) as exit_, open_session(store) as session:
        os.kill(os.getpid(), signal.SIGTERM)
        session.step(1, state_at(1))
    assert exit_.value.code == 75
    assert session.failed_saves == 1
    assert events(store) == []  # no time is spent on storage that has just failed
    printed = capsys.readouterr().err
    assert "step 1 could not be saved" in printed
    assert "no checkpoint exists yet" in printed


def test_sigterm_while_restoring_does_not_wait_for_the_rest(store):
    train(store, 1)
    with pytest.raises(SystemExit) as exit_, open_session(store, 2, resume_from=ref(1, 1)) as session:
        os.kill(os.getpid(), signal.SIGTERM)
        session.restore()
    assert exit_.value.code == 75
    assert list_quarantined(store, LINEAGE) == set()


def test_a_replaced_attempt_asked_to_stop_is_fenced_not_saved(store):
    write_claim(store, claim_of(2))
    with pytest.raises(SystemExit) as exit_, open_session(store) as session:
        os.kill(os.getpid(), signal.SIGTERM)
        session.step(1, state_at(1))
    assert exit_.value.code == 76


def test_the_handler_of_the_program_comes_back_after_the_session(store):
    def handler(number, frame):
        raise AssertionError("not called")

    previous = signal.signal(signal.SIGTERM, handler)
    try:
        with open_session(store):
            assert signal.getsignal(signal.SIGTERM) is not handler
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_outside_the_main_thread_the_session_works_but_says_that_sigterm_does_not(store, capsys):
    thread = threading.Thread(target=train, args=(store, 1))
    thread.start()
    thread.join()
    assert list_commits(store, LINEAGE) == [ref(1, 1)]
    assert "not opened in the main thread" in capsys.readouterr().err


def test_an_error_of_the_program_passes_through_as_it_is(store):
    with pytest.raises(ZeroDivisionError), open_session(store):
        raise ZeroDivisionError


def test_an_image_without_numpy_names_the_package_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "tiphys.checkpoint.tracked_session", None)
    environ = {
        "TIPHYS_STORE": str(tmp_path),
        "TIPHYS_RUN": RUN,
        "TIPHYS_STEP": "fit",
        "TIPHYS_ATTEMPT": "1",
        "TIPHYS_LINEAGE": LINEAGE,
    }
    with pytest.raises(UsageError, match=r"install tiphys\[numpy\]"):
        checkpoint.session(environ=environ)


def test_every_manifest_tells_when_its_attempt_got_to_train(store):
    admitted(store, 1)
    with open_session(store, 1) as session:
        session.restore(default=state_at(0))
        first = read_manifest(store, session.step(1, state_at(1)).wait()).began
        second = read_manifest(store, session.step(2, state_at(2)).wait()).began
    assert first == second
    assert first.restored_at is None
    assert first.opened_at <= first.first_step_at
    write_end(store, end_of(1))
    admitted(store, 2, ref(1, 2))
    with open_session(store, 2) as session:
        session.restore(default=state_at(0))
        resumed = read_manifest(store, session.step(3, state_at(3)).wait()).began
    assert resumed.opened_at <= resumed.restored_at <= resumed.first_step_at


def test_process_after_a_restart_repeats_when_its_attempt_began_and_what_was_lost(store):
    admitted(store, 1)
    with open_session(store, 1) as session:
        session.restore(default=state_at(0))
        first = read_manifest(store, session.step(1, state_at(1)).wait())
    environ = {"TIPHYS_RESTARTED_AFTER": f"infrastructure 137 {time.time()}"}
    for process in (2, 3):
        with open_session(store, 1, admit=False, incarnation=process, environ=environ) as session:
            session.restore(default=state_at(0))
            began = read_manifest(store, session.step(process, state_at(process)).wait()).began
    assert (began.opened_at, began.first_step_at) == (first.began.opened_at, first.began.first_step_at)
    assert began.restarts[0].committed_at == first.written_at
    assert [restart.committed_at <= restart.restored_at for restart in began.restarts] == [True, True]
    restarted = [event.message for event in read_events(store, RUN) if event.name == "program.restarted"]
    assert len(restarted) == 2
    assert restarted[1].startswith("attempt 1 goes on in its pod, as process 3: its program ended with 137 (infra")
