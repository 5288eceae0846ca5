"""What is done with the time between SIGTERM and SIGKILL.

| the measured bandwidth says | choice |
|---|---|
| nothing: no save yet, or no grace period known | save the newest state |
| the save under way and the newest state both land | save: finish the one, then the other |
| the newest lands, both do not | replace: give up the one under way |
| only the one under way may land | finish it |
| nothing lands | leave |
| the newest nearly lands, nothing is under way | save: there is nothing to lose |
"""

import asyncio
import os
import signal
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.builders.lineage import LINEAGE, RUN, ref
from support.fakes.memory_store import MemoryStore
from support.processes.polling import until
from support.stories.sessions import Clock, open_session, state_at

from tiphys.checkpoint.lifecycle.preemption import (
    PreemptionReport,
    PreemptionSaveChoice,
    PreemptionSaveInputs,
    choose_preemption_save,
)
from tiphys.checkpoint.settings import SaveInterval
from tiphys.lineage.select import list_commits
from tiphys.store import read_events

MIB = 1 << 20
PATIENCE_SECONDS = 120


@pytest.mark.parametrize(
    ("left", "mib_per_second", "state_mib", "running_mib", "expected"),
    [
        (None, 100, 1024, 0, PreemptionSaveChoice.SAVE),
        (5, None, 1024, 512, PreemptionSaveChoice.SAVE),
        (30, 100, 1024, 0, PreemptionSaveChoice.SAVE),
        (30, 100, 1024, 1024, PreemptionSaveChoice.SAVE),
        (30, 100, 2048, 1024, PreemptionSaveChoice.REPLACE),
        (5, 100, 1024, 200, PreemptionSaveChoice.FINISH),
        (5, 100, 1024, 1000, PreemptionSaveChoice.FINISH),
        (5, 100, 1024, 5000, PreemptionSaveChoice.LEAVE),
        (5, 100, 1024, 0, PreemptionSaveChoice.LEAVE),
        (13, 100, 1024, 0, PreemptionSaveChoice.SAVE),
        (0, 100, 1024, 0, PreemptionSaveChoice.LEAVE),
    ],
)
def test_the_most_that_lands_is_tried(left, mib_per_second, state_mib, running_mib, expected):
    speed = mib_per_second * MIB if mib_per_second else None
    assert choose_preemption_save(PreemptionSaveInputs(left, speed, state_mib * MIB, running_mib * MIB)) is expected


approaches = st.builds(
    PreemptionSaveInputs,
    st.floats(0, 300),
    st.floats(1e6, 1e10),
    st.integers(0, 1 << 36),
    st.integers(0, 1 << 36),
)


@given(approaches)
def test_a_save_that_will_not_land_never_replaces_one_that_does(seen):
    if choose_preemption_save(seen) is PreemptionSaveChoice.REPLACE:
        assert seen.state_bytes / seen.bytes_per_second < seen.seconds_left


@given(approaches, st.floats(0, 300))
def test_more_time_never_makes_less_of_it(seen, more):
    worth = {
        PreemptionSaveChoice.LEAVE: 0,
        PreemptionSaveChoice.FINISH: 1,
        PreemptionSaveChoice.REPLACE: 2,
        PreemptionSaveChoice.SAVE: 2,
    }
    longer = seen._replace(seconds_left=seen.seconds_left + more)
    assert worth[choose_preemption_save(longer)] >= worth[choose_preemption_save(seen)]


