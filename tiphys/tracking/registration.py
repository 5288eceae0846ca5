"""Registers an output of a run as a version of a model in MLflow 3: verified, once, and promoted last.

| write | where | a crash after it |
|---|---|---|
| request | store | the next call, or `tiphys register`, goes on |
| version, with its tags | MLflow | the next call finds it by its tag |
| alias | MLflow | the next call sees that the alias names it |
| version record | store | nothing is left to do |

Two callers may both create a version, because MLflow creates nothing
conditionally. Its numbers ascend in the order of creation, so the lowest number
with the tag wins, and each caller deletes the others.

An alias only moves to a newer version: a registration that is repeated later
must not take the place of a model that another run has promoted since.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tiphys.errors import IntegrityError, NotFoundError
from tiphys.faults import failpoint
from tiphys.lineage.run_history import RunHistory
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.protocol.step_spec import CODE_VERSION_ANNOTATION, STEP_LABEL
from tiphys.records import (
    AttemptClaim,
    AttemptEnd,
    AttemptEndOutcome,
    ModelVersionRecord,
    Output,
    OutputKind,
    RegistrationRequest,
    ReuseRecord,
    SubmissionClaim,
    TrackingRunRecord,
    json_digest,
    task_name,
)
from tiphys.records.tracking import ModelRegistration
from tiphys.store import (
    RunLayout,
    Store,
    claim_record,
    find_output_fault,
    find_record,
    read_attempt_end,
    read_record,
    read_run,
    read_submission_workflow,
)
from tiphys.store.layout import parse_reused
from tiphys.store.outputs import list_confirmed_outputs
from tiphys.tracking.records import Registration, registration_done_key, registration_key, tracking_run_key
from tiphys.tracking.server import MlflowServer

VERSION_TAG = "tiphys.registration"
_ALIAS_TAG = "tiphys.alias."
_CHUNK_BYTES = 1 << 20

Digests = Mapping[str, str]
"""SHA-256 of each file of an output, by its path in the output; ``""`` for an output that is one file."""


class RecordedOutput(NamedTuple):
    """A finished output, as the end of its attempt records it."""

    end: AttemptEnd
    output: Output

    def relative(self, key: str) -> str:
        """The path in the output of its object ``key``."""
        return key.removeprefix(f"{self.output.key}/" if self.output.directory else self.output.key)

    @property
    def digests(self) -> dict[str, str]:
        return {self.relative(entry.key): entry.sha256 for entry in self.output.objects}


def hash_files(path: Path) -> dict[str, str]:
    """`Digests` of the file or folder at ``path``."""
    if path.is_file():
        return {"": _hash_file(path)}
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path).as_posix(): _hash_file(file) for file in files}


def hash_stored(store: Store, recorded: RecordedOutput) -> dict[str, str]:
    """`Digests` of the bytes of an output in storage."""
    keys = [entry.key for entry in recorded.output.objects]
    return {recorded.relative(key): _sha256(store.chunks(key, _CHUNK_BYTES)) for key in keys}


def find_recorded_output(store: Store, run: str, digests: Digests) -> RecordedOutput:
    """The output of ``run``, or one that it reuses, that consists of exactly these bytes.

    A step that keeps checkpoints comes first: the step after a sweep has copied the model of a trial.

    Raises:
        IntegrityError: no finished step has recorded these bytes.
    """
    matching = [
        recorded
        for end in _finished_ends(store, run)
        for recorded in (RecordedOutput(end, output) for output in end.outputs if output.kind is OutputKind.ARTIFACT)
        if recorded.digests == digests
    ]
    if not matching or not digests:
        raise IntegrityError(
            f"run {run}: no finished step has recorded an output of these bytes, so the model is not registered; "
            f"`tiphys verify {run} --deep` compares all outputs with their records"
        )

    def order(output: RecordedOutput) -> tuple[bool, str, str, int]:
        return output.end.last_checkpoint is None, output.end.run, output.end.step, output.end.attempt

    return min(matching, key=order)


def read_requested_output(store: Store, request: RegistrationRequest) -> RecordedOutput:
    """The output that a request names, if the run has made or reused it.

    Raises:
        IntegrityError: it has not; a program may have written the request.
    """
    for end in _finished_ends(store, request.run):
        source = (end.run, end.step, end.attempt)
        if source == (request.source_run, request.source_step, request.source_attempt):
            for output in end.outputs:
                if output.name == request.output and output.kind is OutputKind.ARTIFACT:
                    return RecordedOutput(end, output)
    raise IntegrityError(
        f"run {request.run}: a request names output {request.output!r} of attempt {request.source_attempt} of "
        f"{request.source_run}/{request.source_step}, which this run has neither made nor reused; nothing was "
        "registered: run the step again"
    )


def request_registration(
    store: Store, run: str, step: str, wanted: ModelRegistration, recorded: RecordedOutput
) -> tuple[str, RegistrationRequest]:
    """Store the request to register ``recorded``; return its id and the stored request."""
    end, output = recorded.end, recorded.output
    key = _version_key(store, wanted.model, recorded)
    request = RegistrationRequest(
        run=run,
        step=step,
        model=wanted.model,
        alias=wanted.alias,
        version_key=key,
        source_run=end.run,
        source_step=end.step,
        source_attempt=end.attempt,
        output=output.name,
    )
    registration = json_digest([key, wanted.alias])[:32]
    stored = claim_record(store, registration_key(run, step, registration), request).record
    failpoint("register.after_request")
    return registration, stored


def _version_key(store: Store, model: str, recorded: RecordedOutput) -> str:
    end, source = recorded.end, read_run(store, recorded.end.run)
    identity = ["model", model, source.run, source.nonce, end.step, recorded.output.name, recorded.digests]
    return json_digest(identity)[:32]


def repeat_registration(
    server: MlflowServer, store: Store, registration: Registration, pipeline: CompiledPipeline
) -> ModelVersionRecord:
    """Register what a step has requested, after the stored bytes were verified. Raises as `register_model` does.

    A program may have written the request, and this caller may have better credentials for MLflow than it has. So the
    model and the alias must be those of the step in the Workflow, and the server is never read from the store.

    Raises:
        IntegrityError: the bytes do not match their record, or the Workflow registers something else.
    """
    request = registration.request
    spec = pipeline.steps.get(task_name(request.step))
    wanted = spec.registration if spec else None
    if wanted is None or (wanted.model, wanted.alias) != (request.model, request.alias):
        raise IntegrityError(
            f"run {request.run}: a request of step {request.step} names model {request.model!r} with alias "
            f"{request.alias!r}, which is not what its Workflow registers; nothing was done: run the step again, or "
            f"remove {registration_key(request.run, request.step, registration.id)}"
        )
    recorded = read_requested_output(store, request)
    if request.version_key != _version_key(store, request.model, recorded):
        raise IntegrityError(
            f"run {request.run}: a request of step {request.step} names the version of another output; nothing was "
            f"done: remove {registration_key(request.run, request.step, registration.id)} and run the step again"
        )
    if hash_stored(store, recorded) != recorded.digests:
        raise IntegrityError(
            f"run {request.run}: the bytes of {recorded.output.key} do not match their record; the model is not "
            f"registered: `tiphys verify {recorded.end.run} --deep` lists all damage"
        )
    return register_model(server, store, registration.id, request, recorded)


def register_model(
    server: MlflowServer, store: Store, registration: str, request: RegistrationRequest, recorded: RecordedOutput
) -> ModelVersionRecord:
    """Make the version and set its alias; a repeated call finishes, or returns, the same version.

    The caller has verified the bytes of ``recorded``.

    Raises:
        NotFoundError: a person has deleted the version in MLflow.
        IntegrityError: objects of the output are missing in storage.
        StoreError: MLflow or storage did not answer.
        SettingsError: MLflow refuses these credentials.
        UsageError: MLflow refuses the request.
    """
    done_key = registration_done_key(request.run, request.step, registration)
    if done := find_record(store, done_key, ModelVersionRecord):
        if not server.version_exists(done.model, int(done.model_version)):
            raise NotFoundError(
                f"version {done.model_version} of model {done.model} was deleted in MLflow after {request.run}/"
                f"{request.step} had registered it; it is not registered again"
            )
        return done
    _check_stored(store, recorded)
    server.ensure_model(request.model)
    failpoint("register.after_model")
    version = _ensure_version(server, request, lambda: _create_version(server, store, request, recorded))
    if request.alias:
        server.tag_version(request.model, version, f"{_ALIAS_TAG}{request.alias}", "wanted")
        failpoint("register.before_alias")
        _promote(server, request.model, request.alias)
    failpoint("register.after_alias")
    record = ModelVersionRecord(run=request.run, step=request.step, model=request.model, model_version=str(version))
    return claim_record(store, done_key, record).record


def _ensure_version(server: MlflowServer, request: RegistrationRequest, create: Callable[[], int]) -> int:
    """The one version with the tag of the request."""
    versions = server.find_versions(request.model, VERSION_TAG, request.version_key)
    if not versions:
        failpoint("register.before_version")
        created = create()
        failpoint("register.after_version")
        versions = server.find_versions(request.model, VERSION_TAG, request.version_key) or [created]
    first, *others = versions
    for other in others:
        server.delete_version(request.model, other)
    return first


def _promote(server: MlflowServer, model: str, alias: str) -> None:
    """Move the alias to the newest version that wants it, unless it names a newer one.

    MLflow cannot set an alias conditionally. Each caller looks again after it has set the alias, so that the last of
    several leaves it at the newest.
    """
    while True:
        newest = max(server.find_versions(model, f"{_ALIAS_TAG}{alias}", "wanted"))
        current = server.alias(model, alias)
        if current is not None and current >= newest:
            return
        server.set_alias(model, alias, newest)
        failpoint("register.after_set_alias")


def _create_version(server: MlflowServer, store: Store, request: RegistrationRequest, recorded: RecordedOutput) -> int:
    end = recorded.end
    record = find_record(store, tracking_run_key(end.run, end.step), TrackingRunRecord)
    tags = version_tags(store, recorded) | {VERSION_TAG: request.version_key, "tiphys.registered_by": request.run}
    return server.create_version(
        request.model, source_uri(store, recorded), record.mlflow_run_id if record else "", tags
    )


def source_uri(store: Store, recorded: RecordedOutput) -> str:
    """Location of the model as MLflow knows it: ``s3://…``, ``gs://…``, ``wasbs://…``; a name for a local store."""
    if store.url.startswith(("s3://", "gs://")):
        return f"{store.url.rstrip('/')}/{recorded.output.key}"
    if store.url.startswith("az://"):
        account, _, rest = store.url.removeprefix("az://").rstrip("/").partition("/")
        container, _, prefix = rest.partition("/")
        path = "/".join(filter(None, (prefix, recorded.output.key)))
        return f"wasbs://{container}@{account}.blob.core.windows.net/{path}"
    end = recorded.end
    return f"tiphys://{end.run}/{end.step}/{end.attempt}/{recorded.output.name}"


