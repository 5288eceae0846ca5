"""The program of a step as one run of MLflow.

`run_tracked` sets ``MLFLOW_RUN_ID`` and ``MLFLOW_EXPERIMENT_ID``, so that an
unchanged program continues the run of earlier attempts, and sets the run's status
at the end. MLflow never decides about the step: without an answer the program
starts anyway, and its exit code is that of the step.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from tiphys.launch.member_files import is_first_member
from tiphys.launch.processes import DEFAULT_GRACE_SECONDS, SignalQueue, log_line
from tiphys.launch.restart import ProgramEnd, run_program
from tiphys.protocol import environment
from tiphys.records.tracking import MLFLOW_RUN_ID, STOPPED

OPEN_SECONDS, CLOSE_SECONDS = 60.0, 30.0
"""Longest time that MLflow may delay the start, and the end, of a program."""
_EXIT_MARGIN_SECONDS = 2.0
_LEAST_CLOSE_SECONDS = 2.0


def run_tracked(command: Sequence[str], environ: Mapping[str, str], signals: SignalQueue) -> ProgramEnd:
    """Open the run of MLflow, run the program, close the run; return the end of the program."""
    if MLFLOW_RUN_ID in environ:
        log_line(f"{MLFLOW_RUN_ID} is set by the author of the step, who thus decides which run of MLflow it is")
        return run_program(command, environ, signals)
    variables = _open_run(environ)
    if signals.is_stop_requested:
        return ProgramEnd(environment.EX_TEMPFAIL)
    end = run_program(command, {**variables, **environ}, signals)
    if variables and is_first_member(environ, end):
        _close_run(environ, end.code, signals.stopped_at)
    return end


def _open_run(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for the program; none if its run of MLflow is not known."""
    answer = _call_tracking(environ, ["open"], OPEN_SECONDS)
    if answer is None:
        log_line("this attempt is not tracked in MLflow")
        return {}
    return {str(name): str(value) for name, value in json.loads(answer).items()}


def _close_run(environ: Mapping[str, str], code: int, stopped_at: float | None) -> None:
    seconds = CLOSE_SECONDS
    if stopped_at is not None:
        grace = float(environ.get(environment.GRACE_SECONDS) or DEFAULT_GRACE_SECONDS)
        seconds = min(seconds, stopped_at + grace - _EXIT_MARGIN_SECONDS - time.monotonic())
    if seconds < _LEAST_CLOSE_SECONDS:
        log_line("the grace period is over, so the status of the run in MLflow stays RUNNING")
        return
    _call_tracking(environ, ["close", str(code) if stopped_at is None else STOPPED], seconds)


def _call_tracking(environ: Mapping[str, str], words: Sequence[str], seconds: float) -> str | None:
    """Standard output of a call of `tiphys.tracking`; None if it failed, which its standard error explains."""
    command = [sys.executable, "-P", "-m", "tiphys.tracking", *words]
    try:
        ended = subprocess.run(command, env=dict(environ), stdout=subprocess.PIPE, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        log_line(f"MLflow did not answer within {seconds:.0f} s")
        return None
    except OSError as error:
        log_line(f"MLflow cannot be called: {error}")
        return None
    return ended.stdout.decode() if ended.returncode == 0 else None
