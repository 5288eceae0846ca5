"""Records and settings of MLflow and Weights & Biases, and the identity of a step's tracking run.

Both services continue a run whose id a program gets from the environment. A run
of W&B has the id that its client chooses, so the plugin computes it. MLflow
chooses ids itself, so records keep them. Programs write these below ``data/``:
they decide about the tenant's own runs and models in MLflow, for which its
programs have the credentials anyway.
"""

import re
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, PositiveInt

from tiphys.errors import UsageError
from tiphys.records.base import MAX_PROGRAM_RECORD_BYTES, Record, StoredRecord
from tiphys.records.names import json_digest
from tiphys.records.run import RunRecord

MLFLOW_TRACKING_URI = "MLFLOW_TRACKING_URI"
MLFLOW_EXPERIMENT_NAME = "MLFLOW_EXPERIMENT_NAME"
MLFLOW_EXPERIMENT_ID = "MLFLOW_EXPERIMENT_ID"
MLFLOW_RUN_ID = "MLFLOW_RUN_ID"

STOPPED = "stopped"
"""In place of the exit code of a program that SIGTERM ended, for ``python -m tiphys.tracking close``."""

TRACKING_ID_OUTPUT = "tracking-id"
"""Output parameter of admit with the `tracking_id` of the step."""

_MODEL_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_. ]{0,198}[A-Za-z0-9])?")
_ALIAS = re.compile(r"[A-Za-z][-A-Za-z0-9_]{0,99}")
# Also in records and in Workflows written as YAML: a quote would change a search of MLflow.
ModelName = Annotated[str, Field(pattern=f"^{_MODEL_NAME.pattern}$")]
ModelAlias = Annotated[str, Field(pattern=f"^({_ALIAS.pattern})?$")]
_VERSION_ALIAS = re.compile(r"v\d+", re.IGNORECASE)
_SCHEMES = ("http", "https")


class MlflowTracking(Record):
    """MLflow 3: one run for each run of Tiphys, with a nested one for each step."""

    kind: Literal["mlflow"] = "mlflow"
    uri: str = ""
    """URL of the tracking server; empty: the variable MLFLOW_TRACKING_URI of the container."""
    experiment: str = ""
    """Name of the experiment; empty: the variable MLFLOW_EXPERIMENT_NAME, or else the name of the pipeline."""


class WandbTracking(Record):
    """Weights & Biases: one run for each step, all of a run of Tiphys in one group."""

    kind: Literal["wandb"] = "wandb"
    project: str = ""
    """Project; empty: the variable WANDB_PROJECT of the container, or the default of W&B."""
    entity: str = ""
    """User or team; empty: the variable WANDB_ENTITY of the container, or the default of the API key."""


TrackingSettings = Annotated[MlflowTracking | WandbTracking, Field(discriminator="kind")]


class ModelRegistration(Record):
    """A model of MLflow's registry that a step registers its input artifact ``model`` as."""

    model: ModelName
    alias: ModelAlias = ""
    """Alias to set on the version once it is complete; empty for none."""


def tracking_id(record: RunRecord, step: str) -> str:
    """Id of the tracking run of a step, 32 hex digits; of the run as a whole if ``step`` is empty.

    It is the same in all attempts, submissions and resumes, and in a store that was moved. A run of the same name in
    another store, or after a deletion, has another one: ``nonce`` is drawn when ``run.json`` is written.
    """
    return json_digest(["tracking", record.run, record.nonce, step])[:32]


def check_tracking_uri(uri: str, where: str) -> str:
    """Return ``uri`` if MLflow can be reached by it from another machine.

    Raises:
        UsageError: it has another scheme, or contains credentials.
    """
    try:
        parts = urlsplit(uri)
        scheme, user, host = parts.scheme or uri, parts.username or parts.password, parts.hostname
    except ValueError:
        scheme, user, host = "", None, None
    if scheme not in _SCHEMES or not host or not uri.isprintable():
        shown = f"{scheme}://{host}" if host and "@" in uri else uri.rpartition("@")[2][:200]  # never credentials
        raise UsageError(
            f"{where}{shown!r} is no MLflow server: write http://host:port or https://host; files and databases "
            "such as sqlite: belong to the server, and the registry of Databricks cannot be searched by a tag"
        )
    if user:
        raise UsageError(
            f"{where}credentials do not belong in the URL of MLflow, which is recorded and shown; put "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, into a Secret and the "
            "environment"
        )
    return uri


def check_model_name(name: str, where: str) -> str:
    """Return ``name`` if every registry of MLflow takes it.

    Raises:
        UsageError: it does not.
    """
    if not _MODEL_NAME.fullmatch(name):
        raise UsageError(
            f"{where}model name {_shorten(name)} is not valid: use letters, digits, '-', '_', '.' and spaces, at most "
            "200, with a letter or digit at both ends"
        )
    return name


def check_alias(alias: str, where: str) -> str:
    """Return ``alias`` if MLflow takes it.

    Raises:
        UsageError: it does not; ``latest`` and ``v1`` have a meaning of their own there.
    """
    if not _ALIAS.fullmatch(alias) or alias.lower() == "latest" or _VERSION_ALIAS.fullmatch(alias):
        raise UsageError(
            f"{where}alias {_shorten(alias)} is not valid: use letters, digits, '-' and '_', at most 100, a letter "
            "first; 'latest' and 'v1' are reserved by MLflow"
        )
    return alias


def _shorten(text: str) -> str:
    return repr(text) if len(text) <= 60 else f"{text[:60]!r}… ({len(text)} characters)"


_MlflowId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class TrackingRunRecord(StoredRecord):
    """``tracking/parent.json``, ``tracking/steps/<step>.json``: the run of MLflow of a run, or of one of its steps.

    Several processes may create a run in MLflow; the one that this create-only record names counts.
    """

    max_bytes: ClassVar[int] = MAX_PROGRAM_RECORD_BYTES
    damage_remedy: ClassVar[str] = "remove the object: the next attempt finds its run in MLflow by its tag"

    run: str
    step: str = ""
    """Step id; empty for the parent of all steps."""
    experiment_id: _MlflowId
    mlflow_run_id: _MlflowId


class RegistrationRequest(StoredRecord):
    """``tracking/models/<step>/<id>.json``: an output is to be registered as a version of a model.

    Written before MLflow is asked, so that a registration that MLflow does not answer is repeated.
    """

    max_bytes: ClassVar[int] = MAX_PROGRAM_RECORD_BYTES
    damage_remedy: ClassVar[str] = "remove the object and run the step again"

    run: str
    step: str
    """Id of the step that registers."""
    model: ModelName
    alias: ModelAlias = ""
    version_key: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Tag of the version: the same for the same model, source step, output and content."""
    source_run: str
    source_step: str
    source_attempt: PositiveInt
    """The attempt that wrote the output."""
    output: Annotated[str, Field(max_length=253)]


class ModelVersionRecord(StoredRecord):
    """``tracking/models/<step>/<id>.done.json``: the registration is complete, the alias included."""

    max_bytes: ClassVar[int] = MAX_PROGRAM_RECORD_BYTES
    damage_remedy: ClassVar[str] = "remove the object and call `tiphys register` again"

    run: str
    step: str
    model: ModelName
    model_version: Annotated[str, Field(pattern=r"^[0-9]{1,18}$")]
