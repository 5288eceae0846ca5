"""A real training process is killed at every write boundary, and its run must end as if it had not been.

| promise | shown by |
|---|---|
| the fault really happened | the log of failpoints, and exit by SIGKILL |
| an acknowledged checkpoint is never lost | the next attempt starts at it or later |
| an incomplete one is never chosen | what is chosen restores without quarantine |
| the run goes on as if nothing had happened | the final state is bit-identical |
"""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.forking import ForkingProcess
from support.lineage import LINEAGE, RUN, STEP, claim_of, end_of, ref, write_claim, write_end
from support.trainer import digest_of, initial_state, train_step

from tiphys.lineage.quarantine import list_quarantined
from tiphys.lineage.select import choose_checkpoint, list_commits
from tiphys.lineage.validity import read_manifest
from tiphys.store import DirectoryStore, LineageLayout, read_events, read_step_attempts

STEPS = 20
KEEP = 2
TRAINER = "import runpy; runpy.run_module('support.trainer', run_name='__main__', alter_sys=True)"
LAYOUT = LineageLayout(LINEAGE)

# Each save has two shards; from the third save on, retention removes one checkpoint of two shards.
POINTS = [
    "checkpoint.before_shard=crash@1",
    "checkpoint.after_shard=crash@1",
    "checkpoint.before_manifest=crash@1",
    "checkpoint.after_manifest=crash@1",
    "checkpoint.before_shard=crash@6",
    "checkpoint.after_shard=crash@5",
    "checkpoint.after_shard=crash@6",
    "checkpoint.before_manifest=crash@3",
    "checkpoint.after_manifest=crash@3",
    "retention.before_mark=crash@1",
    "retention.after_mark=crash@1",
    "retention.after_announcement=crash@1",
    "retention.after_manifest_delete=crash@1",
    "retention.after_shard_delete=crash@1",
    "retention.after_shard_delete=crash@2",
    "retention.before_clear=crash@1",
    "retention.after_clear=crash@1",
    "store.before_publish=crash@5",
    "store.after_publish=crash@6",
]


def uninterrupted() -> str:
    state = initial_state()
    for _ in range(STEPS):
        train_step(state)
    return digest_of(state)