def version_tags(store: Store, recorded: RecordedOutput) -> dict[str, str]:
    """Where a version comes from, as far as the records know it."""
    end, output = recorded.end, recorded.output
    layout, record = RunLayout(end.run), read_run(store, end.run)
    claim = read_record(store, layout.attempt(end.step, end.attempt), AttemptClaim)
    submission = read_record(store, layout.submission(end.submission), SubmissionClaim)
    workflow = read_submission_workflow(store, record, submission)
    checkpoint = end.last_checkpoint.checkpoint if end.last_checkpoint else None
    tags = {
        "tiphys.run": end.run,
        "tiphys.step": end.step,
        "tiphys.attempt": str(end.attempt),
        "tiphys.submission": str(end.submission),
        "tiphys.step_key": end.step_key,
        "tiphys.output": output.name,
        "tiphys.source": f"{store.url.rstrip('/')}/{output.key}",
        "tiphys.sha256": output.objects[0].sha256 if len(output.objects) == 1 else json_digest(recorded.digests),
        "tiphys.dataset": claim.dataset,
        "tiphys.parameters": claim.parameters,
        "tiphys.commit": (workflow["metadata"].get("annotations") or {}).get(CODE_VERSION_ANNOTATION, ""),
        "tiphys.image": _step_image(workflow, task_name(end.step)),
        "tiphys.checkpoint": f"{checkpoint.lineage}/{checkpoint}" if checkpoint else "",
        "tiphys.forked_from": record.parent,
    }
    return {name: value for name, value in tags.items() if value}


