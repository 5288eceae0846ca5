"""``python -m tiphys.lineage.best STEP``: the step behind a sweep, which hands on what the best trial has made.

Argo gathers the output parameters of a fan-out and no artifacts, and not those
of a trial that failed. Storage has all of it: the choice is made from the
records, and the outputs of the best trial become those of this step.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tiphys.errors import IntegrityError, NotFoundError, StoreError, TiphysError, UsageError
from tiphys.lineage.trials import Sweep, Trial, read_sweep
from tiphys.protocol import environment
from tiphys.protocol.fan_out import in_words
from tiphys.records import Output, OutputKind, OutputObject, utc_now
from tiphys.store import Store, open_store

TRIAL = "trial"
"""Output parameter with the parameters of the best trial, as JSON."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Choose, write the outputs, and say which trial it was; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tiphys.lineage.best")
    parser.add_argument("step")
    parser.add_argument("--metric", required=True)
    parser.add_argument("--mode", choices=("min", "max"), required=True)
    given = parser.parse_args(arguments)
    try:
        store = open_store(_variable(os.environ, environment.STORE), must_exist=True)
        run = _variable(os.environ, environment.RUN)
        sweep = read_sweep(store, run, given.step, given.metric, given.mode, utc_now())
        trial = chosen(sweep)
        hand_on(store, trial, os.environ)
    except StoreError as error:
        return _told(error, environment.EX_UNAVAILABLE)
    except TiphysError as error:
        return _told(error, error.exit_code)
    sys.stdout.write(f"{trial.step} {in_words(trial.parameters)}: {given.metric} {trial.value}\n")
    return 0


def chosen(sweep: Sweep) -> Trial:
    """The best trial; `NotFoundError` if no trial that is done has a value."""
    if sweep.best:
        return next(trial for trial in sweep.trials if trial.step == sweep.best)
    known = sorted({name for trial in sweep.trials for name in trial.metrics})
    raise NotFoundError(
        f"no finished trial of {sweep.run}/{sweep.step} has a finite {sweep.metric!r}, as an output parameter or in a "
        f"checkpoint that is left; recorded are: {', '.join(known) or 'none'}{f'; {sweep.note}' if sweep.note else ''}"
    )


def hand_on(store: Store, trial: Trial, environ: Mapping[str, str]) -> None:
    """Write the outputs of ``trial`` to where this step declares outputs of the same names."""
    _write(environ, TRIAL, json.dumps(trial.parameters, sort_keys=True).encode())
    for output in trial.outputs:
        if output.kind is OutputKind.PARAMETER:
            _write(environ, output.name, (output.value or "").encode())
        elif path := environ.get(environment.output_path_variable(output.name)):
            _fetch(store, output, Path(path))


def _fetch(store: Store, output: Output, path: Path) -> None:
    for one in output.objects:
        target = path / one.key.removeprefix(f"{output.key}/") if output.directory else path
        target.parent.mkdir(parents=True, exist_ok=True)
        found = hashlib.sha256()
        with target.open("wb") as file:
            for chunk in store.chunks(one.key):
                found.update(chunk)
                file.write(chunk)
        _check(one, found.hexdigest())


def _check(one: OutputObject, found: str) -> None:
    if found != one.sha256:
        raise IntegrityError(f"{one.key} does not match its SHA-256; `tiphys verify --deep` tells what else is damaged")


def _write(environ: Mapping[str, str], name: str, data: bytes) -> None:
    if path := environ.get(environment.output_path_variable(name)):
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def _variable(environ: Mapping[str, str], name: str) -> str:
    if value := environ.get(name):
        return value
    raise UsageError(f"{name} is not set: this program is the step behind a sweep, and started by nothing else")


def _told(error: TiphysError, code: int) -> int:
    sys.stderr.write(f"tiphys: {error}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
