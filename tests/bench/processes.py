"""What a process on this machine costs, as Linux counts it."""

import os
import time
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")


class Cost(NamedTuple):
    """``cpu_seconds`` since its start; ``rss_mib`` now, ``peak_rss_mib`` the most so far."""

    at: float
    cpu_seconds: float
    rss_mib: float
    peak_rss_mib: float


def cost(pid: int) -> Cost:
    """Look at a process once."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    cpu = (int(fields[11]) + int(fields[12])) / _TICKS
    return Cost(time.monotonic(), cpu, _mib(status["VmRSS"]), _mib(status["VmHWM"]))


def find(program: str) -> list[int]:
    """Processes of this machine that run a program or Python module of this name, those in containers among them."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _program(entry) == program]


def between(before: Cost, after: Cost) -> dict[str, float]:
    """What it took from one look to the next; ``cpu_percent`` is of one core."""
    seconds = after.at - before.at
    used = after.cpu_seconds - before.cpu_seconds
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(used, 2),
        "cpu_percent": round(100 * used / seconds, 1),
        "rss_mib": after.rss_mib,
        "peak_rss_mib": after.peak_rss_mib,
    }


def _program(process: Path) -> str:
    try:
        words = (process / "cmdline").read_text(errors="replace").split("\0")
        return words[2] if words[1:2] == ["-m"] else words[0].rpartition("/")[2]
    except OSError:  # it has ended since the listing
        return ""


def _mib(text: str) -> float:
    return round(int(text.split()[0]) / 1024, 1)
