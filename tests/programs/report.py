"""The report of the campaign, and the table of ``docs/programs.md`` that is made from it."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from programs.catalogue import PROGRAMS, Program

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "tests/bench/reports/programs.json"
PAGE = ROOT / "docs/programs.md"
AIM_KILLS = 50
"""Kills of each program that its row has to show."""
BEGIN, END = "<!-- made from tests/bench/reports/programs.json by `make test-programs` -->", "<!-- end -->"
LIBRARIES = ("torch", "torchdata", "transformers", "lightning", "accelerate", "keras", "jax", "orbax-checkpoint",
             "xgboost-cpu", "scikit-learn", "joblib", "numpy")  # fmt: skip
_NAMES = {"weights": "weights", "optimizer": "optimizer", "generators": "generators"}


def publish(results: Mapping[str, Any], machine: Mapping[str, Any], section: str) -> None:
    """Write the report and the table; programs that were not run stay as they are."""
    found = read() if REPORT.exists() else {"programs": {}, "signals": {}}
    order = [program.name for program in PROGRAMS]
    merged = {**found[section], **results}
    found[section] = {name: merged[name] for name in order if name in merged}
    found["machine"] = dict(machine)
    REPORT.write_text(json.dumps(found, indent=2) + "\n")
    write_page()


def read() -> dict[str, Any]:
    """The committed report."""
    report: dict[str, Any] = json.loads(REPORT.read_text())
    return report


def write_page() -> None:
    """Write the table of the docs from the report."""
    PAGE.write_text(with_table(PAGE.read_text(), read()))


def with_table(text: str, report: Mapping[str, Any]) -> str:
    """``text`` with the table of ``report``.

    Raises:
        ValueError: the comments that hold its place are not there.
    """
    before, found, rest = text.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"{PAGE.name} needs the lines {BEGIN!r} and {END!r} where the table shall stand")
    return before + "\n".join([BEGIN, *table(report), END]) + after


def table(report: Mapping[str, Any]) -> list[str]:
    """A row for each program, also for one that was not killed."""
    lines = [
        "| program | lines for Tiphys | restored | position in the data | kills | lost silently | wrong states "
        "| other findings | samples twice, never | same order |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = (_cells(program, report["programs"].get(program.name)) for program in PROGRAMS)
    return lines + ["| " + " | ".join(cells) + " |" for cells in rows]


def _cells(program: Program, result: Mapping[str, Any] | None) -> list[str]:
    wrapped = f"none; `tiphys-exec --dir {program.folder}`" if program.folder else f"{program.own_lines}, a session"
    words = [program.title, wrapped]
    if result is None:
        return [*words, "not measured", program.position, f"0 (missed: {AIM_KILLS})", *["not measured"] * 5]
    findings = dict(result["findings"])
    restored = ", ".join(_NAMES[name] for name in _NAMES if result["restored"].get(name)) or "nothing yet"
    has_samples = result["samples"] > 0
    return [
        *words,
        restored,
        program.position,
        f"{result['kills']}" + (f" (missed: {AIM_KILLS})" if result["kills"] < AIM_KILLS else ""),
        *(_against_zero(findings.pop(kind, 0)) for kind in ("silent loss", "wrong state")),
        _against_zero(sum(findings.values()), ", ".join(findings)),
        f"{result['twice']}, {result['never']} of {result['samples']}" if has_samples else "–",
        ("yes" if result["same_order"] else "**no**") if has_samples else "–",
    ]


def _against_zero(count: int, what: str = "") -> str:
    return f"**{count}**{f' ({what})' if what else ''}, missed: 0" if count else "0"


def line(result: Mapping[str, Any]) -> str:
    """One line for a terminal."""
    findings = ", ".join(f"{count} × {kind}" for kind, count in result["findings"].items()) or "nothing lost"
    return (
        f"{result['name']}: {result['kills']} kills in {result['runs']} runs, {result['restores']} restores, "
        f"{findings}, {result['losses_said']} losses said; samples twice {result['twice']}, "
        f"never {result['never']} of {result['samples']}, {result['seconds']} s"
    )


def versions(program: Program) -> dict[str, str]:
    """Versions of the libraries in the program's environment."""
    code = (
        "import importlib.metadata as m, json, sys; v = {d.metadata['Name'].lower(): d.version for d in "
        "m.distributions()}; print(json.dumps({n: v[n] for n in sys.argv[1:] if n in v}))"
    )
    python = ROOT / program.environment / "bin" / "python"
    output = subprocess.run([python, "-c", code, *LIBRARIES], check=True, capture_output=True, text=True).stdout
    found: dict[str, str] = json.loads(output)
    return found