@dataclass
class Run:
    """Attempts of one training step, opened and ended as the plugin does it."""

    root: Path
    trainers: ForkingProcess
    saved: list[int] = field(default_factory=list)
    attempt: int = 0

    def __post_init__(self):
        self.store = DirectoryStore(self.root / "store")
        self.result = self.root / "result"
        self.log = self.root / "failpoints.log"

    def environ(self, start, failpoints, **others):
        own = {
            "TIPHYS_STORE": self.store.url,
            "TIPHYS_RUN": RUN,
            "TIPHYS_STEP": STEP,
            "TIPHYS_ATTEMPT": str(self.attempt),
            "TIPHYS_LINEAGE": LINEAGE,
            "TIPHYS_RESUME_FROM": str(start) if start else "",
            "TIPHYS_SAVE_EVERY": "3 steps",
            "TIPHYS_KEEP_LAST": str(KEEP),
            "TIPHYS_DELETE_AFTER_SECONDS": "0",
            "TIPHYS_FAILPOINTS": failpoints,
            "TIPHYS_FAILPOINTS_LOG": str(self.log),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        kept = {key: value for key, value in os.environ.items() if not key.startswith("TIPHYS_")}
        return {**kept, **own, **others}

    def claim(self):
        """Open the next attempt where the choice says."""
        choice = choose_checkpoint(self.store, LINEAGE, read_step_attempts(self.store, RUN, STEP))
        self.attempt += 1
        write_claim(self.store, claim_of(self.attempt, choice.checkpoint))
        return choice

    def start(self, **variables):
        """Start the program of the next attempt."""
        choice = self.claim()
        command = [sys.executable, "-m", "support.trainer", str(STEPS), str(self.result)]
        environ = self.environ(choice.checkpoint, "", **variables)
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return choice, process

    def finish(self, process):
        """Wait for the attempt, and record its end unless it succeeded."""
        out, err = process.communicate(timeout=120)
        return self.end(process.returncode, out, err)

    def end(self, code, out, err):
        lines = [line.split() for line in out.splitlines()]
        self.saved += [int(number) for word, number in lines if word == "saved"]
        if code != 0:
            write_end(self.store, end_of(self.attempt))
        return code, int(lines[0][1]) if lines else None, err

    def attempt_until_end(self, failpoints=""):
        choice = self.claim()
        environ = self.environ(choice.checkpoint, failpoints)
        done = self.trainers.run(TRAINER, [str(STEPS), str(self.result)], environ=environ)
        return choice, *self.end(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def trainers():
    """Forks processes that have imported what the trainer trains and saves with."""
    with ForkingProcess("numpy.random", "tiphys.checkpoint.session", "tiphys.checkpoint.tracked_session") as process:
        yield process


@pytest.fixture
def run(tmp_path, trainers):
    return Run(tmp_path, trainers)


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_any_write_loses_nothing_that_was_acknowledged(run, point):
    _, code, _, _ = run.attempt_until_end(point)
    assert code == -signal.SIGKILL
    assert run.log.read_text().strip() == point.rpartition("@")[0]
    acknowledged = max(run.saved, default=0)

    choice, code, started, err = run.attempt_until_end()
    assert code == 0, err
    assert started >= acknowledged
    assert started == (choice.checkpoint.global_step if choice.checkpoint else 0)
    assert list_quarantined(run.store, LINEAGE) == set()
    assert run.result.read_text() == uninterrupted()
    assert_storage_is_tidy(run)


def test_a_run_that_is_killed_again_and_again_still_ends_the_same(run):
    """Each attempt dies at another boundary, some before they have saved anything."""
    for point in POINTS:
        acknowledged = max(run.saved, default=0)
        _, code, started, err = run.attempt_until_end(point)
        assert started is None or started >= acknowledged
        if code == 0:
            break
        assert code == -signal.SIGKILL, err
    else:
        _, code, _, err = run.attempt_until_end()
        assert code == 0, err
    assert run.attempt > 3
    assert run.result.read_text() == uninterrupted()
    assert list_quarantined(run.store, LINEAGE) == set()


def test_without_a_fault_the_program_ends_the_same(run):
    """The negative twin: no failpoint, no crash, no log."""
    _, code, _, err = run.attempt_until_end()
    assert code == 0, err
    assert not run.log.exists()
    assert run.saved == [3, 6, 9, 12, 15, 18]
    assert run.result.read_text() == uninterrupted()
    assert_storage_is_tidy(run)


def test_sigterm_commits_the_step_it_met_and_exits_75(run):
    _, process = run.start(TRAINER_PAUSE="0.05", TIPHYS_SAVE_EVERY="600s")
    assert process.stdout.readline() == "starts 0\n"
    process.send_signal(signal.SIGTERM)
    code, _, err = run.finish(process)
    assert code == 75, err
    (saved,) = list_commits(run.store, LINEAGE)
    assert read_manifest(run.store, saved).reason == "sigterm"
    assert f"the newest checkpoint is checkpoint {saved.global_step} of attempt 1" in err

    choice, code, started, err = run.attempt_until_end()
    assert code == 0, err
    assert choice.checkpoint == saved
    assert started == saved.global_step
    assert run.result.read_text() == uninterrupted()


def test_a_process_whose_attempt_was_replaced_exits_76_and_commits_no_more(run):
    _, process = run.start(TRAINER_PAUSE="0.05")
    assert process.stdout.readline() == "starts 0\n"
    write_end(run.store, end_of(1))
    write_claim(run.store, claim_of(2))
    before = list_commits(run.store, LINEAGE)
    process.wait(timeout=120)
    _, err = process.communicate()
    assert process.returncode == 76
    assert "may not commit" in err
    assert len(list_commits(run.store, LINEAGE)) <= len(before) + 1  # one may have passed its fence already


def test_bytes_corrupted_between_attempts_cost_one_checkpoint_and_not_the_run(run):
    run.attempt_until_end("checkpoint.before_manifest=crash@4")
    assert run.saved == [3, 6, 9]
    shard = read_manifest(run.store, ref(1, 9)).shards[1].key
    path = run.root / "store" / shard
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    choice, code, started, err = run.attempt_until_end()
    assert code == 0, err
    assert choice.checkpoint == ref(1, 9)  # the sizes are right, so only the reader can tell
    assert started == 6
    assert list_quarantined(run.store, LINEAGE) == {ref(1, 9)}
    assert [event.name for event in read_events(run.store, RUN)] == ["checkpoint.skipped", "checkpoint.restored"]
    assert "checkpoint 9 of attempt 1 is corrupt" in err
    assert run.result.read_text() == uninterrupted()


def assert_storage_is_tidy(run):
    """Only whole checkpoints remain: no shard without its manifest, no manifest without its shards."""
    commits = set(list_commits(run.store, LINEAGE))
    assert {LAYOUT.parse_shard(info.key) for info in run.store.list(LAYOUT.all_shards)} == commits
    assert list(run.store.list(LAYOUT.all_tombstones)) == []
    assert len([commit for commit in commits if commit.attempt == run.attempt]) == KEEP
