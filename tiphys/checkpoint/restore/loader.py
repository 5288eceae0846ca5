"""Reading a checkpoint of NumPy arrays, several shards at a time."""

from collections.abc import Callable
from typing import Any

from tiphys.checkpoint.ranks.barrier import ALONE, Place
from tiphys.checkpoint.restore.shard_reader import NodeCache, ShardReader, manifest_of
from tiphys.checkpoint.state.shards import FRAMEWORK, Assembly
from tiphys.errors import UsageError
from tiphys.records import CheckpointManifest, CheckpointRef, Shard
from tiphys.store import Store
from tiphys.threads import in_parallel


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

    def manifest(self, ref: CheckpointRef) -> CheckpointManifest:
        """The manifest of ``ref``, if its shards hold NumPy arrays; raises as `manifest_of` does."""
        return manifest_of(self._store, ref, FRAMEWORK)

    def load(self, manifest: CheckpointManifest, like: Any = None, place: Place = ALONE) -> Any:
        """The state that the rank at ``place`` saved, or that one saved for all.

        ``like`` is what `tiphys.checkpoint.state.serialization.unflatten` takes classes from.

        Raises:
            IntegrityError: the manifest or some shard is damaged or missing.
            UsageError: the program's classes are not those of the state, or as
                many ranks as there are now did not save it.
            StoreError: storage did not answer; that says nothing about the checkpoint.
            LoadStoppedError: ``stopping`` answered yes.
        """
        document, *shards = _shards_of(manifest, place)
        reader = ShardReader(self._store, cache=self._cache, stopping=self._stopping)  # its buffers go with it
        assembly = Assembly(bytes(reader.read(document)))
        in_parallel(lambda _, shard: assembly.add(reader.read(shard)), shards, self._threads)
        if self._cache:
            self._cache.trim({shard.sha256 for shard in manifest.shards})
        return assembly.state(like)


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
