"""How long training stands still for a save, beside a blocking upload of the same bytes and the copy that must be."""

import time
from typing import Any

from bench.checkpoint.ceilings import WarmCopy, joined, put_object
from bench.checkpoint.server import plain_client
from bench.checkpoint.workload import Workload, commit, session
from bench.progress import say
from bench.samples import interleaved, ratio, summary

FIRST_STEPS_SECONDS_PER_GIB = 2.0
"""Training before the first save; real ones are minutes away."""


def measure(work: Workload) -> dict[str, Any]:
    """All through the slow network, in turns."""
    whole, copy = joined(work.state), WarmCopy(work.state)
    with work.server.at(work.throttle), session() as opened:
        opened.restore(default=work.state)
        commit(opened, 1, work)
        steps = iter(range(2, work.repeats + 2))

        def steady() -> float:
            took = commit(opened, next(steps), work)
            work.server.empty()
            return took

        times = interleaved(
            {
                "put_object": lambda: put_object(plain_client(), whole),
                "first": lambda: _first(work, restore=True),
                "first_without_restore": lambda: _first(work, restore=False),
                "memcpy": copy.seconds,
                "steady": steady,
            },
            work.repeats,
        )
    found = {f"{name}_seconds": summary(values) for name, values in times.items()}
    say(", ".join(f"{name} {value['median']}" for name, value in found.items()))
    return {
        **found,
        "line": {
            "stall_first_ratio": ratio(times["put_object"], times["first"]),
            "stall_steady_ratio": ratio(times["put_object"], times["steady"]),
            "stall_over_memcpy": ratio(times["steady"], times["memcpy"]),
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
