"""The `tiphys` processes that the demo starts, as a person would in other terminals.

What the demo does to a running training: the three ways in which runs really die.
"""

import os
import signal
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


# Often enough to strike at the right moment, seldom enough to leave the processors to the training.
_POLL_SECONDS = 0.05


class PromiseBrokenError(TiphysError):
    """Something that Tiphys promises did not happen. The demo fails."""


class Engine:
    """One ``tiphys`` command in a process of its own; what it says goes to ``log``."""

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
        """Leave nothing running; containers die with their engine."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._stream.close()

    def kill(self) -> None:
        """SIGKILL the engine."""
        self._process.kill()
        self._process.wait()

    def wait_for(self, happened: Callable[[], bool], what: str, seconds: float) -> None:
        """Return once ``happened``; `PromiseBrokenError` if the engine ends before, or time is up."""
        deadline = time.monotonic() + seconds
        while not happened():
            if self._process.poll() is not None and not happened():
                raise PromiseBrokenError(f"the engine ended before {what}; it said: {self._last_words()}")
            if time.monotonic() > deadline:
                raise PromiseBrokenError(f"after {seconds:g} s, still waiting: {what}; see {self.log}")
            time.sleep(_POLL_SECONDS)

    def finish(self, seconds: float, watch: Callable[[], None] = lambda: None) -> None:
        """Wait for the end, calling ``watch`` meanwhile; `PromiseBrokenError` unless the exit code is 0."""
        deadline = time.monotonic() + seconds
        while (code := self._process.poll()) is None:
            if time.monotonic() > deadline:
                raise PromiseBrokenError(f"the engine is not done after {seconds:g} s; see {self.log}")
            watch()
            time.sleep(_POLL_SECONDS)
        if code:
            raise PromiseBrokenError(f"the engine ended with exit code {code}; it said: {self._last_words()}")

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "nothing")
