"""From the death of a training to its next step in the same pod, with and without a spare process, beside a new start.

The launcher and the program are processes; the store is a folder, so that no network is part of it. The program imports
PyTorch where it is installed, else NumPy alone.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.checkpoint.workload import Workload, new_run, variables
from bench.progress import say
from bench.samples import summary

from tiphys.protocol import environment
from tiphys.store import DirectoryStore

KILLS, QUICK_KILLS = 10, 2
_KILLED, _FIRST = re.compile(r"^killed (\S+)$", re.MULTILINE), re.compile(r"^first (\S+)$", re.MULTILINE)
SPARES = {"in_place": "off", "spare": "on"}


def measure(work: Workload) -> dict[str, Any]:
    """Seconds from the kill of each process to the first step of the next."""
    kills = QUICK_KILLS if work.quick else KILLS
    found = {name: _seconds_of_restarts(spare, kills, work.state_mib) for name, spare in SPARES.items()}
    line = {f"restart_{name}_seconds": summary(times) for name, times in found.items()}
    say(", ".join(f"{name} {value['median']:.3g}" for name, value in line.items()))
    return {"kills": kills, "line": line}


def _seconds_of_restarts(spare: str, kills: int, mib: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        store = DirectoryStore(Path(folder) / "store")
        environ = {
            **os.environ,
            **variables(store.url, new_run(store)),
            "PYTHONPATH": os.pathsep.join(sys.path),
            environment.KEEP_LAST: "2",
            environment.DELETE_AFTER_SECONDS: "0",
            environment.RESTART_CAUSES: "infrastructure",
            environment.SPARE: spare,
        }
        program = [sys.executable, "-m", "bench.checkpoint.restart_trainer", str(mib), str(kills)]
        launched = [sys.executable, "-P", "-m", "tiphys.launch", "--", *program]
        ended = subprocess.run(launched, env=environ, capture_output=True, text=True, check=False)
    killed, first = (list(map(float, pattern.findall(ended.stdout))) for pattern in (_KILLED, _FIRST))
    if ended.returncode != 0 or len(killed) != kills or len(first) != kills + 1:
        raise RuntimeError(f"{len(killed)} of {kills} kills, exit code {ended.returncode}: {ended.stderr[-2000:]}")
    return [after - before for before, after in zip(killed, first[1:], strict=True)]
