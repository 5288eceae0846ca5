"""What a benchmark leaves: the committed report, a table for people, and the line that programs compare."""

from collections.abc import Iterator, Mapping
from typing import Any

from bench.aims import Aim, number_line, verdicts

AIMS = {
    "stall_first_ratio": Aim("≥", 20),
    "stall_steady_ratio": Aim("≥", 100),
    "stall_over_memcpy": Aim("≤", 1.3),
    "durable_ratio": Aim("≥", 1.5),
    "verify_over_sha256": Aim("≥", 0.8),
    "restore_verify_overhead": Aim("≤", 1.10),
    "corrupt_found": Aim("≥", 1000),
    "corrupt_total": Aim("≥", 1000),
    "good_refused": Aim("≤", 0),
    "sigterm_landed_ratio": Aim("≥", 1.0),
    "step_inflation": Aim("≤", 0.10),
}
"""What is promised of a state of 1 GiB on two cores, in the order of the last line."""


def line(parts: Mapping[str, Any]) -> str:
    """``key=value`` of all that was measured."""
    found = {name: value for part in parts.values() for name, value in part.get("line", {}).items()}
    return number_line(found, AIMS)


def table(parts: Mapping[str, Any]) -> str:
    """Every number with its spread, then the promises."""
    rows = [row for name, part in parts.items() for row in _rows(name, part)]
    width = max((len(name) for name, _ in rows), default=0)
    promised = [row for part in parts.values() for row in verdicts(part.get("line", {}), AIMS)]
    return "\n".join([*(f"{name:<{width}}  {words}" for name, words in rows), "", *promised])


def _rows(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and "samples" in value:
        low, high = value["range"]
        yield name, f"{value['median']:>12,g}   {low:,g} … {high:,g}   n={len(value['samples'])}"
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key != "line":
                yield from _rows(f"{name}.{key}", inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _rows(f"{name}[{index}]", inner)
    else:
        yield name, f"{value:>12,g}" if isinstance(value, float | int) else str(value)
