"""``python -m tiphys.tracking.register``: the step that registers its input artifact ``model`` in MLflow.

A server that does not answer does not fail the run: the request stays in the
store, and the next submission or ``tiphys register`` repeats it. What only a
person can fix, such as missing credentials, fails the step.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import ValidationError

from tiphys import inputs
from tiphys.errors import SettingsError, StoreError, TiphysError, UsageError, report_error
from tiphys.protocol import environment
from tiphys.records.tracking import ModelRegistration
from tiphys.store import open_store
from tiphys.tracking.registration import find_recorded_output, hash_files, register_model, request_registration
from tiphys.tracking.server import MlflowServer, connect

MODEL_INPUT = "model"
VERSION_OUTPUT = "version"
PENDING = "pending"
"""Value of the output ``version`` while MLflow has not answered."""


def main(connect_server: Callable[[Mapping[str, str]], MlflowServer] = connect) -> int:
    """Register the model; return the exit code."""
    try:
        sys.stdout.write(f"{_register(os.environ, connect_server)}\n")
        return 0
    except SettingsError as error:
        return report_error(error, error.exit_code)
    except StoreError as error:
        return report_error(error, environment.EX_UNAVAILABLE)
    except TiphysError as error:
        return report_error(error, error.exit_code)


def _register(environ: Mapping[str, str], connect_server: Callable[[Mapping[str, str]], MlflowServer]) -> str:
    try:
        run, step, url = (environ[name] for name in (environment.RUN, environment.STEP, environment.STORE))
        wanted = ModelRegistration.model_validate_json(environ[environment.REGISTRATION])
    except (KeyError, ValidationError) as error:
        raise UsageError(
            f"{error}: only the step of `RegisterModel` in a compiled Workflow runs this program"
        ) from error
    store = open_store(url, must_exist=True)
    recorded = find_recorded_output(store, run, hash_files(inputs.path(MODEL_INPUT)))
    registration, request = request_registration(store, run, step, wanted, recorded)
    try:
        done = register_model(connect_server(environ), store, registration, request, recorded)
    except SettingsError:
        raise
    except StoreError as error:
        _write_version(environ, PENDING)
        return f"{error}\nregistration of model {wanted.model} is pending; `tiphys register {run}` repeats it"
    _write_version(environ, done.model_version)
    alias = f", alias {wanted.alias}" if wanted.alias else ""
    return f"registered {recorded.end.run}/{recorded.end.step} as version {done.model_version} of {done.model}{alias}"


def _write_version(environ: Mapping[str, str], version: str) -> None:
    if path := environ.get(environment.output_path_variable(VERSION_OUTPUT)):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(version)


if __name__ == "__main__":
    sys.exit(main())
