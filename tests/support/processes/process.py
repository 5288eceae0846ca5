"""Our services as processes, and what they say on stderr, line by line."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any


def lives(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it goes between open and read
        return False


def children_of(pid: int) -> list[int]:
    """The processes whose parent is this one, whichever of its threads started them; zombies too.

    Asked of the children: a thread of the parent may end between the listing of threads and the listing of its
    children, which then belong to another thread.
    """
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if int(file.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(file.parent.name))
    return found


class Process:
    """``python -m MODULE ARGUMENTS`` until the end of the block.

    ``started`` is the line in which it says that it has started; empty if it ended instead.
    """

    def __init__(self, module: str, *arguments: str, **environment: str) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._environment = {**os.environ, **environment}
        self.lines: list[str] = []
        self.started: dict[str, Any] = {}

    def __enter__(self) -> "Process":
        self.process = subprocess.Popen(
            self._command, env=self._environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        while not self.started and (line := self._line()):
            said = json.loads(line)
            self.started = said if said["event"].endswith(".started") else {}
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        self._reader.join(60)
        assert self.process.stderr is not None
        self.process.stderr.close()

    @property
    def log(self) -> list[dict[str, Any]]:
        """What it has logged so far; complete once it has ended."""
        return [json.loads(line) for line in self.lines]

    def stop(self) -> int:
        """SIGTERM; its exit code."""
        self.process.terminate()
        code = self.process.wait(60)
        self._reader.join(60)
        return code

    def resident_bytes(self) -> int:
        """Memory that it occupies now (Linux, ``proc(5)``)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS:"))

    def _line(self) -> str:
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        self.lines += [line] if line else []
        return line

    def _read(self) -> None:
        while self._line():
            pass
