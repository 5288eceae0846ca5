"""What the demo does to a running training: the three ways in which runs really die."""

import os
import signal
import time
from pathlib import Path

from tiphys.errors import TiphysError
from tiphys.records import CheckpointManifest

_FLIPPED_BYTES = 64


def freeze(pid: int) -> None:
    """Stop a process without ending it, so that what follows happens at one known moment."""
    os.kill(pid, signal.SIGSTOP)


def kill(pid: int) -> None:
    """SIGKILL: no handler runs, nothing is saved. Works on a frozen process too."""
    os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    """Whether the process runs (or is frozen); one that only awaits its parent does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[0] not in ("Z", "X")


def wait_until_gone(pid: int, seconds: float) -> bool:
    """Whether the process ended within ``seconds``."""
    deadline = time.monotonic() + seconds
    while alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def flip_bytes(store: Path, manifest: CheckpointManifest) -> Path:
    """Invert some bytes in the middle of the checkpoint's largest shard; its size stays. Return the file.

    Storage is create-only for Tiphys; this is the broken disk that does not ask.
    """
    shard = max(manifest.shards, key=lambda shard: shard.size)
    path = store / shard.key
    data = bytearray(path.read_bytes())
    if len(data) < _FLIPPED_BYTES:
        raise TiphysError(f"{path} has only {len(data)} bytes; nothing to corrupt")
    start = (len(data) - _FLIPPED_BYTES) // 2
    data[start : start + _FLIPPED_BYTES] = bytes(byte ^ 0xFF for byte in data[start : start + _FLIPPED_BYTES])
    path.chmod(0o644)
    path.write_bytes(data)
    return path
