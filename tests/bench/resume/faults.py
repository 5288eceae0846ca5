"""The faults of a campaign: when they come and of what kind is drawn from a seed, the same for every arm."""

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
"""Who runs out of memory is killed as by the kernel of a container: at once, and without a word."""
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
    pid: int


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
        os.kill(pid, 0)
    except (FileNotFoundError, ProcessLookupError):
        return None
    at = time.time()
    with contextlib.suppress(ProcessLookupError):
        if kind == "sigterm":
            os.kill(pid, signal.SIGTERM)
            threading.Thread(target=_kill_later, args=(pid,), daemon=True).start()
        else:
            if kind == "corruption":
                _damage_newest(checkpoints)
            os.kill(pid, signal.SIGKILL)
    return Struck(at, kind, pid)


def _kill_later(pid: int) -> None:
    deadline = time.monotonic() + GRACE_SECONDS
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(_POLL_SECONDS)
        os.kill(pid, signal.SIGKILL)


def _damage_newest(checkpoints: Path) -> None:
    """Flip a byte in the middle of the newest file that holds weights."""
    files = [path for pattern in ("**/shards/**/*", "0*/*.npz") for path in checkpoints.glob(pattern) if path.is_file()]
    with contextlib.suppress(FileNotFoundError):
        if newest := max(files, key=lambda path: path.stat().st_mtime, default=None):
            data = bytearray(newest.read_bytes())
            data[len(data) // 2] ^= 1
            newest.chmod(0o644)
            newest.write_bytes(data)
