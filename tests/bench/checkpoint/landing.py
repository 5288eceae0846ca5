"""How often a checkpoint lands between SIGTERM and SIGKILL: one signal for each process, which is killed at the end."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import cycle, groupby, islice
from typing import Any, NamedTuple

from bench.checkpoint.foresight import compile_warns
from bench.checkpoint.server import STORE
from bench.checkpoint.situations import Cell, Situation, cells
from bench.checkpoint.workload import STEP, Workload, new_run, variables
from bench.progress import say
from bench.samples import significant, summary, wilson_lower

from tiphys.lineage.validity import checkpoint_fault, read_manifest
from tiphys.protocol import environment
from tiphys.records import CheckpointRef
from tiphys.store import LineageLayout, Store, open_store, read_events

QUICK = [Cell(5, 64, 100.0)]


class Trial(NamedTuple):
    situation: Situation
    landed: bool
    choice: str
    """What the session chose to do; empty if it was killed before it could tell."""
    seconds: float
    """From SIGTERM to the end of the process."""
    code: int


def measure(work: Workload) -> dict[str, Any]:
    chance = random.Random(work.seed)
    found: dict[Cell, list[Trial]] = {}
    with work.server.at(None):
        store = open_store(STORE)
    for network, group in groupby(QUICK if work.quick else cells(), key=lambda cell: cell.network):
        with work.server.at(network) as leads:
            for cell in group:
                found[cell] = _trials(work, store, cell, leads, chance)
                _tell(cell, found[cell])
    return outcome(found)


def outcome(found: Mapping[Cell, Sequence[Trial]]) -> dict[str, Any]:
    """Pooled over the cells in which a landing is possible; the others must have been refused by compile."""
    pool = [trial for cell, trials in found.items() if cell.allows_landing for trial in trials]
    landed = sum(trial.landed for trial in pool)
    hopeless = [cell for cell in found if not cell.allows_landing]
    warned = [cell for cell in hopeless if compile_warns(cell)]
    if warned != hopeless:
        raise AssertionError(
            f"compile did not warn of {', '.join(str(cell) for cell in hopeless if cell not in warned)}"
        )
    return {
        "landed": landed,
        "trials": len(pool),
        "wilson_lower_bound": significant(wilson_lower(landed, len(pool))),
        "hopeless_cells": len(hopeless),
        "hopeless_cells_that_compile_refused": len(warned),
        "cells": {str(cell): _row(cell, trials) for cell, trials in found.items()},
        "line": {"sigterm_landed_ratio": significant(landed / len(pool))},
    }


def _row(cell: Cell, trials: Sequence[Trial]) -> dict[str, Any]:
    return {
        "possible": cell.allows_landing,
        "landed": sum(trial.landed for trial in trials),
        "trials": len(trials),
        "choices": dict(Counter(trial.choice or "killed" for trial in trials)),
        "seconds": summary([trial.seconds for trial in trials]),
        "missed": [f"{trial.situation}: {trial.choice or 'killed'}" for trial in trials if not trial.landed],
    }


def _trials(work: Workload, store: Store, cell: Cell, leads: Mapping[str, str], chance: random.Random) -> list[Trial]:
    situations = list(Situation)
    chance.shuffle(situations)
    trials = []
    for situation in islice(cycle(situations), 1 if work.quick else cell.trials):
        trials.append(_trial(store, cell, situation, leads, chance))
        work.server.empty()
    return trials


def _trial(store: Store, cell: Cell, situation: Situation, leads: Mapping[str, str], chance: random.Random) -> Trial:
    run = new_run(store)
    settings = variables(STORE, run, **{environment.GRACE_SECONDS: str(cell.grace_seconds)})
    command = [sys.executable, "-m", "bench.checkpoint.landing_trainer", str(cell.state_mib), situation.value]
    with subprocess.Popen(
        command, env={**os.environ, **leads, **settings}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert process.stdout
            if process.stdout.readline() != b"ready\n":
                raise RuntimeError(f"the training program of {cell} ended before it was told to")
            time.sleep(chance.uniform(0, cell.upload_seconds if situation.is_uploading else 0.2))
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(cell.grace_seconds)
        finally:
            process.kill()
    seconds = time.monotonic() - began
    landed, choice = _examine(store, run)
    return Trial(situation, landed, choice, seconds, process.returncode)


def _examine(store: Store, run: str) -> tuple[bool, str]:
    """Whether a checkpoint that is whole stands at the step that was told to stop, or, of the choice to finish the
    save under way, whether that one does.
    """
    lineage = f"{run}/{STEP}"
    keys = [info.key for info in store.list(LineageLayout(lineage).manifests)]
    newest = LineageLayout(lineage).parse_checkpoint(keys[0]) if keys else None
    cards = [event.data for event in read_events(store, run) if event.name == "checkpoint.preempted"]
    card = cards[0] if cards else {}
    choice = str(card.get("choice", ""))
    if newest is None or checkpoint_fault(store, newest) is not None:
        return False, choice
    return _is_landing(store, newest, card), choice


def _is_landing(store: Store, newest: CheckpointRef, card: Mapping[str, Any]) -> bool:
    if card.get("choice") == "finish":
        return card["committed"] == str(newest)
    return newest.global_step == card.get("global_step") or read_manifest(store, newest).reason == "sigterm"


def _tell(cell: Cell, trials: Sequence[Trial]) -> None:
    landed = sum(trial.landed for trial in trials)
    kind = "" if cell.allows_landing else " (too short for it, as compile says)"
    choices = ", ".join(f"{count} {choice}" for choice, count in Counter(t.choice or "killed" for t in trials).items())
    longest = max(trial.seconds for trial in trials)
    say(f"{cell}: {landed} of {len(trials)} landed{kind}; {choices}; at most {longest:.1f} s")
