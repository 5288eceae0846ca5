"""A session whose program runs out of memory, or of threads.

| what is missing | what happens |
|---|---|
| memory for a save, for a moment | it is tried again |
| memory for a save, for good | it is counted and told; training goes on |
| memory to say so | whoever waits hears of it once there is some |
| memory of the program, which ends of it | the save under way is tried once more at once; the crash is on record |
| the end of a save, at the end of the program | it is waited for while it moves, and no longer |
| threads | the training does the work itself |
| memory of what looks after the training | it goes on once there is some |
"""

import threading
import time
import weakref
from types import SimpleNamespace

import pytest
from support.builders.lineage import LINEAGE, ref
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import Clock, open_session, state_at

from tiphys import threads
from tiphys.checkpoint import tracked_session
from tiphys.checkpoint.exec.save import BackgroundCommit
from tiphys.checkpoint.lifecycle.hang_watchdog import CrashLog, HangWatchdog, KernelAlarm
from tiphys.checkpoint.lifecycle.out_of_memory import (
    DRAIN_TIMEOUT_SECONDS,
    RESERVE_BYTES,
    MemoryReserve,
    OutOfMemoryGuard,
)
from tiphys.checkpoint.ranks import coordination
from tiphys.checkpoint.ranks.barrier import RankInfo
from tiphys.checkpoint.save import saver
from tiphys.checkpoint.telemetry import metrics
from tiphys.errors import UsageError
from tiphys.lineage.select import list_commits
from tiphys.store.incarnations import find_crash_record

GUARD_SECONDS = 120


class Scarce(MemoryStore):
    """Has no memory to store a shard while ``missing`` is above 0; ``met`` is set once that has happened."""

    def __init__(self, missing=0):
        super().__init__()
        self.missing = missing
        self.met = threading.Event()

    def create(self, key, data, *, sha256=None):
        if "shards/" in key and self.missing > 0:
            self.missing -= 1
            self.met.set()
            raise MemoryError
        super().create(key, data, sha256=sha256)


def behind(store, **options):
    return open_session(store, asynchronous=True, **options)


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr(saver, "PAUSES_SECONDS", (0.0, 0.0))


@pytest.fixture
def no_threads(monkeypatch):
    def refused(body, arguments):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads._thread, "start_new_thread", refused)


@pytest.mark.usefixtures("no_pauses")
def test_a_save_that_finds_no_memory_for_a_moment_is_tried_again():
    store = Scarce(missing=2)
    with behind(store) as session:
        assert session.save(1, state_at(1)).wait(GUARD_SECONDS) == ref(1, 1)
    assert session.failed_saves == 0


@pytest.mark.usefixtures("no_pauses")
def test_a_save_without_memory_is_reported_and_the_training_goes_on(capsys):
    store = Scarce(missing=1000)
    with behind(store) as session:
        assert session.save(1, state_at(1)).wait(GUARD_SECONDS) is None
        assert session.failed_saves == 1
        store.missing = 0
        assert session.save(2, state_at(2)).wait(GUARD_SECONDS) == ref(1, 2)
    assert "step 1 could not be saved: MemoryError" in capsys.readouterr().err


def test_a_training_that_waits_for_its_saves_goes_on_too():
    store = Scarce(missing=1)
    with open_session(store) as session:
        assert session.save(1, state_at(1)).done
        assert session.save(2, state_at(2)).wait(0) == ref(1, 2)
    assert session.failed_saves == 1


@pytest.mark.usefixtures("no_pauses")
def test_a_waiting_save_returns_even_without_memory_to_report_the_end(monkeypatch):
    """Neither for the log, nor, for a while, for those who wait."""
    store, missing = Scarce(missing=1000), [1, 1]
    monkeypatch.setattr(saver, "_MEMORY_RETRY_SECONDS", 0.0)
    with behind(store) as session:

        def tells_nothing(step, error):
            raise MemoryError

        give_back = session._saver._give_back

        def gives_back_later(*job):
            if missing:
                missing.pop()
                raise MemoryError
            give_back(*job)

        monkeypatch.setattr(session._committer, "on_failed", tells_nothing)
        monkeypatch.setattr(session._saver, "_give_back", gives_back_later)
        assert session.save(1, state_at(1)).wait(GUARD_SECONDS) is None
        assert session._saver.wait(GUARD_SECONDS)
        store.missing = 0
        assert session.save(2, state_at(2)).wait(GUARD_SECONDS) == ref(1, 2)


