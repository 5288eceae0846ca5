"""What the start of a command costs: ``python -m bench.cli``, with ``tests`` on PYTHONPATH.

Every command runs in a process of its own on the store of one small run, in turns
with ``python -c pass`` and ``python -c 'import typer'``. What counts is CPU time,
user and system, as a ratio to the import of Typer, which no command can avoid. The
report goes to ``tests/bench/reports/cli.json``.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.aims import Aim, number_line, verdicts
from bench.machine import NoiseProbe, describe_noise, machine
from bench.samples import interleaved, ratio, summary
from support.stories import small_pipeline

REPORT = Path(__file__).parent / "reports" / "cli.json"
ROUNDS, QUICK_ROUNDS = 15, 5
RUN = "tiny-1"
TIPHYS = [sys.executable, "-m", "hera_pipelines.cli"]
COMPLETION = {"_TIPHYS_COMPLETE": "complete_bash", "COMP_WORDS": "tiphys ge", "COMP_CWORD": "1"}
BASELINES = {"pass": [sys.executable, "-c", "pass"], "typer": [sys.executable, "-c", "import typer"]}
READS = {
    "runs": ["runs"],
    "get": ["get", RUN],
    "events": ["events", RUN],
    "plan": ["plan", RUN],
    "lineage": ["lineage", RUN],
    "report": ["report", RUN],
    "verify": ["verify", RUN],
    "checkpoint_list": ["checkpoint", "list", RUN],
}
AIMS = {
    "help": Aim("≤", 1.75),
    "completion": Aim("≤", 3),
    **dict.fromkeys(READS, Aim("≤", 6)),
}
"""Ratios to the import of Typer."""


def main() -> int:
    """Measure, write the report, print the verdicts."""
    parser = argparse.ArgumentParser(prog="python -m bench.cli", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; no report is written")
    quick = parser.parse_args().quick
    probe = NoiseProbe()
    with tempfile.TemporaryDirectory() as folder:
        found = interleaved(_measurements(Path(folder)), QUICK_ROUNDS if quick else ROUNDS)
    report = {
        "machine": machine(),
        "noise": probe.report(),
        "cpu_seconds": {name: summary(values) for name, values in found.items()},
        "ratio_to_typer": {name: ratio(found[name], found["typer"]) for name in AIMS},
    }
    if not quick:
        REPORT.write_text(json.dumps(report, indent=2) + "\n")
    print(describe_noise(report["noise"], report["machine"]["cores"]))  # noqa: T201  the result
    for line in verdicts(report["ratio_to_typer"], AIMS):
        print(line)  # noqa: T201  the result
    print(number_line(report["cpu_seconds"], AIMS))  # noqa: T201  the result
    return 0


def _measurements(folder: Path) -> dict[str, Callable[[], float]]:
    """By name, a call that returns the CPU seconds of one process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIPHYS_")}
    file = small_pipeline.write(folder)
    started = [*TIPHYS, "run", str(file), "--run", RUN]
    subprocess.run(started, cwd=folder, env=environment, check=True, capture_output=True)
    lines = {
        **BASELINES,
        "help": [*TIPHYS, "--help"],
        "completion": TIPHYS,
        **{name: [*TIPHYS, *arguments] for name, arguments in READS.items()},
    }

    def measure(name: str) -> Callable[[], float]:
        variables = {**environment, **(COMPLETION if name == "completion" else {})}
        return lambda: cpu_seconds(lines[name], folder, variables)

    return {name: measure(name) for name in lines}


def cpu_seconds(line: list[str], folder: Path, variables: Mapping[str, str]) -> float:
    """CPU time of a command in a process of its own, user and system.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    before = _children()
    subprocess.run(line, cwd=folder, env=variables, check=True, capture_output=True)
    return _children() - before


def _children() -> float:
    used: Any = resource.getrusage(resource.RUSAGE_CHILDREN)
    return float(used.ru_utime + used.ru_stime)


if __name__ == "__main__":
    sys.exit(main())
