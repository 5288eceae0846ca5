"""SIGTERM as pods get it: to a group of processes, through a shell, through a launcher, to one rank of several.

A session without a ``with`` block, and one whose program starts other processes, ends like any other.
"""

import os
import signal
import subprocess
import sys

import pytest
from support.builders.lineage import LINEAGE, RUN, STEP, claim_of, ref, write_claim
from support.processes.forking import ForkingProcess

from tiphys.lineage.select import list_commits
from tiphys.lineage.validity import read_manifest
from tiphys.records import CrashRecord
from tiphys.store import DirectoryStore, RunLayout, find_record, read_events
from tiphys.store.incarnations import crash_key

STEPS = 100_000
TRAINER = [sys.executable, "-m", "support.programs.trainer", str(STEPS)]


@pytest.fixture
def store(tmp_path):
    found = DirectoryStore(tmp_path / "store")
    write_claim(found, claim_of(1, None))
    return found


def environ(store, **others):
    own = {
        "TIPHYS_STORE": store.url,
        "TIPHYS_RUN": RUN,
        "TIPHYS_STEP": STEP,
        "TIPHYS_ATTEMPT": "1",
        "TIPHYS_LINEAGE": LINEAGE,
        "TIPHYS_SAVE_EVERY": "1h",
        "TIPHYS_GRACE_SECONDS": "120",
        "TRAINER_PAUSE": "0.01",
        "ARGO_CONTAINER_NAME": "main",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return {**{key: value for key, value in os.environ.items() if not key.startswith("TIPHYS_")}, **own, **others}


def wait_for_training(process):
    """Return once the first program of ``process`` trains."""
    line = process.stdout.readline()
    assert line.startswith("starts"), line


def landed(store):
    """The one checkpoint, and the report card that speaks of it."""
    (ref,) = list_commits(store, LINEAGE)
    cards = [event for event in read_events(store, RUN) if event.name == "checkpoint.preempted"]
    assert [card.data["committed"] for card in cards] == [str(ref)]
    assert cards[0].data["steps_lost"] == 0
    return ref


def start(command, env):
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


LAUNCHER = [sys.executable, "-P", "-m", "tiphys.launch", "--"]


def test_a_program_below_a_shell_saves_and_asks_for_another_attempt(store, tmp_path):
    """Kubernetes' executor signals the whole group; a shell that has more to do dies of it at once."""
    script = f"{' '.join(TRAINER)} {tmp_path / 'result'}; echo never"
    process = start([*LAUNCHER, "sh", "-c", script], environ(store))
    wait_for_training(process)
    os.killpg(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 75
    assert "never" not in out
    assert landed(store).global_step > 0


@pytest.mark.heavy
@pytest.mark.parametrize("signalled_rank", ["0", "1"])
def test_a_launcher_that_tells_one_rank_ends_both_with_one_checkpoint(store, signalled_rank):
    process = start([sys.executable, "-m", "support.programs.two_ranks", signalled_rank], environ(store))
    wait_for_training(process)
    wait_for_training(process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 75, err
    ref = landed(store)
    assert read_manifest(store, ref).reason == "sigterm"


def test_a_second_sigterm_changes_nothing(store, tmp_path):
    process = start([*TRAINER, str(tmp_path / "result")], environ(store))
    wait_for_training(process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 75
    landed(store)


@pytest.fixture(scope="module")
def programs():
    with ForkingProcess("support.programs.trainer", "tiphys.checkpoint.tracked_session") as process:
        yield process


OPENED = """
import multiprocessing, os, signal, sys, threading, time
import numpy as np
from tiphys import checkpoint
session = checkpoint.session()
state = session.restore(default={"step": 0, "weights": np.zeros(300_000)})
def train(until):
    while state["step"] < until:
        state["step"] += 1
        session.step(state["step"], state)
"""


@pytest.mark.parametrize(
    ("end", "code", "newest", "crash"),
    [
        ("train(5)", 0, 5, None),
        ("train(5); sys.exit(3)", 3, 5, None),
        ("train(5); raise ValueError('diverged')", 1, 5, "ValueError: diverged"),
        ("os.kill(os.getpid(), signal.SIGTERM); train(5)", 75, 1, None),
        ("train(5); os.kill(os.getpid(), signal.SIGTERM)", 0, 5, None),
        ("threading.Thread(target=lambda: (time.sleep(0.2), train(5))).start()", 0, 5, None),
    ],
)
def test_program_without_a_with_block_keeps_its_last_save_and_its_exit_code(store, programs, end, code, newest, crash):
    ended = programs.run(OPENED + end, environ=environ(store, TIPHYS_SAVE_EVERY="1 steps"))
    assert ended.returncode == code, ended.stderr
    assert list_commits(store, LINEAGE)[0] == ref(1, newest)
    record = find_record(store, crash_key(RunLayout(RUN), STEP, 1), CrashRecord)
    assert (record and record.error) == crash
    assert "Exception ignored" not in ended.stderr
    assert "Error in atexit" not in ended.stderr


WITH_CHILDREN = """
import multiprocessing, os, signal, sys, time
from tiphys import checkpoint
fork = multiprocessing.get_context("fork")
def prefetch():
    while True: time.sleep(0.05)
def end_child(error):
    raise error
with checkpoint.session() as session:
    state = session.restore(default={"step": 0})
    def train(until):
        while state["step"] < until:
            state["step"] += 1
            session.step(state["step"], state)
    train(2)
"""


@pytest.mark.parametrize(
    "children",
    [
        # Leaving the block terminates the workers at once, some before they have begun.
        "for _ in range(20):\n        with fork.Pool(2): pass",
        "with fork.Pool(2) as pool: assert pool.map(abs, range(-9, 0))[0] == 9",
        "fork.Process(target=prefetch, daemon=True).start()",
        "worker = fork.Process(target=end_child, args=(SystemExit(9),)); worker.start(); worker.join(); "
        "assert worker.exitcode == 9",
        "worker = os.fork()\n    if not worker: raise ValueError('of a child')\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 1",
        "worker = os.fork()\n    if not worker: sys.exit(9)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 9",
    ],
)
def test_forked_children_neither_delay_nor_change_the_end_of_the_training(store, programs, children):
    program = f"{WITH_CHILDREN}    {children}\n    train(4)\n"
    ended = programs.run(program, environ=environ(store, TIPHYS_SAVE_EVERY="1 steps"))
    assert ended.returncode == 0, ended.stderr
    assert [found.global_step for found in list_commits(store, LINEAGE)] == [4, 3, 2, 1]
    assert find_record(store, crash_key(RunLayout(RUN), STEP, 1), CrashRecord) is None


NAIVE = """
import multiprocessing
from tiphys import checkpoint
def augment(item):
    return item * item
with checkpoint.session() as session:
    state = session.restore(default={"step": 0})
    worker = multiprocessing.get_context("spawn").Process(target=augment, args=(2,))
    worker.start()
    worker.join()
    session.step(1, state)
    assert worker.exitcode == 1
"""


def test_a_spawned_child_that_imports_the_program_again_does_not_train(store, tmp_path):
    (tmp_path / "träining.py").write_text(NAIVE)
    process = start([sys.executable, str(tmp_path / "träining.py")], environ(store, TIPHYS_SAVE_EVERY="1 steps"))
    _, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert 'put what opens the session and trains below if __name__ == "__main__":' in err
    assert list_commits(store, LINEAGE) == [ref(1, 1)]
    assert find_record(store, crash_key(RunLayout(RUN), STEP, 1), CrashRecord) is None
