"""What is promised of Workflows on Argo, for each requeue time of its controller, and how reports are merged."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.aims import Aim, Measured
from bench.samples import median_of

REPORT = Path(__file__).parents[1] / "reports" / "argo.json"
BEFORE: dict[str, Any] = {
    "measured": "2026-11-23, sidecar 2s; seconds of the line from two rounds, all else from one quick run",
    "added_seconds_per_step": 9.1,
    "floor_seconds_per_step": 4.3,
    "first_pod_later_seconds": 6.3,
    "nodes_of_step": 8,
    "nodes_of_train": 12,
    "nodes_of_further_attempt": 7,
    "next_attempt_seconds": 10.9,
    "bytes_per_step": 10_410,
}
"""What this benchmark measured of the last Workflows in which admit, run, settle and conclude were steps of a step."""
_AIMS = {
    "nodes_of_step": Aim("≤", 5),
    "nodes_of_train": Aim("≤", 8),
    "nodes_of_further_attempt": Aim("≤", 4),
    "next_attempt_seconds": Aim("≤", 10),
    "bytes_per_step_over_before": Aim("≤", 0.5),
    "fan_ratio": Aim("≤", 1.25),
}
_AIMS_BY_REQUEUE = {
    "2s": {"added_seconds_per_step": Aim("≤", 2.5), "first_pod_later_seconds": Aim("≤", 4)},
    "1s": {"added_seconds_per_step": Aim("≤", 1.2)},
}
NAMES = (
    *("added_seconds_per_step", "floor_seconds_per_step", "first_pod_later_seconds", "nodes_of_step"),
    *("nodes_of_train", "nodes_of_further_attempt", "next_attempt_seconds", "bytes_per_step"),
    *("bytes_per_step_over_before", "fan_ratio", "items_ratio"),
)
"""All that is compared, in its order."""


def label(mode: str, requeue: str, offloading: str = "not configured") -> str:
    """Key of a run in the report."""
    return f"{mode} {requeue}{' offloading' if offloading == 'configured' else ''}"


def aims(requeue: str, quick: bool) -> dict[str, Aim]:
    """The aims for a requeue time. A quick run has too few tasks for those of a wide fan-out."""
    found = {**_AIMS_BY_REQUEUE.get(requeue, {}), **_AIMS}
    return {name: aim for name, aim in found.items() if not quick or name != "fan_ratio"}


def values(parts: Mapping[str, Any]) -> dict[str, Measured]:
    """What the parts measured, in the order of `NAMES`."""
    found: dict[str, Measured] = {name: value for part in parts.values() for name, value in part["line"].items()}
    if "bytes_per_step" in found:
        found["bytes_per_step_over_before"] = median_of(found["bytes_per_step"]) / BEFORE["bytes_per_step"]
    return {name: found[name] for name in NAMES if name in found}


def merged(report: Mapping[str, Any], key: str, run: Mapping[str, Any]) -> dict[str, Any]:
    """``report`` with the parts of a run; its other parts, and runs with other labels, stay."""
    runs = dict(report.get("runs", {}))
    parts = {**runs.get(key, {}).get("parts", {}), **run["parts"]}
    return {"before": BEFORE, "runs": dict(sorted({**runs, key: {**run, "parts": parts}}.items()))}


def publish(key: str, run: Mapping[str, Any]) -> None:
    """Write a run into the report."""
    report = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    REPORT.write_text(json.dumps(merged(report, key, run), indent=2) + "\n")
