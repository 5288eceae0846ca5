"""Real processes, real signals: what is left when a run is stopped, killed or starved, and what resume makes of it."""

import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.processes.forking import ForkedProcess
from support.processes.process import lives
from support.stories import small_pipeline
from tiphys_controller import start_run

from hera_pipelines import load_pipeline
from hera_pipelines.local.nodes import NodePhase
from hera_pipelines.local.run_session import LocalSession
from tiphys.lineage.run_history import RunHistory
from tiphys.records import AttemptEnd, AttemptEndOutcome
from tiphys.store import DirectoryStore, read_events, read_submissions

from .conftest import Command, begin, invoke, snapshot

PATIENCE_SECONDS = 120
MODULE_BESIDE = """
from hera_pipelines import Pipeline, Step

with Pipeline("own") as pipeline:
    Step(name="only", image="i", command=["python", "beside.py"])()
"""


def wait_for(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not happened():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.02)


def manifests(store: Path) -> list[Path]:
    return list((store / "data" / "lineages").rglob("manifests/*.json"))


def ends(store: Path, run: str, step: str) -> list[AttemptEnd | None]:
    return [attempt.end for attempt in RunHistory(DirectoryStore(store), run).attempts[step]]


def model(store: Path, run: str) -> bytes:
    done = next(end for end in ends(store, run, "fit") if end and end.outcome is AttemptEndOutcome.DONE)
    return DirectoryStore(store).read(done.outputs[0].key)


def started(folder: Path, *arguments: str) -> ForkedProcess:
    """`tiphys run` of the tiny pipeline, once it has saved something; it goes no further than step 10 until let go."""
    file = small_pipeline.write(folder / "code")
    small_pipeline.hold(folder / "code")
    process = begin(["run", file, "--run", "r", *arguments], folder)
    wait_for(lambda: bool(manifests(folder / ".tiphys/store")), "the first checkpoint")
    return process


def test_a_killed_engine_is_resumed_from_storage_alone(tmp_path: Path) -> None:
    store = tmp_path / ".tiphys/store"
    with started(tmp_path) as engine:
        trainer = small_pipeline.last_process(tmp_path / "code")
        engine.kill()
    wait_for(lambda: not lives(trainer), "the trainer dies with its engine")
    subprocess.run(["rm", "-r", tmp_path / ".tiphys/state"], check=True)
    (tmp_path / "code/ran.txt").unlink()
    small_pipeline.let_go(tmp_path / "code")

    answer = invoke(["resume", "r", "--code", "code"], tmp_path)

    assert answer.code == 0, answer.err
    assert small_pipeline.ran(tmp_path / "code") == ["fit", "report"]
    assert answer.out.splitlines()[1].split()[:3] == ["prepare", "step", "skip"]
    claims = [attempt.claim for attempt in RunHistory(DirectoryStore(store), "r").attempts["fit"]]
    assert claims[1].starts_from is not None
    assert (claims[1].submission, len(read_submissions(DirectoryStore(store), "r"))) == (2, 2)
    invoke(["run", tmp_path / "code/tiny.py", "--run", "undisturbed"], tmp_path)
    assert model(store, "r") == model(store, "undisturbed")


@pytest.mark.heavy
@pytest.mark.parametrize("has_state", [True, False], ids=["state", "no state"])
def test_the_report_counts_a_killed_run_until_its_last_sign_of_life(tmp_path: Path, has_state: bool) -> None:
    with started(tmp_path) as engine:
        trainer = small_pipeline.last_process(tmp_path / "code")
        running = invoke(["report", "r"], tmp_path)
        engine.kill()
    assert "interrupted" not in running.out + running.err
    wait_for(lambda: not lives(trainer), "the trainer dies with its engine")
    if not has_state:
        shutil.rmtree(tmp_path / ".tiphys/state")

    def report() -> tuple[float, str]:
        answer = invoke(["report", "r", "-o", "json"], tmp_path)
        [run] = json.loads(answer.out)["runs"]
        assert run["costs"]["interrupted"]["failures"] == 1
        return run["gpu_seconds"]["held"], answer.err

    held, said = report()
    time.sleep(1)
    assert report()[0] == held
    assert "run r: its engine is gone and recorded no end; what was open counts until its last sign of life, " in said