def _step_image(workflow: Manifest, step: str) -> str:
    """Image of the program of a step, with its digest if the author gave one; empty where a Job creates the pods."""
    for template in workflow["spec"].get("templates") or []:
        labels = (template.get("metadata") or {}).get("labels") or {}
        if labels.get(STEP_LABEL) == step:
            return str((template.get("container") or template.get("script") or {}).get("image", ""))
    return ""


def _check_stored(store: Store, recorded: RecordedOutput) -> None:
    end = recorded.end
    if fault := find_output_fault(end, list_confirmed_outputs(store, end)):
        raise IntegrityError(f"run {end.run}, step {end.step}: {fault}; the model is not registered")


def _finished_ends(store: Store, run: str) -> Iterator[AttemptEnd]:
    """Ends of the finished attempts of a run, and of those that it reuses."""
    for attempts in RunHistory(store, run).attempts.values():
        yield from (end for _, end in attempts if end is not None and end.outcome is AttemptEndOutcome.DONE)
    for info in store.list(RunLayout(run).all_reused):
        if parse_reused(info.key) is not None:
            reused = read_record(store, info.key, ReuseRecord)
            if reused.source_run != run:
                yield read_attempt_end(store, reused.source_run, reused.source_step, reused.source_attempt)


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sha256(chunks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()
