"""A training program whose steps are timed: ``python -m bench.checkpoint.inflation_trainer MIB ROUNDS``.

Its training stays on the first core, and what uploads on the last. It prints
the seconds of its steps, in rounds without and with an upload, as JSON.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from bench.checkpoint.workload import State, make_state

from tiphys import checkpoint
from tiphys.checkpoint.session import Session

SEED = 13
SHORTEST_ROUND_STEPS = 60
_SIZE = 384


class Training:
    """Products of matrices, and an update of a part of the state: some 10 ms a step."""

    def __init__(self, mib: int) -> None:
        self.state: State = make_state(mib, SEED)
        self._batch = np.random.default_rng(SEED).random((_SIZE, _SIZE), dtype=np.float32)
        self._gradient = np.full(256 << 10, 1e-6, dtype=np.float32)
        self.steps = 0

    def step(self) -> float:
        before = time.perf_counter()
        hidden = self._batch
        for _ in range(4):
            hidden = np.tanh(hidden @ self._batch / _SIZE)
        layer = self.state[f"layer{self.steps % len(self.state):02}"]
        for start in range(0, min(layer.size, 1 << 20), self._gradient.size):
            part = layer[start : start + self._gradient.size]
            part -= self._gradient[: part.size]
        self.steps += 1
        return time.perf_counter() - before


def main(mib: int, rounds: int) -> None:
    training = Training(mib)
    times: dict[str, list[list[float]]] = {"idle": [], "uploading": []}
    with checkpoint.session() as session:
        session.restore(default=training.state)
        _upload(session, training)
        _pin()
        length = max(SHORTEST_ROUND_STEPS, len(_upload(session, training)))
        for _ in range(rounds):
            times["idle"].append([training.step() for _ in range(length)])
            times["uploading"].append(_upload(session, training))
    sys.stdout.write(json.dumps(times) + "\n")


def _upload(session: Session, training: Training) -> list[float]:
    """Steps that were trained while a save was on its way."""
    save = session.save(training.steps + 1, training.state)
    if save is None:
        raise RuntimeError("there is no checkpoint to save; TIPHYS_* are missing")
    return _while(lambda: not save.done, training)


def _while(holds: Callable[[], bool], training: Training) -> list[float]:
    times = []
    while holds():
        times.append(training.step())
    return times


def _pin() -> None:
    """Training on the first core; all other threads, and those that they start, on the last."""
    cores = sorted(os.sched_getaffinity(0))
    for task in Path("/proc/self/task").iterdir():
        is_main = int(task.name) == os.getpid()
        with contextlib.suppress(ProcessLookupError):  # it has ended since the listing
            os.sched_setaffinity(int(task.name), {cores[0] if is_main else cores[-1]})


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
