"""Writing a checkpoint: shards, then the fence, then the manifest, whose creation is the commit.

Until the manifest exists there is no checkpoint, so a process may die at any
point before it and leave nothing but bytes that retention sweeps up. Shards are
named by their content: a repeated save meets its own shards and never others.
"""

import hashlib
import time
from collections.abc import Callable, Iterable

from tiphys.checkpoint.shards import PackedShard
from tiphys.errors import IntegrityError, ObjectExistsError, StoreError
from tiphys.faults import failpoint
from tiphys.records import CheckpointManifest, Shard
from tiphys.store import LineageLayout, Store, claim


def commit(
    store: Store, draft: CheckpointManifest, shards: Iterable[PackedShard], check_fence: Callable[[], None]
) -> CheckpointManifest:
    """Store ``shards`` and commit ``draft`` with them; answer the manifest that stands.

    A second commit of the same step by the same attempt answers the first.

    Raises:
        FencedError: from ``check_fence``; nothing was committed.
        StoreError: storage failed; whether the commit stands is unknown only if
            the last write got no answer.
    """
    manifest = _store_shards(store, draft, shards)
    check_fence()
    failpoint("checkpoint.before_manifest")
    key = LineageLayout(draft.lineage).manifest(draft.attempt, draft.global_step)
    held, won = claim(store, key, manifest.sealed())
    failpoint("checkpoint.after_manifest")
    if not won and held.shards != manifest.shards:
        raise StoreError(
            f"checkpoint {draft.global_step} of attempt {draft.attempt} exists with other content, written by an "
            "earlier process of this attempt; it stands, and the next step can be saved"
        )
    return held


def _store_shards(store: Store, draft: CheckpointManifest, shards: Iterable[PackedShard]) -> CheckpointManifest:
    """``draft`` with the shards that are stored now, and the time it took."""
    layout = LineageLayout(draft.lineage)
    stored: list[Shard] = []
    started, upload_seconds = time.perf_counter(), 0.0
    for index, packed in enumerate(shards):
        sha256 = hashlib.sha256(packed.data).hexdigest()
        key = layout.shard(draft.attempt, draft.global_step, index, sha256, packed.suffix)
        before = time.perf_counter()
        failpoint("checkpoint.before_shard")
        _store_shard(store, key, packed.data)
        failpoint("checkpoint.after_shard")
        upload_seconds += time.perf_counter() - before
        stored.append(Shard(key=key, size=len(packed.data), sha256=sha256))
    stage_seconds = time.perf_counter() - started - upload_seconds
    return draft.model_copy(
        update={
            "shards": tuple(stored),
            "stage_seconds": round(stage_seconds, 6),
            "upload_seconds": round(upload_seconds, 6),
        }
    )


def _store_shard(store: Store, key: str, data: bytes) -> None:
    try:
        store.create(key, data)
    except ObjectExistsError:
        # An earlier try of this save wrote it. Its name is its content's; trust it no further than that.
        if store.read(key) != data:
            raise IntegrityError(
                f"{store.url}: {key} holds other bytes than its name says, so this step cannot be saved"
            ) from None
