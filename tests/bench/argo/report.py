"""What is promised of Workflows on Argo, and how reports are merged."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.aims import Aim, Measured

REPORT = Path(__file__).parents[1] / "reports" / "argo.json"
_AIMS = {
    "added_seconds_per_step": Aim("≤", 0.15),
    "first_pod_later_seconds": Aim("≤", 0.5),
    "nodes_of_step": Aim("≤", 2),
    "nodes_of_train": Aim("≤", 6),
    "nodes_of_further_attempt": Aim("≤", 4),
    "next_attempt_seconds": Aim("≤", 10),
    "bytes_per_step_over_plain": Aim("≤", 1.3),
}
_WIDE_AIMS = {
    "ratio": Aim("≤", 1.05),
    "record_seconds": Aim("≤", 3),
    "apiserver_cpu_ratio": Aim("≤", 1.1),
    "controller_cpu_ratio": Aim("≤", 1.1),
}
"""Of each wide fan-out; a quick run has too few tasks for them."""
NAMES = (
    *("added_seconds_per_step", "floor_seconds_per_step", "first_pod_later_seconds", "end_later_seconds"),
    "nodes_of_step",
    *("nodes_of_train", "nodes_of_further_attempt", "next_attempt_seconds", "bytes_per_step"),
    "bytes_per_step_over_plain",
    *(f"{wide}_{name}" for wide in ("fan", "items") for name in (*_WIDE_AIMS, "recorder_seconds")),
)
"""All that is compared, in its order."""


def label(mode: str, requeue: str, offloading: str = "not configured") -> str:
    """Key of a run in the report."""
    return f"{mode} {requeue}{' offloading' if offloading == 'configured' else ''}"


def aims(quick: bool) -> dict[str, Aim]:
    """What a run is judged by, at every requeue time."""
    wide = {f"{wide}_{name}": aim for wide in ("fan", "items") for name, aim in _WIDE_AIMS.items()}
    return _AIMS if quick else _AIMS | wide


def values(parts: Mapping[str, Any]) -> dict[str, Measured]:
    """What the parts measured, in the order of `NAMES`."""
    found: dict[str, Measured] = {name: value for part in parts.values() for name, value in part["line"].items()}
    return {name: found[name] for name in NAMES if name in found}


def merged(report: Mapping[str, Any], key: str, run: Mapping[str, Any]) -> dict[str, Any]:
    """``report`` with the parts of a run; its other parts, and runs with other labels, stay."""
    runs = dict(report.get("runs", {}))
    parts = {**runs.get(key, {}).get("parts", {}), **run["parts"]}
    return {"runs": dict(sorted({**runs, key: {**run, "parts": parts}}.items()))}


def publish(key: str, run: Mapping[str, Any]) -> None:
    """Write a run into the report."""
    report = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    REPORT.write_text(json.dumps(merged(report, key, run), indent=2) + "\n")
