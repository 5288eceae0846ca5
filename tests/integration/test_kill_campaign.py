"""Hundreds of runs that are killed again and again at named places, and must end as if nothing had happened.

Each run is one training step whose attempts die one after the other, at a place
and a passage drawn from a seed; the last attempt is left alone. A kill counts
only if the log of failpoints says that it happened.

| promise | shown by |
|---|---|
| an acknowledged checkpoint is never lost | each attempt starts at it or later |
| an incomplete one is never chosen | nothing is quarantined |
| the run goes on as if nothing had happened | the final state is bit-identical |
| nothing is left over | after one more pass of retention each shard belongs to a manifest |
"""

import random
import signal
import sys
from collections import Counter

import pytest
from support.lineage import LINEAGE, RUN, STEP, claim_of, end_of, write_claim, write_end
from support.trainer import digest_of, initial_state, train_step
from support.zygote import Zygote

from tiphys.lineage.quarantine import list_quarantined
from tiphys.lineage.retention.delete import Retention
from tiphys.lineage.select import choose_checkpoint, list_commits, starts_from_claims
from tiphys.protocol.step_spec import RetentionPolicy
from tiphys.store import DirectoryStore, LineageLayout, read_step_attempts

SEED = 20261121
KILLS = 500
STEPS = 30
KEEP = RetentionPolicy(last=2, delay_seconds=0)
POINTS = {
    "checkpoint.after_stage": 6,
    "checkpoint.before_shard": 12,
    "checkpoint.after_shard": 12,
    "checkpoint.before_manifest": 6,
    "checkpoint.after_manifest": 6,
    "retention.before_mark": 4,
    "retention.after_mark": 4,
    "retention.after_announcement": 3,
    "retention.after_manifest_delete": 3,
    "retention.after_shard_delete": 6,
    "store.before_publish": 20,
    "store.after_publish": 20,
}
"""Places, and the latest passage that an attempt reaches."""


def uninterrupted():
    state = initial_state()
    for _ in range(STEPS):
        train_step(state)
    return digest_of(state)


class Run:
    def __init__(self, root, zygote, rng):
        self.root = root
        self.zygote = zygote
        self.rng = rng
        self.store = DirectoryStore(root / "store")
        self.log = root / "log"
        self.faults = root / "faults"
        self.attempt = 0

    def told(self, word):
        lines = [line.split() for line in self.log.read_text().splitlines()] if self.log.exists() else []
        return [value for what, value in lines if what == word]

    def go(self, failpoints=""):
        """One attempt, opened where the choice says; its exit code."""
        acknowledged = max(map(int, self.told("saved")), default=0)
        choice = choose_checkpoint(self.store, LINEAGE, read_step_attempts(self.store, RUN, STEP))
        self.attempt += 1
        write_claim(self.store, claim_of(self.attempt, choice.checkpoint))
        environ = {
            "TIPHYS_STORE": self.store.url,
            "TIPHYS_RUN": RUN,
            "TIPHYS_STEP": STEP,
            "TIPHYS_ATTEMPT": str(self.attempt),
            "TIPHYS_LINEAGE": LINEAGE,
            "TIPHYS_RESUME_FROM": str(choice.checkpoint or ""),
            "TIPHYS_SAVE_EVERY": "3 steps",
            "TIPHYS_WHEN_BUSY": self.rng.choice(["wait", "queue"]),
            "TIPHYS_KEEP_LAST": "2",
            "TIPHYS_DELETE_AFTER_SECONDS": "0",
            "TIPHYS_FAILPOINTS": failpoints,
            "TIPHYS_FAILPOINTS_LOG": str(self.faults),
        }
        code = self.zygote.run(STEPS, self.log, environ)
        started = self.told("started")
        if len(started) == self.attempt:
            assert int(started[-1]) >= acknowledged, failpoints
        if code:
            write_end(self.store, end_of(self.attempt))
        return code

    def check(self):
        assert self.told("digest") == [uninterrupted()]
        assert list_quarantined(self.store, LINEAGE) == set()
        layout = LineageLayout(LINEAGE)
        Retention(self.store, LINEAGE, KEEP).collect(starts_from_claims(read_step_attempts(self.store, RUN, STEP)), ())
        commits = set(list_commits(self.store, LINEAGE))
        assert max(ref.global_step for ref in commits) == STEPS
        left = {layout.parse_shard(info.key) for info in self.store.list(layout.all_shards)}
        assert left == commits


@pytest.mark.heavy
@pytest.mark.timeout(1500)
def test_five_hundred_kills_lose_nothing(tmp_path, capsys):
    rng = random.Random(SEED)
    kills: Counter[str] = Counter()
    with Zygote() as zygote:
        number = 0
        while sum(kills.values()) < KILLS:
            number += 1
            run = Run(tmp_path / str(number), zygote, rng)
            for _ in range(rng.randint(2, 6)):
                point = rng.choice(list(POINTS))
                before = run.faults.read_text().count("\n") if run.faults.exists() else 0
                code = run.go(f"{point}=crash@{rng.randint(1, POINTS[point])}")
                if code == 0:  # it ended before that passage
                    break
                assert code == -signal.SIGKILL, f"{run.root}: {code}"
                assert run.faults.read_text().splitlines()[before:] == [f"{point}=crash"]
                kills[point] += 1
            else:
                assert run.go() == 0, (run.root / "log.err").read_text()
            run.check()
    with capsys.disabled():
        counts = dict(sorted(kills.items()))
        sys.stdout.write(f"\nseed {SEED}: {sum(kills.values())} kills in {number} runs: {counts}\n")
    assert set(kills) == set(POINTS)
