"""Tries out what rests on the store: claims, fences, pins, and commits that are killed or damaged.

The trials share a store that no run uses. Their clients are real ones: threads with connections of their own,
processes, and a training under the launcher and the local engine.
"""

import hashlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tiphys_controller.doctor.check import Finding, passed
from tiphys_controller.doctor.store_probe import ProbeCheck, list_probe_checks

from hera_pipelines.conformance.promises import UntriedError
from hera_pipelines.demo.processes import TiphysProcess, check
from tiphys.checkpoint.save.commit import check_fence, publish_manifest
from tiphys.errors import ConflictError, FencedError, IntegrityError, NotFoundError, install_command
from tiphys.lineage.quarantine import list_quarantined
from tiphys.lineage.retention.delete import Retention
from tiphys.lineage.retention.policy import pin_checkpoint
from tiphys.lineage.select import choose_checkpoint, list_commits
from tiphys.lineage.validity import read_manifest
from tiphys.protocol.step_spec import RetentionPolicy
from tiphys.records import AttemptClaim, AttemptEnd, CheckpointManifest, CheckpointRef, Shard, StartTimes, utc_now
from tiphys.records import AttemptEndOutcome as Outcome
from tiphys.store import (
    DirectoryStore,
    LineageLayout,
    RunLayout,
    S3Store,
    Store,
    claim_record,
    lineage_name,
    read_step_attempts,
)

WRITERS = 4
CLAIMS, FENCES, RETENTIONS = 25, 10, 5
_COMMITS = 12
_SHARD_BYTES = 10_000
_LONGEST_PAUSE_SECONDS = 0.2
_STEP_FAILED = 1
"""Exit code of `tiphys run`."""
_RUN, _TRAINING_RUN = "conformance", "conformance-training"
_DEATHS = {
    "checkpoint.before_shard": 3,
    "checkpoint.after_shard": 3,
    "checkpoint.before_manifest": 2,
    "checkpoint.after_manifest": 2,
}
"""Places in a commit, and the earliest passage at which a program dies there; a save has two shards."""


