"""A hundred healthy runs beside an API server and a store that time out for an hour; the clock is virtual."""

import tempfile
from pathlib import Path
from typing import Any

from bench.progress import say
from support.servers.kube_server import serving
from support.stories.auto_resume_loop import hour_of_time_outs

from tiphys.store import DirectoryStore

RUNS = 100
SEEDS = (7, 8, 9)
QUICK_SEEDS = (7,)


def measure(quick: bool) -> dict[str, Any]:
    seeds, resubmitted, faults = QUICK_SEEDS if quick else SEEDS, 0, 0
    for seed in seeds:
        with tempfile.TemporaryDirectory(prefix="tiphys-healthy-") as folder, serving() as kubernetes:
            seen = hour_of_time_outs(kubernetes, DirectoryStore(Path(folder) / "store"), Path(folder), RUNS, seed)
        resubmitted, faults = resubmitted + seen.resubmitted, faults + seen.faults
    say(f"healthy: {resubmitted} of {RUNS} runs were submitted again beside {faults} time-outs")
    return {
        "runs": RUNS,
        "seeds": list(seeds),
        "time_outs": faults,
        "line": {"false_resubmits": resubmitted},
    }
