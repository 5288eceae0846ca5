"""The life of a wrapped program where storage, the folder or the moment are against it.

| what happens | promise |
|---|---|
| storage fails at the last commit | told and counted; the exit code stays that of the program |
| SIGTERM before the program was started | it is not started, exit 75 |
| the checkpoint changes between reading and commit | it is not committed |
| a step that is not above the newest one | it is left out, and told once |
"""

import os
import re
import threading
import time

import pytest
from support.lineage import LINEAGE, RUN, claim_of, ref, write_claim
from support.memory import MemoryStore
from support.polling import until
from support.sessions import Clock

from tiphys.checkpoint.exec.detect import find_checkpoints
from tiphys.checkpoint.exec.files import scan_folder
from tiphys.checkpoint.exec.options import ExecOptions
from tiphys.checkpoint.exec.save import BackgroundCommit
from tiphys.checkpoint.exec.store import FileCheckpointStore
from tiphys.checkpoint.exec.supervise import ProgramRunner
from tiphys.checkpoint.lifecycle.preemption import StopSignal
from tiphys.checkpoint.settings import CheckpointSettings, IntervalBounds, SaveInterval
from tiphys.checkpoint.telemetry.metrics import NoMetrics
from tiphys.lineage.select import list_commits
from tiphys.lineage.training_progress import read_training_progress
from tiphys.store import read_events

SETTINGS = CheckpointSettings(
    run=RUN,
    step="fit",
    attempt=1,
    lineage=LINEAGE,
    store="memory://",
    checkpoint_store="memory://",
    save_every=SaveInterval(600.0, "seconds", auto=IntervalBounds(60, 600)),
)


class NoSignals:
    """Signals of a process that has none of its own in this test; children are looked after by polling."""

    def __init__(self, is_stop_requested=False):
        self.is_stop_requested = is_stop_requested

    def wait_next(self, seconds):
        time.sleep(min(seconds, 0.01))


@pytest.fixture
def store():
    made = MemoryStore()
    write_claim(made, claim_of(1))
    return made


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "ckpt"
    made.mkdir()
    return made


def options(folder, script="true", **others):
    wanted = {"checkpoint": "checkpoint-*", "quiet_seconds": 600.0, "step_from": re.compile(r"\d+"), **others}
    return ExecOptions(folder, ("sh", "-c", script, str(folder)), interval_seconds=0.01, **wanted)


def keeper(store, attempt=1, clock=time.monotonic):
    return FileCheckpointStore(
        CheckpointSettings(**{**vars(SETTINGS), "attempt": attempt}),
        {},
        run_store=store,
        store=store,
        metrics=NoMetrics(),
        stop_signal=StopSignal(time.monotonic),
        clock=clock,
    )


def run(store, given, signals=None, attempt=1):
    stop_signal = StopSignal(time.monotonic)
    runner = ProgramRunner(given, keeper(store, attempt), signals or NoSignals(), stop_signal, grace_seconds=60.0)
    return runner.run(os.environ)


def events(store):
    return [event.name for event in read_events(store, RUN)]


def write(folder, step, content=b"weights"):
    place = folder / f"checkpoint-{step}"
    place.mkdir(exist_ok=True)
    (place / "model").write_bytes(content)


def test_what_the_program_wrote_is_committed_when_it_ends(store, folder):
    assert run(store, options(folder, 'mkdir "$0"/checkpoint-7; echo x > "$0"/checkpoint-7/model; exit 3')) == 3
    assert list_commits(store, LINEAGE) == []  # it may have died while it wrote
    assert run(store, options(folder, 'echo y > "$0"/checkpoint-7/model')) == 0
    assert list_commits(store, LINEAGE) == [ref(1, 7)]


def test_the_step_of_a_commit_is_reported(store, folder):
    clock = Clock()
    checkpoints = keeper(store, clock=clock)
    clock.advance(1.0)
    write(folder, 7)
    saving = BackgroundCommit(checkpoints, options(folder), time.monotonic)
    saving.start(find_checkpoints(scan_folder(folder, ()), options(folder))[0], 7, "due", lambda one: None)
    until(lambda: read_training_progress(store, LINEAGE) is not None)
    assert (reported := read_training_progress(store, LINEAGE)) is not None
    assert (reported.global_step, reported.checkpoint_step) == (7, 7)


def test_storage_that_fails_at_the_end_leaves_the_exit_code_alone(store, folder):
    store.refuses = lambda operation, key: operation == "create" and "shards/" in key
    assert run(store, options(folder, 'mkdir "$0"/checkpoint-7; echo x > "$0"/checkpoint-7/model')) == 0
    assert list_commits(store, LINEAGE) == []
    assert events(store) == ["checkpoint.save_failed"]


def test_sigterm_before_the_program_was_started_starts_none(store, folder):
    write(folder, 7)
    found = find_checkpoints(scan_folder(folder, ()), options(folder))
    saving = BackgroundCommit(keeper(store), options(folder), time.monotonic)
    saving.start(found[0], 7, "due", lambda one: None)
    until(lambda: not saving.is_busy)
    write_claim(store, claim_of(2, ref(1, 7)))
    marker = folder / "started"
    given = options(folder, 'touch "$0"/started')
    assert run(store, given, NoSignals(is_stop_requested=True), attempt=2) == 75
    assert not marker.exists()
    assert "checkpoint.preempted" in events(store)


def test_a_checkpoint_that_gets_another_file_while_it_is_stored_is_not_committed(store, folder, capsys):
    write(folder, 7)
    (found,) = find_checkpoints(scan_folder(folder, ()), options(folder))
    real = store.create

    def create(key, data, **others):
        write(folder, 7, b"of another size")
        real(key, data, **others)

    store.create = create
    saving = BackgroundCommit(keeper(store), options(folder), time.monotonic)
    settled = threading.Event()
    saving.start(found, 7, "due", lambda one: settled.set())
    until(lambda: not saving.is_busy)
    assert list_commits(store, LINEAGE) == []
    assert not settled.is_set()
    assert "it is stored once it is complete again" in capsys.readouterr().err


def test_a_step_that_is_not_above_the_newest_is_left_out(store, folder, capsys):
    script = 'mkdir "$0"/checkpoint-0; echo x > "$0"/checkpoint-0/model; sleep 0.3'
    assert run(store, options(folder, script, quiet_seconds=0.05)) == 0
    assert list_commits(store, LINEAGE) == []
    assert capsys.readouterr().err.count("checkpoint-0 is of step 0, and is not committed") == 1


def test_a_name_without_a_step_is_told(store, folder, capsys):
    given = options(folder, 'mkdir "$0"/checkpoint-x; echo x > "$0"/checkpoint-x/model')
    assert run(store, given) == 0
    assert "checkpoint-x has no global step in its name" in capsys.readouterr().err


def test_what_was_there_before_is_none_of_the_programs_doing(store, folder):
    write(folder, 7)
    assert run(store, options(folder)) == 0
    assert list_commits(store, LINEAGE) == []


def test_a_program_that_cannot_be_started_is_told(store, folder, capsys):
    given = ExecOptions(folder, ("no-such-program-anywhere",))
    assert run(store, given) == 127
    assert "cannot be started" in capsys.readouterr().err
