"""The pipeline file of the trials, as ``tiphys run`` takes it: a training whose last bits depend on every step of it.

It computes with whole numbers, so that a seed gives the same bits on every machine. ``deaths`` says where its processes
are killed, one after the other; on a cluster, the command deletes its pod.
"""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from hera.workflows import Parameter

from hera_pipelines import Checkpoints, Pipeline, Retries, step, train
from tiphys import checkpoint
from tiphys.lineage.select import list_commits
from tiphys.lineage.validity import read_manifest
from tiphys.store import open_store

STEPS, NUMBERS = 60, 16384
DAMAGE = "damage"
"""In the place of a death: the next process damages the newest checkpoint before it restores one."""
PARAMETERS = {"image": "none", "seed": "7", "deaths": "[]", "log": "", "pause": "0"}

Seed = Annotated[int, Parameter(name="seed")]
Digest = Annotated[str, Parameter(name="digest")]


def initial_state(seed: int) -> dict[str, Any]:
    """What a checkpoint holds."""
    return {"step": 0, "numbers": np.random.default_rng(seed).integers(0, 2**63, NUMBERS, dtype=np.uint64)}


def advance(state: dict[str, Any]) -> None:
    """Take one step. It wraps around, so that each step changes all bits that come later."""
    state["step"] += 1
    state["numbers"] = state["numbers"] * np.uint64(6364136223846793005) + np.uint64(state["step"])


def digest_state(state: dict[str, Any]) -> str:
    """Equal only for states that are equal in every bit."""
    return hashlib.sha256(state["numbers"].tobytes()).hexdigest()


def train_undisturbed(seed: int) -> str:
    """What a training that nothing disturbs answers."""
    state = initial_state(seed)
    for _ in range(STEPS):
        advance(state)
    return digest_state(state)


def plan_death(deaths: list[str], log: Path) -> None:
    """Arm the next death that the log does not have yet, after the damage that comes before it."""
    met = [line for line in log.read_text().splitlines() if not line.startswith("starts ")]
    if deaths[len(met) : len(met) + 1] == [DAMAGE]:
        note(log, f"{DAMAGE} {damage_newest_checkpoint()}")
        met.append(DAMAGE)
    if len(met) < len(deaths):
        os.environ |= {"TIPHYS_FAILPOINTS": deaths[len(met)], "TIPHYS_FAILPOINTS_LOG": str(log)}


def damage_newest_checkpoint() -> int:
    """Turn one bit of the newest checkpoint's largest shard, as a failing disk does; return its step."""
    store = open_store(os.environ["TIPHYS_STORE"])
    newest = list_commits(store, os.environ["TIPHYS_LINEAGE"])[0]
    key = max(read_manifest(store, newest).shards, key=lambda shard: shard.size).key
    data = bytearray(store.read(key))
    data[len(data) // 2] ^= 1
    store.delete(key)
    store.create(key, data)
    return newest.global_step


def note(log: Path, line: str) -> None:
    """Add a line to the log, which outlives the process."""
    with log.open("a") as stream:
        stream.write(f"{line}\n")


@step(image="{{workflow.parameters.image}}", image_pull_policy="IfNotPresent")
def choose_seed(seed: int) -> Seed:
    return seed


@train(
    name="train",
    image="{{workflow.parameters.image}}",
    image_pull_policy="IfNotPresent",
    # A restart has to read the store, and not the copy in the memory of its pod.
    checkpoints=Checkpoints(every="2 steps", keep_last=None, near_copy=False),
    retries=Retries(backoff="1s", spare=False),
)
def train_numbers(seed: int, deaths: str, log: str, pause: float) -> Digest:
    notes = Path(log or os.devnull)
    notes.touch()
    plan_death(json.loads(deaths), notes)
    with checkpoint.session(total_steps=STEPS) as session:
        state = session.restore(default=initial_state(seed))
        note(notes, f"starts {state['step']}")
        while state["step"] < STEPS:
            advance(state)
            session.step(state["step"], state)
            time.sleep(pause)
    return digest_state(state)


with Pipeline(
    "conformance", arguments=[Parameter(name=name, value=value) for name, value in PARAMETERS.items()]
) as pipeline:
    chosen = choose_seed(pipeline.get_parameter("seed"))
    train_numbers(chosen, *(pipeline.get_parameter(name) for name in ("deaths", "log", "pause")))
