"""`MlflowServer`: the calls of MLflow's REST API that Tiphys needs, through MLflow's own client.

The client is imported here and only when it is used. It waits for minutes by
default; the limits that `connect` sets keep a server that does not answer from
holding up a training.
"""

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple

from tiphys.errors import (
    ConflictError,
    ForbiddenError,
    NotFoundError,
    SettingsError,
    StoreError,
    TiphysError,
    UsageError,
)
from tiphys.records.tracking import MLFLOW_TRACKING_URI, check_tracking_uri

RunStatus = Literal["RUNNING", "FINISHED", "FAILED", "KILLED"]
PARENT_TAG = "mlflow.parentRunId"
"""MLflow's own tag, by which its UI nests runs."""

_LIMITS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Environment of the client where the user has set nothing."""
_MOST_RUNS = 1000
_MOST_VERSIONS = 200


class MlflowRun(NamedTuple):
    """A run of MLflow that is not deleted."""

    id: str
    status: str


class MlflowServer:
    """What Tiphys asks of an MLflow server. Use `connect`.

    Every method raises `StoreError` if MLflow does not answer, `SettingsError` if it refuses these credentials, and
    `UsageError` if it refuses the request.
    """

    def __init__(self, client: Any, uri: str) -> None:
        self._client = client
        self.uri = uri

    def experiment(self, name: str) -> str:
        """Id of the experiment ``name``, which is created if there is none.

        Raises:
            NotFoundError: it is deleted.
        """
        with self._translated():
            found = self._client.get_experiment_by_name(name)
            if found is None:
                try:
                    return str(self._client.create_experiment(name))
                except _mlflow_exception() as error:
                    if _error_code(error) != "RESOURCE_ALREADY_EXISTS":
                        raise
                found = self._client.get_experiment_by_name(name)  # another caller created it meanwhile
            if found is None or found.lifecycle_stage != "active":
                raise NotFoundError(
                    f"{self.uri}: experiment {name!r} is deleted; restore it with `mlflow experiments restore`, or "
                    "name another"
                )
            return str(found.experiment_id)

    def find_runs(self, experiment: str, tag: str, value: str) -> list[MlflowRun]:
        """Runs of an experiment with this value of a tag, the oldest first, without deleted ones."""
        query = f"tags.`{tag}` = '{value}'"
        with self._translated():
            found = self._client.search_runs([experiment], query, order_by=["start_time ASC"], max_results=_MOST_RUNS)
        return [MlflowRun(run.info.run_id, run.info.status) for run in found]

    def run_exists(self, run: str) -> bool:
        """Whether there is a run of this id that is not deleted."""
        with suppress(NotFoundError), self._translated():
            return bool(self._client.get_run(run).info.lifecycle_stage == "active")
        return False

    def create_run(self, experiment: str, name: str, tags: Mapping[str, str]) -> str:
        """Create a run in the status RUNNING; return its id."""
        with self._translated():
            return str(self._client.create_run(experiment, tags=dict(tags), run_name=name).info.run_id)

    def delete_run(self, run: str) -> None:
        """Move a run to MLflow's trash; no error if it is there or nowhere."""
        if self.run_exists(run):
            with self._translated():
                self._client.delete_run(run)

    def set_status(self, run: str, status: RunStatus) -> None:
        """Set the status of a run; all but RUNNING also set its end time. Raises `NotFoundError` if there is none."""
        with self._translated():
            if status == "RUNNING":
                self._client.update_run(run, status=status)
            else:
                self._client.set_terminated(run, status=status)

    def ensure_model(self, model: str) -> None:
        """Create a registered model unless there is one of this name."""
        with suppress(ConflictError), self._translated():
            self._client.create_registered_model(model)

    def find_versions(self, model: str, tag: str, value: str) -> list[int]:
        """Versions of a model with this value of a tag, in ascending order."""
        query = f"name = '{model}' and tags.`{tag}` = '{value}'"
        with self._translated():
            found = self._client.search_model_versions(query, max_results=_MOST_VERSIONS)
        return sorted(int(version.version) for version in found)

    def create_version(self, model: str, source: str, run: str, tags: Mapping[str, str]) -> int:
        """Create a version with its tags in one request; ``run`` is an MLflow run, or empty. Return its number."""
        with self._translated():
            created = self._client.create_model_version(
                model, source, run or None, tags=dict(tags), await_creation_for=None
            )
        return int(created.version)

    def delete_version(self, model: str, version: int) -> None:
        """Delete a version; no error if there is none."""
        with suppress(NotFoundError), self._translated():
            self._client.delete_model_version(model, str(version))

    def version_exists(self, model: str, version: int) -> bool:
        with suppress(NotFoundError), self._translated():
            self._client.get_model_version(model, str(version))
            return True
        return False

    def tag_version(self, model: str, version: int, tag: str, value: str) -> None:
        self._write_row(lambda: self._client.set_model_version_tag(model, str(version), tag, value))

    def alias(self, model: str, alias: str) -> int | None:
        """Version that an alias names; None for none."""
        # MLflow 3 says INVALID_PARAMETER_VALUE for an alias that is not set.
        with suppress(NotFoundError, UsageError), self._translated():
            return int(self._client.get_model_version_by_alias(model, alias).version)
        return None

    def set_alias(self, model: str, alias: str, version: int) -> None:
        self._write_row(lambda: self._client.set_registered_model_alias(model, alias, str(version)))

    def _write_row(self, write: Callable[[], object]) -> None:
        """Insert or update a row. MLflow looks for the row first: of two callers that find none, it refuses one."""
        try:
            with self._translated():
                write()
        except ConflictError:  # now it finds the row of the other
            with self._translated():
                write()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise errors of the client as ours."""
        try:
            yield
        except _mlflow_exception() as error:
            raise _translate(self.uri, error) from error
        except OSError as error:  # of a certificate or token file
            raise SettingsError(f"{self.uri}: MLflow's client cannot be used: {error}") from error


def connect(environ: Mapping[str, str]) -> MlflowServer:
    """Connect to the server that MLFLOW_TRACKING_URI names, with the credentials of MLflow's own variables.

    Raises:
        UsageError: no server is named, the URL is not valid, ``mlflow`` is not installed, or the server is MLflow 2.
        SettingsError: it refuses these credentials.
        StoreError: it does not answer.
    """
    if not (uri := environ.get(MLFLOW_TRACKING_URI, "")):
        raise UsageError(f"no MLflow server is named; set {MLFLOW_TRACKING_URI}, such as http://mlflow:5000")
    check_tracking_uri(uri, f"{MLFLOW_TRACKING_URI}=")
    for variable, value in _LIMITS.items():
        os.environ.setdefault(variable, value)
    try:
        client = importlib.import_module("mlflow").MlflowClient(uri, uri)
    except ImportError as error:
        raise UsageError(
            f"MLflow's client cannot be imported ({error}); install tiphys[mlflow] into the image or environment"
        ) from error
    _check_version(uri)
    return MlflowServer(client, uri)


def _check_version(uri: str) -> None:
    """Refuse MLflow 2. A server that does not tell its version, as behind some proxies, is taken for MLflow 3."""
    rest = importlib.import_module("mlflow.utils.rest_utils")
    credentials = importlib.import_module("mlflow.utils.credentials").get_default_host_creds(uri)
    try:
        reply = rest.http_request(credentials, "/version", "GET", raise_on_status=False)
    except _mlflow_exception() as error:
        raise _translate(uri, error) from error
    version = reply.text.strip()
    if reply.status_code == 200 and version[:2] in ("0.", "1.", "2."):
        raise UsageError(
            f"{uri} is MLflow {version[:20]}; Tiphys needs MLflow 3, whose versions have aliases and tags instead of "
            "stages: upgrade the server"
        )


_ERRORS: Mapping[str, tuple[type[TiphysError], str]] = {
    "RESOURCE_DOES_NOT_EXIST": (NotFoundError, ""),
    "RESOURCE_ALREADY_EXISTS": (ConflictError, ""),
    **dict.fromkeys(
        ("UNAUTHENTICATED", "PERMISSION_DENIED", "CUSTOMER_UNAUTHORIZED"),
        (
            ForbiddenError,
            "; check MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, and the rights "
            "of that user",
        ),
    ),
    **dict.fromkeys(("INVALID_PARAMETER_VALUE", "BAD_REQUEST"), (UsageError, "")),
    **dict.fromkeys(
        ("ENDPOINT_NOT_FOUND", "NOT_FOUND"), (UsageError, "; is this the URL of an MLflow 3 server, without a path?")
    ),
}
_MOST_CHARACTERS = 300


def _mlflow_exception() -> type[Exception]:
    kind: type[Exception] = importlib.import_module("mlflow.exceptions").MlflowException
    return kind


def _error_code(error: Exception) -> str:
    return str(getattr(error, "error_code", ""))


def _translate(uri: str, error: Exception) -> TiphysError:
    """``error`` of MLflow's client as ours. The text of a server may be a page of HTML; it is cut to one line."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())[:_MOST_CHARACTERS]
    kind, remedy = _ERRORS.get(_error_code(error), (StoreError, "; it is tried again later"))
    if _error_code(error) == "BAD_REQUEST" and "IntegrityError" in text:  # of SQLAlchemy, in store/db/utils.py
        kind = ConflictError
    return kind(f"MLflow at {uri} answered: {text}{remedy}")
