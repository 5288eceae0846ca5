"""How long training stands still for a save, beside a blocking upload of the same bytes and the copy that must be."""

import time
from typing import Any

from bench.checkpoint.ceilings import WarmCopy, joined, put_object
from bench.checkpoint.samples import ratio, summary
from bench.checkpoint.server import plain_client
from bench.checkpoint.workload import Workload, commit, session
from bench.progress import say

FIRST_STEPS_SECONDS_PER_GIB = 2.0
"""Training before the first save; real ones are minutes away."""


def measure(work: Workload) -> dict[str, Any]:
    """All through the slow network."""
    with work.server.at(work.throttle):
        whole = joined(work.state)
        put = summary([put_object(plain_client(), whole) for _ in range(work.repeats)])
        say(f"blocking put_object: {put['median']} s")
        first = summary([_first(work, restore=True) for _ in range(work.repeats)])
        say(f"save(), the first one: {first['median']} s")
        cold = summary([_first(work, restore=False) for _ in range(1 if work.quick else 3)])
        say(f"save(), the first one without restore(): {cold['median']} s")
        floor, steady = _steady(work)
        say(f"save(), the following ones: {steady['median']} s, memcpy {floor['median']} s")
    return {
        "put_object_seconds": put,
        "first_seconds": first,
        "first_without_restore_seconds": cold,
        "steady_seconds": steady,
        "memcpy_seconds": floor,
        "line": {
            "stall_first_ratio": ratio(put, first),
            "stall_steady_ratio": ratio(put, steady),
            "stall_over_memcpy": ratio(steady, floor),
        },
    }


def _first(work: Workload, *, restore: bool) -> float:
    """Stall of the first save of a session."""
    with session() as opened:
        if restore:
            opened.restore(default=work.state)
        time.sleep(FIRST_STEPS_SECONDS_PER_GIB * work.state_mib / 1024)
        took = commit(opened, 1, work)
    work.server.empty()
    return took


def _steady(work: Workload) -> tuple[dict[str, Any], dict[str, Any]]:
    """memcpy and the stalls of later saves, in turns, so that both see the same machine."""
    copies, stalls = [], []
    copy = WarmCopy(work.state)
    with session() as opened:
        opened.restore(default=work.state)
        commit(opened, 1, work)
        for step in range(2, work.repeats + 2):
            opened.flush()
            work.server.empty()
            copies.append(copy.seconds())
            stalls.append(commit(opened, step, work))
    work.server.empty()
    return summary(copies), summary(stalls)