class SlowStore(MemoryStore):
    """Each shard takes ``seconds`` of ``clock``, once `open`."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.clock = clock
        self.seconds = seconds

    def create(self, key, data, *, sha256=None):
        if "shards/" in key:
            self.clock.advance(self.seconds)
        super().create(key, data, sha256=sha256)


def preempted(store):
    return [event for event in read_events(store, RUN) if event.name == "checkpoint.preempted"]


def test_the_report_card_says_what_became_of_the_grace_period():
    clock = Clock()
    store = SlowStore(clock, 2.0)
    with pytest.raises(SystemExit) as exit_, open_session(store, clock=clock, grace_seconds=30) as session:
        os.kill(os.getpid(), signal.SIGTERM)
        clock.advance(1.5)
        session.step(7, state_at(7))
    assert exit_.value.code == 75
    assert list_commits(store, LINEAGE) == [ref(1, 7)]
    (event,) = preempted(store)
    assert event.message == ("stopped by SIGTERM at step 7: it was committed 5.5s after SIGTERM, 24.5s before the kill")
    assert event.data["choice"] == "save"
    assert event.data["noticed_seconds"] == 1.5
    assert event.data["ended_seconds"] == 5.5
    assert event.data["spare_seconds"] == 24.5
    assert event.data["committed"] == "1-7"
    assert event.data["steps_lost"] == 0


class SlowEvents(MemoryStore):
    """Storage that takes an event after 0.7 s, or once the program has ended."""

    def __init__(self, answers=None):
        super().__init__()
        self.answers = answers

    def create(self, key, data, *, sha256=None):
        if "/events/" in key:
            time.sleep(0.7) if self.answers is None else self.answers.wait(PATIENCE_SECONDS)
        super().create(key, data, sha256=sha256)


def test_slow_storage_takes_the_report_while_the_grace_period_lasts():
    store = SlowEvents()
    with pytest.raises(SystemExit), open_session(store, clock=Clock(), grace_seconds=30) as session:
        os.kill(os.getpid(), signal.SIGTERM)
        session.step(7, state_at(7))
    assert [event.data["committed"] for event in preempted(store)] == ["1-7"]


def test_a_report_that_storage_never_takes_is_said_to_be_lost(capsys):
    store = SlowEvents(threading.Event())
    with pytest.raises(SystemExit), open_session(store, clock=Clock(), grace_seconds=1.5) as session:
        os.kill(os.getpid(), signal.SIGTERM)
        session.step(7, state_at(7))
    assert "the events above were not stored: storage has not answered for 1.35 s" in capsys.readouterr().err
    assert list_commits(store, LINEAGE) == [ref(1, 7)]
    store.answers.set()


def test_a_state_that_cannot_land_is_not_begun():
    clock = Clock()
    store = SlowStore(clock, 0.0)
    session = open_session(store, clock=clock, grace_seconds=5)
    with pytest.raises(SystemExit), session:
        session.save(3, state_at(3)).wait(PATIENCE_SECONDS)
        session._saver._measured = 1.0
        os.kill(os.getpid(), signal.SIGTERM)
        session.step(5, state_at(5))
    assert list_commits(store, LINEAGE) == [ref(1, 3)]
    (event,) = preempted(store)
    assert "there was no time to save its" in event.message
    assert event.message.endswith("; 2 steps are trained again")
    assert event.data["choice"] == "leave"


def test_the_save_under_way_is_finished_where_there_is_no_time_for_more(monkeypatch):
    decided = threading.Event()

    class Gated(MemoryStore):
        def create(self, key, data, *, sha256=None):
            if "shards/" in key:
                assert decided.wait(PATIENCE_SECONDS)
            super().create(key, data, sha256=sha256)

    store = Gated()
    session = open_session(store, clock=Clock(), grace_seconds=120, asynchronous=True)
    wait = session._saver.wait

    def wait_after_the_choice(timeout_seconds=None):
        decided.set()
        return wait(timeout_seconds)

    with pytest.raises(SystemExit), session:
        session.save(3, state_at(3))
        session._saver._measured = 1.0
        session._saver._pending[0].size_bytes = 10
        monkeypatch.setattr(session._saver, "wait", wait_after_the_choice)
        os.kill(os.getpid(), signal.SIGTERM)
        session.step(5, state_at(5))
    assert list_commits(store, LINEAGE) == [ref(1, 3)]
    (event,) = preempted(store)
    assert "there was time only for the running save, of step 3; 2 steps are trained again" in event.message


def test_the_first_save_under_way_tells_the_bandwidth_before_anything_is_decided():
    """Nothing was measured yet, and but for the small document no shard arrives before the training came by."""
    sent, gate = threading.Event(), threading.Event()

    class Gated(MemoryStore):
        def create(self, key, data, *, sha256=None):
            if "shards/" in key and not key.endswith("json"):
                assert gate.wait(PATIENCE_SECONDS)
            super().create(key, data, sha256=sha256)
            if "shards/" in key and key.endswith("json"):
                sent.set()

    store = Gated()
    large = {"weights": np.zeros(1 << 16)}
    session = open_session(store, clock=Clock(), grace_seconds=1200, asynchronous=True, upload_threads=4)
    with pytest.raises(SystemExit), session:
        session.save(3, large)
        assert sent.wait(PATIENCE_SECONDS)
        until(lambda: session._saver._pending[0].stored_bytes)
        assert session._saver.bytes_per_second is None, "a document of some bytes tells nothing"
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(0.1, gate.set).start()
        session.step(5, large)
    assert list_commits(store, LINEAGE) == [ref(1, 5), ref(1, 3)]
    (event,) = preempted(store)
    assert event.data["bytes_per_second"] > 0


def test_a_signal_during_a_save_is_answered_when_the_save_is_over():
    class Signalling(MemoryStore):
        def create(self, key, data, *, sha256=None):
            if "manifests/" in key and not session.should_stop:
                os.kill(os.getpid(), signal.SIGTERM)
            super().create(key, data, sha256=sha256)

    store = Signalling()
    session = open_session(store)
    with pytest.raises(SystemExit) as exit_, session:
        session.step(1, state_at(1))
    assert exit_.value.code == 75
    assert list_commits(store, LINEAGE) == [ref(1, 1)]


def test_a_card_without_a_grace_period_says_nothing_about_the_kill():
    card = PreemptionReport(PreemptionSaveChoice.SAVE, 4, 10, None, 0.1, 0.2, 0.3, None, ref(1, 4), 4)
    assert card.message() == "stopped by SIGTERM at step 4: it was committed 300ms after SIGTERM"
    assert card.data()["spare_seconds"] is None


def test_a_card_of_a_failure_counts_what_is_lost():
    card = PreemptionReport(PreemptionSaveChoice.SAVE, 4, 10, 30.0, 0.1, 0.2, 29.0, None, None, 3)
    assert card.message() == "stopped by SIGTERM at step 4: nothing was committed within 29s; 1 step is trained again"


@pytest.fixture
def handler():
    """Installs handlers of the program as a test goes on, and removes them at its end."""
    before = signal.getsignal(signal.SIGTERM)
    yield lambda function: signal.signal(signal.SIGTERM, function)
    signal.signal(signal.SIGTERM, before)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_handler_of_the_program_is_called_once_for_each_sigterm_after_that_of_the_session(handler):
    seen = []
    handler(lambda number, frame: seen.append((number, session.should_stop)))
    with open_session(MemoryStore()) as session, pytest.raises(SystemExit):
        terminate()
        assert seen == [(signal.SIGTERM, True)]
        terminate()
        session.step(1, state_at(1))
    assert seen == [(signal.SIGTERM, True)] * 2


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), ValueError("no logger")])
def test_an_exit_by_a_handler_of_the_program_is_held_back_until_the_state_is_saved(handler, error, capsys):
    def exit_(number, frame):
        raise error

    handler(exit_)
    store = MemoryStore()
    with pytest.raises(SystemExit) as end, open_session(store) as session:
        terminate()
        session.step(3, state_at(3))
    assert end.value.code == 75
    assert list_commits(store, LINEAGE) == [ref(1, 3)]
    assert f"handler of SIGTERM raised {error!r}" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is exit_


@pytest.mark.parametrize("previous", [signal.SIG_DFL, signal.SIG_IGN])
def test_default_handlers_are_restored_as_they_were(handler, previous):
    handler(previous)
    with pytest.raises(SystemExit) as end, open_session(MemoryStore()) as session:
        terminate()
        session.step(1, state_at(1))
    assert end.value.code == 75
    assert signal.getsignal(signal.SIGTERM) == previous


def test_program_that_ignores_sigterm_within_its_session_is_stopped_all_the_same(handler, capsys):
    with pytest.raises(SystemExit) as end, open_session(MemoryStore()) as session:
        handler(signal.SIG_IGN)
        session.step(1, state_at(1))
        terminate()
        session.step(2, state_at(2))
    assert end.value.code == 75
    assert "SIG_IGN has replaced the session's handler" in capsys.readouterr().err


@pytest.mark.parametrize("call", ["step", "save", "report"])
def test_a_handler_that_a_library_replaced_is_back_after_the_next_call_and_said_once(handler, capsys, call):
    seen = []

    def library_handler(number, frame):
        seen.append(session.should_stop)

    store = MemoryStore()
    with pytest.raises(SystemExit) as end, open_session(store) as session:
        for step in (1, 2):
            handler(library_handler)
            getattr(session, call)(step, state_at(step) if call != "report" else None)
        terminate()
        assert seen == [True]
        session.step(3, state_at(3))
    assert end.value.code == 75
    assert list_commits(store, LINEAGE)[0] == ref(1, 3)
    assert capsys.readouterr().err.count("library_handler has replaced the session's handler") == 1
    assert signal.getsignal(signal.SIGTERM) is library_handler


def test_a_library_that_calls_the_handler_that_it_replaced_is_not_called_in_a_circle(handler):
    seen = []
    with open_session(MemoryStore()) as session:
        replaced = signal.getsignal(signal.SIGTERM)
        handler(lambda number, frame: (seen.append(number), replaced(number, frame)))
        session.step(1, state_at(1))
        terminate()
        assert seen == [signal.SIGTERM]
        assert session.should_stop


def test_a_library_that_puts_the_handler_back_leaves_the_one_of_the_program(handler):
    seen = []
    handler(lambda *_: seen.append("program"))
    program = signal.getsignal(signal.SIGTERM)
    with open_session(MemoryStore()) as session:
        replaced = handler(lambda *_: seen.append("library"))
        session.step(1, state_at(1))
        handler(replaced)
        terminate()
        assert session.should_stop
    assert seen == ["program"]
    assert signal.getsignal(signal.SIGTERM) is program


def test_a_handler_that_outlives_its_session_does_what_was_installed_before(handler):
    seen = []
    handler(lambda *_: seen.append("program"))
    with open_session(MemoryStore()):
        replaced = signal.getsignal(signal.SIGTERM)
        handler(lambda number, frame: replaced(number, frame))
        library = signal.getsignal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is library
    terminate()
    assert seen == ["program"]


def test_a_handler_of_an_earlier_session_does_not_end_the_next_one(handler):
    handler(signal.SIG_DFL)
    with open_session(MemoryStore()):
        replaced = signal.getsignal(signal.SIGTERM)
    handler(lambda number, frame: replaced(number, frame))  # a library puts back what it found, but too late
    store = MemoryStore()
    with pytest.raises(SystemExit) as end, open_session(store) as session:
        terminate()
        session.step(1, state_at(1))
    assert end.value.code == 75
    assert list_commits(store, LINEAGE) == [ref(1, 1)]


def test_an_event_loop_that_handles_sigterm_learns_of_it_too(handler):
    async def train():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, seen.append, "loop")
        session.step(1, state_at(1))
        terminate()
        while not seen:
            await asyncio.sleep(0)
        session.step(2, state_at(2))

    seen, store = [], MemoryStore()
    with pytest.raises(SystemExit) as end, open_session(store) as session:
        asyncio.run(train())
    assert end.value.code == 75
    assert list_commits(store, LINEAGE)[0] == ref(1, 2)


def test_a_session_inside_another_one_stops_both(handler):
    stores = MemoryStore(), MemoryStore()
    with open_session(stores[0]) as outer, open_session(stores[1]) as inner:
        inner.report(1)
        outer.report(1)
        terminate()
        assert (outer.should_stop, inner.should_stop) == (True, True)


def test_an_error_after_sigterm_says_what_was_not_saved(capsys):
    with pytest.raises(RuntimeError), open_session(MemoryStore(), every=SaveInterval(2, "steps")) as session:
        session.step(2, state_at(2))
        session.step(3, state_at(3))
        terminate()
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated")
    assert "ended after SIGTERM without a step() that could have saved; the newest checkpoint is checkpoint 2" in (
        capsys.readouterr().err
    )


def test_a_session_in_another_thread_says_once_that_sigterm_does_not_reach_it(capsys):
    def train():
        with open_session(MemoryStore()) as session:
            for step in (1, 2):
                session.step(step, state_at(step))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert capsys.readouterr().err.count("not opened in the main thread") == 1


def test_a_session_of_the_main_thread_may_be_called_by_another_one(handler):
    with open_session(MemoryStore()) as session:
        handler(library := lambda *_: None)
        thread = threading.Thread(target=session.step, args=(1, state_at(1)))
        thread.start()
        thread.join()
        assert session.last_committed == ref(1, 1)
        assert signal.getsignal(signal.SIGTERM) is library
