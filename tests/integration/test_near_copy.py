"""Programs one after the other below one launcher: what the first leaves in memory, the next one reads.

The programs are those of the tests of crashes; the first is killed at a place of its third save. The launcher itself
starts the next one, or a shell does, which starts it also after a program that has committed nothing.
"""

import os
import shlex
import subprocess
import sys

import pytest
from support.builders.lineage import LINEAGE, RUN, STEP, claim_of, ref, write_claim
from support.programs.trainer import digest_of, initial_state, train_step

from tiphys.lineage.select import list_commits
from tiphys.store import DirectoryStore

STEPS = 12
PATIENCE_SECONDS = 300


def uninterrupted():
    state = initial_state()
    for _ in range(STEPS):
        train_step(state)
    return digest_of(state)


def launch(folder, script, **variables):
    """What the programs of a shell script print below one launcher, and the store."""
    store, result = DirectoryStore(folder / "store"), folder / "result"
    write_claim(store, claim_of(1))
    own = {
        "TIPHYS_STORE": store.url,
        "TIPHYS_RUN": RUN,
        "TIPHYS_STEP": STEP,
        "TIPHYS_ATTEMPT": "1",
        "TIPHYS_LINEAGE": LINEAGE,
        "TIPHYS_SAVE_EVERY": "3 steps",
        "TIPHYS_KEEP_LAST": "2",
        "PYTHONPATH": os.pathsep.join(sys.path),
        **variables,
    }
    program = shlex.join([sys.executable, "-m", "support.programs.trainer", str(STEPS), str(result)])
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "tiphys.launch", "--", "bash", "-c", script.replace("PROGRAM", program)],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
    assert result.read_text() == uninterrupted()
    return ended.stdout, ended.stderr, store


def run(folder, failpoint, **variables):
    """Two programs one after the other, of which the first dies at ``failpoint``."""
    printed, said, store = launch(
        folder, f"TIPHYS_FAILPOINTS={failpoint} PROGRAM; echo ended with $?; PROGRAM", **variables
    )
    assert "ended with 137" in printed
    return printed, said, store


def test_a_program_that_is_started_again_in_its_pod_reads_its_commit_from_memory(tmp_path):
    crash = {"TIPHYS_FAILPOINTS": "checkpoint.after_manifest=crash@3", "TIPHYS_RESTART_CAUSES": "infrastructure"}
    printed, said, _ = launch(tmp_path, "exec PROGRAM", **crash)
    assert [line for line in printed.splitlines() if line.startswith("starts")] == ["starts 0", "starts 9"]
    assert "process 2 is started in this pod" in said
    assert "checkpoint 9 of attempt 1 was read from its copy in the memory of this pod" in said


@pytest.mark.parametrize(
    ("point", "committed", "is_near"),
    [
        # Torn: nothing of the third save is written, or its document.
        pytest.param("checkpoint.before_copy=crash@5", 6, False, marks=pytest.mark.heavy),
        ("checkpoint.before_copy=crash@6", 6, False),
        pytest.param("checkpoint.after_stage=crash@3", 6, False, marks=pytest.mark.heavy),
        ("checkpoint.before_manifest=crash@3", 6, False),
        ("checkpoint.after_manifest=crash@3", 9, True),
        pytest.param("retention.before_mark=crash@1", 9, True, marks=pytest.mark.heavy),
    ],
)
def test_a_program_that_is_killed_is_followed_by_one_that_reads_its_commit_from_memory(
    tmp_path, point, committed, is_near
):
    printed, said, store = run(tmp_path, point)
    assert f"starts {committed}\n" in printed
    is_used = f"checkpoint {committed} of attempt 1 was read from its copy in the memory of this pod" in said
    is_refused = f"shards of checkpoint {committed} of attempt 1 were read from the store" in said
    # Which thread came first to its copy decides whether a copy that was begun has changed anything.
    assert is_used is not is_refused
    assert is_used == is_near or point == "checkpoint.before_copy=crash@5"
    assert ref(1, STEPS) in list_commits(store, LINEAGE)


def test_without_a_near_copy_the_next_program_reads_the_store(tmp_path):
    """The negative twin, and the setting."""
    printed, said, _ = run(tmp_path, "checkpoint.after_manifest=crash@3", TIPHYS_NEAR_COPY="false")
    assert "starts 9\n" in printed
    assert "memory of this pod" not in said
    assert "this pod holds" not in said
