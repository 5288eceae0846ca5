"""The life of a wrapped program where storage, the folder or the moment are against it.

| what happens | promise |
|---|---|
| storage fails at the last commit | told and counted; the exit code stays that of the program |
| SIGTERM before the program was started | it is not started, exit 75 |
| the checkpoint changes between reading and commit | it is not committed |
| a step that is not above the newest one, or too large | it is counted, and said once |
| a file that is never closed | it is named within half a minute, in the log and in the progress of the run |
| a program that writes nothing to the folder | the progress says so, and the log at its end |
| files of an attempt that committed nothing | set aside, but not those from before |
"""

import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from support.builders.lineage import LINEAGE, RUN, claim_of, ref, write_claim
from support.fakes.memory_store import MemoryStore
from support.processes.polling import until
from support.stories.sessions import Clock

from tiphys.checkpoint.exec.options import ExecOptions
from tiphys.checkpoint.exec.save import BackgroundCommit
from tiphys.checkpoint.exec.store import FileCheckpointStore
from tiphys.checkpoint.exec.supervise import ProgramRunner
from tiphys.checkpoint.exec.watch import FolderWatch
from tiphys.checkpoint.lifecycle.preemption import StopSignal
from tiphys.checkpoint.settings import CheckpointSettings, IntervalBounds, SaveInterval
from tiphys.checkpoint.telemetry.metrics import NoMetrics
from tiphys.lineage.select import list_commits
from tiphys.lineage.training_progress import describe_training_progress, read_training_progress
from tiphys.records.base import utc_now
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


