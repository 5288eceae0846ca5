"""Real training processes are killed at every write boundary, again and again, and end as if they had not been.

Each run is one training step whose attempts die one after the other, at a place and a passage drawn from a seed; the
last attempt is left alone.

| promise | shown by |
|---|---|
| the fault really happened | the log of failpoints, and exit by SIGKILL |
| an acknowledged checkpoint is never lost | each attempt starts at it or later |
| an incomplete one is never chosen | what is chosen restores without quarantine |
| what a killed process left in the memory of its pod is used if it is the commit | half of the runs have such memory |
| the run goes on as if nothing had happened | the final state is bit-identical |
| nothing is left over | each shard belongs to a manifest, and no mark of retention is there |
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path

import pytest
from support.builders.lineage import LINEAGE, RUN, STEP, claim_of, end_of, ref, write_claim, write_end
from support.builders.near_memory import held_memory
from support.processes.forking import ForkingProcess
from support.programs.trainer import digest_of, initial_state, train_step

from tiphys.lineage.quarantine import list_quarantined
from tiphys.lineage.retention.delete import Retention
from tiphys.lineage.select import choose_checkpoint, list_commits, starts_from_claims
from tiphys.lineage.validity import read_manifest
from tiphys.protocol.step_spec import RetentionPolicy
from tiphys.store import DirectoryStore, LineageLayout, read_events, read_step_attempts

SEED = 20261121
KILLS = 500
STEPS = 20
KEEP = 2
TRAINER = "import runpy; runpy.run_module('support.programs.trainer', run_name='__main__', alter_sys=True)"
LAYOUT = LineageLayout(LINEAGE)

POINTS = {
    "checkpoint.before_copy": 8,
    "checkpoint.after_stage": 4,
    "checkpoint.before_shard": 8,
    "checkpoint.after_shard": 8,
    "checkpoint.before_manifest": 4,
    "checkpoint.after_manifest": 4,
    "retention.before_mark": 3,
    "retention.after_mark": 3,
    "retention.after_announcement": 2,
    "retention.after_manifest_delete": 2,
    "retention.after_shard_delete": 4,
    "retention.before_clear": 2,
    "retention.after_clear": 2,
    "store.before_publish": 14,
    "store.after_publish": 14,
}
"""Places, and the latest passage that an attempt reaches; each save has two shards."""


@cache
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
    number: int = 0
    memory: Mapping[str, str] = field(default_factory=dict)
    """Variables of memory that outlives the processes."""
    near: Counter[str] = field(default_factory=Counter)
    """How often a process found its checkpoint there, and how often another save."""

    def __post_init__(self):
        self.store = DirectoryStore(self.root / "store")
        self.result = self.root / "result"
        self.log = self.root / "failpoints.log"

    def environ(self, start, failpoints, **others):
        own = {
            "TIPHYS_STORE": self.store.url,
            "TIPHYS_RUN": RUN,
            "TIPHYS_STEP": STEP,
            "TIPHYS_ATTEMPT": str(self.number),
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
        return {**kept, **own, **self.memory, **others}

    def claim(self):
        """Open the next attempt where the choice says."""
        choice = choose_checkpoint(self.store, LINEAGE, read_step_attempts(self.store, RUN, STEP))
        self.number += 1
        write_claim(self.store, claim_of(self.number, choice.checkpoint))
        return choice

    def start(self, **variables):
        """Start the program of the next attempt."""
        choice = self.claim()
        command = [sys.executable, "-m", "support.programs.trainer", str(STEPS), str(self.result)]
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
        self.near["used"] += err.count("was read from its copy in the memory")
        self.near["refused"] += err.count("were read from the store: what this pod holds")
        if code != 0:
            write_end(self.store, end_of(self.number))
        return code, int(lines[0][1]) if lines else None, err

    def attempt_until_end(self, failpoints="", **variables):
        choice = self.claim()
        environ = self.environ(choice.checkpoint, failpoints, **variables)
        done = self.trainers.run(TRAINER, [str(STEPS), str(self.result)], environ=environ)
        return choice, *self.end(done.returncode, done.stdout, done.stderr)

    def attempt(self, failpoints, **variables):
        """One attempt that loses nothing; whether it was killed."""
        acknowledged, faults = max(self.saved, default=0), self.faults()
        choice, code, started, err = self.attempt_until_end(failpoints, **variables)
        assert code in (0, -signal.SIGKILL), err
        assert started is None or started == (choice.checkpoint.global_step if choice.checkpoint else 0)
        assert started is None or started >= acknowledged, failpoints
        assert self.faults()[len(faults) :] == ([failpoints.partition("@")[0]] if code else []), failpoints
        return code != 0

    def faults(self):
        return self.log.read_text().split() if self.log.exists() else []

    def collect(self):
        """One more pass of retention: the last save may have been queued behind the end of the program."""
        starts = starts_from_claims(read_step_attempts(self.store, RUN, STEP))
        Retention(self.store, LINEAGE, RetentionPolicy(last=KEEP, delay_seconds=0)).collect(starts, ())

    def check(self):
        """Its state is that of a run without a fault, and only whole checkpoints remain."""
        assert self.result.read_text() == uninterrupted()
        assert list_quarantined(self.store, LINEAGE) == set()
        commits = set(list_commits(self.store, LINEAGE))
        assert {LAYOUT.parse_shard(info.key) for info in self.store.list(LAYOUT.all_shards)} == commits
        assert list(self.store.list(LAYOUT.all_tombstones)) == []


@pytest.fixture(scope="module")
def trainers():
    """Forks processes that have imported what the trainer trains and saves with."""
    with ForkingProcess("numpy.random", "tiphys.checkpoint.session", "tiphys.checkpoint.tracked_session") as process:
        yield process


@pytest.fixture
def run(tmp_path, trainers):
    return Run(tmp_path, trainers)


def campaign(folder, trainers, kills):
    """Have runs end with attempts that die, at each place before at one again; where, once so many were killed."""
    rng, places, killed, near = random.Random(SEED), [], Counter(), Counter()
    for number in count():
        with contextlib.ExitStack() as stack:
            memory = stack.enter_context(held_memory()) if number % 2 else {}
            run = Run(folder / str(number), trainers, memory=memory)
            _end_well(run, rng, places, killed)
        near += run.near
        if killed.total() >= kills:
            assert near["used"] > 0
            assert near["refused"] > 0
            return killed
    raise AssertionError


def _end_well(run, rng, places, killed):
    """Have a run end after attempts that died; ``places`` are those that are left, and ``killed`` counts."""
    for _ in range(rng.randint(2, 6)):
        places[:] = places or rng.sample(list(POINTS), len(POINTS))
        place = places.pop()
        busy = rng.choice(["wait", "queue"])
        fault = f"{place}=crash@{rng.randint(1, POINTS[place])}"
        if not run.attempt(fault, TIPHYS_WHEN_BUSY=busy, TRAINER_WAITS=str(int(busy == "wait"))):
            break  # it ended before that passage
        killed[place] += 1
    else:
        assert not run.attempt("")
    run.collect()
    run.check()


def test_trainers_that_are_killed_lose_nothing_that_was_acknowledged(tmp_path, trainers):
    campaign(tmp_path, trainers, kills=2 * len(POINTS))


@pytest.mark.heavy
@pytest.mark.timeout(1500)
def test_five_hundred_trainers_that_are_killed_lose_nothing(tmp_path, trainers, capsys):
    killed = campaign(tmp_path, trainers, KILLS)
    assert set(killed) == set(POINTS)
    with capsys.disabled():
        sys.stderr.write(f"\nseed {SEED}: {killed.total()} kills: {dict(sorted(killed.items()))}\n")


def test_without_a_fault_the_program_ends_the_same(run):
    """The negative twin: no failpoint, no crash, no log."""
    _, code, _, err = run.attempt_until_end()
    assert code == 0, err
    assert not run.log.exists()
    assert run.saved == [3, 6, 9, 12, 15, 18]
    run.check()
    assert len(list_commits(run.store, LINEAGE)) == KEEP


def test_sigterm_commits_the_step_it_met_and_exits_75(run):
    _, process = run.start(TRAINER_PAUSE="0.25", TIPHYS_SAVE_EVERY="600s")
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
    _, process = run.start(TRAINER_PAUSE="0.25")
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
