"""Reading shards: no byte reaches the program before its hash was compared.

Storage that returns wrong bytes does so quietly. Every shard is read in pieces,
hashed while it arrives, and only then decoded, by each thread in a buffer of its
own, so that a state is never in memory twice.
"""

import hashlib
import threading
from collections.abc import Callable

from tiphys.checkpoint.cache import NodeCache
from tiphys.errors import IntegrityError, ObjectMissingError, UsageError
from tiphys.lineage.verify import read_manifest
from tiphys.records import CheckpointManifest, CheckpointRef, Shard
from tiphys.store import Store

_PIECE_BYTES = 1 << 20
"""Read, hashed and copied while it is in the processor's cache."""


class LoadStoppedError(Exception):
    """The load was given up, because the program was told to stop."""


def manifest_of(store: Store, ref: CheckpointRef, framework: str, reader: str = "this program") -> CheckpointManifest:
    """The manifest of ``ref``, if ``reader``, which reads ``framework``, can read its shards.

    Raises:
        IntegrityError: it is damaged or missing.
        UsageError: another framework wrote it.
        StoreError: storage did not answer; that says nothing about the checkpoint.
    """
    try:
        manifest = read_manifest(store, ref)
    except ObjectMissingError:
        raise IntegrityError("its manifest is missing") from None
    check_framework(manifest, framework, reader)
    return manifest


def check_framework(manifest: CheckpointManifest, framework: str, reader: str = "this program") -> None:
    """Raise `UsageError` if ``reader``, which reads ``framework``, cannot read the shards of ``manifest``."""
    if manifest.framework != framework:
        raise UsageError(
            f"checkpoint {manifest.ref} of {manifest.lineage} was written by the framework {manifest.framework!r}, "
            f"{reader} reads {framework!r}; start a new run"
        )


class ShardReader:
    """Verified shards of ``store``.

    Args:
        cache: Where shards are looked for first, and left for the next reader on this node.
        stopping: Asked before each shard; a load is given up once it answers yes.
    """

    def __init__(
        self, store: Store, *, cache: NodeCache | None = None, stopping: Callable[[], bool] = lambda: False
    ) -> None:
        self._store = store
        self._cache = cache
        self._stopping = stopping
        self._own = threading.local()

    def read(self, shard: Shard) -> memoryview:
        """The bytes of ``shard``, until the same thread asks for the next.

        Raises:
            IntegrityError: they are not those of the manifest, or missing.
            StoreError: storage did not answer; that says nothing about the checkpoint.
            LoadStoppedError: ``stopping`` answered yes.
        """
        if self._stopping():
            raise LoadStoppedError
        if self._cache is None:
            return self._fetched(shard)
        with self._cache.one_reader(shard.sha256):
            cached = self._from_cache(self._cache, shard)
            if cached is None:
                cached = self._fetched(shard)
                self._cache.keep(shard.sha256, cached)
        return cached

    def _from_cache(self, cache: NodeCache, shard: Shard) -> memoryview | None:
        buffer = self._buffer(shard.size)
        if not cache.read_into(shard.sha256, buffer):
            return None
        if hashlib.sha256(buffer).hexdigest() != shard.sha256:
            cache.drop(shard.sha256)
            return None
        return buffer

    def _fetched(self, shard: Shard) -> memoryview:
        try:
            return self._read(shard)
        except IntegrityError:
            # Once more: a checkpoint must not be condemned for what went wrong on the way.
            return self._read(shard)

    def _read(self, shard: Shard) -> memoryview:
        buffer = self._buffer(shard.size)
        digest, size = hashlib.sha256(), 0
        try:
            for piece in self._store.chunks(shard.key, _PIECE_BYTES):
                end = size + len(piece)
                if end > shard.size:
                    raise IntegrityError(
                        f"shard {shard.key} has more than {shard.size} bytes, the manifest says {shard.size}"
                    )
                digest.update(piece)
                buffer[size:end] = piece
                size = end
        except ObjectMissingError:
            raise IntegrityError(f"shard {shard.key} is missing") from None
        if size != shard.size:
            raise IntegrityError(f"shard {shard.key} has {size} bytes, the manifest says {shard.size}")
        if digest.hexdigest() != shard.sha256:
            raise IntegrityError(
                f"shard {shard.key} has sha256 {digest.hexdigest()[:12]}…, the manifest says {shard.sha256[:12]}…"
            )
        return buffer

    def _buffer(self, size_bytes: int) -> memoryview:
        """Memory of this thread, which is kept from shard to shard."""
        kept: bytearray = getattr(self._own, "buffer", bytearray())
        if len(kept) < size_bytes:
            kept = self._own.buffer = bytearray(size_bytes)
        return memoryview(kept)[:size_bytes]
