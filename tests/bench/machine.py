"""The machine of a benchmark, and how noisy it was: load, stolen time, and a fixed loop before and after.

Ratios hold on a noisy machine, with a wider spread; absolute figures beside them do not.
"""

import os
import platform
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.samples import seconds, significant, summary

LOOP_ADDITIONS = 200_000
LOOPS = 25
QUIET_LOAD_PER_CORE = 0.5
QUIET_STEAL_PERCENT = 1.0
QUIET_SPREAD_PERCENT = 5.0
"""Of the fixed loop, as the distance of its quartiles over its median."""
QUIET_DRIFT_PERCENT = 5.0
"""Of the fixed loop's median, from before the benchmark to after it."""


def machine() -> dict[str, Any]:
    """Processor, memory, kernel and Python; and the commit that is measured, empty outside of a checkout."""
    model = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    return {
        "cpu": model.partition(":")[2].strip(),
        "cores": os.cpu_count(),
        "memory_mib": int(Path("/proc/meminfo").read_text().split()[1]) // 1024,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _read_commit(),
    }


def _read_commit() -> str:
    described = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    found = subprocess.run(described, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return found.stdout.strip()


class NoiseProbe:
    """Looks at the machine when it is made, and again for its `report`; each look takes about a second."""

    def __init__(self) -> None:
        self._load = os.getloadavg()[0]
        self._loop = _fixed_loop()
        self._cpu = _cpu_times()
        self._began = time.monotonic()

    def report(self) -> dict[str, Any]:
        """What `describe_noise` reads; percentages are of all cores, or of the fixed loop."""
        total, stolen = (after - before for before, after in zip(self._cpu, _cpu_times(), strict=True))
        lasted = time.monotonic() - self._began
        before, after = self._loop, _fixed_loop()
        return {
            "seconds": significant(lasted),
            "load_average_before": significant(self._load),
            "steal_percent": significant(100 * stolen / max(1, total), 2),
            "loop_seconds": {"before": before, "after": after},
            "spread_percent": significant(max(_spread_percent(before), _spread_percent(after)), 2),
            "drift_percent": significant(100 * (after["median"] / before["median"] - 1), 2),
        }


def describe_noise(noise: Mapping[str, Any], cores: int) -> str:
    """One line: the noise, and whether the machine was quiet enough for absolute figures to mean something."""
    too_much = [
        name
        for name, value, limit in (
            ("load", noise["load_average_before"] / cores, QUIET_LOAD_PER_CORE),
            ("steal", noise["steal_percent"], QUIET_STEAL_PERCENT),
            ("spread", noise["spread_percent"], QUIET_SPREAD_PERCENT),
            ("drift", abs(noise["drift_percent"]), QUIET_DRIFT_PERCENT),
        )
        if value > limit
    ]
    verdict = f"NOISY ({', '.join(too_much)}): only ratios count" if too_much else "quiet"
    return (
        f"machine: {verdict}; load {noise['load_average_before']:.2f} on {cores} cores before, "
        f"{noise['steal_percent']:g} % of CPU time stolen, fixed loop spread {noise['spread_percent']:g} %, "
        f"drift {noise['drift_percent']:+g} % in {noise['seconds']:.0f} s"
    )


def _fixed_loop() -> dict[str, Any]:
    return summary([seconds(_additions) for _ in range(LOOPS)])


def _additions() -> int:
    total = 0
    for number in range(LOOP_ADDITIONS):
        total += number
    return total


def _spread_percent(loop: Mapping[str, Any]) -> float:
    low, high = loop["quartiles"]
    return float(100 * (high - low) / loop["median"])


def _cpu_times() -> tuple[int, int]:
    """All time of all cores, and the part that the hypervisor gave to other machines, in clock ticks (proc(5))."""
    user, nice, system, idle, iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return user + nice + system + idle + iowait + irq + softirq + steal, steal
