"""What the cost of a process grows with: ``python -m bench.scale``, with ``tests`` on PYTHONPATH.

Storage is a bucket in memory that counts requests; the first pages are also measured with 20 ms for each request.
The report goes to ``tests/bench/reports/scale.json``.
"""

import argparse
import sys
from typing import Any

import structlog
from bench import page
from bench.aims import has_missed_count, number_line, verdicts
from bench.machine import NoiseProbe, describe_noise, machine
from bench.progress import say
from bench.samples import interleaved, ratio, seconds, summary
from bench.scale.costs import SIZES, measure_all
from bench.scale.filled import add_older_runs, add_runs
from bench.scale.paged_store import PagedStore
from bench.scale.report import AIMS, values
from tiphys_controller.run_search import RunFilter, search_runs

from hera_pipelines.ui.home_page import PAGE_SIZE, HomeFilter, read_home_view
from hera_pipelines.ui.run_index import RunIndex

FEW, MANY = 1_000, 99_000
LATENCY_SECONDS = 0.02
ROUNDS, QUICK_ROUNDS = 3, 1


def main() -> int:
    """Measure, write the report, print the verdicts."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a hundredth of most; no report is written")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often the first pages are measured")
    options = parser.parse_args()
    quick = options.quick
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    probe, part = NoiseProbe(), 100 if quick else 1
    parts: dict[str, Any] = {
        "pages": _measure_pages(FEW, MANY // part + FEW, QUICK_ROUNDS if quick else options.rounds)
    }
    parts["processes"] = {"costs": measure_all([-(-size // part) for size in SIZES], say)}
    report = {"machine": machine(), "noise": probe.report(), "parts": parts}
    if not quick:
        page.publish("scale", report, parts)
    found = values(report)
    noise = describe_noise(report["noise"], report["machine"]["cores"])
    print(*verdicts(found, AIMS), noise, number_line(found, AIMS), sep="\n")  # noqa: T201  the result
    return int(has_missed_count(found, AIMS))


def _measure_pages(few: int, many: int, rounds: int) -> dict[str, Any]:
    """First pages over few runs and over many, at the latency of a network."""
    stores = {"few": PagedStore(), "many": PagedStore()}
    for name, store in stores.items():
        add_runs(store, few)
        if name == "many":
            add_older_runs(store, many - few)
        next(store.list(""))  # sorts its keys, which a bucket has done before
        store.latency = LATENCY_SECONDS
    say(f"first pages over {few:,} and {many:,} runs")

    def show_home(store: PagedStore) -> None:
        index = RunIndex(store)
        index.refresh()
        assert sum(len(runs) for _, runs in read_home_view(index, HomeFilter()).groups) == min(PAGE_SIZE, few + 10)

    def show_list(store: PagedStore) -> None:
        assert len(search_runs(store, RunFilter(), None, 5).summaries) >= 5

    calls = {"page": show_list, "home": show_home}
    took = interleaved(
        {
            f"{call} {name}": lambda show=show, store=store: seconds(lambda: show(store))  # type: ignore[misc]
            for call, show in calls.items()
            for name, store in stores.items()
        },
        rounds,
    )
    return {
        "settings": {"few": few, "many": many, "latency_seconds": LATENCY_SECONDS},
        "seconds": {name: summary(times) for name, times in took.items()},
        "line": {f"{call}_over_1k": ratio(took[f"{call} many"], took[f"{call} few"]) for call in calls},
    }


if __name__ == "__main__":
    sys.exit(main())
