"""Programs as the tutorials of their libraries have them, killed again and again: ``make test-programs``.

Each program runs in attempts that are opened as the plugin opens them, by the
command that compile writes. A fault, drawn from the seed, ends an attempt at
something that the program does: its first step, a batch that it loads, a save.
The last attempt of a run is left alone, and the run is compared with one that
was never disturbed. The report goes to ``tests/bench/reports/programs.json``,
and its table to ``docs/programs.md``.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

from bench.machine import machine

from programs import marked_processes, report
from programs.attempts import STEPS_PER_SAVE, AttemptRecord, Run
from programs.catalogue import PROGRAMS, Program
from programs.faults import KINDS, draw_fault, passages_of
from programs.judge import Verdict, judge

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "programs"
KILLS, QUICK_KILLS = report.AIM_KILLS, 2
KILLS_PER_RUN = 4
UNFINISHED_LIMIT = 3
"""Faults in a row that an attempt may miss, because it ended before."""
SIGNALS = {"term": "SIGTERM", "kill": "SIGKILL", "memory": "out of memory", "damage": "damaged checkpoint"}


def main() -> int:
    """Run the campaign; 1 if a program lost something."""
    parser = argparse.ArgumentParser(prog="python -m programs", description=__doc__.partition("\n")[0])
    parser.add_argument("--program", action="append", choices=[program.name for program in PROGRAMS])
    parser.add_argument("--kills", type=int, help=f"of each program; default: {KILLS}, or {QUICK_KILLS} with --quick")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--signal", choices=list(SIGNALS), help="the only kind of fault; default: all, by the seed")
    parser.add_argument("--minutes", type=float, help="kill each program no more after this time, but once")
    parser.add_argument("--jobs", type=int, default=2, help="programs at a time")
    parser.add_argument("--quick", action="store_true", help="a few kills of each program, and no report")
    parser.add_argument("--keep", action="store_true", help="keep the files of runs without a finding, too")
    parser.add_argument("--table", action="store_true", help="write the table of the docs from the report, and no more")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _end_programs)
    if options.table:
        report.write_page()
        return 0
    kills = options.kills or (QUICK_KILLS if options.quick else KILLS)
    chosen = [program for program in PROGRAMS if program.name in (options.program or [program.name])]
    say(f"seed {options.seed}, {kills} kills of each of {len(chosen)} programs")
    with ThreadPoolExecutor(options.jobs) as pool:
        only = SIGNALS.get(options.signal, "")
        seconds = 60 * options.minutes if options.minutes else float("inf")
        results = list(
            pool.map(lambda program: campaign(program, kills, options.seed, only, options.keep, seconds), chosen)
        )
    if not options.quick:
        report.publish(
            {result["name"]: result for result in results}, machine(), "signals" if options.signal else "programs"
        )
    return 1 if any(result["findings"] for result in results) else 0


def _end_programs(number: int, frame: FrameType | None) -> None:
    """Leave no program behind when the campaign itself is ended."""
    marked_processes.kill_container(f"{os.getpid()}-")
    os._exit(128 + number)


def campaign(
    program: Program, kills: int, seed: int, only: str, keep: bool = False, seconds: float = float("inf")
) -> dict[str, Any]:
    """Kill ``program`` that often, in runs of a few kills; after ``seconds`` none more, once there is one."""
    began = time.monotonic()
    undisturbed = Run(FOLDER / program.name / "undisturbed", program).attempt()
    if undisturbed.code != 0:
        raise SystemExit(f"{program.name} fails without a fault, with {undisturbed.code}:\n{undisturbed.log[-3000:]}")
    generator = random.Random(f"{seed}/{program.name}")
    passages = passages_of([line["event"] for line in undisturbed.lines], STEPS_PER_SAVE)
    verdicts: list[Verdict] = []
    struck: list[AttemptRecord] = []
    number = 0
    while len(struck) < kills and (not struck or time.monotonic() < began + seconds):
        number += 1
        run = Run(FOLDER / program.name / str(number), program)
        missed = 0
        for _ in range(min(KILLS_PER_RUN, kills - len(struck)) + UNFINISHED_LIMIT):
            record = run.attempt(draw_fault(generator, passages, only), random.Random(generator.random()))
            struck += [record] if record.struck else []
            missed += not record.struck
            ended = record.code == 0
            if ended or missed == UNFINISHED_LIMIT or len(run.attempts) - missed >= KILLS_PER_RUN:
                break
            if len(struck) == kills or time.monotonic() > began + seconds:
                break
        if not ended:
            run.attempt()
        verdict = judge(program, undisturbed, run.attempts)
        verdicts.append(verdict)
        for finding in verdict.findings:
            fault = run.attempts[finding.attempt - 1].fault
            before = run.attempts[finding.attempt - 2].fault if finding.attempt > 1 else None
            say(f"{program.name}, run {number}, attempt {finding.attempt}: {finding.kind}: {finding.sentence}")
            say(f"  fault: {fault}; before: {before}; files: {run.root}")
        if not verdict.findings and not keep:
            shutil.rmtree(run.root)
    result = summary(program, seed, struck, verdicts, time.monotonic() - began)
    say(report.line(result))
    return result


def summary(
    program: Program, seed: int, struck: list[AttemptRecord], verdicts: list[Verdict], seconds: float
) -> dict[str, Any]:
    """What all runs of a program showed, as the report has it."""
    faults = [record.fault for record in struck if record.fault]
    findings = Counter(finding.kind for verdict in verdicts for finding in verdict.findings)
    parts = {name for verdict in verdicts for name in verdict.parts}
    return {
        "name": program.name,
        "seed": seed,
        "versions": report.versions(program),
        "kills": len(struck),
        "kinds": {kind: sum(fault.kind == kind for fault in faults) for kind in KINDS},
        "moments": dict(sorted(Counter(fault.moment for fault in faults).items())),
        "runs": len(verdicts),
        "restores": sum(verdict.restores for verdict in verdicts),
        "restored": {name: all(verdict.parts.get(name, True) for verdict in verdicts) for name in sorted(parts)},
        "findings": dict(sorted(findings.items())),
        "losses_said": sum(verdict.losses_said for verdict in verdicts),
        "samples": sum(verdict.samples for verdict in verdicts),
        "twice": sum(verdict.twice for verdict in verdicts),
        "never": sum(verdict.never for verdict in verdicts),
        "same_order": all(verdict.same_order for verdict in verdicts),
        "seconds": round(seconds),
    }


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)  # noqa: T201  the result


if __name__ == "__main__":
    sys.exit(main())
