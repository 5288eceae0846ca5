"""Compiled pipelines on this machine: engine, plugin, ledger and store as people use them.

What a training meets and how it goes on is in `test_whole_run.py` and `cli/test_survival.py`.
"""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hera.workflows import DAG, Artifact, Parameter
from hera.workflows.models import ValueFrom
from tiphys_controller import resume_run, start_run
from tiphys_plugin import DirectoryCluster

from hera_pipelines import Checkpoints, Pipeline, Step, Train
from hera_pipelines.local.nodes import NodeChange
from hera_pipelines.local.run_session import LocalSession
from tiphys.errors import ConflictError, NotFoundError, StoreError
from tiphys.records import utc_now
from tiphys.store import DirectoryStore, read_step_attempts

PREP = """
import os, pathlib
folder = pathlib.Path(os.environ["TIPHYS_OUTPUT_DATA"])
(folder / "deep").mkdir(parents=True)
(folder / "deep" / "a.txt").write_text("rows")
"""

# Saves one checkpoint per step; fails or goes on as told in `plan`, once for each attempt.
TRAIN = """
import os, pathlib, sys, time
from tiphys import checkpoint

print("data:", pathlib.Path(os.environ["TIPHYS_INPUT_DATA"], "deep/a.txt").read_text(), flush=True)
plan = pathlib.Path("plan").read_text().split()
attempt = int(os.environ["TIPHYS_ATTEMPT"])
fate = plan[attempt - 1] if attempt <= len(plan) else "finish"
with checkpoint.session() as session:
    state = session.restore(default={"step": 0})
    print("from:", state["step"], flush=True)
    for step in range(state["step"] + 1, 7 if fate != "hang" else 10**6):
        session.step(step, {"step": step})
        if fate == "1":
            sys.exit("diverged")
        if fate == "hang":
            print("hanging", flush=True)
            time.sleep(0.05)
pathlib.Path(os.environ["TIPHYS_OUTPUT_LOSS"]).write_text("0.25")
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "prep.py").write_text(PREP)
    (folder / "train.py").write_text(TRAIN)
    (folder / "plan").write_text("")
    return folder


def pipeline() -> dict[str, Any]:
    with Pipeline("digits", store="s3://ml-runs", entrypoint="main") as made:
        prep = Step(
            name="prep", image="i", command=["python", "prep.py"], outputs=[Artifact(name="data", path="/tmp/data")]
        )
        fit = Train(
            name="fit",
            image="i",
            command=["python", "train.py"],
            inputs=[Artifact(name="data", path="/tmp/data")],
            outputs=[Parameter(name="loss", value_from=ValueFrom(path="/tmp/loss"))],
            checkpoints=Checkpoints(every="1 step"),
        )
        with DAG(name="main"):
            data = prep()
            data >> fit(arguments=[data.get_artifact("data")])
    manifest: dict[str, Any] = made.to_dict()
    return manifest


class Desk:
    """One state folder and one store, and what was told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = DirectoryStore(folder / "store")
        self.changes: list[NodeChange] = []

    def session(self) -> LocalSession:
        return LocalSession(
            self.store,
            self.folder / "state",
            speed=50.0,
            observer=self.changes.append,
            code=self.folder / "code",
        )

    def start(self) -> str:
        with self.session() as session:
            return str(session.run(start_run(self.store, session, pipeline(), "night").workflow_name))

    def resume(self) -> str:
        with self.session() as session:
            return str(session.run(resume_run(self.store, session, "night").workflow_name))

    def outcomes(self, step: str, run: str = "night") -> list[str]:
        ended = (attempt.end for attempt in read_step_attempts(self.store, run, step))
        return [f"{end.outcome}" if end.cause is None else f"{end.outcome}:{end.cause}" for end in ended if end]

    def said(self, word: str) -> list[str]:
        logs = sorted((self.folder / "state" / "logs").glob("*-fit-run-*.log"), key=lambda path: path.stat().st_mtime)
        lines = (line for log in logs for line in log.read_text().splitlines())
        return [line.removeprefix(word) for line in lines if line.startswith(word)]


@pytest.fixture
def desk(tmp_path: Path, code: Path) -> Iterator[Desk]:
    yield Desk(tmp_path)


def test_a_pipeline_runs_to_its_end_with_a_folder_as_output(desk: Desk) -> None:
    assert desk.start() == "Succeeded"
    assert desk.outcomes("prep") == desk.outcomes("fit") == ["done"]
    assert desk.said("data: ") == ["rows"]
    [end] = (attempt.end for attempt in read_step_attempts(desk.store, "night", "fit"))
    assert end is not None
    assert [(output.name, output.value) for output in end.outputs] == [("loss", "0.25")]


