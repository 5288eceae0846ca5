"""The launcher of a step that MLflow tracks: MLflow may say nothing, the program decides about the step.

| event | program | exit code |
|---|---|---|
| MLflow knows the run | gets its variables | its own |
| no answer, or an error | runs without them | its own |
| the author has set the run | runs with it; MLflow is not called | its own |
| SIGTERM before the program | is not started | 75 |
| SIGTERM | gets it; the run is closed within what is left of the grace period | its own |
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tiphys.launch import mlflow_run
from tiphys.launch.__main__ import main

IDS = {"MLFLOW_EXPERIMENT_ID": "7", "MLFLOW_RUN_ID": "f" * 32}
PROGRAM = """
import os, pathlib, sys
pathlib.Path(sys.argv[1]).write_text(os.environ.get("MLFLOW_RUN_ID", "none"))
sys.exit(int(sys.argv[2]))
"""


class Tracking:
    """Stands for ``python -m tiphys.tracking``."""

    def __init__(self, answer: str | None) -> None:
        self.answer = answer
        self.calls: list[tuple[list[str], float]] = []

    def __call__(self, environ: Mapping[str, str], words: Sequence[str], seconds: float) -> str | None:
        self.calls.append((list(words), seconds))
        return self.answer if words == ["open"] else ""


@pytest.fixture
def tracking(monkeypatch: pytest.MonkeyPatch) -> Tracking:
    stand_in = Tracking(json.dumps(IDS))
    monkeypatch.setattr(mlflow_run, "_call_tracking", stand_in)
    for name in ("MLFLOW_RUN_ID", "RANK", "NODE_RANK", "PET_NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TIPHYS_GRACE_SECONDS", "30")
    return stand_in


def run(folder: Path, code: int = 0, program: str = PROGRAM) -> tuple[int, str]:
    ended = main(["--mlflow", "--", sys.executable, "-c", program, str(folder / "saw"), str(code)])
    return ended, (folder / "saw").read_text() if (folder / "saw").exists() else ""


@pytest.mark.parametrize("code", [0, 1, 75, 76])
def test_the_program_gets_the_run_and_its_exit_code_is_that_of_the_step(
    tracking: Tracking, tmp_path: Path, code: int
) -> None:
    assert run(tmp_path, code) == (code, "f" * 32)
    assert [words for words, _ in tracking.calls] == [["open"], ["close", str(code)]]


def test_an_experiment_that_the_author_has_named_stays(
    tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "mine")
    assert run(tmp_path, program=PROGRAM.replace("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID")) == (0, "mine")


@pytest.mark.parametrize("code", [0, 3])
def test_without_an_answer_the_program_runs_untracked(tracking: Tracking, tmp_path: Path, code: int) -> None:
    tracking.answer = None
    assert run(tmp_path, code) == (code, "none")
    assert [words for words, _ in tracking.calls] == [["open"]]


def test_a_run_that_the_author_has_chosen_stays(
    tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "mine")
    assert run(tmp_path) == (0, "mine")
    assert tracking.calls == []


STOPPED_PROGRAM = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
os.kill(os.getppid(), signal.SIGTERM)
while True:
    time.sleep(0.01)
"""
# A process of its own: a signal to a worker of pytest, which has several threads, would end it.
LAUNCHER = """
import json, os, signal, sys
from pathlib import Path
from tiphys.launch import mlflow_run
from tiphys.launch.__main__ import main

ids, stops_at_open, calls, program = json.loads(sys.argv[1]), sys.argv[2] == "open", Path(sys.argv[3]), sys.argv[4]

def call(environ, words, seconds):
    with calls.open("a") as log:
        log.write(json.dumps([words, seconds]) + "\\n")
    if words == ["open"] and stops_at_open:
        os.kill(os.getpid(), signal.SIGTERM)
    return json.dumps(ids)

mlflow_run._call_tracking = call
sys.exit(main(["--mlflow", "--", sys.executable, "-c", program]))
"""


def stop(folder: Path, when: str, grace: str = "30") -> tuple[int, list[tuple[list[str], float]]]:
    """Exit code and calls of a launcher that SIGTERM reaches while it opens the run, or while the program runs."""
    calls = folder / "calls"
    command = [sys.executable, "-c", LAUNCHER, json.dumps(IDS), when, str(calls), STOPPED_PROGRAM]
    environ = {**os.environ, "TIPHYS_GRACE_SECONDS": grace, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=environ, timeout=240, check=False)
    return ended.returncode, [tuple(json.loads(line)) for line in calls.read_text().splitlines()]


def test_a_stop_before_the_start_asks_for_another_attempt(tracking: Tracking, tmp_path: Path) -> None:
    code, calls = stop(tmp_path, "open")
    assert (code, [words for words, _ in calls]) == (75, [["open"]])


def test_a_stop_is_forwarded_and_leaves_time_to_exit(tracking: Tracking, tmp_path: Path) -> None:
    code, [_, (words, seconds)] = stop(tmp_path, "program", grace="3600")
    assert (code, words) == (75, ["close", "stopped"])
    assert seconds <= mlflow_run.CLOSE_SECONDS


def test_at_the_end_of_the_grace_period_the_status_is_left_alone(tracking: Tracking, tmp_path: Path) -> None:
    code, calls = stop(tmp_path, "program", grace="3")
    assert (code, [words for words, _ in calls]) == (75, [["open"]])


def test_only_the_first_pod_of_a_gang_sets_the_status(
    tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_RANK", "1")
    assert run(tmp_path) == (0, "f" * 32)
    assert [words for words, _ in tracking.calls] == [["open"]]


def test_a_program_that_does_not_exist_ends_as_in_a_shell(tracking: Tracking) -> None:
    assert main(["--mlflow", "--", "/does/not/exist"]) == 127
    assert [words for words, _ in tracking.calls] == [["open"], ["close", "127"]]


def test_a_call_that_hangs_or_fails_is_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a stand-in for Python, since the real call needs a store."""
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    assert mlflow_run._call_tracking(os.environ, ["open"], 0.2) is None
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert mlflow_run._call_tracking(os.environ, ["open"], 60) is None
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    assert mlflow_run._call_tracking(os.environ, ["open"], 60) is None
