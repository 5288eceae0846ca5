"""SIGTERM as pods get it: to a group of processes, through a shell, through a launcher, to one rank of several."""

import os
import signal
import subprocess
import sys

import pytest
from support.lineage import LINEAGE, RUN, STEP, claim_of, write_claim
from support.polling import until

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


def test_a_program_below_a_shell_saves_although_the_shell_is_told_to_stop_too(store, tmp_path):
    """Kubernetes' executor signals the whole group; a shell that has more to do dies of it at once."""
    script = f"{' '.join(TRAINER)} {tmp_path / 'result'}; echo never"
    process = start(["sh", "-c", script], environ(store))
    wait_for_training(process)
    os.killpg(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGTERM
    assert "never" not in out
    assert landed(store).global_step > 0
    assert "started by sh" in err


def test_a_program_that_the_shell_has_become_is_not_warned(store, tmp_path):
    process = start(["sh", "-c", f"exec {' '.join(TRAINER)} {tmp_path / 'result'}"], environ(store))
    wait_for_training(process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 75
    landed(store)
    assert "started by" not in err


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


def test_the_group_of_a_shell_is_gone_in_the_end(store, tmp_path):
    process = start(["sh", "-c", f"{' '.join(TRAINER)} {tmp_path / 'result'}; true"], environ(store))
    wait_for_training(process)
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=120)

    def gone():
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    until(gone)