@pytest.mark.heavy
def test_killed_trainer_goes_on_in_its_pod(tmp_path: Path) -> None:
    with started(tmp_path) as engine:
        # The launcher hears of a commit when the next one begins at the latest.
        wait_for(lambda: len(manifests(tmp_path / ".tiphys/store")) > 1, "the second checkpoint")
        os.kill(small_pipeline.last_process(tmp_path / "code"), signal.SIGKILL)
        small_pipeline.let_go(tmp_path / "code")
        _, err = engine.communicate(timeout=PATIENCE_SECONDS)
    assert engine.returncode == 0, err
    [end] = ends(tmp_path / ".tiphys/store", "r", "fit")
    assert end and (end.outcome, end.incarnations) == (AttemptEndOutcome.DONE, 2)
    assert "Backoff" not in err


@pytest.mark.heavy
def test_ctrl_c_lets_the_training_save_and_ends_with_130(tmp_path: Path) -> None:
    with started(tmp_path, "-p", "steps=1000") as engine:
        engine.send_signal(signal.SIGINT)
        out, err = engine.communicate(timeout=PATIENCE_SECONDS)
    assert (engine.returncode, out) == (130, "r\n")
    assert err.splitlines()[-1].startswith(
        "tiphys: run r was stopped; finished steps and checkpoints are kept; continue with `tiphys resume r`"
    )
    # Which save it was depends on what the signal met: one that was just being made counts as well.
    [log] = (tmp_path / ".tiphys/state/logs").glob("r-fit-run-*.log")
    [shown] = re.findall(
        r"stopped by SIGTERM .* the newest checkpoint is checkpoint (\d+) of attempt 1", log.read_text()
    )
    saved = [json.loads(path.read_text())["global_step"] for path in manifests(tmp_path / ".tiphys/store")]
    assert max(saved) == int(shown)
    assert "Traceback" not in err


def test_a_failing_step_ends_with_1_says_which_and_what_a_resume_would_do(tiphys: Command, tmp_path: Path) -> None:
    answer = tiphys("run", small_pipeline.write(tmp_path / "code"), "--run", "r", "-p", "fail=yes", "--speed", "50")
    assert (answer.code, answer.out) == (1, "r\n")
    assert answer.error.startswith("tiphys: run r failed: report failed in attempt 1 ")
    assert "the program exited with 1" in answer.error
    assert "tiphys resume r" in answer.error
    assert "report | told to fail" in answer.err.splitlines()
    assert "prepare" not in answer.error
    before = snapshot(tmp_path)
    planned = tiphys("resume", "r", "--dry-run")
    assert planned.code == 0
    assert [line.split()[2] for line in planned.out.splitlines()[1:]] == ["skip", "skip", "run"]
    assert snapshot(tmp_path) == before, "a dry run writes nothing"


def test_a_resume_from_anywhere_finds_the_modules_of_the_run(tiphys: Command, tmp_path: Path) -> None:
    file = tmp_path / "code" / "own.py"
    file.parent.mkdir()
    file.write_text(MODULE_BESIDE)
    first = tiphys("run", file, "--run", "r", "--store", "kept", "--speed", "50")
    assert first.code == 1
    [shown] = re.findall(r"and `tiphys get (.*?)` shows the details", first.error)
    assert shown == f"r --store {(tmp_path / 'kept').as_uri()}"
    (file.parent / "beside.py").write_text("print('repaired')\n")
    shutil.rmtree(tmp_path / ".tiphys")
    assert tiphys("resume", *shown.split()).code == 0


def test_the_log_of_the_plugin_does_not_meet_the_data(tiphys: Command, tmp_path: Path) -> None:
    file = small_pipeline.write(tmp_path / "code")
    file.write_text(f"import structlog\nstructlog.get_logger().error('an outage')\n{file.read_text()}")
    silent, shown = tiphys("compile", file), tiphys("compile", file, "--verbose")
    assert "an outage" not in silent.out + silent.err + shown.out
    assert "an outage" in shown.err


