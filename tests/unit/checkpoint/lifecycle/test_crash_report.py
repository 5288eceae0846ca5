"""What a dying program leaves, and that leaving it never makes matters worse."""

import json
import threading

import pytest
from support.builders.lineage import LINEAGE, ref
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import open_session, state_at

from tiphys.checkpoint.lifecycle.crash_report import (
    error_fingerprint,
    format_error,
    is_crash,
    normalize_message,
    record_crash,
)
from tiphys.checkpoint.settings import CheckpointSettings
from tiphys.errors import FencedError, StoreError, UsageError
from tiphys.lineage.validity import read_manifest
from tiphys.store.incarnations import find_crash_record

SETTINGS = CheckpointSettings(
    run="digits-1", step="fit", attempt=2, lineage=LINEAGE, store="memory://", checkpoint_store="memory://"
)


def caught(action) -> BaseException:
    try:
        action()
    except BaseException as error:  # noqa: BLE001  whatever it is, is what is looked at
        return error
    raise AssertionError("nothing was raised")


def fails(message: str) -> BaseException:
    def load():
        raise ValueError(message)

    return caught(load)


def test_a_crash_is_kept_with_what_was_loaded_and_how_far_it_got():
    store = MemoryStore()
    record_crash(store, SETTINGS, fails("NaN in layer 3"), 23, ref(1, 20))
    crash = find_crash_record(store, "digits-1", "fit", 2)
    assert crash.error == "ValueError: NaN in layer 3"
    assert crash.fingerprint == "ValueError: <number> in layer <number> at test_crash_report.py:fails.<locals>.load"
    assert (crash.global_step, crash.restored) == (23, ref(1, 20))


def test_an_attempt_that_left_nothing_has_no_crash():
    assert find_crash_record(MemoryStore(), "digits-1", "fit", 2) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("loss is nan at step 23", "loss is inf at step 1024"),
        ("object at 0x7f60dbfa6c90", "object at 0xabc"),
        ("cannot read /mnt/a1/data/part-7", "cannot read /scratch/b2/part-8"),
        ("took 1.5e-03 s", "took 20 s"),
        ("lost\n  contact", "lost contact"),
    ],
)
def test_errors_of_one_kind_have_one_fingerprint(one, other):
    assert normalize_message(one) == normalize_message(other)


def test_errors_of_other_kinds_messages_or_places_do_not():
    def elsewhere():
        raise ValueError("a")

    def another_kind():
        raise OSError("a")

    kinds = [fails("a"), fails("b"), caught(elsewhere), caught(another_kind)]
    assert len({error_fingerprint(error) for error in kinds}) == len(kinds)


def test_the_place_is_in_the_users_code_even_where_a_library_raised():
    def parse():
        json.loads("{")

    assert error_fingerprint(caught(parse)).endswith(".<locals>.parse")
    assert " at test_crash_report.py:" in error_fingerprint(caught(parse))


@pytest.mark.parametrize(
    "error", [UsageError("other classes"), StoreError("no answer"), MemoryError(), FencedError("a")]
)
def test_an_error_that_no_checkpoint_can_cause_has_no_fingerprint(error):
    assert error_fingerprint(error) == ""


def test_a_lack_of_gpu_memory_has_no_fingerprint_either():
    assert error_fingerprint(type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory")) == ""


@pytest.mark.parametrize(
    ("error", "crash"),
    [
        (SystemExit(), False),
        (SystemExit(0), False),
        (SystemExit(75), False),
        (SystemExit(69), False),
        (SystemExit(76), False),
        (KeyboardInterrupt(), False),
        (StoreError("no answer"), False),
        (FencedError("another attempt"), False),
        (SystemExit(1), True),
        (SystemExit("no data"), True),
        (ValueError(), True),
    ],
)
def test_an_end_counts_as_a_crash_by_its_error_and_exit_code(error, crash):
    assert is_crash(error) is crash
    store = MemoryStore()
    record_crash(store, SETTINGS, error, None, None)
    assert bool(store.objects) is crash


def test_a_program_that_ended_well_leaves_nothing():
    store = MemoryStore()
    record_crash(store, SETTINGS, None, 5, None)
    assert store.objects == {}


def test_exit_codes_are_distinguished():
    assert error_fingerprint(SystemExit(3)) != error_fingerprint(SystemExit(4))


def test_the_first_process_of_an_attempt_that_crashes_is_believed():
    store = MemoryStore()
    record_crash(store, SETTINGS, fails("first"), 1, None)
    record_crash(store, SETTINGS, fails("second"), 2, None)
    assert find_crash_record(store, "digits-1", "fit", 2).error == "ValueError: first"


def test_storage_that_fails_is_reported_and_no_more(capsys):
    store = MemoryStore()
    store.refuses = lambda operation, key: True
    record_crash(store, SETTINGS, fails("a"), 1, None)
    assert "could not be stored" in capsys.readouterr().err


def test_storage_that_hangs_does_not_hold_up_the_end():
    never = threading.Event()
    store = MemoryStore()
    store.refuses = lambda operation, key: not never.wait(60)
    record_crash(store, SETTINGS, fails("a"), 1, None, timeout_seconds=0.01)
    assert store.objects == {}
    never.set()


def test_a_long_message_is_cut():
    assert len(format_error(fails("x" * 10_000))) == 500
    assert len(error_fingerprint(fails("x" * 10_000))) < 700


def test_a_session_leaves_what_ended_the_program_and_lets_the_error_through():
    store = MemoryStore()
    with pytest.raises(ZeroDivisionError), open_session(store) as session:
        session.step(7, state_at(7))
        raise ZeroDivisionError("division by zero")
    crash = find_crash_record(store, "digits-1", "fit", 1)
    assert (crash.error, crash.global_step, crash.restored) == ("ZeroDivisionError: division by zero", 7, None)


def test_a_session_tells_what_it_had_restored():
    store = MemoryStore()
    with open_session(store) as session:
        session.save(20, state_at(20))
    with pytest.raises(ValueError, match="NaN"), open_session(store, 2, resume_from=ref(1, 20)) as session:
        session.restore()
        raise ValueError("NaN")
    crash = find_crash_record(store, "digits-1", "fit", 2)
    assert (crash.global_step, crash.restored) == (None, ref(1, 20))


def test_a_session_whose_program_ends_well_leaves_nothing():
    store = MemoryStore()
    with open_session(store) as session:
        session.save(20, state_at(20))
    assert find_crash_record(store, "digits-1", "fit", 1) is None


def test_manifests_hold_the_facts_of_their_save():
    store = MemoryStore()
    with open_session(store, environ={"TIPHYS_IMAGE": "i:1", "WORLD_SIZE": "2"}) as session:
        session.restore()
        session.save(20, state_at(20), epoch=3, data_position={"sample": 5})
    facts = read_manifest(store, ref(1, 20)).facts
    assert (facts.image, facts.world_size, facts.epoch, facts.data_position) == ("i:1", 2, 3, {"sample": 5})
    assert {"python", "numpy", "tiphys"} <= set(facts.versions)