def test_cleanup_after_a_commit_may_lack_memory_without_ending_the_training(monkeypatch):
    def none_left(committed):
        raise MemoryError

    with behind(MemoryStore()) as session:
        monkeypatch.setattr(session._committer, "_retain", none_left)
        assert session.save(1, state_at(1)).wait(GUARD_SECONDS) == ref(1, 1)
        session.flush()
        session.step(2, state_at(2))


def test_at_the_end_of_the_program_the_save_under_way_is_tried_at_once(monkeypatch):
    """When its memory comes free, the next try would be in an hour."""
    monkeypatch.setattr(saver, "PAUSES_SECONDS", (3600.0,))
    store = Scarce(missing=1)
    with pytest.raises(MemoryError), behind(store) as session:
        session.save(1, state_at(1))
        assert store.met.wait(GUARD_SECONDS)
        raise MemoryError
    assert list_commits(store, LINEAGE) == [ref(1, 1)]
    crash = find_crash_record(store, "digits-1", "fit", 1)
    assert (crash.error, crash.fingerprint) == ("MemoryError", "")


def test_memory_of_the_program_is_released_before_the_report():
    class Batch:
        pass

    class Store(MemoryStore):
        def create(self, key, data, *, sha256=None):
            alive.append(kept() is not None)
            super().create(key, data, sha256=sha256)

    alive, store = [], Store()

    def hoard():
        nonlocal kept
        batch = Batch()
        kept = weakref.ref(batch)
        raise MemoryError

    kept = Batch
    with pytest.raises(MemoryError), open_session(store):
        alive.clear()
        hoard()
    assert alive == [False]


def test_a_save_that_does_not_move_ends_with_the_program(monkeypatch):
    monkeypatch.setattr(tracked_session, "DRAIN_TIMEOUT_SECONDS", 0.01)
    gate, asked = threading.Event(), threading.Event()

    class Gated(MemoryStore):
        def create(self, key, data, *, sha256=None):
            if "shards/" in key:
                asked.set()
                assert gate.wait(GUARD_SECONDS)
            super().create(key, data, sha256=sha256)

    store = Gated()
    with pytest.raises(MemoryError), behind(store) as session:
        save = session.save(1, state_at(1))
        assert asked.wait(GUARD_SECONDS)
        raise MemoryError
    assert not save.done
    gate.set()
    save.wait(GUARD_SECONDS)


class Alarms(KernelAlarm):
    """Notes what it is set to; nothing in a test may end the process that tests."""

    def __init__(self):
        self.set_to, self.calls = 0.0, []

    def install(self):
        self.calls.append("installed")
        return True

    def arm(self, seconds):
        self.set_to = seconds

    def uninstall(self):
        self.calls.append("uninstalled")
        self.set_to = 0.0


def test_the_kernel_is_to_end_a_session_that_stands_still_without_memory_and_nothing_else(tmp_path):
    alarm = Alarms()
    with pytest.raises(ZeroDivisionError), OutOfMemoryGuard(MemoryError(), CrashLog(), alarm):
        assert alarm.set_to == 2 * DRAIN_TIMEOUT_SECONDS
        raise ZeroDivisionError  # whatever happens in there: the program may go on outside of its session
    assert (alarm.calls, alarm.set_to) == (["installed", "uninstalled"], 0)


@pytest.mark.parametrize("error", [None, ValueError(), SystemExit(75)])
def test_an_end_without_memory_shortage_starts_no_alarm(error):
    alarm = Alarms()
    with OutOfMemoryGuard(error, CrashLog(), alarm) as ending:
        assert not ending.is_out_of_memory
        assert "installed" not in alarm.calls


def test_a_released_memory_reserve_is_free_again():
    reserve = MemoryReserve()
    reserve.allocate()
    held = reserve._reserve
    assert len(held) == RESERVE_BYTES
    reserve.release()
    assert held.closed
    reserve.release()


