"""What the web pages cost: ``python -m bench.ui``, with ``tests`` on PYTHONPATH.

The store has a thousand runs, one of them with 500 attempts and 10,000 checkpoints.
Each page is asked for at a real server, from the same process, in turns with one
plain pass that reads and parses the records of the large run. The first page of a
run reads its records; later ones, while it is followed, find them in memory. The
report goes to ``tests/bench/reports/ui.json``.
"""

import argparse
import json
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from bench.aims import Aim, number_line, verdicts
from bench.machine import NoiseProbe, describe_noise, machine
from bench.progress import say
from bench.samples import interleaved, ratio, seconds, summary
from support.builders.lineage import RUN, claim_of, commit, end_of, ref, write_claim, write_end, write_run

from hera_pipelines.ui.app import build_app
from hera_pipelines.ui.run_index import RunIndex
from tiphys.records import AttemptEndOutcome
from tiphys.service.http_server import AppServer
from tiphys.store import DirectoryStore, RunLayout, Store

REPORT = Path(__file__).parent / "reports" / "ui.json"
RUNS, ATTEMPTS, CHECKPOINTS = 1000, 500, 20
ROUNDS, QUICK_ROUNDS = 10, 3
PATHS = {"home": "/", "home_page_20": "/?page=20", "run": f"/runs/{RUN}", "run_page_2": f"/runs/{RUN}?page=2"}
PICTURES = {name: f"/runs/{RUN}/{name}.svg" for name in ("times", "lineage", "metrics")}
AIMS = {
    **{f"{name}_ms": Aim("≤", 300) for name in ("home", "home_page_20", "run")},
    **{f"{name}_kb": Aim("≤", 200) for name in ("home", "home_page_20", "run")},
}


def main() -> int:
    """Measure, write the report, print the verdicts."""
    parser = argparse.ArgumentParser(prog="python -m bench.ui", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the store, fewer rounds; no report is written")
    quick = parser.parse_args().quick
    probe, part = NoiseProbe(), 10 if quick else 1
    # In memory where that is possible: the pages are measured, and not the disk.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        found = _measure(
            DirectoryStore(Path(folder)), RUNS // part, ATTEMPTS // part, QUICK_ROUNDS if quick else ROUNDS
        )
    report = {"machine": machine(), "noise": probe.report(), "seed": "none: nothing is random", **found}
    if not quick:
        REPORT.write_text(json.dumps(report, indent=2) + "\n")
    values = {f"{name}_ms": 1000 * found["seconds"][name]["median"] for name in PATHS}
    values |= {f"{name}_kb": found["bytes"][name] / 1000 for name in PATHS}
    print(  # noqa: T201  the result
        *verdicts(values, AIMS),
        describe_noise(report["noise"], report["machine"]["cores"]),
        number_line(values, AIMS),
        sep="\n",
    )
    return 0


def _measure(store: Store, runs: int, attempts: int, rounds: int) -> dict[str, Any]:
    say(f"writing {runs} runs")
    _write_runs(store, runs, attempts)
    index = RunIndex(store)
    say("reading them all, as a server does that starts")
    first_round = seconds(index.refresh)
    with AppServer(build_app(store, index=index)) as server:
        pages = {name: server.url + path for name, path in {**PATHS, **PICTURES}.items()}
        first_page = seconds(lambda: _load(pages["run"]))
        sizes = {name: len(_load(url)) for name, url in pages.items()}
        say("pages")
        took = interleaved(
            {
                "plain": lambda: seconds(lambda: _read_plainly(store)),
                **{name: lambda url=url: seconds(lambda: _load(url)) for name, url in pages.items()},  # type: ignore[misc]
            },
            rounds,
        )
    return {
        "runs": runs,
        "attempts": attempts,
        "checkpoints": attempts * CHECKPOINTS,
        "first_round_seconds": round(first_round, 2),
        "first_page_of_run_seconds": round(first_page, 3),
        "bytes": sizes,
        "seconds": {name: summary(values) for name, values in took.items()},
        "over_plain_pass": {name: ratio(took[name], took["plain"]) for name in pages},
    }


def _load(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=600) as answer:  # a loopback address of our own
        data: bytes = answer.read()
        return data


def _read_plainly(store: Store) -> int:
    """Read and parse the claims and ends of the large run, and nothing more."""
    keys = [info.key for info in store.list(RunLayout(RUN).control)]
    return sum(len(json.loads(store.read(key))) for key in keys)


def _write_runs(store: Store, runs: int, attempts: int) -> None:
    for number in range(runs - 1):
        write_run(store, run=f"small-{number:04}")
    write_run(store)
    parent = None
    for attempt in range(1, attempts + 1):
        write_claim(store, claim_of(attempt, parent))
        for number in range(CHECKPOINTS):
            saved = ref(attempt, (attempt - 1) * CHECKPOINTS + number + 1)
            commit(store, saved, data=(b"x",), parent=parent)
            parent = saved
        outcome = AttemptEndOutcome.DONE if attempt == attempts else AttemptEndOutcome.FAILED
        write_end(store, end_of(attempt, outcome=outcome))


if __name__ == "__main__":
    sys.exit(main())
