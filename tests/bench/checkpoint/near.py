"""A restart in the pod: its checkpoint from the memory of the pod, beside one from the bucket, and that memory.

What it is measured against is the least that any restore does: a copy of the state into new memory, and a SHA-256 pass,
each on all cores. Besides: damaged copies that were accepted, of a thousand.
"""

import contextlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from bench.checkpoint.ceilings import cut, joined, sha256_seconds
from bench.checkpoint.server import STORE
from bench.checkpoint.workload import MIB, Workload, commit, make_state, new_run, session, variables
from bench.progress import say
from bench.samples import interleaved, ratio, seconds, summary
from support.builders.near_memory import held_memory
from support.stories.damaged_near_copies import damaged_copies

from tiphys import checkpoint
from tiphys.protocol import environment
from tiphys.store import open_store

SEED = 20_261_128
TRIALS = 1_000
_CORES = 2
_LOOK_SECONDS = 0.005


class _KilledError(Exception):
    """Ends a program whose copy is to stay."""


def measure(work: Workload) -> dict[str, Any]:
    restored = {name: _restore(work, network) for name, network in work.networks.items()}
    peak = _peak(work)
    accepted = _accepted_damage()
    say(f"near copy: {accepted} of {TRIALS} damaged ones accepted, {peak:.2f} times the state in memory")
    fastest = restored.get("free", restored["throttled"])
    return {
        "seed": SEED,
        "restore": restored,
        "line": {
            "near_restore_over_copy_and_hash": fastest["over_copy_and_hash"],
            "near_restore_over_bucket": restored["throttled"]["over_bucket"],
            "near_peak_over_state": peak,
            "near_damage_accepted": accepted,
        },
    }


def _restore(work: Workload, network: float | None) -> dict[str, Any]:
    pieces = cut(joined(work.state))
    with held_memory() as memory:
        with work.server.at(None):
            run = new_run(open_store(STORE))
            with contextlib.suppress(_KilledError), session(STORE, run, **memory) as opened:
                commit(opened, 1, work)
                raise _KilledError
        with work.server.at(network):
            times = interleaved(
                {
                    "near": lambda: _restored(run, memory),
                    "bucket": lambda: _restored(run, {}),
                    "copy": lambda: _copied(pieces),
                    "sha256": lambda: sha256_seconds(pieces, _CORES),
                },
                work.repeats,
            )
    work.server.empty()
    least = [copied + hashed for copied, hashed in zip(times["copy"], times["sha256"], strict=True)]
    found = {f"{name}_seconds": summary(values) for name, values in times.items()}
    say(", ".join(f"{name} {one['median']}" for name, one in found.items()) + f" at {network or 'any'} MB/s")
    return {
        **found,
        "over_copy_and_hash": ratio(times["near"], least),
        "over_bucket": ratio(times["near"], times["bucket"]),
    }


def _restored(run: str, memory: Mapping[str, str]) -> float:
    """Seconds in which the next start of the program has its state."""
    took = 0.0
    with contextlib.suppress(_KilledError), session(STORE, run, **memory) as opened:
        states: list[Any] = []
        took = seconds(lambda: states.append(opened.restore()))
        if states[0] is None:
            raise RuntimeError("nothing was restored")
        raise _KilledError
    return took


def _copied(pieces: list[bytes]) -> float:
    """Seconds of a copy of all pieces into new memory."""
    arrays = [np.frombuffer(piece, dtype=np.uint8) for piece in pieces]
    with ThreadPoolExecutor(_CORES) as pool:
        return seconds(lambda: list(pool.map(np.copy, arrays)))


def _peak(work: Workload) -> float:
    """Most memory of a program and its near copy, over the state: its first start, its death, and its restart."""
    with work.server.at(None), held_memory() as memory:
        environ = {
            **os.environ,
            **variables(STORE, new_run(open_store(STORE)), **memory),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        command = [sys.executable, "-m", "bench.checkpoint.near", str(work.state_mib), str(work.seed)]
        peak = max(_most_bytes(subprocess.Popen(command, env=environ), memory) for _ in range(2))
    work.server.empty()
    return peak / (work.state_mib * MIB)


def _most_bytes(process: "subprocess.Popen[bytes]", memory: Mapping[str, str]) -> int:
    """Own pages of a program, and those of the file in memory, at their most."""
    path, page, most = Path(f"/proc/{process.pid}/statm"), os.sysconf("SC_PAGE_SIZE"), 0
    while process.poll() is None:
        _, resident, shared, *_ = map(int, path.read_text().split())
        held = 512 * Path(memory[environment.NEAR_MEMORY]).stat().st_blocks
        most = max(most, (resident - shared) * page + held)
        time.sleep(_LOOK_SECONDS)
    if process.returncode != 1:
        raise RuntimeError(f"the program ended with {process.returncode}")
    return most


def _accepted_damage() -> int:
    with contextlib.redirect_stderr(io.StringIO()), damaged_copies(SEED) as copies:
        return sum(not copies.run_trial(number).is_right for number in range(TRIALS))


def main(mib: int, seed: int) -> None:
    """A program that restores or begins, saves twice, and dies with 1."""
    with checkpoint.session() as opened:
        state = opened.restore()
        first = 1 if state is None else 3
        state = state or make_state(mib, seed)
        for step in (first, first + 1):
            for array in state.values():
                array += 1
            save = opened.save(step, state)
            if save is None or save.wait() is None:
                raise RuntimeError(f"the save of step {step} was not committed")
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  for the life of the process
        raise _KilledError


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