@dataclass
class StorePromises:
    """The trials in one empty store.

    Args:
        rng: Draws moments and victims.
        deadline: When the training is given up, by the monotonic clock.
    """

    store: Store
    other: Store
    rng: random.Random
    deadline: float
    training: list[str] = field(default_factory=list)
    """What the program of `killed_commit` noted; empty before it has succeeded."""

    def trials(self) -> list[ProbeCheck]:
        """Every promise of a store, with its trial, the cheap ones first."""
        probes = list_probe_checks(self.store, "probe/")
        if not isinstance(self.store, S3Store | DirectoryStore):
            probes.append(("clock", self.clock))
        own = (self.claims, self.fence, self.pins, self.killed_commit, self.damage)
        return [*probes, *((trial.__name__.replace("_", "-"), trial) for trial in own)]

    def clock(self) -> Finding:
        """Refuse: `store_probe` compares clocks with S3, and a folder has that of its machine."""
        raise UntriedError("no reply of this kind of store is read for its time", "compare both clocks by hand")

    def claims(self) -> Finding:
        """Have processes claim the same keys at the same time."""
        command = [sys.executable, "-P", "-m", "hera_pipelines.conformance.writer", self.store.url]
        with ExitStack() as stack:
            writers = []
            for number in range(WRITERS):
                # In sessions of their own: Ctrl-C ends this command first, which kills them.
                pipes = subprocess.Popen(
                    [*command, f"writer-{number}"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
                writers.append(stack.enter_context(pipes))
                stack.callback(pipes.kill)
            for number in range(CLAIMS):
                _race(writers, f"control/claims/{number:03d}.json")
        return passed(f"each of {CLAIMS} claims was won by one of {WRITERS} processes; the others read and listed it")

    def fence(self) -> Finding:
        """End attempts while they commit, and see whether they go on."""
        accepted = 0
        for number in range(FENCES):
            step, fenced = f"fence-{number}", threading.Event()
            self._claim(step, 1)
            self._commit(self.store, step, 1, 1)
            with ThreadPoolExecutor(1) as pool:
                late = pool.submit(self._commit_until_refused, step, fenced)
                time.sleep(self.rng.uniform(0, _LONGEST_PAUSE_SECONDS))
                end = AttemptEnd(run=_RUN, step=step, attempt=1, submission=1, outcome=Outcome.FENCED)
                claim_record(self.store, RunLayout(_RUN).attempt_end(step, 1), end)
                fenced.set()
                accepted += late.result()
            start = self._choose(step)
            assert start is not None, "step 1 was committed"
            self._claim(step, 2, start)
            own = self._commit(self.store, step, 2, start.global_step + 1)
            check((chosen := self._choose(step)) == own, f"{chosen} of {step} is chosen, and {own} is the newest")
        return passed(f"{FENCES} attempts were ended while they committed, after {accepted} commits: none went on")

    def _commit_until_refused(self, step: str, fenced: threading.Event) -> int:
        """Commit as attempt 1; how many commits were accepted. None that begins once ``fenced`` is set may be."""
        count = 0
        while True:
            is_late = fenced.is_set()
            try:
                self._commit(self.other, step, 1, count + 2)
            except FencedError:
                return count
            check(not is_late, f"attempt 1 of {step} committed after its end was recorded: it was not listed")
            count += 1

    def pins(self) -> Finding:
        """Pin checkpoints while two clients delete."""
        deleted = in_time = 0
        for number in range(RETENTIONS):
            step = f"pins-{number}"
            self._claim(step, 1)
            commits = [self._commit(self.store, step, 1, one) for one in range(1, _COMMITS + 1)]
            before, meanwhile = self.rng.sample(commits[:-1], 2)
            pin_checkpoint(self.store, before, "conformance")
            collects = [partial(_collect, client, before.lineage) for client in (self.store, self.other)]
            calls = [*collects, partial(_try_to_pin, self.other, meanwhile)]
            with ThreadPoolExecutor(len(calls)) as pool:
                is_pinned = any(list(pool.map(lambda call: call(), self.rng.sample(calls, len(calls)))))
            for kept in (before, commits[-1], *[meanwhile] * is_pinned):
                check(_is_whole(self.other, kept), f"checkpoint {kept} of {step} had to stay, and is not whole")
            deleted += _COMMITS - len(list_commits(self.other, before.lineage))
            in_time += is_pinned
        check(deleted > 0, "nothing was deleted, so that nothing could be shown")
        late = f"{in_time} of {RETENTIONS} late pins came in time, the others were refused"
        return passed(f"{deleted} checkpoints were deleted, and none that was pinned; {late}")

    def killed_commit(self) -> Finding:
        """Run a training whose processes are killed in their commits, and compare its last bits."""
        if importlib.util.find_spec("numpy") is None:
            raise UntriedError("the training needs NumPy", install_command("numpy"))
        from hera_pipelines.conformance import program  # imports Hera and NumPy

        places = self.rng.sample(sorted(_DEATHS), len(_DEATHS))
        deaths = [f"{place}=crash@{_DEATHS[place] + self.rng.randint(0, 2)}" for place in places]
        plan = [*deaths]
        plan.insert(self.rng.randint(2, len(deaths)), program.DAMAGE)
        seed = self.rng.randrange(2**31)
        with tempfile.TemporaryDirectory(prefix="tiphys-conformance-") as name:
            log, output = Path(name, "program.log"), Path(name, "engine.log")
            given = {"seed": seed, "deaths": json.dumps(plan), "log": log}
            command = ["run", str(program.__file__), "--run", _TRAINING_RUN, "--store", self.store.url]
            command += ["--state", f"{name}/state", *(f"--parameter={key}={value}" for key, value in given.items())]
            with TiphysProcess(command, output) as engine:
                try:
                    code = engine.wait(max(1.0, self.deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    raise UntriedError("the training did not end in time", "give it more with --minutes") from None
            lines = log.read_text().splitlines() if log.exists() else []
            ending = f"the training ended with exit code {code}: {output.read_text(errors='replace')[-500:]}"
        if code not in (0, _STEP_FAILED):
            raise UntriedError(ending)
        check(code == 0, ending)
        met = [line for line in lines if "=" in line]
        check(len(met) == len(deaths), f"only {len(met)} of {len(deaths)} deaths happened: {', '.join(lines)}")
        digest = read_digest(self.store, _TRAINING_RUN)
        check(digest == program.train_undisturbed(seed), f"its result is not that of an undisturbed one: {digest}")
        self.training = lines
        return passed(f"killed {len(deaths)} times ({', '.join(deaths)}), it ended with the same bits, {digest[:16]}…")

    def damage(self) -> Finding:
        """See what the training of `killed_commit` made of the damage that it met."""
        if not self.training:
            raise UntriedError("the training that meets it did not end as it should", "see killed-commit")
        place = next(index for index, line in enumerate(self.training) if line.startswith("damage "))
        damaged, start = (int(line.split()[1]) for line in self.training[place : place + 2])
        quarantined = [ref.global_step for ref in list_quarantined(self.store, lineage_name(_TRAINING_RUN, "train"))]
        check(quarantined == [damaged], f"step {damaged} was damaged, and {quarantined} are in quarantine")
        check(0 < start < damaged, f"step {damaged} was damaged, and the program went on from {start}")
        return passed(f"one bit of step {damaged} was turned; it was quarantined, and step {start} restored")

    def _claim(self, step: str, attempt: int, start: CheckpointRef | None = None) -> None:
        known = {"run": _RUN, "step": step, "lineage": lineage_name(_RUN, step), "step_key": "0" * 64}
        claim = AttemptClaim(
            **known, attempt=attempt, submission=1, uid=_RUN, node=step, instance=step, starts_from=start
        )
        claim_record(self.store, RunLayout(_RUN).attempt(step, attempt), claim)

    def _choose(self, step: str) -> CheckpointRef | None:
        attempts = read_step_attempts(self.other, _RUN, step)
        return choose_checkpoint(self.other, lineage_name(_RUN, step), attempts).checkpoint

    def _commit(self, client: Store, step: str, attempt: int, global_step: int) -> CheckpointRef:
        content, lineage = os.urandom(_SHARD_BYTES), lineage_name(_RUN, step)
        sha256 = hashlib.sha256(content).hexdigest()
        key = LineageLayout(lineage).shard(attempt, global_step, 0, sha256, "bin")
        client.create(key, content, sha256=sha256)
        manifest = CheckpointManifest(
            lineage=lineage,
            run=_RUN,
            step=step,
            attempt=attempt,
            global_step=global_step,
            shards=(Shard(key=key, size=len(content), sha256=sha256),),
            began=StartTimes(opened_at=utc_now()),
        )
        return publish_manifest(client, manifest, partial(check_fence, client, _RUN, step, attempt)).ref


def read_digest(store: Store, run: str) -> str:
    """What the training of ``run`` answered; empty if it has not ended well."""
    end = read_step_attempts(store, run, "train")[-1].end
    return (end.outputs[0].value or "") if end and end.outputs else ""


def _race(writers: Sequence[subprocess.Popen[str]], key: str) -> None:
    """Have all ``writers`` claim ``key`` at once, and compare their answers."""
    for writer in writers:
        print(key, file=writer.stdin, flush=True)
    answers = [json.loads(writer.stdout.readline() or '{"error": "it ended"}') for writer in writers if writer.stdout]
    if errors := [answer["error"] for answer in answers if "error" in answer]:
        raise UntriedError(f"a process could not claim {key}: {errors[0]}")
    winners = [answer["winner"] for answer in answers if answer["won"]]
    check(len(winners) == 1, f"{len(winners)} of {len(writers)} processes believe that they won the claim {key}")
    check({answer["winner"] for answer in answers} == {*winners}, f"processes read different winners of {key}")
    check(all(key in answer["listed"] for answer in answers), f"{key} was written, and a listing did not show it")


def _collect(client: Store, lineage: str) -> None:
    Retention(client, lineage, RetentionPolicy(last=1, delay_seconds=0)).collect({1: None}, ())


def _try_to_pin(client: Store, ref: CheckpointRef) -> bool:
    try:
        pin_checkpoint(client, ref, "conformance")
    except (NotFoundError, ConflictError):
        return False
    return True


def _is_whole(client: Store, ref: CheckpointRef) -> bool:
    try:
        [shard] = read_manifest(client, ref).shards
        return hashlib.sha256(client.read(shard.key)).hexdigest() == shard.sha256
    except (NotFoundError, IntegrityError):
        return False
