"""Hundreds of trainings at once: ``python -m bench.fleet``, with ``tests`` on PYTHONPATH.

The cluster is that of ``make test-argo`` (`argo.settings`), made by ``make cluster``, because its nodes are of paper.
The report goes to ``tests/bench/reports/fleet.json``.
"""

import argparse
import sys

from argo.settings import from_environment
from bench import page
from bench.aims import has_missed_count, number_line, verdicts
from bench.fleet.report import AIMS, WORDS, values
from bench.fleet.stories import SAVE_SECONDS, hour, lose_etcd
from bench.machine import NoiseProbe, describe_noise, machine


def main() -> int:
    """Run one story, add it to the report."""
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="no report")
    stories = parser.add_subparsers(dest="story", required=True)
    lost = stories.add_parser("etcd", help="etcd is lost, and all trainings go on from the bucket")
    lost.add_argument("--runs", type=int, default=500)
    lost.add_argument("--rebuild", required=True, help="command that empties etcd, and installs Argo and Tiphys again")
    lost.add_argument("--save-seconds", type=float, default=SAVE_SECONDS)
    long = stories.add_parser("hour", help="evictions, preemptions and lost nodes")
    long.add_argument("--runs", type=int, default=1000)
    long.add_argument("--minutes", type=float, default=60)
    long.add_argument("--fault-seconds", type=float, default=5)
    long.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    settings, probe = from_environment(), NoiseProbe()
    if options.story == "etcd":
        found = lose_etcd(settings, options.runs, options.rebuild, options.save_seconds)
    else:
        found = hour(settings, options.runs, options.minutes, options.fault_seconds, options.seed)
    part = {"machine": machine(), "noise": probe.report(), **found}
    if not options.quick:
        page.publish("fleet", {"parts": {options.story: part}}, [options.story])
    measured = values({"parts": {options.story: part}})
    noise = describe_noise(part["noise"], part["machine"]["cores"])
    print(*verdicts(measured, AIMS), noise, number_line(measured, WORDS), sep="\n")  # noqa: T201  the result
    return int(has_missed_count(measured, AIMS))


if __name__ == "__main__":
    sys.exit(main())