def test_a_broken_program_ends_its_step_after_one_attempt(desk: Desk, code: Path) -> None:
    (code / "plan").write_text("1 1 1")
    assert desk.start() == "Failed"
    assert desk.outcomes("fit") == ["failed:user_error"]
    [ended] = read_step_attempts(desk.store, "night", "fit")
    assert ended.end is not None
    assert ended.end.message == "the program exited with 1 (SystemExit: diverged)"
    verdict = next(
        change.message for change in desk.changes if change.node == "night.fit(0).conclude" and change.message
    )
    assert "the program exited with 1 (SystemExit: diverged)" in verdict
    assert verdict.endswith(
        "When the cause is gone: `tiphys resume night`, or `tiphys resume night FILE` with a changed pipeline file"
    )
    with desk.session() as session:
        live = session.find("default", "night")
    assert live is not None
    assert (live.phase, live.running) == ("Failed", False)


def test_a_name_is_taken_once_and_a_workflow_runs_once(desk: Desk) -> None:
    assert desk.start() == "Succeeded"
    with desk.session() as session:
        with pytest.raises(ConflictError, match="a Workflow night exists"):
            session.create({**pipeline(), "metadata": {"name": "night"}})
        with pytest.raises(ConflictError, match="was started before and is Succeeded"):
            session.run("night")
        with pytest.raises(NotFoundError, match="no Workflow other"):
            session.run("other")
        assert session.find("default", "other") is None


def test_a_state_folder_that_cannot_be_written_any_more_is_named(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(DirectoryCluster, "write_pod", full)
    with pytest.raises(StoreError, match=r"cannot keep its state in .*: No space left .* resume the run"):
        desk.start()


def test_a_run_says_that_it_runs_once_others_find_it_running(desk: Desk) -> None:
    seen = []
    with desk.session() as session:
        name = start_run(desk.store, session, pipeline(), "night").workflow_name
        phase = session.run(name, lambda: seen.append((desk.session().find("default", name), list(desk.changes))))
    [(live, changes)] = seen
    assert live is not None
    assert (live.phase, live.running, changes, str(phase)) == ("Running", True, [], "Succeeded")


def test_a_session_that_is_not_open_can_look_but_not_run(desk: Desk) -> None:
    assert desk.session().find("default", "night") is None
    with pytest.raises(ConflictError, match="not open"):
        desk.session().run("night")


def test_engines_of_different_folders_are_different_clusters(desk: Desk, tmp_path: Path) -> None:
    # What runs in one of them cannot be seen from the other, though they may share storage.
    here = desk.session().cluster
    there = LocalSession(desk.store, tmp_path / "elsewhere").cluster

    assert here.startswith("local:")
    assert here == desk.session().cluster
    assert here != there


ENGINE = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
import importlib.util
spec = importlib.util.spec_from_file_location("scenario", {file!r})
scenario = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scenario)
print(scenario.Desk(Path({folder!r})).start())
"""


def started(folder: Path, **streams: Any) -> subprocess.Popen[bytes]:
    """An engine in a process of its own."""
    source = ENGINE.format(here=str(Path(__file__).parents[1]), file=__file__, folder=str(folder))
    return subprocess.Popen([sys.executable, "-c", source], **{"stdout": subprocess.PIPE, **streams})


@pytest.mark.heavy
def test_closed_terminal_stops_the_workflow_and_the_program_saves(desk: Desk, code: Path) -> None:
    (code / "plan").write_text("hang")
    screen, terminal = os.openpty()
    with started(desk.folder, stdin=terminal, stdout=terminal, stderr=terminal) as engine:
        os.close(terminal)
        _until(lambda: desk.said("hanging"))
        os.close(screen)
        for _ in range(3):  # the kernel and the shell each send it
            engine.send_signal(signal.SIGHUP)
    assert engine.returncode == 0
    [stopped] = (attempt.end for attempt in read_step_attempts(desk.store, "night", "fit"))
    assert stopped is not None
    assert (stopped.stopped, stopped.message, stopped.progress) == (True, "stopped by a person", True)


def test_a_killed_engine_takes_the_program_along_and_the_next_submission_goes_on(desk: Desk, code: Path) -> None:
    (code / "plan").write_text("hang")
    with started(desk.folder) as engine:
        _until(lambda: desk.said("hanging"))
        alive = desk.session().find("default", "night")
        engine.kill()
    died_at = utc_now()
    _until(lambda: not _programs(desk.folder))
    dead = desk.session().find("default", "night")
    assert alive is not None
    assert dead is not None
    assert (alive.running, dead.running) == (True, False)
    os.utime(desk.folder / "state" / "locks" / "night.lock", (died_at.timestamp() + 3600,) * 2)
    (code / "plan").write_text("")
    assert desk.resume() == "Succeeded"
    assert desk.outcomes("fit") == ["fenced", "done"]
    [lost, _] = (attempt.end for attempt in read_step_attempts(desk.store, "night", "fit"))
    assert lost is not None
    assert lost.last_alive_at == (died_at + timedelta(hours=1)).replace(microsecond=0)
    assert not lost.stopped


def _programs(folder: Path) -> list[int]:
    """Processes that work in an attempt's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cwd").readlink().is_relative_to(folder):
                    found.append(int(entry.name))
            except OSError:
                continue
    return [pid for pid in found if pid != os.getpid()]


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within 120 s"
        time.sleep(0.02)
