"""The processes of an attempt, found by a variable that they inherit, also those with a session of their own."""

import contextlib
import os
import signal
import time
from pathlib import Path

MARK = "PROGRAM_MARK"
PATIENCE_SECONDS = 10.0
"""How long a process that was killed may take until the kernel has removed it."""


def marked(mark: str) -> list[int]:
    """Process ids whose mark begins with ``mark``, zombies excepted."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(entry.startswith(wanted) for entry in (folder / "environ").read_bytes().split(b"\0")):
                found.append(int(folder.name))
    return found


def kill_container(mark: str) -> None:
    """End all processes of an attempt, as the kernel does when the first process of a container ends."""
    while processes := marked(mark):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def kill_largest(mark: str, leader: int) -> None:
    """End the process with the most resident memory, as the kernel does when a container has used its memory up.

    If that is ``leader``, the first process of the container, then the container ends with it.
    """
    sizes = {}
    for process in marked(mark):
        with contextlib.suppress(OSError):
            sizes[process] = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    largest = max(sizes, key=lambda process: sizes[process], default=leader)
    if largest == leader:
        kill_container(mark)
    with contextlib.suppress(ProcessLookupError):
        os.kill(largest, signal.SIGKILL)


def left_behind(mark: str) -> list[str]:
    """Command lines of processes that outlived the first process of their attempt; they are ended."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (processes := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    lines = []
    for process in processes:
        with contextlib.suppress(OSError):
            lines.append(Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()[:200])
    kill_container(mark)
    return lines
