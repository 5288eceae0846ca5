"""Begin a run once for each idempotency key, whoever asks how often and whatever dies in between.

The key names the run before anything of the run is written. Every later write is
create-only and says under which key it was made, so that the same call, repeated
anywhere, finds what there is and adds what is missing.

Idempotency keys: who asks twice under one key, because the answer was lost, gets the same run and no second one.

The key is kept as its hash, so that it may hold anything, and is no secret that
a reader of the store learns.
"""

import hashlib
from collections.abc import Callable
from typing import NamedTuple

from tiphys.errors import ConflictError, UsageError
from tiphys.faults import failpoint
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.records import RunRecord, StartKey, SubmissionBound, digest
from tiphys.store import RunLayout, Store, claim, find_record, start_key
from tiphys_controller.submit.start import Origin, Started, candidate_names, first_claim, random_suffix, run_record
from tiphys_controller.submit.submission import check_free, find_created, send
from tiphys_controller.submit.submitter import Submitter

_LONGEST_KEY = 255


def key_digest(key: str) -> str:
    """SHA-256 of a key, in hex.

    Raises:
        UsageError: it is empty, longer than 255 characters, or holds control characters.
    """
    if not 0 < len(key) <= _LONGEST_KEY or not key.isprintable():
        raise UsageError(
            f"idempotency key {key[:40]!r} is not valid: use 1 to {_LONGEST_KEY} printable characters, such as a UUID"
        )
    return hashlib.sha256(key.encode()).hexdigest()


class Asked(NamedTuple):
    """What is to be begun under a key: all of it as a digest, and in words."""

    content: str
    words: str


def start_once(
    store: Store,
    submitter: Submitter,
    manifest: Manifest,
    key: str,
    run: str | None = None,
    namespace: str = "default",
    suffix: Callable[[], str] = random_suffix,
) -> Started:
    """Start a run of a compiled pipeline, or find the one that was started under ``key`` before.

    The first submission is answered, with ``created`` False where it had been
    sent before this call. Arguments beside ``key`` are those of `start`.

    Raises:
        UsageError: the key or the name is not valid, or Tiphys did not compile the Workflow.
        ConflictError: the key was used for something else; the name is taken by
            a run without this key; or the run was begun for another cluster.
    """
    pipeline = CompiledPipeline.from_manifest(manifest)
    wanted = digest({"workflow": manifest, "run": run or "", "namespace": namespace})
    asked = Asked(wanted, f"{run or 'a run'} of pipeline {pipeline.name}")
    return begin_once(store, submitter, pipeline, key, asked, run, namespace, suffix, Origin())


def find_begun(store: Store, key: str, asked: Asked) -> StartKey | None:
    """Which run was begun under ``key``; None for none.

    Raises:
        UsageError: the key is not valid.
        ConflictError: it was used for something else.
    """
    held = find_record(store, start_key(key_digest(key)), StartKey)
    return held and _same(held, key, asked)


def begin_once(
    store: Store,
    submitter: Submitter,
    pipeline: CompiledPipeline,
    key: str,
    asked: Asked,
    run: str | None,
    namespace: str,
    suffix: Callable[[], str],
    origin: Origin,
) -> Started:
    """Like `start_once`, for a run that may go on from another one."""
    origin = origin._replace(key=key_digest(key))
    held = find_begun(store, key, asked)
    if held is None:
        name = _free_name(store, submitter, pipeline, run, namespace, suffix)
        reserved = StartKey(run=name, namespace=namespace, content=asked.content)
        held = _same(claim(store, start_key(origin.key), reserved).record, key, asked)
    failpoint("start.after_key")
    return _submitted(store, submitter, _recorded(store, pipeline, held, origin), namespace)


def _same(held: StartKey, key: str, asked: Asked) -> StartKey:
    if held.content == asked.content:
        return held
    raise ConflictError(
        f"idempotency key {key!r} was used at {held.written_at:%Y-%m-%d %H:%M:%S} UTC to start run {held.run} "
        f"(content {held.content[:12]}), and this call asks for something else ({asked.words}, content "
        f"{asked.content[:12]}); repeat the call as it was, or choose another key"
    )


def _free_name(
    store: Store,
    submitter: Submitter,
    pipeline: CompiledPipeline,
    run: str | None,
    namespace: str,
    suffix: Callable[[], str],
) -> str:
    name = ""
    for name in candidate_names(pipeline, run, suffix):
        check_free(store, submitter, namespace, name, 1)
        if find_record(store, RunLayout(name).record, RunRecord) is None:
            return name
    raise _taken(store, name)


def _recorded(store: Store, pipeline: CompiledPipeline, held: StartKey, origin: Origin) -> RunRecord:
    record = run_record(pipeline, held.run, held.namespace, origin)
    found = claim(store, RunLayout(held.run).record, record).record
    if found.key != origin.key:
        raise _taken(store, held.run)
    failpoint("start.after_record")
    return found


def _submitted(store: Store, submitter: Submitter, record: RunRecord, namespace: str) -> Started:
    layout = RunLayout(record.run)
    wanted = first_claim(record, submitter.cluster, namespace)
    held = claim(store, layout.submission(1), wanted).record
    bound = find_record(store, layout.submission_bound(1), SubmissionBound)
    if bound is not None:
        return Started(record.run, 1, bound.workflow_name, bound.uid, created=False)
    if held.cluster not in ("", submitter.cluster):
        raise ConflictError(
            f"run {record.run} was begun under this key for cluster {held.cluster} and may run there; from cluster "
            f"{submitter.cluster} nobody can tell: repeat the call there, or `tiphys resume {record.run} --force` here"
        )
    if live := find_created(store, submitter, held):
        return Started(record.run, 1, live.name, live.uid, created=False)
    live = send(store, submitter, held, record.workflow, "start")
    return Started(record.run, 1, live.name, live.uid)


def _taken(store: Store, name: str) -> ConflictError:
    return ConflictError(
        f"{store.url} already has a run {name!r}, which was not begun under this key; choose another name, or go on "
        f"with it by `tiphys resume {name}`"
    )
