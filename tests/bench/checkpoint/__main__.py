"""What checkpoints cost: ``python -m bench.checkpoint``, with ``tests`` on PYTHONPATH.

Everything is real: an S3 server as a process, a network slowed to the pace of
cloud storage, trainers as processes. The report goes to ``tests/bench/reports/checkpoint.json``.
"""

import argparse
import importlib.metadata
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import boto3
from bench import page
from bench.aims import has_missed_count, number_line, verdicts
from bench.checkpoint import (
    corruption,
    drift,
    durable,
    inflation,
    inflation_trainer,
    landing,
    landing_trainer,
    launcher,
    near,
    overlap,
    peers,
    restart,
    stall,
    verifying,
)
from bench.checkpoint.report import AIMS, QUICK_AIMS, table, values
from bench.checkpoint.server import LATENCY_SECONDS, s3_server
from bench.checkpoint.workload import TENSORS, Workload
from bench.machine import NoiseProbe, describe_noise, machine
from bench.progress import say

SEED = 5
PARTS = {
    "stall": stall.measure,
    "overlap": overlap.measure,
    "durable": durable.measure,
    "verifying": verifying.measure,
    "near": near.measure,
    "corruption": corruption.measure,
    "inflation": inflation.measure,
    "launcher": launcher.measure,
    "restart": restart.measure,
    "drift": drift.measure,
    "landing": landing.measure,
    "peers": peers.measure,
}
"""In the order in which they run."""
LONG = ("landing", "peers")
"""They take most of an hour, and are measured only where they are asked for; a quick run has the first."""


def main() -> int:
    """Measure, write the report, print the table and the line of numbers."""
    options = _parser().parse_args()
    # As Ctrl-C does: the servers and programs that were started end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    probe = NoiseProbe()
    with s3_server() as server:
        mib = options.state_mib or (32 if options.quick else 1024)
        work = Workload(server, options.quick, SEED, state_mib=mib, repeats=3 if options.quick else 5)
        parts: dict[str, Any] = {}
        for name in _names(options):
            say(f"── {name}")
            parts[name] = measured(name, work)
    report = {
        "machine": machine(),
        "noise": probe.report(),
        "versions": versions(),
        "settings": settings(work),
        "parts": parts,
    }
    if not (options.quick or options.state_mib):
        page.publish("checkpoint", report, parts)
    aims = {} if options.state_mib else QUICK_AIMS if options.quick else AIMS
    noise = describe_noise(report["noise"], report["machine"]["cores"])
    found = values(parts)
    print(table(parts), "", *verdicts(found, aims), "", noise, number_line(found, AIMS), sep="\n")  # noqa: T201
    return int(any("failed" in part for part in parts.values()) or has_missed_count(found, aims))


def _names(options: argparse.Namespace) -> Sequence[str]:
    left_out = ("peers",) if options.quick else () if options.long else LONG
    return options.only or [name for name in PARTS if name not in left_out]


def measured(name: str, work: Workload) -> dict[str, Any]:
    """One part; if it fails, what it said of it."""
    try:
        return PARTS[name](work)
    except Exception as error:  # noqa: BLE001  an hour of other results must not be lost with it
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("boto3", "botocore", "numpy")}


def settings(work: Workload) -> dict[str, Any]:
    return {
        "server": work.server.name,
        "state": f"{TENSORS} float32 arrays, together {work.state_mib} MiB",
        "throttle_megabytes_per_second": work.throttle,
        "throttle_latency_seconds": LATENCY_SECONDS,
        "repeats": work.repeats,
        "seeds": {
            "state, and moments of signals": work.seed,
            "trainers": [landing_trainer.SEED, inflation_trainer.SEED],
            "corruption": corruption.SEED,
            "damaged near copies": near.SEED,
        },
        "put_object": f"boto3 {boto3.__version__} with its defaults, one request, from memory",
        "clock": "time.perf_counter of the process that saves",
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoint", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a state of 32 MiB and few trials; writes no report")
    parser.add_argument("--state-mib", type=int, metavar="MIB", help="a state of another size; writes no report")
    parser.add_argument("--long", action="store_true", help=f"measure {' and '.join(LONG)}, too")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=f"some of {', '.join(PARTS)}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
