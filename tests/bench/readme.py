"""README quotes the committed reports, and nothing else: ``python -m bench.readme`` writes its tables again."""

import importlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from bench.aims import Aim, Measured
from bench.samples import median_of

README = Path(__file__).parents[2] / "README.md"
REPORTS = Path(__file__).parent / "reports"
BENCHMARKS = ("checkpoint", "resume", "quota")
"""Each has a module ``report`` with a function ``block``."""


def main() -> None:
    """Write every table of README from its report."""
    text = README.read_text()
    for name in BENCHMARKS:
        text = inserted(text, name, read_report(name))
    README.write_text(text)


def publish(name: str, report: dict[str, Any]) -> None:
    """Write the report of a benchmark, and README's tables; parts that were not measured stay as they are."""
    if "parts" in report:
        report["parts"] = {**read_report(name)["parts"], **report["parts"]}
    (REPORTS / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
    main()


def read_report(name: str) -> dict[str, Any]:
    """The committed report of a benchmark."""
    report: dict[str, Any] = json.loads((REPORTS / f"{name}.json").read_text())
    return report


def inserted(text: str, name: str, report: Mapping[str, Any]) -> str:
    """``text`` with the block of a benchmark exchanged.

    Raises:
        ValueError: the comments that hold its place are not there.
    """
    begin, end = f"<!-- made from tests/bench/reports/{name}.json by `python -m bench.readme` -->", "<!-- end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"README needs the lines {begin!r} and {end!r} where the figures shall stand")
    lines = importlib.import_module(f"bench.{name}.report").block(report)
    return before + "\n".join([begin, *lines, end]) + after


def rows(
    words: Mapping[str, str],
    measured: Mapping[str, Measured],
    aims: Mapping[str, Aim],
    percent: Collection[str] = (),
) -> list[str]:
    """A table of what was measured, with quartiles where there are several rounds, and of the aims."""
    lines = ["| | measured (quartiles) | aim |", "|---|---|---|"]
    for name, sentence in words.items():
        if name in measured:
            lines.append(f"| {sentence} | {_value(name, measured[name], percent)} | {_aim(name, aims, percent)} |")
    return lines


def _value(name: str, value: Measured, percent: Collection[str]) -> str:
    middle = _number(median_of(value), name in percent)
    if not isinstance(value, Mapping) or len(value["samples"]) == 1:
        return middle
    low, high = (_number(quartile, name in percent) for quartile in value["quartiles"])
    return f"{middle} ({low} … {high})"


def _aim(name: str, aims: Mapping[str, Aim], percent: Collection[str]) -> str:
    return f"{aims[name].sign} {_number(aims[name].value, name in percent)}" if name in aims else ""


def _number(value: float, is_share: bool) -> str:
    if is_share:
        return f"{100 * value:.3g} %"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    main()
