"""A training of 50 ms steps that never ends by itself: ``python trainer.py ARM FOLDER SECONDS_BETWEEN_SAVES``.

| arm | what it does about failures |
|---|---|
| scratch | nothing: it begins again |
| folder | saves into numbered folders by rename, and goes on from the newest that can be read; SIGTERM ends it, as it \
does every program without a handler |
| tiphys | a session |

Every arm leaves its process id, and a line for each thing that it does.
"""

import os
import shutil
import sys
import time
from pathlib import Path

ARM, FOLDER = sys.argv[1], Path(sys.argv[2])
STEP_SECONDS = 0.05
SAVE_SECONDS = float(sys.argv[3])
MEMORY_BYTES = 1 << 20

(FOLDER / "pid.new").write_text(str(os.getpid()))
(FOLDER / "pid.new").rename(FOLDER / "pid")
LOG = (FOLDER / "log").open("a", buffering=1)


def tell(what: str, value: float) -> None:
    LOG.write(f"{time.time():.6f} {what} {value}\n")


tell("start", os.getpid())

import numpy as np  # noqa: E402  what it takes to load is part of a restart


def train_one(state) -> None:
    time.sleep(STEP_SECONDS)
    state["weights"] += 1
    state["step"] += 1


def scratch() -> None:
    state = beginning()
    while True:
        train_one(state)
        tell("step", state["step"])


def folder() -> None:
    state, saved_at = newest(), time.monotonic()
    while True:
        train_one(state)
        tell("step", state["step"])
        if time.monotonic() - saved_at >= SAVE_SECONDS:
            before = time.monotonic()
            save(state)
            saved_at = time.monotonic()
            tell("save", saved_at - before)


def save(state) -> None:
    made = FOLDER / "checkpoints" / "new"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    np.savez(made / "state.npz", **state)
    made.rename(FOLDER / "checkpoints" / f"{state['step']:09}")


def newest():
    for path in sorted((FOLDER / "checkpoints").glob("0*"), reverse=True):
        try:
            with np.load(path / "state.npz") as found:
                return {"step": int(found["step"]), "weights": found["weights"]}
        except Exception:  # noqa: BLE001  whatever a damaged archive raises
            shutil.rmtree(path)
    return beginning()


def tiphys() -> None:
    from tiphys import checkpoint

    with checkpoint.session() as session:
        state = session.restore(default=beginning())
        while True:
            train_one(state)
            tell("step", state["step"])
            before, newest = time.monotonic(), session.last_committed
            if session.step(state["step"], state):
                tell("save", time.monotonic() - before)
            if session.last_committed != newest:
                tell("committed", session.last_committed.global_step)


def beginning():
    return {"step": 0, "weights": np.zeros(MEMORY_BYTES // 8)}


{"scratch": scratch, "folder": folder, "tiphys": tiphys}[ARM]()
