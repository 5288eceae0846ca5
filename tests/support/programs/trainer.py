"""A small deterministic training program, as people write one: ``python -m support.programs.trainer STEPS RESULT``.

It prints ``saved <step>`` for each checkpoint that the session acknowledged, and
leaves the SHA-256 of its final state in the file RESULT. ``TRAINER_PAUSE``
seconds pass after each step. It waits for each save, unless ``TRAINER_WAITS`` is 0.
"""

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tiphys import checkpoint

TRUE_WEIGHTS = np.linspace(-1, 1, 48)


def initial_state() -> dict[str, Any]:
    return {
        "step": 0,
        "weights": np.zeros(48),
        "momentum": np.zeros(48, dtype=np.float32),
        "rng": np.random.default_rng(11).bit_generator.state,
    }


def train_step(state: dict[str, Any]) -> float:
    """One step of noisy least squares; every number of the state decides the next one."""
    generator = np.random.Generator(np.random.PCG64())
    generator.bit_generator.state = state["rng"]
    batch = generator.normal(size=(16, 48))
    error = batch @ (state["weights"] - TRUE_WEIGHTS)
    state["momentum"] = (0.9 * state["momentum"] + batch.T @ error / 16).astype(np.float32)
    state["weights"] = state["weights"] - 0.05 * state["momentum"]
    state["rng"] = generator.bit_generator.state
    state["step"] += 1
    return float(np.mean(error**2))


def digest_of(state: dict[str, Any]) -> str:
    """Equal only for states that are equal in every bit."""
    parts = [state["weights"].tobytes(), state["momentum"].tobytes(), repr((state["step"], state["rng"])).encode()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(steps: int, result: Path) -> None:
    waits, save = os.environ.get("TRAINER_WAITS") != "0", None
    with checkpoint.session(total_steps=steps) as session:
        state = session.restore(default=initial_state())
        say(f"starts {state['step']}")
        while state["step"] < steps:
            loss = train_step(state)
            save = session.step(state["step"], state, metrics={"loss": loss}) or save
            if save and (waits or save.done):
                if committed := save.wait():
                    say(f"saved {committed.global_step}")
                save = None
            time.sleep(float(os.environ.get("TRAINER_PAUSE", "0")))
    result.write_text(digest_of(state))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
