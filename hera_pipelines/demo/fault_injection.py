"""Starts the demo's `tiphys` processes and injects faults into them.

The faults are those that end real runs: a killed process, a damaged checkpoint,
and a killed engine.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tiphys.errors import TiphysError
from tiphys.records import CheckpointManifest

_FLIPPED_BYTES = 64


def is_process_alive(pid: int) -> bool:
    """Whether the process runs or is frozen; a zombie does not count as alive."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[0] not in ("Z", "X")


def wait_until_dead(pid: int, seconds: float) -> bool:
    """Wait up to ``seconds`` for the process to end; return whether it did."""
    deadline = time.monotonic() + seconds
    while is_process_alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def flip_bytes(store: Path, manifest: CheckpointManifest) -> Path:
    """Invert some bytes in the middle of the checkpoint's largest shard, keep its size, and return its path.

    Tiphys never overwrites an object; this simulates a failing disk.
    """
    shard = max(manifest.shards, key=lambda shard: shard.size)
    path = store / shard.key
    data = bytearray(path.read_bytes())
    if len(data) < _FLIPPED_BYTES:
        raise TiphysError(f"{path} has only {len(data)} bytes, too few to damage")
    start = (len(data) - _FLIPPED_BYTES) // 2
    data[start : start + _FLIPPED_BYTES] = bytes(byte ^ 0xFF for byte in data[start : start + _FLIPPED_BYTES])
    path.chmod(0o644)
    path.write_bytes(data)
    return path


# Short enough to hit the planned step, long enough to leave the processors to the training.
_POLL_SECONDS = 0.05


class PromiseBrokenError(TiphysError):
    """A guarantee of Tiphys did not hold, so the demo fails."""


class TiphysProcess:
    """One ``tiphys`` command in its own process and session; its output goes to ``log``."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.log = log
        self._stream = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hera_pipelines.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kill the process if it still runs; its containers end with it."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._stream.close()

    def kill(self) -> None:
        """SIGKILL the engine."""
        self._process.kill()
        self._process.wait()

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float) -> None:
        """Wait until ``condition`` holds; ``what`` names it in messages.

        Raises:
            PromiseBrokenError: the process ends before, or ``seconds`` pass.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if self._process.poll() is not None and not condition():
                raise PromiseBrokenError(f"the engine ended before {what}; its last line: {self._last_log_line()}")
            if time.monotonic() > deadline:
                raise PromiseBrokenError(f"timed out after {seconds:g} s while waiting for {what}; see {self.log}")
            time.sleep(_POLL_SECONDS)

    def finish(self, seconds: float, on_poll: Callable[[], None] = lambda: None) -> None:
        """Wait for the end of the process and call ``on_poll`` meanwhile.

        Raises:
            PromiseBrokenError: the exit code is not 0, or ``seconds`` pass.
        """

        def has_ended() -> bool:
            on_poll()
            return self._process.poll() is not None

        self.wait_for(has_ended, "its end", seconds)
        if code := self._process.returncode:
            raise PromiseBrokenError(f"the engine ended with exit code {code}; its last line: {self._last_log_line()}")

    def _last_log_line(self) -> str:
        lines = self.log.read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "nothing")
