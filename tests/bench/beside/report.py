"""The report of `bench.beside` as a table and a picture."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.beside.contenders import CONTENDERS
from bench.beside.faults import FAULTS
from bench.beside.judge import Outcome

from hera_pipelines.draw.report_html import ReportBar, ReportChart, ReportRow, render_chart_svg

REPORT = Path(__file__).parents[1] / "reports" / "beside.json"
NO_CHECKPOINTS = "no checkpoints"
_COLOURS = {Outcome.RIGHT: "#2f9e6e", Outcome.WRONG: "#8f7fc7", Outcome.FAILED: "#d6453d", Outcome.UNENDED: "#7a8591"}


def merged(report: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """``report`` with the trials of a run; those of other contenders and faults stay."""
    trials = {name: dict(found) for name, found in report.get("trials", {}).items()}
    for name, found in run["trials"].items():
        trials[name] = {**trials.get(name, {}), **found}
    return {**run, "trials": trials}


def publish(run: Mapping[str, Any]) -> None:
    """Write the trials into the report."""
    before = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    REPORT.write_text(json.dumps(merged(before, run), indent=2) + "\n")


def block(report: Mapping[str, Any]) -> list[str]:
    """The table: a row for each fault, a column for each contender."""
    trials = report["trials"]
    shown = {name: contender for name, contender in CONTENDERS.items() if name in trials}
    lines = [
        f"| | {' | '.join(contender.words for contender in shown.values())} |",
        "|---" * (len(shown) + 1) + "|",
    ]
    for name, fault in FAULTS.items():
        cells = [_cell(trials[contender].get(name), fault.needs_checkpoints, contender) for contender in shown]
        lines.append(f"| {fault.words} | {' | '.join(cells)} |")
    left_out = "; ".join(f"{name}: {why}" for name, why in report["left_out"].items())
    given, machine = report["settings"], report["machine"]
    return [
        *lines,
        "",
        f"{given['steps']} steps of {given['step_seconds']:g} s; a save every {given['every']} steps; the fault "
        f"after step {given['fault_at_step']}; Argo {given['controller'].rpartition(':')[2]} with a requeue time of "
        f"{given['requeue']}; {machine['cores']} cores of {machine['cpu'].split(' Processor')[0]}.",
        *([f"Not tried: {left_out}."] if left_out else []),
    ]


def _cell(trial: Mapping[str, Any] | None, needs_checkpoints: bool, contender: str) -> str:
    if needs_checkpoints and not CONTENDERS[contender].checkpoints:
        return NO_CHECKPOINTS
    if trial is None:
        return "not measured"
    if "not_counted" in trial:
        return f"not counted: {trial['not_counted']}"
    seconds = "" if trial["seconds"] is None else f", {trial['seconds']:.1f} s"
    actions = f"; by hand: {', '.join(trial['actions'])}" if trial["actions"] else ""
    return f"{trial['outcome']}, {trial['trained_again']} again{seconds}{actions}"


def picture(report: Mapping[str, Any]) -> str:
    """Seconds without a new step, a row for each fault and contender; a training that never made one fills its row."""
    found = [
        (fault, contender.words.replace("`", ""), report["trials"][name][key])
        for key, fault in FAULTS.items()
        for name, contender in CONTENDERS.items()
        if fault.meets_process and "outcome" in report["trials"].get(name, {}).get(key, {})
    ]
    longest = max((trial["seconds"] or 1.0 for _, _, trial in found), default=1.0)
    rows, before = [], ""
    for fault, contender, trial in found:
        outcome, seconds = Outcome(trial["outcome"]), trial["seconds"]
        words = "no new step" if seconds is None else f"{seconds:g} s without a new step"
        bar = ReportBar(0.0, seconds or longest, _COLOURS[outcome], f"{fault.words}, {contender}: {outcome}, {words}")
        label = "" if fault.words == before else fault.words
        rows.append(ReportRow(label, f"{contender}, {trial['trained_again']} again", (bar,)))
        before = fault.words
    legend = tuple((str(outcome), colour) for outcome, colour in _COLOURS.items())
    return render_chart_svg(ReportChart("Seconds from a fault to the next new step", "", tuple(rows), longest, legend))
