"""SIGTERM as pods get it: to a group of processes, through a shell, through a launcher, to one rank of several."""

import os
import signal
import subprocess
import sys

import pytest
from support.lineage import LINEAGE, RUN, STEP, claim_of, write_claim

from tiphys.lineage.select import list_commits
from tiphys.lineage.validity import read_manifest
from tiphys.store import DirectoryStore, read_events

STEPS = 100_000
TRAINER = [sys.executable, "-m", "support.trainer", str(STEPS)]


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


@pytest.mark.parametrize("told", [pytest.param("0", marks=pytest.mark.heavy), "1"])
def test_a_launcher_that_tells_one_rank_ends_both_with_one_checkpoint(store, told):
    process = start([sys.executable, "-m", "support.ranks", told], environ(store))
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
