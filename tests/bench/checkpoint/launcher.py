"""What the launcher of trainings costs beside the program that it starts: time until that runs, and memory."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.checkpoint.workload import MIB, Workload
from bench.progress import say
from bench.samples import interleaved, seconds, summary

LAUNCHER = (sys.executable, "-P", "-m", "tiphys.launch", "--")
PROGRAM = ("cat",)
ROUNDS, QUICK_ROUNDS = 41, 11


def measure(work: Workload) -> dict[str, Any]:
    """Rounds of a program alone and below the launcher, in turns."""
    rounds = QUICK_ROUNDS if work.quick else ROUNDS
    times = interleaved(
        {"program": lambda: _seconds_until_it_runs(()), "launched": lambda: _seconds_until_it_runs(LAUNCHER)}, rounds
    )
    pairs = zip(times["program"], times["launched"], strict=True)
    milliseconds = [1000 * (launched - bare) for bare, launched in pairs]
    line = {
        "launcher_milliseconds": summary(milliseconds),
        "launcher_mib": summary([_resident_bytes() / MIB for _ in range(work.repeats)]),
    }
    say(", ".join(f"{name} {value['median']:.3g}" for name, value in line.items()))
    return {**{f"{name}_seconds": summary(values) for name, values in times.items()}, "line": line}


def _start(launcher: tuple[str, ...]) -> "subprocess.Popen[bytes]":
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([*launcher, *PROGRAM], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin
    assert process.stdout
    process.stdin.write(b"\n")
    process.stdin.flush()
    process.stdout.readline()
    return process


def _seconds_until_it_runs(launcher: tuple[str, ...]) -> float:
    found: list[subprocess.Popen[bytes]] = []
    took = seconds(lambda: found.append(_start(launcher)))
    found[0].communicate()
    return took


def _resident_bytes() -> int:
    process = _start(LAUNCHER)
    try:
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    finally:
        process.communicate()
    return pages * os.sysconf("SC_PAGE_SIZE")