@pytest.mark.heavy
def test_a_run_that_is_alive_is_not_resumed(tmp_path: Path) -> None:
    with started(tmp_path, "-p", "steps=1000") as engine:
        answer = invoke(["resume", "r"], tmp_path)
        engine.send_signal(signal.SIGKILL)
    assert answer.code == 4
    assert "is still running" in answer.error
    assert "--force" in answer.error


@pytest.fixture
def no_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python replaces a byte-code file even if it could write only a part, and then no process can import it."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")


def limited(file_bytes: int) -> Callable[[], None]:
    """Files may not grow beyond this: what a full disk looks like to one process and its children."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

    return limit


@pytest.mark.heavy
@pytest.mark.usefixtures("no_bytecode")
def test_a_disk_that_is_full_while_saving_does_not_end_the_training(tmp_path: Path) -> None:
    file = small_pipeline.write(tmp_path / "code")
    programs = file.with_name("tiny_programs.py")
    impatient = "from tiphys.checkpoint.save import saver\nsaver.PAUSES_SECONDS = (0.1, 0.2)\n"
    # The plan of a pod's mounts grows with the entries of /tmp, so a shard has to be larger than that by far.
    programs.write_text(impatient + programs.read_text().replace("np.full(5000,", "np.full(50_000,"))
    answer = invoke(["run", file, "--run", "r", "-p", "steps=5"], tmp_path, preexec_fn=limited(399_900))
    store = DirectoryStore(tmp_path / ".tiphys/store")
    failed = [event for event in read_events(store, "r") if event.name == "checkpoint.save_failed"]
    assert failed, answer.err
    assert manifests(tmp_path / ".tiphys/store") == []
    for shard in store.list("data/lineages/"):
        assert hashlib.sha256(store.read(shard.key)).hexdigest().startswith(re.split(r"[-.]", shard.key)[-2])


@pytest.mark.heavy
@pytest.mark.usefixtures("no_bytecode")
def test_a_disk_that_is_full_from_the_beginning_leaves_nothing_behind(tmp_path: Path) -> None:
    file = small_pipeline.write(tmp_path / "code")
    answer = invoke(["run", file, "--run", "r"], tmp_path, preexec_fn=limited(500))
    assert (answer.code, answer.out) == (75, "")
    assert str(tmp_path / ".tiphys") in answer.error
    assert snapshot(tmp_path / ".tiphys/store") == {}


def test_an_engine_with_a_wrong_token_gets_no_step_admitted(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    file = small_pipeline.write(tmp_path / "code")
    file.write_text(file.read_text().replace('name="prepare",', 'name="prepare", gate=True,'))
    manifest = load_pipeline(file).compile(store=store.url)
    with LocalSession(store, tmp_path / "state") as session:
        session.engine._plugin = session.engine._plugin._replace(token="stolen")  # what a stranger on this host has
        started = start_run(store, session, manifest, "r")
        before = snapshot(tmp_path / "store")
        phase = session.run(started.workflow_name)
    assert phase.finished
    assert phase is not NodePhase.SUCCEEDED
    assert small_pipeline.ran(tmp_path / "code") == []
    assert snapshot(tmp_path / "store") == before


@pytest.mark.parametrize("command", [["run", "code/tiny.py"], ["resume", "r"]])
def test_a_state_folder_that_is_a_file_is_refused(command: list[str], tiphys: Command, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    manifest = load_pipeline(small_pipeline.write(tmp_path / "code")).compile(store=store.url)
    with LocalSession(store, tmp_path / "state") as session:
        start_run(store, session, manifest, "r")
    (tmp_path / "file").write_text("precious")
    answer = tiphys(*command, "--state", "file", "--store", "store")
    assert (answer.code, answer.out) == (2, "")
    assert "cannot keep the engine's state in" in answer.error
    assert "--state" in answer.error
    assert (tmp_path / "file").read_text() == "precious"
