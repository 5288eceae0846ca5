"""How long a save and the update after it stop a training whose weights are copied beside the next step.

Each step computes longer than the copy takes, on one core, as a step on a GPU leaves the others free.
"""

import statistics
import time
from typing import Any

import numpy as np
from bench.checkpoint.workload import Workload, session
from bench.progress import say
from bench.samples import seconds, significant, summary

from tiphys.checkpoint.session import Session

SAVES, QUICK_SAVES = 100, 10
STEP_SECONDS_PER_GIB = 1.0
MATRIX = 512


def measure(work: Workload) -> dict[str, Any]:
    """At full speed, since the network has no part in it; without the first save, which is copied at once."""
    stalls, waits = [], []
    factor = np.random.default_rng(work.seed).random((MATRIX, MATRIX), dtype=np.float32)
    with work.server.at(None), session() as opened:
        opened.restore(default=work.state)
        for number in range(1, 2 + (QUICK_SAVES if work.quick else SAVES)):
            stall, wait = _save_and_update(opened, number, work, factor)
            stalls.append(stall)
            waits.append(wait)
            work.server.empty()
    totals = [1000 * (stall + wait) for stall, wait in zip(stalls[1:], waits[1:], strict=True)]
    p99 = significant(statistics.quantiles(totals, n=100, method="inclusive")[98])
    say(f"beside the next step: a save stops the training for {statistics.median(totals):.2f} ms, p99 {p99:g} ms")
    return {
        "stall_seconds": summary(stalls[1:]),
        "update_wait_seconds": summary(waits[1:]),
        "line": {"overlap_stall_milliseconds": summary(totals), "overlap_stall_p99_milliseconds": p99},
    }


def _save_and_update(opened: Session, number: int, work: Workload, factor: Any) -> tuple[float, float]:
    saves = []
    stall = seconds(lambda: saves.append(opened.save(number, work.state)))
    end = time.perf_counter() + STEP_SECONDS_PER_GIB * work.state_mib / 1024
    while time.perf_counter() < end:
        factor @ factor
    before = time.perf_counter()
    with opened.updating():
        wait = time.perf_counter() - before
        for array in work.state.values():
            array[:1] += 1
    if saves[0] is None or saves[0].wait() is None:
        raise RuntimeError(f"the save of step {number} was not committed")
    return stall, wait
