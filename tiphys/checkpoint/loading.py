"""Reading a checkpoint: no byte reaches the program before its hash was compared.

Storage that returns wrong bytes does so quietly. Every shard is read in pieces,
hashed while it arrives, and only then decoded. Several are read at a time, each
thread with a buffer of its own, so that a state is never in memory twice.
"""

import hashlib
import threading
from collections.abc import Callable
from typing import Any

from tiphys.checkpoint.cache import NodeCache
from tiphys.checkpoint.gang import ALONE, Place
from tiphys.checkpoint.parallel import in_parallel
from tiphys.checkpoint.shards import FRAMEWORK, Assembly
from tiphys.errors import IntegrityError, ObjectMissingError, UsageError
from tiphys.lineage.verify import read_manifest
from tiphys.records import CheckpointManifest, CheckpointRef, Shard
from tiphys.store import Store

_PIECE_BYTES = 1 << 20
"""Read, hashed and copied while it is in the processor's cache."""


class LoadStoppedError(Exception):
    """The load was given up, because the program was told to stop."""


class Loader:
    """Reads checkpoints of ``store``.

    Args:
        cache: Where shards are looked for first, and left for the next reader on this node.
        stopping: Asked before each shard; a load is given up once it answers yes.
        threads: Shards read at a time.
    """

    def __init__(
        self,
        store: Store,
        *,
        cache: NodeCache | None = None,
        stopping: Callable[[], bool] = lambda: False,
        threads: int = 4,
    ) -> None:
        self._store = store
        self._cache = cache
        self._stopping = stopping
        self._threads = threads
        self._own = threading.local()

    def manifest(self, ref: CheckpointRef, framework: str = FRAMEWORK) -> CheckpointManifest:
        """The manifest of ``ref``, if its shards can be read by ``framework``; raises as `load` does."""
        try:
            manifest = read_manifest(self._store, ref)
        except ObjectMissingError:
            raise IntegrityError("its manifest is missing") from None
        if manifest.framework != framework:
            raise UsageError(
                f"checkpoint {ref} of {ref.lineage} was written by the framework {manifest.framework!r}, this program "
                f"reads {framework!r}; start a new run"
            )
        return manifest

    def load(self, manifest: CheckpointManifest, like: Any = None, place: Place = ALONE) -> Any:
        """The state that the rank at ``place`` saved, or that one saved for all.

        ``like`` is what `tiphys.checkpoint.state.unflatten` takes classes from.

        Raises:
            IntegrityError: the manifest or some shard is damaged or missing.
            UsageError: the program's classes are not those of the state, or as
                many ranks as there are now did not save it.
            StoreError: storage did not answer; that says nothing about the checkpoint.
            LoadStoppedError: ``stopping`` answered yes.
        """
        document, *shards = _shards_of(manifest, place)
        assembly = Assembly(bytes(self._verified(document)))
        in_parallel(lambda _, shard: assembly.add(self._verified(shard)), shards, self._threads)
        if self._cache:
            self._cache.trim({shard.sha256 for shard in manifest.shards})
        return assembly.state(like)

    def _verified(self, shard: Shard) -> memoryview:
        """The bytes of ``shard``, until the same thread asks for the next."""
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


def _shards_of(manifest: CheckpointManifest, place: Place) -> list[Shard]:
    writers = {shard.rank for shard in manifest.shards}
    if writers == {0}:
        return list(manifest.shards)  # one state for everybody
    if len(writers) != place.world_size:
        raise UsageError(
            f"checkpoint {manifest.ref} holds the states of {len(writers)} ranks, and there are {place.world_size} "
            "now; NumPy states are not divided anew: start as many, or save with tiphys.checkpoint.adapters.dcp"
        )
    return [shard for shard in manifest.shards if shard.rank == place.rank]
