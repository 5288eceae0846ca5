"""What is promised of recoveries, and how the pages say it."""

from collections.abc import Mapping
from typing import Any

from bench.aims import Aim, Measured
from bench.page import rows

AIMS = {
    "plan_10k_requests": Aim("≤", 120),
    "plan_over_heads": Aim("≤", 0.25),
    "decide_requests": Aim("≤", 30),
    "decide_over_requests": Aim("≤", 1.25),
    "decide_p95_over_requests": Aim("≤", 1.5),
    "webhook_resumes": Aim("≤", 1),
    "webhook_over_put": Aim("≤", 2),
    "webhook_p99_over_put": Aim("≤", 20),
    "false_resubmits": Aim("≤", 0),
    "poison_cycles": Aim("≤", 2),
    "goodput_over_optimum": Aim("≥", 0.9),
}
QUICK_AIMS = {
    "plan_10k_requests": Aim("≤", 10),
    "plan_over_heads": Aim("≤", 1),
    **{
        name: AIMS[name]
        for name in (
            *("decide_requests", "decide_over_requests", "webhook_resumes", "webhook_over_put"),
            *("false_resubmits", "poison_cycles"),
        )
    },
}
"""Of plans of 200 steps; percentiles of a few and ten seconds of faults are not judged."""

WORDS = {
    "goodput_scratch": "useful time: restarted from scratch",
    "goodput_folder": "useful time: a folder of checkpoints, the newest taken",
    "goodput_tiphys": "useful time: Tiphys",
    "goodput_over_optimum": "the same over the optimum for these restarts and failures (Daly)",
    "poison_cycles": "crashes caused by one bad checkpoint before it is quarantined",
    "decide_requests": "deciding and submitting a resume: requests to storage",
    "decide_over_requests": "the same: its time, times that of as many plain requests in a row, at 20 ms each",
    "decide_p95_over_requests": "the same, p95",
    "plan_10k_requests": "plan of 10,000 steps, 1 % missing: requests to storage",
    "plan_over_heads": "the same: its time, times that of asking for each output by name, 16 at a time",
    "webhook_resumes": "resumes caused by 1,000 deliveries of one alert",
    "webhook_over_put": "replies to them, times one plain PUT of the same bytes",
    "webhook_p99_over_put": "the same, p99",
    "false_resubmits": "healthy runs submitted again in an hour of time-outs, of 100",
}


def values(parts: Mapping[str, Any]) -> dict[str, Measured]:
    """What the parts measured, by name."""
    return {name: value for part in parts.values() for name, value in part.get("line", {}).items()}


def block(report: Mapping[str, Any]) -> list[str]:
    """Markdown of the committed report."""
    percent = ("goodput_scratch", "goodput_folder", "goodput_tiphys")
    return rows(WORDS, values(report["parts"]), AIMS, percent)
