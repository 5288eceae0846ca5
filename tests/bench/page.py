"""The pages quote the committed reports, and nothing else: ``python -m bench.page`` writes their tables again.

`docs/benchmarks.md` has the whole table of each benchmark, and README few rows: those of `FRONT`, and all misses.
`docs/comparison.md` has the table and the picture of what other tools make of the same faults.
"""

import hashlib
import importlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from bench.aims import Aim, Measured
from bench.samples import median_of

ROOT = Path(__file__).parents[2]
PAGE, README, COMPARISON = ROOT / "docs/benchmarks.md", ROOT / "README.md", ROOT / "docs/comparison.md"
BESIDE_PICTURE = ROOT / "docs/images/beside.svg"
REPORTS = Path(__file__).parent / "reports"
BENCHMARKS = ("checkpoint", "resume", "quota", "scale", "fleet")
"""Each has a module ``report`` with ``WORDS`` for what it measures and a function ``block``."""
MEASURED_CODE = {
    "checkpoint": ("tiphys/checkpoint", "tiphys/lineage", "tiphys/store"),
    "resume": ("controller/tiphys_controller", "tiphys/checkpoint", "tiphys/lineage", "tiphys/store"),
    "quota": ("plugin/tiphys_plugin/quota",),
    "scale": ("controller/tiphys_controller", "hera_pipelines/ui", "tiphys/lineage", "tiphys/store"),
    "fleet": ("controller/tiphys_controller", "plugin/tiphys_plugin"),
}
"""The folders of the product that a benchmark measures: a change of them makes its figures old."""
FRONT = {
    "checkpoint": ("stall_over_memcpy", "corrupt_found", "sigterm_landed_ratio"),
    "resume": ("goodput_scratch", "goodput_folder", "goodput_tiphys"),
    "quota": ("over_admissions",),
}
"""Rows of README, by benchmark, beside all those that miss their aim."""
_MISSED = "**missed**: "
_TABLE_HEAD = ("| | measured (quartiles) | aim |", "|---|---|---|")


def main() -> None:
    """Write every table and picture from its report."""
    for path, write in ((PAGE, with_tables), (README, with_front_rows), (COMPARISON, with_comparison)):
        path.write_text(write(path.read_text()))
    BESIDE_PICTURE.write_text(_report_module("beside").picture(read_report("beside")))


def publish(name: str, report: dict[str, Any], measured: Collection[str]) -> None:
    """Write the report of a benchmark, of which ``measured`` are the new parts, and the tables; other parts stay."""
    before = read_report(name)
    if "parts" in report:
        report["parts"] = {**before["parts"], **report["parts"]}
    report["code"] = {**before.get("code", {}), **dict.fromkeys(measured, code_digest(name))}
    (REPORTS / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")
    main()


def read_report(name: str) -> dict[str, Any]:
    """The committed report of a benchmark."""
    report: dict[str, Any] = json.loads((REPORTS / f"{name}.json").read_text())
    return report


def code_digest(name: str) -> str:
    """The SHA-256 of the Python code that a benchmark measures, with its paths."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in MEASURED_CODE[name] for path in (ROOT / folder).rglob("*.py")):
        digest.update(
            b"%s %s\n" % (bytes(path.relative_to(ROOT)), hashlib.sha256(path.read_bytes()).hexdigest().encode())
        )
    return digest.hexdigest()


def describe_age(name: str, report: Mapping[str, Any]) -> list[str]:
    """A line that names the parts whose code has changed since they were measured; none if nothing has."""
    now, parts = code_digest(name), list(report.get("parts") or report["measured"])
    old = [part for part in parts if report.get("code", {}).get(part) != now]
    if not old:
        return []
    which = "all rows were" if old == parts else f"{', '.join(old)} {'was' if len(old) == 1 else 'were'}"
    folders = ", ".join(f"`{folder}`" for folder in MEASURED_CODE[name])
    return ["", f"The code has changed since {which} measured ({folders}): `make bench-{name}` measures it again."]


def with_tables(text: str) -> str:
    """``text`` with the whole table of each benchmark."""
    for name in BENCHMARKS:
        report = read_report(name)
        text = inserted(text, f"{name}.json", [*_report_module(name).block(report), *describe_age(name, report)])
    return text


def with_front_rows(text: str) -> str:
    """``text`` with the rows of `FRONT`, and those that miss their aim."""
    lines = list(_TABLE_HEAD)
    for name, chosen in FRONT.items():
        words, table = _report_module(name).WORDS, _report_module(name).block(read_report(name))
        front = tuple(f"| {words[one]} |" for one in chosen)
        lines += [row for row in table if row.startswith(front) or _MISSED in row]
    return inserted(text, "*.json", lines)


def with_comparison(text: str) -> str:
    """``text`` with what became of the same training by each tool."""
    return inserted(text, "beside.json", _report_module("beside").block(read_report("beside")))


def _report_module(name: str) -> Any:
    return importlib.import_module(f"bench.{name}.report")


def inserted(text: str, source: str, lines: list[str]) -> str:
    """``text`` with other lines between the comments that name their source.

    Raises:
        ValueError: the comments that hold its place are not there.
    """
    begin, end = f"<!-- made from tests/bench/reports/{source} by `python -m bench.page` -->", "<!-- end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page needs the lines {begin!r} and {end!r} where the figures shall stand")
    return before + "\n".join([begin, *lines, end]) + after


def rows(
    words: Mapping[str, str],
    measured: Mapping[str, Measured],
    aims: Mapping[str, Aim],
    percent: Collection[str] = (),
) -> list[str]:
    """A table of what was measured, with quartiles where there are several rounds, and of the aims."""
    lines = list(_TABLE_HEAD)
    for name, sentence in words.items():
        if name in measured:
            value = measured[name]
            lines.append(f"| {sentence} | {_value(name, value, percent)} | {_aim(name, value, aims, percent)} |")
    return lines


def _value(name: str, value: Measured, percent: Collection[str]) -> str:
    middle = _number(median_of(value), name in percent)
    if not isinstance(value, Mapping) or len(value["samples"]) == 1:
        return middle
    low, high = (_number(quartile, name in percent) for quartile in value["quartiles"])
    return f"{middle} ({low} … {high})"


def _aim(name: str, value: Measured, aims: Mapping[str, Aim], percent: Collection[str]) -> str:
    if name not in aims:
        return ""
    missed = "" if aims[name].met(median_of(value)) else _MISSED
    return f"{missed}{aims[name].sign} {_number(aims[name].value, name in percent)}"


def _number(value: float, is_share: bool) -> str:
    if is_share:
        return f"{100 * value:.3g} %"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    main()
