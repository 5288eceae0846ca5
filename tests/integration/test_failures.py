"""Trainings that fill their GPU, and that hang, with real processes: each says so, and the next attempt goes on."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from hera.workflows import DAG
from support.builders.lineage import LINEAGE, RUN, STEP, claim_of, write_claim
from tiphys_controller import start_run

from hera_pipelines import Checkpoints, Pipeline, Retries, Train
from hera_pipelines.local.run_session import LocalSession
from tiphys.checkpoint.lifecycle.hang_watchdog import KernelAlarm
from tiphys.failures.classify import AttemptObservation, classify_failure
from tiphys.records import AttemptEndOutcome, Cause, CrashRecord
from tiphys.store import DirectoryStore, RunLayout, read_record, read_step_attempts
from tiphys.store.incarnations import crash_key

# The first attempt finds its GPU full, the second waits for ever after step 3.
FAILS_TWICE = """
import os, signal, threading
from tiphys import checkpoint

signal.signal(signal.SIGALRM, lambda *_: None)  # so that the thread that watches is alone
attempt = int(os.environ["TIPHYS_ATTEMPT"])

class OutOfMemoryError(RuntimeError):
    pass

def all_reduce():
    threading.Event().wait()

with checkpoint.session() as session:
    state = session.restore(default={"step": 0})
    if checkpoint.batch_scale() != (1.0 if attempt == 1 else 0.5):
        raise ValueError(f"batch scale is {checkpoint.batch_scale()}")
    for step in range(state["step"] + 1, 6):
        session.save(step, {"step": step}).wait()
        if (step, attempt) == (2, 1):
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if (step, attempt) == (3, 2):
            all_reduce()
"""

# C code that never returns and lets no other thread run.
HOLDS_THE_LOCK = """
import ctypes
from tiphys import checkpoint

sleep = ctypes.PyDLL(None).sleep
with checkpoint.session() as session:
    session.step(1, {"step": 1})
    sleep(3600)
"""


def pipeline() -> dict[str, Any]:
    with Pipeline("digits", store="s3://ml-runs", entrypoint="main") as made:
        fit = Train(
            name="fit",
            image="i",
            command=["python", "train.py"],
            checkpoints=Checkpoints(every="1000 steps", hang_after="0.5s"),
            retries=Retries(gpu_out_of_memory=1, in_place=False),
        )
        with DAG(name="main"):
            fit()
    manifest: dict[str, Any] = made.to_dict()
    return manifest


def run_once(folder: Path) -> DirectoryStore:
    store = DirectoryStore(folder / "store")
    code = folder / "code"
    code.mkdir()
    (code / "train.py").write_text(FAILS_TWICE)
    with LocalSession(store, folder / "state", speed=50.0, code=code) as session:
        session.run(start_run(store, session, pipeline(), "night").workflow_name)
    return store


def test_a_failure_is_reported_and_the_next_attempt_gets_what_it_needs(tmp_path: Path) -> None:
    store = run_once(tmp_path)
    attempts = read_step_attempts(store, "night", "fit")
    ends = [attempt.end for attempt in attempts if attempt.end is not None]
    assert [(end.outcome, end.cause, end.exit_code) for end in ends] == [
        (AttemptEndOutcome.FAILED, Cause.GPU_OUT_OF_MEMORY, 1),
        (AttemptEndOutcome.FAILED, Cause.HANG, 79),
        (AttemptEndOutcome.DONE, None, 0),
    ]
    assert [end.evidence.rule for end in ends if end.evidence] == ["gpu-out-of-memory", "no-step"]
    assert "it completed no step in" in ends[1].message
    assert "after step 3" in ends[1].message
    starts = [attempt.claim.starts_from.global_step for attempt in attempts if attempt.claim.starts_from]
    assert starts == [2, 3]
    left = read_record(store, crash_key(RunLayout("night"), "fit", 2), CrashRecord)
    assert "in all_reduce" in left.stacks


def environ(store: DirectoryStore) -> dict[str, str]:
    own = {
        "TIPHYS_STORE": store.url,
        "TIPHYS_RUN": RUN,
        "TIPHYS_STEP": STEP,
        "TIPHYS_ATTEMPT": "1",
        "TIPHYS_LINEAGE": LINEAGE,
        "TIPHYS_SAVE_EVERY": "1h",
        "TIPHYS_HANG_AFTER_SECONDS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return {**{key: value for key, value in os.environ.items() if not key.startswith("TIPHYS_")}, **own}


def test_a_program_that_lets_no_thread_run_is_ended_by_the_kernel(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    write_claim(store, claim_of(1, None))
    ended = subprocess.run(
        [sys.executable, "-c", HOLDS_THE_LOCK], env=environ(store), capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == -signal.SIGALRM
    assert "(most recent call first)" in ended.stderr


def test_the_termination_message_of_a_hung_program_names_the_hang(tmp_path: Path) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    program = (
        "import ctypes, pathlib, sys; from tiphys.checkpoint.lifecycle.hang_watchdog import KernelAlarm\n"
        "alarm = KernelAlarm(pathlib.Path(sys.argv[1])); assert alarm.install(); alarm.arm(0.05)\n"
        "ctypes.PyDLL(None).sleep(3600)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", program, str(log)], env=environment, timeout=60)
    assert ended.returncode == -signal.SIGALRM
    for code in (128 + signal.SIGALRM, 137):  # Argo tells every signal as 137
        assert (
            classify_failure(AttemptObservation("Failed", code, termination_message=log.read_text())).cause
            is Cause.HANG
        )


def test_an_alarm_that_a_program_uses_itself_is_left_to_it() -> None:
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        assert not KernelAlarm().install()
    finally:
        signal.signal(signal.SIGALRM, before)
