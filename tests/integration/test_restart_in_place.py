"""A program that dies after a checkpoint is started again in its pod: the same attempt, its next process.

| how the process ends | what follows |
|---|---|
| killed, hung, or by an error that a new process may cure, after a checkpoint | a process in the same pod |
| the same before any checkpoint | another attempt |
| by an error of its own that its policy does not retry | the step fails |
| by an error of its own, started again, before a checkpoint | another attempt: the pod may be to blame |
| by a broken GPU | another attempt |
| by SIGTERM | another attempt |
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hera.workflows import DAG
from tiphys_controller import start_run

from hera_pipelines import Checkpoints, Pipeline, Retries, Train
from hera_pipelines.local.run_session import LocalSession
from tiphys.records import IncarnationRecord
from tiphys.store import DirectoryStore, RunLayout, read_events, read_record, read_step_attempts
from tiphys.store.incarnations import incarnation_key

# Each process meets its fate after its third step. `plan` has a word for each attempt, with a part for each process.
TRAIN = """
import os, pathlib, signal, subprocess, sys, time
from tiphys import checkpoint

if pathlib.Path("made").exists() and "mkdir" in pathlib.Path("plan").read_text():
    os.mkdir("made")
plan = [word.split(",") for word in pathlib.Path("plan").read_text().split()]
attempt, process = int(os.environ["TIPHYS_ATTEMPT"]), int(os.environ.get("TIPHYS_INCARNATION", "1"))
fates = plan[attempt - 1] if attempt <= len(plan) else []
fate = fates[process - 1] if process <= len(fates) else "finish"

def read(path):
    try:
        return path.read_bytes() if str(os.getppid()) in (path.parent / "stat").read_text().split()[3:4] else b""
    except OSError:
        return b""

