"""How much longer a step takes while an upload goes on behind it, with training and upload on a core each."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from bench.checkpoint.server import S3, STORE, s3_server
from bench.checkpoint.workload import Workload, new_run, variables
from bench.progress import say
from bench.samples import significant, summary

from tiphys.store import open_store

NICE = 10
"""Of server and network, so that they never keep an upload from going on that holds the interpreter's lock."""


def measure(work: Workload) -> dict[str, Any]:
    """Of the network as slow as cloud storage, and of one that lets the uploader work without a pause."""
    if len(os.sched_getaffinity(0)) < 2:
        raise RuntimeError("training and upload need a core each, and there is only one")
    with _on_the_last_core(), s3_server(NICE) as server:
        found = {name: _inflation(work, server, network) for name, network in work.networks.items()}
    # At full speed one core hashes, uploads and serves, and threads that hold the interpreter's lock wait for it.
    return {**found, "line": {"step_inflation": found["throttled"]["median_inflation"]}}


def _inflation(work: Workload, server: S3, network: float | None) -> dict[str, Any]:
    with server.at(network) as leads:
        run = new_run(open_store(STORE))
        command = [sys.executable, "-m", "bench.checkpoint.inflation_trainer", str(work.state_mib), str(work.repeats)]
        settings = {**os.environ, **leads, **variables(STORE, run), "OPENBLAS_NUM_THREADS": "1"}
        with _all_cores():
            process = subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        with process:
            times = json.loads(process.communicate()[0])
    server.empty()
    found = compare(times["idle"], times["uploading"])
    network_name = "free" if network is None else "throttled"
    say(f"steps {network_name}: {found['median_inflation']['median']:+.1%} while uploading")
    return found


def compare(idle: Sequence[Sequence[float]], uploading: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Rounds of step times without and with an upload, in seconds; the median is that of all rounds."""
    rounds = [(calm, busy) for calm, busy in zip(idle, uploading, strict=True) if busy]
    calm, busy = (list(chain(*steps)) for steps in zip(*rounds, strict=True))
    return {
        "idle_step_seconds": summary([statistics.median(steps) for steps, _ in rounds]),
        "uploading_step_seconds": summary([statistics.median(steps) for _, steps in rounds]),
        "steps": [len(calm), len(busy)],
        "median_inflation": summary([statistics.median(busy) / statistics.median(calm) - 1 for calm, busy in rounds]),
        "p99_inflation": significant(_p99(busy) / _p99(calm) - 1),
    }


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


@contextmanager
def _on_the_last_core() -> Iterator[None]:
    """Whatever this process starts: server and network, which in a real cluster are elsewhere."""
    with _on(max(os.sched_getaffinity(0))):
        yield


@contextmanager
def _all_cores() -> Iterator[None]:
    with _on(*range(os.cpu_count() or 1)):
        yield


@contextmanager
def _on(*cores: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