def test_a_machine_that_has_nothing_to_put_aside_does_without(monkeypatch):
    def refused(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("tiphys.checkpoint.lifecycle.out_of_memory.mmap.mmap", refused)
    reserve = MemoryReserve()
    reserve.allocate()
    assert reserve._reserve is None
    reserve.release()


@pytest.mark.usefixtures("no_threads")
def test_without_threads_the_training_saves_and_restores_by_itself(capsys):
    store = MemoryStore()
    with pytest.raises(ValueError, match="a bug"), behind(store, upload_threads=4) as session:
        session.restore(default=state_at(0))
        assert session.step(1, state_at(1)).done
        assert session.step(2, state_at(2)).wait(0) == ref(1, 2)
        raise ValueError("a bug")
    assert list_commits(store, LINEAGE) == [ref(1, 2), ref(1, 1)]
    assert find_crash_record(store, "digits-1", "fit", 1).error == "ValueError: a bug"
    assert "no thread could be started, so the training waits for this save" in capsys.readouterr().err


@pytest.mark.usefixtures("no_threads")
def test_the_hang_watchdog_is_off_where_no_thread_can_start(capsys):
    """Nor does the kernel, which only a thread can put off."""
    alarm = Alarms()
    watch = HangWatchdog(60, lambda stuck: None, clock=lambda: 0.0, is_excused=lambda: False, alarm=alarm)
    watch.open()
    watch.close()
    assert "installed" not in alarm.calls
    assert "a training that hangs is not detected" in capsys.readouterr().err


def test_the_hang_watchdog_survives_a_lack_of_memory():
    ended, lacks = threading.Event(), [1, 1]

    def excused():
        if lacks:
            lacks.pop()
            raise MemoryError
        return False

    watch = HangWatchdog(0.02, lambda stuck: ended.set(), clock=time.monotonic, is_excused=excused, alarm=Alarms())
    watch.open()
    watch.record_step()
    assert ended.wait(GUARD_SECONDS)
    assert not lacks
    watch.close()


def test_the_listener_for_save_requests_survives_a_lack_of_memory(monkeypatch):
    heard, lacks = threading.Event(), [1, 1]

    class Others:
        rank_info = RankInfo(rank=0, world_size=2)

        def read_save_requests(self):
            if lacks:
                lacks.pop()
                raise MemoryError
            heard.set()
            return []

    monkeypatch.setattr(coordination, "POLL_SECONDS", 0.01)
    listening = coordination.SaveRequestListener(Others())
    listening.open()
    assert heard.wait(GUARD_SECONDS)
    listening.close()


@pytest.mark.usefixtures("no_threads")
def test_a_rank_that_cannot_hear_the_others_says_so_before_it_trains():
    class Others:
        rank_info = RankInfo(rank=1, world_size=2)

    with pytest.raises(UsageError, match="rank 1 cannot start the thread"):
        coordination.SaveRequestListener(Others()).open()


def test_metrics_whose_thread_has_died_keep_no_session_open(monkeypatch):
    """As that of a server that wanted to start another one, for a scrape, when there was no memory."""
    never = threading.Event()

    class Server:
        def shutdown(self):
            never.wait(GUARD_SECONDS)

        def server_close(self):
            closed.append(True)

    closed, dead = [], threading.Thread(target=never.wait, args=(GUARD_SECONDS,), daemon=True)
    dead.start()
    monkeypatch.setattr(metrics, "_SHUT_SECONDS", 0.01)
    monkeypatch.setattr("prometheus_client.start_http_server", lambda *_, **__: (Server(), dead))
    metrics.open_metrics({"TIPHYS_METRICS": "port:9464"}).close()
    assert closed == [True]
    never.set()


@pytest.mark.usefixtures("no_threads")
def test_a_commit_of_files_that_finds_no_thread_is_tried_again_later(capsys):
    clock, settled = Clock(), []
    watch = SimpleNamespace(settle=settled.append)
    files = BackgroundCommit(checkpoints=None, folder=None, watch=watch, clock=clock)
    files.start(SimpleNamespace(checkpoint=SimpleNamespace(name="checkpoint-5")), 5, "due")
    assert not files.is_busy
    assert not files.is_ready
    assert "no thread could be started to store checkpoint-5" in capsys.readouterr().err
    clock.advance(5)
    assert files.is_ready
    assert settled == []