class StopAfter(NoSignals):
    """One SIGTERM, once ``path`` exists."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def wait_next(self, seconds):
        super().wait_next(seconds)
        if self.path.exists():
            self.path.unlink()
            return signal.SIGTERM
        return None


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
    resume_from = next(iter(list_commits(store, LINEAGE)), None) if attempt > 1 else None
    return FileCheckpointStore(
        CheckpointSettings(**{**vars(SETTINGS), "attempt": attempt, "resume_from": resume_from}),
        {},
        run_store=store,
        store=store,
        metrics=NoMetrics(),
        stop_signal=StopSignal(time.monotonic),
        clock=clock,
    )


def run(store, given, signals=None, attempt=1, grace_seconds=60.0):
    stop_signal = StopSignal(time.monotonic)
    runner = ProgramRunner(
        given, keeper(store, attempt), signals or NoSignals(), stop_signal, grace_seconds=grace_seconds
    )
    return runner.run(os.environ)


def events(store):
    return [event.name for event in read_events(store, RUN)]


def shown(store):
    """What `tiphys get`, the page and Argo show of the newest report."""
    until(lambda: (reported := read_training_progress(store, LINEAGE)) is not None and reported.hindrance)
    return describe_training_progress(read_training_progress(store, LINEAGE), utc_now())


def write(folder, step, content=b"weights"):
    place = folder / f"checkpoint-{step}"
    place.mkdir(exist_ok=True)
    (place / "model").write_bytes(content)


def selection(folder):
    """The checkpoint in ``folder``, and what commits it."""
    watch = FolderWatch(options(folder), time.monotonic)
    watch.scan(time.time_ns())
    return watch, watch.select(0.0, has_ended=True, has_finished=True)


def saver(checkpoints, folder, watch):
    return BackgroundCommit(checkpoints, folder, watch, time.monotonic)


def test_a_program_that_ends_well_has_its_last_files_committed(store, folder):
    assert run(store, options(folder, 'mkdir "$0"/checkpoint-7; echo x > "$0"/checkpoint-7/model; exit 3')) == 3
    assert list_commits(store, LINEAGE) == []  # it may have died while it wrote
    assert run(store, options(folder, 'echo y > "$0"/checkpoint-7/model')) == 0
    assert list_commits(store, LINEAGE) == [ref(1, 7)]


def test_the_step_of_a_commit_is_reported(store, folder):
    clock = Clock()
    checkpoints = keeper(store, clock=clock)
    clock.advance(1.0)
    write(folder, 7)
    watch, found = selection(folder)
    saver(checkpoints, folder, watch).start(found, 7, "due")
    until(lambda: read_training_progress(store, LINEAGE) is not None)
    assert (reported := read_training_progress(store, LINEAGE)) is not None
    assert (reported.global_step, reported.checkpoint_step) == (7, 7)


def test_storage_that_fails_at_the_end_leaves_the_exit_code_alone(store, folder):
    store.refuses = lambda operation, key: operation == "create" and "shards/" in key
    assert run(store, options(folder, 'mkdir "$0"/checkpoint-7; echo x > "$0"/checkpoint-7/model')) == 0
    assert list_commits(store, LINEAGE) == []
    assert events(store) == ["checkpoint.save_failed"]
    assert "no commit yet, because step 7 could not be saved" in shown(store)


def test_checkpoint_that_is_not_stored_within_the_grace_period_is_said(store, folder, capsys):
    answers = threading.Event()
    store.refuses = lambda operation, key: operation == "create" and "shards/" in key and answers.wait(120) is None
    script = 'mkdir "$0"/checkpoint-7; echo x > "$0"/checkpoint-7/model; touch "$0".saved; exec sleep 600'
    try:
        stop = StopAfter(folder.with_name(f"{folder.name}.saved"))
        assert run(store, options(folder, script, quiet_seconds=0.05), stop, grace_seconds=1.5) == 75
    finally:
        answers.set()
    assert capsys.readouterr().err.count("the grace period ended before the last checkpoint was stored") == 1


def test_sigterm_before_the_program_was_started_starts_none(store, folder):
    write(folder, 7)
    watch, found = selection(folder)
    saving = saver(keeper(store), folder, watch)
    saving.start(found, 7, "due")
    until(lambda: not saving.is_busy)
    write_claim(store, claim_of(2, ref(1, 7)))
    marker = folder / "started"
    given = options(folder, 'touch "$0"/started')
    assert run(store, given, NoSignals(is_stop_requested=True), attempt=2) == 75
    assert not marker.exists()
    assert "checkpoint.preempted" in events(store)


def store_during(change, store, folder, watch, found):
    """Store a selection of step 7, with a change of the folder right before each write to the store."""
    real, alone = store.create, threading.Lock()  # shards are written by several threads

    def create(key, data, **others):
        with alone:
            change()
        real(key, data, **others)

    store.create = create
    saving = saver(keeper(store), folder, watch)
    saving.start(found, 7, "due")
    until(lambda: not saving.is_busy)
    store.create = real


def test_a_checkpoint_that_changes_while_it_is_stored_is_not_committed(store, folder, capsys):
    write(folder, 7)
    watch, found = selection(folder)
    settled = threading.Event()
    watch.settle = lambda entries: settled.set()
    store_during(lambda: write(folder, 7, b"of another size"), store, folder, watch, found)
    assert list_commits(store, LINEAGE) == []
    assert not settled.is_set()
    assert "it is stored once it is complete again" in capsys.readouterr().err


def test_small_files_beside_a_checkpoint_may_change_while_it_is_stored(store, folder):
    write(folder, 7)
    (folder / "metrics.json").write_text("7")
    (folder / "latest").symlink_to("checkpoint-7")
    watch, found = selection(folder)
    assert {"metrics.json", "latest"} <= set(found.loose)

    def change():
        (folder / "metrics.json").write_text("some more")
        (folder / "latest").unlink(missing_ok=True)
        (folder / "latest").symlink_to("checkpoint-8")

    store_during(change, store, folder, watch, found)
    assert list_commits(store, LINEAGE) == [ref(1, 7)]
    write_claim(store, claim_of(2))
    assert run(store, options(folder / "again", 'cat "$0"/metrics.json > "$0".seen'), attempt=2) == 0
    assert (folder / "again.seen").read_text() == "7"
    assert (folder / "again" / "latest").readlink() == Path("checkpoint-7")


def test_a_file_that_appears_beside_a_checkpoint_does_not_refuse_its_commit(store, folder):
    write(folder, 7)
    watch, found = selection(folder)

    def change():
        (folder / "checkpoint-7" / "is_best").touch()
        write(folder, 8)

    store_during(change, store, folder, watch, found)
    assert list_commits(store, LINEAGE) == [ref(1, 7)]


def test_step_zero_is_committed(store, folder):
    assert run(store, options(folder, 'mkdir "$0"/checkpoint-0; echo x > "$0"/checkpoint-0/model')) == 0
    assert list_commits(store, LINEAGE) == [ref(1, 0)]


def test_a_number_that_no_key_can_hold_is_counted_and_said(store, folder, capsys):
    script = 'mkdir "$0"/checkpoint-20260101120000123456; echo x > "$0"/checkpoint-20260101120000123456/model'
    assert run(store, options(folder, script)) == 0
    assert list_commits(store, LINEAGE) == [ref(1, 1)]
    assert "is above 999999999999999, so it is committed as step 1" in capsys.readouterr().err


def test_a_checkpoint_of_a_committed_step_that_changes_is_committed_as_the_next_count(store, folder, capsys):
    write(folder, 7)
    watch, found = selection(folder)
    checkpoints = keeper(store)
    saving = saver(checkpoints, folder, watch)
    saving.start(found, 7, "due")
    until(lambda: not saving.is_busy)
    write_claim(store, claim_of(2, ref(1, 7)))
    assert run(store, options(folder, 'echo more > "$0"/checkpoint-7/optimizer'), attempt=2) == 0
    assert list_commits(store, LINEAGE)[0] == ref(2, 8)
    assert "is not above the newest commit's, so it is committed as step 8" in capsys.readouterr().err


def test_a_name_without_a_step_is_counted(store, folder):
    assert run(store, options(folder, 'mkdir "$0"/checkpoint-x; echo x > "$0"/checkpoint-x/model')) == 0
    assert list_commits(store, LINEAGE) == [ref(1, 1)]


def test_a_program_that_never_closes_its_file_is_reported_by_name(store, folder, capsys):
    watch = FolderWatch(options(folder, checkpoint="", step_from=None, quiet_seconds=5.0), clock := Clock())
    watch.begin(())
    script = 'exec 9> "$0"/model; echo x >&9; echo open; read line'
    with subprocess.Popen(["sh", "-c", script, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout.readline() == b"open\n"
        for seconds in (1.0, 30.0, 30.0, 160.0, 0.0):
            watch.scan()
            assert watch.select(clock()) is None
            why = watch.report_hindrance()
            clock.advance(seconds)
        program.communicate()
    assert why == f"model is held open for writing by process {program.pid} (sh)"
    assert capsys.readouterr().err.count(f"could not be committed for 31 s: {why}") == 1
    keeper(store).report_hindrance(why)
    assert shown(store) == f"no commit yet, because {why}"


def test_a_program_that_writes_nothing_to_the_folder_is_reported(store, folder, capsys, monkeypatch):
    monkeypatch.setattr("tiphys.checkpoint.exec.watch._FIRST_WORD_SECONDS", 0.1)
    watch = FolderWatch(options(folder), clock := Clock())
    watch.scan()
    assert (watch.select(clock()), watch.report_hindrance()) == (None, "")
    clock.advance(1.0)
    assert watch.report_hindrance() == f"the program has written no checkpoint to {folder}"
    assert capsys.readouterr().err == ""  # a checkpoint may be due in an hour
    assert run(store, options(folder)) == 0
    assert capsys.readouterr().err.count("so none was committed; check --dir") == 1
    assert shown(store) == f"no commit yet, because the program has written no checkpoint to {folder}"


def test_settings_alone_are_no_checkpoint_from_which_an_attempt_resumes(store, folder, capsys):
    given = options(folder, 'echo {} > "$0"/config.json; sleep 0.2; exit 1', checkpoint="", step_from=None)
    assert run(store, given) == 1
    assert list_commits(store, LINEAGE) == []
    assert capsys.readouterr().err.count("has written no checkpoint to") == 1


def test_files_of_an_attempt_that_committed_nothing_are_set_aside(store, folder, capsys):
    (folder / "pretrained.pt").write_text("of the image")
    given = options(folder, 'echo torn > "$0"/last.pt; kill -9 $$', checkpoint="", step_from=None)
    assert run(store, given) == 137
    write_claim(store, claim_of(2))
    seen = options(folder, 'ls "$0" > "$0".seen', checkpoint="", step_from=None)
    assert run(store, seen, attempt=2) == 0
    assert folder.with_name("ckpt.seen").read_text().split() == ["pretrained.pt"]
    assert "an attempt that committed nothing left 1 files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("written", "is_said"),
    [
        ("epoch=0-step=4.ckpt", True),
        ("epoch=0-step=4.ckpt last.ckpt", False),
        ("epoch=0-step=4.ckpt last-v1.ckpt", False),
        ("step_4.pt", False),
        ("run.ü/epoch=0-step=4.ckpt", True),
        ("run.ü/epoch=0-step=4.ckpt run.ü/last.ckpt", False),
    ],
)
def test_restored_checkpoint_of_lightning_without_last_ckpt_is_said(store, folder, capsys, written, is_said):
    script = f"for f in {written}; do mkdir -p $(dirname $0/$f); echo weights > $0/$f; done"
    as_the_library = {"checkpoint": "", "step_from": None}
    assert run(store, options(folder, script, **as_the_library)) == 0
    [commit] = list_commits(store, LINEAGE)
    write_claim(store, claim_of(2, commit))
    assert run(store, options(folder, "true", **as_the_library), attempt=2) == 0
    assert ("has no last*.ckpt" in capsys.readouterr().err) is is_said


@pytest.mark.parametrize(
    ("written", "is_said"),
    [
        ("touch -d @10 $0/last.ckpt; touch -d @11 $0/épo=1-step=16.ckpt", True),
        ("touch -d @10 $0/last.ckpt; touch -d @9.5 $0/last-v1.ckpt; touch -d @11 $0/step=16.ckpt", True),
        ("touch -d @11 $0/step=16.ckpt; touch -d @11.5 $0/last.ckpt", False),
        ("touch -d @11 $0/step=16.ckpt $0/last.ckpt", False),
        ("touch -d @11 $0/step=16.ckpt; ln -s step=16.ckpt $0/last.ckpt", False),
    ],
)
def test_last_ckpt_that_is_older_than_the_newest_step_is_said(store, folder, capsys, written, is_said):
    as_the_library = {"checkpoint": "", "step_from": None}
    assert run(store, options(folder, written, **as_the_library)) == 0
    [commit] = list_commits(store, LINEAGE)
    write_claim(store, claim_of(2, commit))
    assert run(store, options(folder, "true", **as_the_library), attempt=2) == 0
    said = "the steps between are lost to a program that resumes from the latter"
    assert (said in capsys.readouterr().err) is is_said


def test_a_file_older_than_the_program_is_not_committed(store, folder):
    write(folder, 7)
    assert run(store, options(folder)) == 0
    assert list_commits(store, LINEAGE) == []


def test_a_program_that_cannot_be_started_is_reported(store, folder, capsys):
    given = ExecOptions(folder, ("no-such-program-anywhere",))
    assert run(store, given) == 127
    assert "cannot be started" in capsys.readouterr().err
