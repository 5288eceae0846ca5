"""What Tiphys costs on a real Argo: ``python -m bench.argo``, with ``tests`` on PYTHONPATH.

It runs Workflows with Tiphys in turns with their twins without, on the cluster that ``make test-argo`` would use
(`argo.settings`). It adds what it measured to ``tests/bench/reports/argo.json``, under the mode and the requeue time
of Argo's controller. The records of its runs, ``bench-…``, stay in the run store.
"""

import argparse
import sys
from typing import Any

from bench.aims import number_line, verdicts
from bench.argo.installation import Installation, installation
from bench.argo.report import aims, label, publish, values
from bench.argo.situations import QUICK, SITUATIONS, Situation, Sizes
from bench.argo.workflows import Twins
from bench.machine import NoiseProbe, describe_noise, machine
from bench.progress import say

from argo.settings import from_environment
from tiphys.errors import TiphysError


def main() -> int:
    """Measure, write the report, print the line of numbers."""
    options = _parser().parse_args()
    sizes = QUICK if options.quick else Sizes(rounds=options.rounds, tasks=options.tasks, items=options.items)
    names = options.only or (["line", "train"] if options.quick else list(SITUATIONS))
    try:
        with installation(from_environment(), options.requeue) as here:
            run = measure(here, sizes, names, keep=not options.quick)
    except (TiphysError, RuntimeError) as error:
        print(f"bench-argo: {error}", file=sys.stderr)  # noqa: T201  a refusal
        return 2
    found, promised = values(run["parts"]), aims(options.quick)
    noise = [describe_noise(part["noise"], run["machine"]["cores"]) for part in run["parts"].values()]
    print(*verdicts(found, promised), *noise, number_line(found, promised), sep="\n")  # noqa: T201  the result
    return 0


def measure(here: Installation, sizes: Sizes, names: list[str], keep: bool) -> dict[str, Any]:
    """The parts of these names; ``keep`` puts each into the report as soon as it is measured."""
    at = Situation(here, Twins(here.settings.image, here.settings.store), sizes)
    parts: dict[str, Any] = {}
    run = {"machine": machine(), "settings": settings(here), "parts": parts}
    for name in names:
        say(f"── {name}")
        probe = NoiseProbe()
        parts[name] = SITUATIONS[name](at)
        parts[name] |= {"noise": probe.report()}
        if keep:
            publish(label(here.settings.mode, here.controller.requeue, here.controller.offloading), run)
    return run


def settings(here: Installation) -> dict[str, Any]:
    """What the numbers depend on, and how they are taken."""
    return {
        "controller": here.controller.image or "unknown",
        "kubernetes": here.api.get_path("/version")["gitVersion"],
        "seed": "none: nothing is random",
        "twin": "the same tasks, images, programs and outputs, and a retryStrategy",
        "clock": "from the request that creates the Workflow to the watch event that shows the change",
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.argo", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of a short line and a training; no report")
    parser.add_argument("--only", action="append", choices=list(SITUATIONS), help="only this part; may be repeated")
    parser.add_argument("--requeue", default="", help="DEFAULT_REQUEUE_TIME of Argo's controller, if it is unreadable")
    parser.add_argument("--rounds", type=int, default=Sizes.rounds, help="turns of each Workflow and its twins")
    parser.add_argument("--tasks", type=int, default=Sizes.tasks, help="tasks of the wide fan-out")
    parser.add_argument("--items", type=int, default=Sizes.items, help="items of the fan-out over an output")
    return parser


if __name__ == "__main__":
    sys.exit(main())
