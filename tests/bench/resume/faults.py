"""The faults of a campaign: when they come and of what kind is drawn from a seed, the same for every arm.

| kind | what happens |
|---|---|
| sigterm | the process group of the step gets it, as from Argo; SIGKILL follows after the grace period |
| sigkill | the program dies |
| oom | all processes of the step die at once, as of a container that runs out of memory (`memory.oom.group`) |
| corruption | a byte of the newest checkpoint in storage flips, and the program dies |
"""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MTBF_SECONDS = 10.0
KINDS = {"sigterm": 0.60, "sigkill": 0.25, "oom": 0.10, "corruption": 0.05}
GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.01


class Fault(NamedTuple):
    """``at`` counts seconds since the begin of the campaign."""

    at: float
    kind: str


class Struck(NamedTuple):
    """A fault that met a process; ``at`` is its time by the clock of the logs."""

    at: float
    kind: str
    has_damaged: bool = False
    """Whether there was a checkpoint to damage."""


def drawn(seed: int, seconds: float) -> Iterator[Fault]:
    """Faults of a Poisson process."""
    chance = random.Random(seed)
    at = chance.expovariate(1 / MTBF_SECONDS)
    while at < seconds:
        (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
        yield Fault(at, kind)
        at += chance.expovariate(1 / MTBF_SECONDS)


def strike(folder: Path, checkpoints: Path, kind: str) -> Struck | None:
    """Do it to the program of ``folder``; None if none runs at the moment."""
    try:
        pid = int((folder / "pid").read_text())
        if str(folder) not in Path(f"/proc/{pid}/cmdline").read_text():
            return None  # the number of a process that has ended is that of another one now
        init = os.getsid(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    at, has_damaged = time.time(), kind == "corruption" and _damage_newest(checkpoints)
    with contextlib.suppress(ProcessLookupError):
        if kind == "sigterm":
            os.killpg(init, signal.SIGTERM)
            threading.Thread(target=_kill_later, args=(init,), daemon=True).start()
        else:
            # What is below the init process of a local container dies with it.
            os.kill(init if kind == "oom" else pid, signal.SIGKILL)
    return Struck(at, kind, has_damaged)


def _kill_later(init: int) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(init, 0)
            time.sleep(_POLL_SECONDS)
        os.kill(init, signal.SIGKILL)


def _damage_newest(checkpoints: Path) -> bool:
    """Flip a byte in the middle of the newest file that holds weights; False if there is none."""
    patterns = ("**/shards/**/*", "0*/*.npz")
    with contextlib.suppress(FileNotFoundError):  # the program and its retention rename and delete meanwhile
        files = [path for pattern in patterns for path in checkpoints.glob(pattern) if path.is_file()]
        if newest := max(files, key=lambda path: path.stat().st_mtime, default=None):
            data = bytearray(newest.read_bytes())
            data[len(data) // 2] ^= 1
            newest.chmod(0o644)
            newest.write_bytes(data)
            return True
    return False
