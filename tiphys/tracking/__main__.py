"""``python -m tiphys.tracking open`` and ``close CODE``: one call about the run of MLflow of this attempt.

`tiphys.launch.mlflow_run` starts them as processes of their own, which it can end
when MLflow does not answer, and whose 100 MB of client are gone while the
program trains. ``open`` prints the variables for the program as JSON.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from tiphys.errors import StoreError, TiphysError, UsageError, report_error
from tiphys.protocol import environment
from tiphys.protocol.environment import EX_FENCED
from tiphys.records import AttemptClaim
from tiphys.records.tracking import MLFLOW_EXPERIMENT_ID, MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID, STOPPED
from tiphys.store import RunLayout, Store, find_record, open_store, read_run
from tiphys.tracking.server import MlflowServer, RunStatus, connect
from tiphys.tracking.step_run import StepRun, close_step_run, find_step_run, open_step_run

Connect = Callable[[Mapping[str, str]], MlflowServer]


def main(arguments: Sequence[str] | None = None, connect_server: Connect = connect) -> int:
    """Carry out one call; return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        store = open_store(_variable(environment.STORE), must_exist=True)
        run, step = _variable(environment.RUN), _variable(environment.STEP)
        if words == ["open"]:
            step_run = _open(store, run, step, connect_server)
            sys.stdout.write(json.dumps(program_variables(step_run)))
        elif len(words) == 2 and words[0] == "close":
            _close(store, run, step, words[1], connect_server)
        else:
            raise UsageError("write open, or close and an exit code; `tiphys.launch.mlflow_run` does")
    except TiphysError as error:
        return report_error(error, error.exit_code)
    return 0


def program_variables(step_run: StepRun) -> dict[str, str]:
    """The variables by which MLflow in the program continues the run."""
    return {MLFLOW_EXPERIMENT_ID: step_run.experiment_id, MLFLOW_RUN_ID: step_run.run_id}


def run_status(code: str) -> RunStatus:
    """Status of the run of MLflow after a program has ended with this exit code, or was stopped."""
    if code in (STOPPED, str(environment.EX_TEMPFAIL)):
        return "KILLED"
    return "FINISHED" if code == "0" else "FAILED"


def _open(store: Store, run: str, step: str, connect_server: Connect) -> StepRun:
    try:
        experiment = os.environ.get(MLFLOW_EXPERIMENT_NAME) or read_run(store, run).pipeline
        return open_step_run(connect_server(os.environ), store, run, step, experiment)
    except TiphysError as error:
        known = find_step_run(store, run, step)
        if known is None or not isinstance(error, StoreError):
            raise
        report_error(error, 0)
        return known


def _close(store: Store, run: str, step: str, code: str, connect_server: Connect) -> None:
    step_run = find_step_run(store, run, step)
    if step_run is None or code == str(EX_FENCED):
        return
    newer = RunLayout(run).attempt(step, int(_variable(environment.ATTEMPT)) + 1)
    if find_record(store, newer, AttemptClaim) is None:  # whose program the run of MLflow belongs to
        close_step_run(connect_server(os.environ), step_run, run_status(code))


def _variable(name: str) -> str:
    if value := os.environ.get(name):
        return value
    raise UsageError(f"{name} is not set: only a compiled step runs this program")


if __name__ == "__main__":
    sys.exit(main())
