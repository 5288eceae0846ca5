"""Starts a run once per idempotency key, however often the call is repeated.

The key names the run before any record of the run is written. Every later write
is create-only and names the key, so a repeated call finds what exists and adds
what a crash left out. Storage holds only the hash of a key: a key may contain
any text, and a reader of the store does not learn it.
"""

import hashlib
from collections.abc import Callable
from typing import NamedTuple

from tiphys.errors import ConflictError, UsageError
from tiphys.faults import failpoint
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.records import IdempotencyKeyRecord, RunRecord, SubmissionBinding, json_digest
from tiphys.store import RunLayout, Store, claim_record, claim_run, find_record, idempotency_record_key, open_submission
from tiphys.store.runs import check_name_free_of_leftovers, check_not_deleted
from tiphys_controller.submit.start import (
    NewRun,
    StartResult,
    build_first_claim,
    build_run_record,
    candidate_run_names,
    random_suffix,
    submit_first,
)
from tiphys_controller.submit.submission import check_workflow_name_free, recover_created_workflow
from tiphys_controller.submit.submitter import Submitter

_LONGEST_KEY = 255


def digest_idempotency_key(key: str) -> str:
    """SHA-256 of a key, in hex.

    Raises:
        UsageError: it is empty, longer than 255 characters, or holds control characters.
    """
    if not 0 < len(key) <= _LONGEST_KEY or not key.isprintable():
        raise UsageError(
            f"idempotency key {key[:40]!r} is not valid: use 1 to {_LONGEST_KEY} printable characters, such as a UUID"
        )
    return hashlib.sha256(key.encode()).hexdigest()


class StartRequest(NamedTuple):
    """The start requested under a key: a digest of all arguments, and a description for messages."""

    content_digest: str
    description: str


def start_run_once(
    store: Store,
    submitter: Submitter,
    manifest: Manifest,
    key: str,
    run: str | None = None,
    namespace: str = "default",
    suffix: Callable[[], str] = random_suffix,
) -> StartResult:
    """Start a run of a compiled pipeline, or find the run started under ``key``.

    Returns the first submission; ``created`` is False if an earlier call sent it.

    Args:
        store: Store of the run.
        submitter: Cluster that gets the Workflow.
        manifest: The compiled Workflow.
        key: Idempotency key.
        run: Name of the run; None: as `start_run` chooses one.
        namespace: Namespace of the Workflow.
        suffix: Returns the random part of a name.

    Raises:
        UsageError: the key or the name is not valid, or Tiphys did not compile the Workflow.
        ConflictError: the key was used for another request, a run without this
            key has the name, or the run was begun for another cluster.
    """
    pipeline = CompiledPipeline.from_manifest(manifest)
    digest = json_digest({"workflow": manifest, "run": run or "", "namespace": namespace})
    request = StartRequest(digest, f"{run or 'a run'} of pipeline {pipeline.name}")
    return begin_run_once(store, submitter, NewRun(pipeline, run, namespace, suffix), key, request)


def find_started_run(store: Store, key: str, request: StartRequest) -> IdempotencyKeyRecord | None:
    """The run begun under ``key``; None for none.

    Raises:
        UsageError: the key is not valid.
        ConflictError: the key was used for another request.
    """
    reservation = find_record(store, idempotency_record_key(digest_idempotency_key(key)), IdempotencyKeyRecord)
    return reservation and _check_same_request(reservation, key, request)


def begin_run_once(store: Store, submitter: Submitter, new: NewRun, key: str, request: StartRequest) -> StartResult:
    """Like `start_run_once`, for a run that may be a fork."""
    new = new._replace(key=digest_idempotency_key(key))
    reservation = find_started_run(store, key, request)
    if reservation is None:
        try:
            name = _find_free_name(store, submitter, new)
        except ConflictError:  # the same request, sent twice at once, may have taken the name since
            reservation = find_started_run(store, key, request)
            if reservation is None:
                raise
        else:
            own = IdempotencyKeyRecord(run=name, namespace=new.namespace, content=request.content_digest)
            stored = claim_record(store, idempotency_record_key(new.key), own).record
            reservation = _check_same_request(stored, key, request)
    failpoint("start.after_key")
    return _submit_first(store, submitter, _claim_run_record(store, new, reservation), new.namespace)


def _check_same_request(reservation: IdempotencyKeyRecord, key: str, request: StartRequest) -> IdempotencyKeyRecord:
    if reservation.content == request.content_digest:
        return reservation
    raise ConflictError(
        f"idempotency key {key!r} was used at {reservation.written_at:%Y-%m-%d %H:%M:%S} UTC to start run "
        f"{reservation.run} "
        f"(content {reservation.content[:12]}), and this call asks for something else ({request.description}, content "
        f"{request.content_digest[:12]}); repeat the call with the same arguments, or choose another key"
    )


def _find_free_name(store: Store, submitter: Submitter, new: NewRun) -> str:
    name = ""
    for name in candidate_run_names(new):
        check_workflow_name_free(store, submitter, new.namespace, name, 1)
        if find_record(store, RunLayout(name).run_record, RunRecord) is None:
            check_name_free_of_leftovers(store, name)
            return name
    raise _name_taken_error(store, name)


def _claim_run_record(store: Store, new: NewRun, reservation: IdempotencyKeyRecord) -> RunRecord:
    record = build_run_record(new._replace(namespace=reservation.namespace), reservation.run)
    existing = claim_run(store, record).record
    if existing.key != new.key:
        raise _name_taken_error(store, reservation.run)
    failpoint("start.after_record")
    if new.parent:
        check_not_deleted(store, new.parent)
    return existing


def _submit_first(store: Store, submitter: Submitter, record: RunRecord, namespace: str) -> StartResult:
    claim = build_first_claim(record, submitter.cluster, namespace)
    existing = open_submission(store, claim).record
    binding = find_record(store, RunLayout(record.run).submission_binding(1), SubmissionBinding)
    if binding is not None:
        return StartResult(record.run, 1, binding.workflow_name, binding.uid, created=False)
    if existing.cluster not in ("", submitter.cluster):
        raise ConflictError(
            f"run {record.run} was begun under this key for cluster {existing.cluster} and may run there; cluster "
            f"{submitter.cluster} does not show it. Repeat the call there, or use `tiphys resume {record.run} --force`"
        )
    if live := recover_created_workflow(store, submitter, existing):
        return StartResult(record.run, 1, live.name, live.uid, created=False)
    return submit_first(store, submitter, record, existing)


def _name_taken_error(store: Store, name: str) -> ConflictError:
    return ConflictError(
        f"{store.url} already has a run {name!r}, which was not begun under this key; choose another name, or continue "
        f"it with `tiphys resume {name}`"
    )
