"""The demo's ``tiphys`` processes, and the faults that end real ones: a killed process and a damaged checkpoint."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tiphys.errors import TiphysError
from tiphys.records import CheckpointManifest, CheckpointRef
from tiphys.store import DirectoryStore, LineageLayout, read_record

TIMEOUT_SECONDS = 300.0
_KILL_SECONDS = 10.0
# Short enough to hit the planned step, long enough to leave the processors to the training.
_POLL_SECONDS = 0.05
_FLIPPED_BYTES = 64


class PromiseBrokenError(TiphysError):
    """A guarantee of Tiphys did not hold, so the demo fails."""


def check(holds: bool, failure: str) -> None:
    """Raise `PromiseBrokenError` with ``failure`` if a promise does not hold."""
    if not holds:
        raise PromiseBrokenError(failure)


class TiphysProcess(subprocess.Popen[bytes]):
    """A ``tiphys`` command in a session of its own, whose output goes to ``log``; killed at the end of its block."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "hera_pipelines.cli", *arguments]
        with log.open("ab") as out:
            super().__init__(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)

    def __exit__(self, *error: Any) -> None:
        self.kill()  # its containers end with it
        super().__exit__(*error)

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = TIMEOUT_SECONDS) -> None:
        """Wait until ``condition`` holds, which ``what`` names in messages.

        Raises:
            PromiseBrokenError: the process ends before, or ``seconds`` pass.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if (code := self.poll()) is not None and not condition():
                last = next(reversed(self.log.read_text(errors="replace").split("\n")[:-1]), "nothing")
                raise PromiseBrokenError(f"the engine ended with exit code {code} before {what}; its last line: {last}")
            check(
                time.monotonic() < deadline, f"timed out after {seconds:g} s while waiting for {what}; see {self.log}"
            )
            time.sleep(_POLL_SECONDS)

    def wait_for_success(self) -> None:
        """Wait for its end with exit code 0. Raises `PromiseBrokenError` as `wait_for` does."""
        self.wait_for(lambda: self.poll() == 0, "its success")


def wait_until_dead(pid: int) -> None:
    """Wait for the end of a process that was killed. Raises `PromiseBrokenError` if it goes on."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended, _, _ = select.select([process], [], [], _KILL_SECONDS)
    os.close(process)
    check(bool(ended), f"the training process {pid} still runs after its kill")


def damage_checkpoint(store: Path, checkpoint: CheckpointRef) -> None:
    """Invert some bytes in the middle of the checkpoint's largest shard, and keep its size, as a failing disk does."""
    key = LineageLayout(checkpoint.lineage).manifest(checkpoint.attempt, checkpoint.global_step)
    shards = read_record(DirectoryStore(store), key, CheckpointManifest).shards
    path = store / max(shards, key=lambda shard: shard.size).key
    data = bytearray(path.read_bytes())
    start = max(0, len(data) - _FLIPPED_BYTES) // 2
    data[start : start + _FLIPPED_BYTES] = bytes(byte ^ 0xFF for byte in data[start : start + _FLIPPED_BYTES])
    path.chmod(0o644)
    path.write_bytes(data)
