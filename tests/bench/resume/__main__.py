"""What failures cost with Tiphys: ``python -m bench.resume``, with ``tests`` on PYTHONPATH.

Plans and resumes are measured against a real S3 server, goodput with the local
engine and real processes. The report goes to ``tests/bench/reports/resume.json``.
"""

import argparse
import signal
import sys
from collections.abc import Callable
from typing import Any

import structlog
from bench import page
from bench.aims import has_missed_count, number_line, verdicts
from bench.checkpoint.server import S3, s3_server
from bench.machine import NoiseProbe, describe_noise, machine
from bench.progress import say
from bench.resume import decide, goodput, healthy, plan, poison, webhooks
from bench.resume.report import AIMS, QUICK_AIMS, values

PARTS: dict[str, Callable[[S3, bool], dict[str, Any]]] = {
    "plan": plan.measure,
    "decide": decide.measure,
    "webhooks": webhooks.measure,
    "healthy": lambda _, quick: healthy.measure(quick),
    "poison": lambda _, quick: poison.measure(quick),
    "goodput": lambda _, quick: goodput.measure(quick),
}


def main() -> int:
    """Measure, write the report, print the line of numbers."""
    options = _parser().parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))
    # As Ctrl-C does: the servers and programs that were started end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    probe = NoiseProbe()
    report: dict[str, Any] = {"machine": machine()}
    parts: dict[str, Any] = {}
    with s3_server() as server:
        report["s3"] = server.name
        for name in options.only or PARTS:
            say(f"── {name}")
            parts[name] = PARTS[name](server, options.quick)
    report["noise"] = probe.report()
    if not options.quick:
        page.publish("resume", {**report, "parts": parts}, parts)
    found, aims = values(parts), QUICK_AIMS if options.quick else AIMS
    noise = describe_noise(report["noise"], report["machine"]["cores"])
    print(*verdicts(found, aims), noise, number_line(found, AIMS), sep="\n")  # noqa: T201  the result
    return int(has_missed_count(found, aims))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.resume", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller runs, under a minute; no report is written")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="only this part; may be repeated")
    return parser


if __name__ == "__main__":
    sys.exit(main())
