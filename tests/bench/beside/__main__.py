"""The same training and faults for each way to survive them on Argo: ``python -m bench.beside``.

With ``tests`` on PYTHONPATH it meets the cluster that ``make test-argo`` would use (`argo.settings`), by `argo` and
`kubectl`. The results go to ``tests/bench/reports/beside.json``, and from there into docs/comparison.md.
"""

import argparse
import shutil
import sys
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import boto3
from argo.settings import from_environment
from bench import page
from bench.argo.installation import Installation, installation
from bench.beside import trainer
from bench.beside.contenders import CONTENDERS, Case, Contender, tidy
from bench.beside.faults import FAULTS, Fault
from bench.beside.judge import happened, judge
from bench.beside.report import publish
from bench.beside.trial import FAULT_AT_STEP, Trial
from bench.machine import machine
from bench.progress import say

from tiphys.errors import TiphysError, UsageError
from tiphys.kube.resources import CUSTOM_RESOURCE_DEFINITIONS

_TRIES = 3
_OTHERS = {"Kueue with JobSet": ("clusterqueues.kueue.x-k8s.io", "jobsets.jobset.x-k8s.io")}
"""Contenders of other systems, with the definitions that show that they are installed."""


def main() -> int:
    """Measure, write report, table and picture."""
    options = _parser().parse_args()
    try:
        with installation(from_environment(), options.requeue) as here:
            measure(here, options.contender or list(CONTENDERS), options.fault or list(FAULTS), not options.quick)
    except (TiphysError, RuntimeError) as error:
        print(f"bench-beside: {error}", file=sys.stderr)  # noqa: T201  a refusal
        return 2
    return 0


def measure(here: Installation, contenders: list[str], faults: list[str], keep: bool) -> None:
    """Each contender with each fault; ``keep`` puts a trial into the report as soon as it is made."""
    store = urlsplit(here.settings.store)
    missing = [program for program in ("argo", "kubectl") if shutil.which(program) is None]
    if missing or store.scheme != "s3":
        raise UsageError(f"needs argo and kubectl on PATH and a store in S3; missing: {missing}, store: {store.scheme}")
    client, expected = boto3.client("s3"), reference()
    run: dict[str, Any] = {"machine": machine(), "settings": settings(here), "left_out": left_out(here)}
    for name in contenders:
        for fault in faults:
            if FAULTS[fault].needs_checkpoints and not CONTENDERS[name].checkpoints:
                continue
            prefix = f"beside-{uuid.uuid4().hex[:6]}-{name.replace('_', '-')}-{fault}"
            case = Case(prefix, here.settings.image, here.settings.store, store.netloc, FAULTS[fault].kills_in_save)
            found = _measure_one(here, client, CONTENDERS[name], FAULTS[fault], case, expected)
            say(f"{name}, {fault}: {found}")
            if keep:
                publish({**run, "trials": {name: {fault: found}}})
                page.main()
    if "files" in contenders:
        here.run(tidy(Case("tidy", here.settings.image, here.settings.store, store.netloc)), 120.0)


def _measure_one(
    here: Installation, client: Any, contender: Contender, fault: Fault, case: Case, expected: str
) -> dict[str, Any]:
    """One trial whose fault happened, of at most three."""
    why = ""
    for _ in range(_TRIES):
        trial = Trial(here, client, contender, fault, case)
        try:
            history = trial.run()
            if happened(history):
                return judge(history, expected)
            why = "the fault did not meet the training"
        except (RuntimeError, TiphysError) as error:
            why = str(error).splitlines()[0]
        finally:
            trial.clean()
        say(f"{case.name}: {why}")
    return {"not_counted": why}


def reference() -> str:
    """The digest of an undisturbed training."""
    weights = trainer.initial()
    for step in range(1, trainer.STEPS + 1):
        trainer.advance(weights, step)
    return trainer.digest(weights)


def left_out(here: Installation) -> dict[str, str]:
    """Contenders that are not tried, and why."""
    return dict(_left_out(here))


def _left_out(here: Installation) -> Iterator[tuple[str, str]]:
    for name, definitions in _OTHERS.items():
        absent = [one for one in definitions if here.api.get(CUSTOM_RESOURCE_DEFINITIONS, None, one) is None]
        yield name, f"not installed ({', '.join(absent)})" if absent else "this benchmark has no JobSet for it"


def settings(here: Installation) -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "controller": here.controller.image or "unknown",
        "requeue": here.controller.requeue,
        "kubernetes": here.api.get_path("/version")["gitVersion"],
        "mode": str(here.settings.mode),
        "seed": "none: nothing is random",
        "steps": trainer.STEPS,
        "every": trainer.EVERY,
        "step_seconds": trainer.STEP_SECONDS,
        "state_bytes": 8 * trainer.WORDS,
        "fault_at_step": FAULT_AT_STEP,
        "clock": "of the nodes, in the journal of the training",
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.beside", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="no report")
    parser.add_argument("--contender", action="append", choices=list(CONTENDERS), help="only this one; may be repeated")
    parser.add_argument("--fault", action="append", choices=list(FAULTS), help="only this one; may be repeated")
    parser.add_argument("--requeue", default="", help="DEFAULT_REQUEUE_TIME of Argo's controller, if it is unreadable")
    return parser


if __name__ == "__main__":
    sys.exit(main())
