"""A run that no terminal holds: started in the background, followed, stopped and resumed from other processes."""

import os
import signal
from pathlib import Path

import pytest
from support.processes.polling import until
from support.processes.process import lives
from support.stories import small_pipeline

from hera_pipelines.local.live_workflows import LocalWorkflows

from .conftest import begin, invoke


def started(folder: Path, *arguments: str) -> Path:
    """Start the tiny pipeline as run ``r`` with ``--detach``; its training goes no further than step 10."""
    file = small_pipeline.write(folder / "code")
    small_pipeline.hold(folder / "code")
    with begin(["run", file, "--run", "r", "--detach", *arguments], folder) as process:
        out, err = process.communicate(timeout=120)  # which waits for all that hold its pipes
    assert (process.returncode, out) == (0, "r\n"), err
    live = LocalWorkflows(folder / ".tiphys/state").find("default", "r")
    assert live is not None and live.running, "the next command finds it, and its engine"
    until(lambda: list((folder / ".tiphys/store").rglob("manifests/*.json")))
    return folder / "code"


@pytest.mark.heavy
def test_a_detached_run_is_followed_stopped_and_resumed_from_elsewhere(tmp_path: Path) -> None:
    code = started(tmp_path)

    with begin(["attach", "r"], tmp_path) as follower:
        assert follower.stderr is not None
        while "is saved" not in follower.stderr.readline():
            assert follower.poll() is None
        follower.send_signal(signal.SIGINT)
        _, errors = follower.communicate(timeout=120)
    assert follower.returncode == 130
    assert "run r continues; show it with `tiphys get r`, stop it with `tiphys stop r`" in errors

    assert invoke(["stop", "r"], tmp_path).code == 0
    stopped = invoke(["attach", "r"], tmp_path)
    assert stopped.code == 130
    assert stopped.err.splitlines()[-1].endswith("continue with `tiphys resume r`")
    assert "never finished: attempt 1 was stopped" in invoke(["plan", "r"], tmp_path).out
    assert "run r is not running" in invoke(["stop", "r"], tmp_path).err

    small_pipeline.let_go(code)
    assert invoke(["resume", "r", "--detach"], tmp_path).code == 0
    finished = invoke(["attach", "r"], tmp_path)
    assert finished.code == 0, finished.err
    assert "run r succeeded" in finished.err
    assert "report: Succeeded" in (tmp_path / ".tiphys/state/logs/engine-r-2.log").read_text()


def test_terminate_ends_a_detached_run_at_once(tmp_path: Path) -> None:
    code = started(tmp_path)
    trainer = small_pipeline.last_process(code)

    assert invoke(["stop", "r", "--terminate"], tmp_path).code == 0

    assert invoke(["attach", "r"], tmp_path).code == 130
    until(lambda: not lives(trainer))
    assert "terminating: all programs end at once" in (tmp_path / ".tiphys/state/logs/engine-r.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "absent.py", "--detach"], 2, "absent.py does not exist"),
        (["run", "code/tiny.py", "--detach", "-p", "other=1"], 2, "Pipeline(arguments={'other': …}) declares it"),
        (["attach", "absent"], 3, "absent"),
    ],
)
def test_a_refusal_reaches_the_terminal(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    small_pipeline.write(tmp_path / "code")
    (tmp_path / ".tiphys/store").mkdir(parents=True)

    answer = invoke(arguments, tmp_path)

    assert answer.code == code
    assert words in answer.error


def test_an_engine_that_died_ends_the_display(tmp_path: Path) -> None:
    started(tmp_path)
    engine = int((tmp_path / ".tiphys/state/locks/r.lock").read_text())
    with begin(["attach", "r"], tmp_path) as follower:
        assert follower.stderr is not None
        while "is saved" not in follower.stderr.readline():
            assert follower.poll() is None
        os.kill(engine, signal.SIGKILL)
        _, errors = follower.communicate(timeout=120)
    assert follower.returncode == 1
    assert "the engine of run r has ended without finishing it; continue with `tiphys resume r`" in errors
