"""``python -m tiphys.lineage.best STEP``: the step after a sweep, which passes on the outputs of the best trial.

Argo aggregates the output parameters of a fan-out, but neither its artifacts nor
the outputs of failed trials. This program selects the best trial from the
records in storage and copies its outputs to those of its own step.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tiphys.errors import IntegrityError, NotFoundError, StoreError, TiphysError, UsageError, report_error
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.trials import SweepReport, Trial, read_sweep
from tiphys.protocol import environment
from tiphys.protocol.fan_out import format_item_parameters
from tiphys.records import Output, OutputKind, OutputObject, utc_now
from tiphys.store import Store, open_store

TRIAL_OUTPUT = "trial"
"""Output parameter with the parameters of the best trial, as JSON."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Select the best trial, write its outputs, and print it; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tiphys.lineage.best")
    parser.add_argument("step")
    parser.add_argument("--metric", required=True)
    parser.add_argument("--mode", choices=("min", "max"), required=True)
    options = parser.parse_args(arguments)
    try:
        store = open_store(_required_variable(os.environ, environment.STORE), must_exist=True)
        run = _required_variable(os.environ, environment.RUN)
        history = RunHistory.for_display(store, run)
        sweep = read_sweep(history, options.step, options.metric, options.mode, utc_now())
        trial = select_best_trial(sweep)
        write_trial_outputs(store, trial, os.environ)
    except StoreError as error:
        return report_error(error, environment.EX_UNAVAILABLE)
    except TiphysError as error:
        return report_error(error, error.exit_code)
    sys.stdout.write(f"{trial.name} {format_item_parameters(trial.parameters)}: {options.metric} {trial.value}\n")
    return 0


def select_best_trial(sweep: SweepReport) -> Trial:
    """The best trial.

    Raises:
        NotFoundError: no finished trial has a finite value of the metric.
    """
    if sweep.best:
        return next(trial for trial in sweep.trials if trial.step == sweep.best)
    recorded = sorted({name for trial in sweep.trials for name in trial.metrics})
    raise NotFoundError(
        f"no finished trial of {sweep.run}/{sweep.step} has a finite {sweep.metric!r}, as an output parameter or in a "
        f"stored checkpoint; recorded metrics are: {', '.join(recorded) or 'none'}"
        f"{f'; {sweep.note}' if sweep.note else ''}"
    )


def write_trial_outputs(store: Store, trial: Trial, environ: Mapping[str, str]) -> None:
    """Write the outputs of ``trial`` to the outputs of this step with the same names.

    Raises:
        IntegrityError: the bytes of an output do not match its record.
    """
    _write_output(environ, TRIAL_OUTPUT, json.dumps(trial.parameters, sort_keys=True).encode())
    for output in trial.outputs:
        if output.kind is OutputKind.PARAMETER:
            _write_output(environ, output.name, (output.value or "").encode())
        elif path := environ.get(environment.output_path_variable(output.name)):
            _fetch_output(store, output, Path(path))


def _fetch_output(store: Store, output: Output, path: Path) -> None:
    for obj in output.objects:
        target = path / obj.key.removeprefix(f"{output.key}/") if output.directory else path
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with target.open("wb") as file:
            for chunk in store.chunks(obj.key):
                digest.update(chunk)
                file.write(chunk)
        _check_sha256(obj, digest.hexdigest())


def _check_sha256(obj: OutputObject, sha256: str) -> None:
    if sha256 != obj.sha256:
        raise IntegrityError(f"{obj.key} does not match its SHA-256; `tiphys verify --deep` lists all damage")


def _write_output(environ: Mapping[str, str], name: str, data: bytes) -> None:
    if path := environ.get(environment.output_path_variable(name)):
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def _required_variable(environ: Mapping[str, str], name: str) -> str:
    if value := environ.get(name):
        return value
    raise UsageError(f"{name} is not set: only the step after a sweep in a compiled Workflow runs this program")


if __name__ == "__main__":
    sys.exit(main())
