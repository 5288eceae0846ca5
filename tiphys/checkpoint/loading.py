"""Reading a checkpoint: no byte reaches the program before its hash was compared.

Storage that returns wrong bytes does so quietly. Every shard is read once, in
pieces, hashed while it arrives, and only then decoded.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from tiphys.checkpoint.shards import FRAMEWORK, unpack
from tiphys.errors import IntegrityError, ObjectMissingError, UsageError
from tiphys.lineage.verify import read_manifest
from tiphys.records import CheckpointManifest, CheckpointRef, Shard
from tiphys.store import Store


def load(store: Store, ref: CheckpointRef, like: Any, before_shard: Callable[[], None]) -> Any:
    """The state that checkpoint ``ref`` holds. ``before_shard`` may raise to give up.

    Raises:
        IntegrityError: the manifest or some shard is damaged or missing.
        UsageError: the program's classes are not those of the state, or another
            framework wrote it.
        StoreError: storage did not answer; that says nothing about the checkpoint.
    """
    try:
        manifest = read_manifest(store, ref)
    except ObjectMissingError:
        raise IntegrityError("its manifest is missing") from None
    if manifest.framework != FRAMEWORK:
        raise UsageError(
            f"checkpoint {ref} of {ref.lineage} was written by the framework {manifest.framework!r}, this program "
            f"reads {FRAMEWORK!r}; start a new run"
        )
    return unpack(_verified(store, manifest, before_shard), like)


def _verified(store: Store, manifest: CheckpointManifest, before_shard: Callable[[], None]) -> Iterator[bytes]:
    for shard in manifest.shards:
        before_shard()
        try:
            content = _read(store, shard)
        except IntegrityError:
            # Once more: a checkpoint must not be condemned for what went wrong on the way.
            content = _read(store, shard)
        yield content


def _read(store: Store, shard: Shard) -> bytes:
    content = bytearray()
    digest = hashlib.sha256()
    try:
        for chunk in store.chunks(shard.key):
            content += chunk
            digest.update(chunk)
            if len(content) > shard.size:
                break
    except ObjectMissingError:
        raise IntegrityError(f"shard {shard.key} is missing") from None
    if len(content) != shard.size:
        longer = "more than " if len(content) > shard.size else ""
        raise IntegrityError(
            f"shard {shard.key} has {longer}{min(len(content), shard.size)} bytes, the manifest says {shard.size}"
        )
    if digest.hexdigest() != shard.sha256:
        raise IntegrityError(
            f"shard {shard.key} has sha256 {digest.hexdigest()[:12]}…, the manifest says {shard.sha256[:12]}…"
        )
    return bytes(content)
