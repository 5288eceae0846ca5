"""What GPU quotas cost and keep: ``python -m bench.quota``, with ``tests`` on PYTHONPATH.

Decisions are timed in memory, and through the ledger object of a real API server
(of KUBECONFIG, or of the project's own cluster, which it starts; ``--quick`` needs
none). Promises about waiting are measured in virtual time, by replays of seeded jobs through the
service's own rules, a published trace of tasks is placed on its nodes, one of
trainings is replayed, and many processes ask one ledger file while some of them
are killed. The report goes to ``tests/bench/reports/quota.json``. What needs a
published trace is measured where ``TIPHYS_TRACES`` names the folder of both. Each part is
in the report as soon as it is measured; ``--only`` measures one again.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from bench import page
from bench.aims import has_missed_count, number_line, verdicts
from bench.machine import NoiseProbe, describe_noise, machine
from bench.place import place
from bench.progress import say
from bench.quota import attained, order
from bench.quota.campaign import campaign
from bench.quota.cluster import admissions
from bench.quota.decisions import CHANGE_EVERY, COHORTS, QUEUES, decisions
from bench.quota.frontier_svg import FRONTIER_PICTURE, render_frontier
from bench.quota.log_campaign import log_campaign
from bench.quota.placement import FOLDER, absent, allocation
from bench.quota.preemption import OTHER_SAVES, preemption
from bench.quota.report import AIMS, QUICK_AIMS, values
from tiphys_plugin.__main__ import set_gc_thresholds

SEED = 6
SIZES = ((1_000, 1_000, 1000), (10_000, 1_000, 100), (1_000, 10_000, 100), (10_000, 10_000, 40), (100_000, 10_000, 20))
"""Waiting requests, nodes, and decisions that are timed."""
QUICK_SIZES = ((1_000, 1_000, 400),)
CAMPAIGNS = ((2, 20_000), (16, 130_000), (64, 60_000))
"""Processes on one ledger file, and what they ask together."""
QUICK_CAMPAIGNS = ((8, 3_000),)
LOG_CAMPAIGN, QUICK_LOG_CAMPAIGN = (8, 8_000), (4, 200)
"""The same for services on one ledger of the cluster, whose log is damaged."""
LOADS = ((1.0, 2.0, 4.0, 8.0), 300)
QUICK_LOADS = ((1.0, 4.0), 100)
"""What jobs of no priority ask for, as a multiple of all GPUs, and how many of high priority come."""
SEEDS = range(10)
QUICK_SEEDS = range(2)
FAMILIES = (range(2), 300)
QUICK_FAMILIES = (range(1), 60)
"""Seeds, and jobs of each family."""
HOURS = 12.0


def main() -> int:
    """Measure, write the report, print the line of numbers."""
    options = _parser().parse_args()
    set_gc_thresholds()  # as the service does
    chosen = options.only or [name for name in PARTS if not (options.quick and name == "cluster")]
    report: dict[str, Any] = page.read_report("quota")
    report |= {"machine": machine(), "settings": settings()}
    probe = NoiseProbe()
    for part, found in measure(chosen, options.quick):
        report |= found
        report["noise"] = probe.report()
        if not options.quick:
            report["measured"] = {**report.get("measured", {}), part: report["noise"]}
            page.publish("quota", report, [part])
    values_found, aims = values(report), QUICK_AIMS if options.quick else AIMS
    noise = describe_noise(report["noise"], report["machine"]["cores"])
    print(*verdicts(values_found, aims), noise, sep="\n")  # noqa: T201  the result
    print(number_line(values_found, AIMS))  # noqa: T201  the result
    return int(has_missed_count(values_found, aims))


def measure(chosen: Sequence[str], quick: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The keys of the report that each chosen part has; the longest part has a process of its own meanwhile."""
    missing = absent(os.environ) or attained.absent(os.environ)
    if missing is not None:
        say(missing)
    with ProcessPoolExecutor(max_workers=1) as other:
        replays = other.submit(attained_service, quick) if "attained" in chosen and missing is None else None
        for part in chosen:
            if part != "attained" and (missing is None or part not in OF_TRACES):
                found = PARTS[part](quick)
                say(f"{part}: {json.dumps(found)}")
                yield part, found
        if replays is not None:
            say(f"attained: {json.dumps(replays.result())}")
            yield "attained", replays.result()


def attained_service(quick: bool) -> dict[str, Any]:
    """Two published traces of trainings of unknown duration."""
    trace = Path(os.environ[FOLDER]) / attained.TRACE
    return {
        "attained": attained.attained(trace, () if quick else attained.OTHER_SAVES),
        "attained_trace3": attained.attained(trace.with_name("muri_trace3.csv")),
    }


def frontier(quick: bool) -> dict[str, Any]:
    """What a bound on overtaking costs."""
    found = order.frontier([Path(os.environ[FOLDER]) / name for name in attained.TRACES])
    if not quick:
        FRONTIER_PICTURE.write_text(render_frontier(found))
    return {"frontier": found}


def core(quick: bool) -> dict[str, Any]:
    """Decisions in memory."""
    return {
        "core": {
            f"{waiting} on {nodes}": decisions(nodes, waiting, samples, SEED)
            for waiting, nodes, samples in (QUICK_SIZES if quick else SIZES)
        }
    }


def campaigns(quick: bool) -> dict[str, Any]:
    """Many processes on one ledger, some of which are killed."""
    log_processes, log_requests = QUICK_LOG_CAMPAIGN if quick else LOG_CAMPAIGN
    return {
        "campaigns": {
            str(processes): campaign(requests, processes, SEED)
            for processes, requests in (QUICK_CAMPAIGNS if quick else CAMPAIGNS)
        }
        | {"log": log_campaign(log_requests, log_processes, SEED)}
    }


def cluster(_: bool) -> dict[str, Any]:
    """Admissions through a real API server."""
    with place() as here:
        return {"cluster": admissions(here.api, here.cluster.kubeconfig)}


def high_priority(quick: bool) -> dict[str, Any]:
    """What preemption costs, and how long a request of high priority waits."""
    return {"preemption": preemption(*QUICK_LOADS, SEED) if quick else preemption(*LOADS, SEED, OTHER_SAVES)}


def settings() -> dict[str, Any]:
    return {
        "seed": SEED,
        "queues": QUEUES,
        "cohorts": COHORTS,
        "hours": HOURS,
        "decisions": "decide() of requests anywhere in the line, one by one; half of all say how long they take; "
        f"a lease goes and another comes before each {CHANGE_EVERY}th decision",
        "allocation": "tasks of the openb trace in random order, then drawn from it with replacement, until they ask "
        "for all GPUs of the nodes that have any; placed at arrival or never",
    }


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {
    "attained": attained_service,
    "frontier": frontier,
    "gang": lambda quick: {"gang_in_stream": order.gang_in_stream(SEED, HOURS)},
    "families": lambda quick: {"families": order.families(*(QUICK_FAMILIES if quick else FAMILIES))},
    "preemption": high_priority,
    "allocation": lambda quick: {"allocation": allocation(Path(os.environ[FOLDER]), QUICK_SEEDS if quick else SEEDS)},
    "core": core,
    "campaigns": campaigns,
    "cluster": cluster,
}
OF_TRACES = frozenset({"attained", "frontier", "allocation"})
"""Parts that need published traces."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.quota", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of everything; writes no report")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="only this part; may be repeated")
    return parser


if __name__ == "__main__":
    sys.exit(main())
