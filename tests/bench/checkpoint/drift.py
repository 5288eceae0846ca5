"""Whether the memory of a training grows with its saves: a program of its own, with retention, in steady state."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.checkpoint.server import STORE
from bench.checkpoint.workload import MIB, Workload, make_state, new_run, variables
from bench.progress import say
from bench.samples import summary

from tiphys import checkpoint
from tiphys.protocol import environment
from tiphys.store import open_store

STATE_MIB, SAVES, FIRST, WINDOW = 16, 200, 20, 10
"""Buffers are allocated in the first saves. Windows of saves at both ends are compared, as single readings jump."""


def measure(work: Workload) -> dict[str, Any]:
    """Medians of the resident memory at the first and the last saves."""
    command = [sys.executable, "-m", "bench.checkpoint.drift", str(work.seed)]
    with work.server.at(None):
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        ended = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    resident = [int(line) / MIB for line in ended.stdout.split()]
    first, last = (summary(window) for window in (resident[FIRST : FIRST + WINDOW], resident[-WINDOW:]))
    drift = last["median"] / first["median"] - 1
    say(f"{first['median']:.1f} MiB after {FIRST} saves, {last['median']:.1f} MiB after {len(resident)}")
    return {"first_mib": first, "last_mib": last, "line": {"rss_drift": drift}}


def main(seed: int) -> None:
    """Save as a training does, and print the resident bytes after each commit."""
    state = make_state(STATE_MIB, seed)
    settings = variables(STORE, new_run(open_store(STORE)), **{environment.KEEP_LAST: "3"})
    with checkpoint.session(environ=settings) as session:
        session.restore(default=state)
        for step in range(1, SAVES + 1):
            for array in state.values():
                array += 1
            save = session.save(step, {"weights": state, "losses": [float(step)] * 1000}, metrics={"loss": 1 / step})
            if save is None or save.wait() is None:
                raise RuntimeError(f"the save of step {step} was not committed")
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            sys.stdout.write(f"{pages * os.sysconf('SC_PAGE_SIZE')}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
