"""What is promised of costs, and how the page says it."""

from collections.abc import Mapping
from typing import Any

from bench.aims import Aim, Measured
from bench.page import rows

AIMS = {
    "page_over_1k": Aim("≤", 1.2),
    "home_over_1k": Aim("≤", 1.2),
    **{
        f"{name}_growth": Aim("≤", 1.2)
        for name in ("first_page", "home_round", "janitor", "auto_resume", "choose_start", "retain")
    },
    "alerts_growth": Aim("≤", 25),
}
"""Requests at 10,000 over those at 100. A turn over alerts lists at most two thousand objects."""
PAGES = {
    "page_over_1k": "`tiphys runs --limit 5` over 100,000 runs, at 20 ms for a request, times that over 1,000",
    "home_over_1k": "the same for the first page of the runs in the browser, from the start of its server",
}
PROCESSES = {
    "first_page": ("`tiphys runs --limit 5`", "runs that have ended"),
    "home_start": ("start of `tiphys ui`, which keeps the newest 1,000", "runs that have ended"),
    "home_round": ("a round of `tiphys ui`, every 5 s, and its first page", "runs that have ended"),
    "janitor": ("a round of the janitor, every hour", "runs that have ended"),
    "auto_resume": ("the search of auto-resume in storage, every 5 min, by a new controller", "runs that have ended"),
    "alerts": ("a turn of the alert worker, every 10 s", "alerts of the last week that were handled"),
    "choose_start": ("choice of a start checkpoint", "checkpoints of a step"),
    "retain": ("retention after a commit that keeps all", "checkpoints of a step"),
    "tracker": ("a round of auto-resume over the watch", "live Workflows"),
    "janitor_namespaces": ("a round of the janitor, with 10 open runs in each", "namespaces"),
    "auto_resume_namespaces": ("the search of auto-resume, with 10 open runs in each", "namespaces"),
}
WORDS = PAGES | {
    f"{name}_growth": f"requests of {process}: over 10,000 {things}, times those over 100"
    for name, (process, things) in PROCESSES.items()
    if f"{name}_growth" in AIMS
}


def values(report: Mapping[str, Any]) -> dict[str, Measured]:
    """What was measured, by name."""
    parts = report["parts"]
    found: dict[str, Measured] = dict(parts.get("pages", {}).get("line", {}))
    for name, costs in parts.get("processes", {}).get("costs", {}).items():
        requests = [cost[0] for cost in costs.values()]
        found[f"{name}_growth"] = round(requests[-1] / max(1, requests[-2]), 3)
    return found


def block(report: Mapping[str, Any]) -> list[str]:
    """Markdown of the committed report."""
    measured = values(report)
    costs = report["parts"]["processes"]["costs"]
    sizes = list(next(iter(costs.values())))
    lines = rows(WORDS, measured, AIMS)
    head = " | ".join(f"{int(size):,}" for size in sizes)
    lines += ["", f"| requests to storage, CPU time | of | {head} |"]
    lines += ["|---" * (len(sizes) + 2) + "|"]
    for name, (process, things) in PROCESSES.items():
        cells = " | ".join(f"{cost[0]:,}, {_time(cost[1])}" for cost in costs[name].values())
        lines.append(f"| {process} | {things} | {cells} |")
    return lines


def _time(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.3g} s"
