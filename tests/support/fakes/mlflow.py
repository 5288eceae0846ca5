"""`FakeMlflow`: what MLflow does for Tiphys, in memory; `tests/tracking/test_server.py` holds it against the real one.

Also a run whose training has left a verified model, for tests of registrations.
"""

import hashlib
import itertools
from collections.abc import Mapping
from datetime import UTC, datetime

from hera.workflows import Artifact

from hera_pipelines import Pipeline, RegisterModel, Train
from support.builders.lineage import START_TIMES
from tiphys.errors import NotFoundError, StoreError, UsageError
from tiphys.protocol.step_spec import CODE_VERSION_ANNOTATION
from tiphys.records import (
    AttemptClaim,
    AttemptEnd,
    AttemptEndOutcome,
    CheckpointRef,
    LastCheckpoint,
    Output,
    OutputKind,
    OutputObject,
    RunRecord,
    SubmissionClaim,
    SubmissionKind,
    json_digest,
)
from tiphys.store import RunLayout, Store
from tiphys.tracking.server import MlflowRun, MlflowServer, RunStatus

RUN, STEP, REGISTER = "digits-1", "fit", "register"
MODEL = b"weights of a small network"
MODEL_NAME, ALIAS = "digits", "champion"


class FakeMlflow(MlflowServer):
    """`MlflowServer` in memory. ``down`` makes every call fail."""

    def __init__(self) -> None:
        self.down = False
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict] = {}
        self.versions: dict[tuple[str, int], dict] = {}
        self.models: dict[str, dict[str, int]] = {}
        self._numbers = itertools.count(1)
        self._last: dict[str, int] = {}

    def experiment(self, name: str) -> str:
        self._answer()
        return self.experiments.setdefault(name, str(len(self.experiments) + 1))

    def find_runs(self, experiment: str, tag: str, value: str) -> list[MlflowRun]:
        self._answer()
        return [
            MlflowRun(name, run["status"])
            for name, run in self.runs.items()
            if run["experiment"] == experiment and run["tags"].get(tag) == value and not run["deleted"]
        ]

    def run_exists(self, run: str) -> bool:
        self._answer()
        return run in self.runs and not self.runs[run]["deleted"]

    def create_run(self, experiment: str, name: str, tags: Mapping[str, str]) -> str:
        self._answer()
        run = f"{next(self._numbers):032x}"
        fields = {"experiment": experiment, "name": name, "tags": dict(tags), "status": "RUNNING", "deleted": False}
        self.runs[run] = fields
        return run

    def delete_run(self, run: str) -> None:
        self._answer()
        if run in self.runs:
            self.runs[run]["deleted"] = True

    def set_status(self, run: str, status: RunStatus) -> None:
        self._answer()
        if run not in self.runs:
            raise NotFoundError(f"no run {run}")
        self.runs[run]["status"] = status

    def ensure_model(self, model: str) -> None:
        self._answer()
        self.models.setdefault(model, {})

    def find_versions(self, model: str, tag: str, value: str) -> list[int]:
        self._answer()
        found = [number for (name, number), v in self.versions.items() if name == model and v["tags"].get(tag) == value]
        return sorted(found)

    def create_version(self, model: str, source: str, run: str, tags: Mapping[str, str]) -> int:
        self._answer()
        if model not in self.models:
            raise NotFoundError(f"no model {model}")
        number = max([number for name, number in self.versions if name == model], default=0) + 1
        self.versions[model, number] = {"source": source, "run": run, "tags": dict(tags)}
        return number

    def delete_version(self, model: str, version: int) -> None:
        self._answer()
        self.versions.pop((model, version), None)

    def version_exists(self, model: str, version: int) -> bool:
        self._answer()
        return (model, version) in self.versions

    def tag_version(self, model: str, version: int, tag: str, value: str) -> None:
        self._answer()
        self.versions[model, version]["tags"][tag] = value

    def alias(self, model: str, alias: str) -> int | None:
        self._answer()
        return self.models[model].get(alias)

    def set_alias(self, model: str, alias: str, version: int) -> None:
        self._answer()
        if (model, version) not in self.versions:
            raise UsageError(f"no version {version}")
        self.models[model][alias] = version

    def _answer(self) -> None:
        if self.down:
            raise StoreError("MLflow does not answer")


def write_run(
    store: Store, run: str = RUN, model: bytes = MODEL, *, parent: str = "", name: str = MODEL_NAME, alias: str = ALIAS
) -> str:
    """Write a run whose step `fit` is done and whose step `register` is next; return the key of the model."""
    layout = RunLayout(run)
    fit = Train(
        name=STEP, image="trainer@sha256:" + "a" * 64, command=["fit"], outputs=Artifact(name="model", path="/m")
    )
    register = RegisterModel(name=REGISTER, model=name, alias=alias, image="tools:1")
    with Pipeline("digits", store="s3://ml-runs") as pipeline:
        register(model=fit())
    workflow = pipeline.compile()
    workflow["metadata"]["annotations"][CODE_VERSION_ANNOTATION] = "c" * 40
    record = RunRecord(run=run, pipeline="digits", workflow=workflow, digest=json_digest(workflow), parent=parent)
    store.create(layout.run_record, record.to_bytes())
    claim = SubmissionClaim(
        run=run, submission=1, kind=SubmissionKind.ORIGINAL, workflow_name=run, namespace="ml", cluster="local:x"
    )
    store.create(layout.submission(1), claim.to_bytes())
    attempt = AttemptClaim(
        run=run,
        step=STEP,
        attempt=1,
        submission=1,
        uid="u",
        node="n",
        instance="i",
        step_key="k" * 64,
        dataset="d" * 64,
    )
    store.create(layout.attempt(STEP, 1), attempt.to_bytes())
    key = f"{layout.outputs(STEP, 1)}artifacts/model"
    store.create(key, model)
    stored = OutputObject(key=key, size=len(model), sha256=hashlib.sha256(model).hexdigest())
    checkpoint = CheckpointRef(lineage=f"{run}/{STEP}", attempt=1, global_step=30)
    end = AttemptEnd(
        run=run,
        step=STEP,
        attempt=1,
        submission=1,
        outcome=AttemptEndOutcome.DONE,
        step_key="k" * 64,
        last_checkpoint=LastCheckpoint(checkpoint=checkpoint, at=datetime(2026, 1, 1, tzinfo=UTC), began=START_TIMES),
        outputs=(Output(name="model", kind=OutputKind.ARTIFACT, key=key, objects=(stored,)),),
    )
    store.create(layout.attempt_end(STEP, 1), end.to_bytes())
    return key