def die(fate):
    if fate == "early" or fate == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "spared":
        while not any(b"spare_process" in read(path) for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "hang":
        time.sleep(600)
    if fate == "mkdir":
        os.mkdir("made")
        os.kill(os.getpid(), signal.SIGKILL)
    if fate in ("bug", "poison"):
        raise TypeError("a bug")
    if fate == "cuda":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if fate == "peer":
        raise RuntimeError("[Gloo] Connection closed by peer [10.0.0.7]:4711")
    if fate == "xid":
        raise RuntimeError("NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus")
    if fate == "fork":  # a process that has left group and session, and is stopped
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        os.kill(child.pid, signal.SIGSTOP)
        print("stopped", child.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

with checkpoint.session() as session:
    state = session.restore(default={"step": 0})
    print("from", state["step"], flush=True)
    if fate == "early" or (fate == "poison" and state["step"] == 3):
        die(fate)
    for step in range(state["step"] + 1, 10):
        session.step(step, {"step": step})
        if step % 3 == 0 and fate != "finish":
            session.flush()
            die(fate)
        time.sleep(0.02)
"""


class Told(NamedTuple):
    """What became of a training."""

    phase: str
    outcomes: list[str]
    """How each attempt ended, and how many processes it had."""
    starts: list[str]
    """The step that each process began with."""
    log: str


def pipeline(retries: Retries, command: list[str], every: str, hang_after: str | None) -> dict[str, Any]:
    with Pipeline("digits", store="s3://ml-runs", entrypoint="main") as made:
        fit = Train(
            name="fit",
            image="i",
            command=command,
            checkpoints=Checkpoints(every=every, hang_after=hang_after),
            retries=retries,
        )
        with DAG(name="main"):
            fit()
    manifest: dict[str, Any] = made.to_dict()
    return manifest


def train(
    folder: Path,
    plan: str,
    retries: Retries = Retries(),  # noqa: B008  it is frozen
    command: tuple[str, ...] = ("python", "train.py"),
    every: str = "1 step",
) -> Told:
    store, code = DirectoryStore(folder / "store"), folder / "code"
    # A pause of a busy machine is no hang: the kernel's alarm comes after twice that time, whoever could not run.
    hang_after = "3s" if "hang" in plan else None
    manifest = pipeline(retries, list(command), every, hang_after)
    code.mkdir()
    (code / "train.py").write_text(TRAIN)
    (code / "plan").write_text(plan)
    with LocalSession(store, folder / "state", speed=50.0, code=code) as session:
        phase = session.run(start_run(store, session, manifest, "night").workflow_name)
    ends = [attempt.end for attempt in read_step_attempts(store, "night", "fit") if attempt.end is not None]
    logs = sorted((folder / "state" / "logs").glob("*-fit-run-*.log"), key=lambda path: path.stat().st_mtime)
    log = "".join(path.read_text() for path in logs)
    outcomes = [f"{end.outcome}{f':{end.cause}' if end.cause else ''} {end.incarnations}" for end in ends]
    starts = [line.removeprefix("from ") for line in log.splitlines() if line.startswith("from ")]
    return Told(str(phase), outcomes, starts, log)


@pytest.mark.parametrize(
    "fate", ["kill", *(pytest.param(fate, marks=pytest.mark.heavy) for fate in ("hang", "cuda", "peer"))]
)
def test_program_that_dies_after_a_checkpoint_goes_on_in_its_attempt(tmp_path: Path, fate: str) -> None:
    told = train(tmp_path, f"{fate},{fate}")
    assert told.outcomes == ["done 3"], told.log
    assert told.starts == ["0", "3", "6"]
    assert told.phase == "Succeeded"


@pytest.mark.heavy
@pytest.mark.parametrize("wrap", ["$P train.py; exit $?", "$P train.py 2>&1 | tee log; exit ${PIPESTATUS[0]}"])
def test_program_below_a_shell_goes_on_in_its_attempt(tmp_path: Path, wrap: str) -> None:
    told = train(tmp_path, "kill", command=("bash", "-c", wrap.replace("$P", sys.executable)))
    assert (told.outcomes, told.starts) == (["done 2"], ["0", "3"]), told.log


def test_spare_takes_the_place_of_a_program_that_dies(tmp_path: Path) -> None:
    told = train(tmp_path, "spared,spared", Retries(spare=True))
    assert (told.outcomes, told.starts) == (["done 3"], ["0", "3", "6"]), told.log
    assert told.log.count("a spare process takes its place") == 2
    assert told.phase == "Succeeded"


@pytest.mark.heavy
def test_author_may_refuse_a_spare(tmp_path: Path) -> None:
    told = train(tmp_path, "kill", Retries(spare=False))
    assert told.outcomes == ["done 2"], told.log
    assert "spare" not in told.log


@pytest.mark.heavy
def test_spare_of_a_program_whose_imports_are_unknown_is_refused_by_name(tmp_path: Path) -> None:
    told = train(tmp_path, "kill", Retries(spare=True), command=("bash", "-c", f"{sys.executable} train.py; exit $?"))
    assert told.outcomes == ["done 2"], told.log
    assert "no spare: bash is not python with a script or a module" in told.log


@pytest.mark.heavy
def test_restart_is_on_record_with_its_cause(tmp_path: Path) -> None:
    told = train(tmp_path, "kill")
    store = DirectoryStore(tmp_path / "store")
    record = read_record(store, incarnation_key(RunLayout("night"), "fit", 1, 2), IncarnationRecord)
    assert (record.cause, record.exit_code, record.incarnation) == ("infrastructure", 137, 2)
    [event] = [event for event in read_events(store, "night") if event.name == "program.restarted"]
    assert event.message.startswith(
        "attempt 1 goes on in its pod, as process 2: its program ended with 137 (infrastructure)"
    )
    assert "the program ended with 137 (infrastructure); process 2 is started in this pod" in told.log


def test_program_that_dies_before_a_checkpoint_gets_another_attempt(tmp_path: Path) -> None:
    told = train(tmp_path, "early")
    assert told.outcomes == ["failed:infrastructure 1", "done 1"], told.log


@pytest.mark.heavy
def test_program_that_dies_again_before_a_checkpoint_gets_another_attempt(tmp_path: Path) -> None:
    told = train(tmp_path, "kill,early")
    assert told.outcomes == ["failed:infrastructure 2", "done 1"], told.log
    assert told.starts == ["0", "3", "3"]


@pytest.mark.heavy
def test_end_of_an_attempt_is_that_of_its_last_process(tmp_path: Path) -> None:
    """Not a hang, although an earlier process has left the report of one."""
    told = train(tmp_path, "hang,early")
    assert told.outcomes == ["failed:infrastructure 2", "done 1"], told.log


def test_error_of_the_program_fails_the_step_without_a_restart(tmp_path: Path) -> None:
    told = train(tmp_path, "bug")
    assert told.outcomes == ["failed:user_error 1"], told.log
    assert told.phase == "Failed"


@pytest.mark.heavy
def test_error_of_the_program_that_its_policy_retries_is_restarted(tmp_path: Path) -> None:
    told = train(tmp_path, "bug", Retries(user_error=1))
    assert (told.outcomes, told.starts) == (["done 2"], ["0", "3"]), told.log


@pytest.mark.heavy
def test_error_that_files_of_the_process_before_cause_gets_another_attempt(tmp_path: Path) -> None:
    told = train(tmp_path, "mkdir")
    assert told.outcomes == ["failed:infrastructure 1", "done 1"], told.log
    assert "FileExistsError" in told.log


@pytest.mark.heavy
def test_broken_gpu_gets_another_attempt(tmp_path: Path) -> None:
    told = train(tmp_path, "xid")
    assert told.outcomes == ["failed:infrastructure 1", "done 1"], told.log
    assert told.starts == ["0", "3"]


@pytest.mark.heavy
def test_author_may_refuse_restarts(tmp_path: Path) -> None:
    told = train(tmp_path, "kill", Retries(in_place=False))
    assert told.outcomes == ["failed:infrastructure 1", "done 1"], told.log


@pytest.mark.heavy
def test_no_process_of_the_one_before_is_left_when_the_next_begins(tmp_path: Path) -> None:
    told = train(tmp_path, "fork")
    assert told.outcomes == ["done 2"], told.log
    [stopped] = [int(line.split()[1]) for line in told.log.splitlines() if line.startswith("stopped ")]
    with pytest.raises(ProcessLookupError):
        os.kill(stopped, signal.SIGCONT)


@pytest.mark.heavy
def test_checkpoint_that_kills_the_next_process_and_the_next_attempt_is_passed_over(tmp_path: Path) -> None:
    told = train(tmp_path, "kill,poison poison", every="1 step")
    assert told.outcomes == ["failed:infrastructure 2", "failed:user_error 1", "done 1"], told.log
    assert told.starts == ["0", "3", "3", "2"]
