"""Loads a checkpoint of NumPy arrays into memory, several shards at a time."""

from collections.abc import Callable
from typing import Any

from tiphys.checkpoint.ranks.barrier import SINGLE_RANK, RankInfo
from tiphys.checkpoint.restore.shard_reader import NodeCache, ShardReader, load_manifest
from tiphys.checkpoint.state.near_copy import NearMemory
from tiphys.checkpoint.state.shards import FRAMEWORK, StateAssembly
from tiphys.errors import UsageError
from tiphys.records import CheckpointManifest, CheckpointRef, Shard
from tiphys.store import Store
from tiphys.threads import map_parallel


class CheckpointLoader:
    """Loads checkpoints of one store.

    `ShardReader` explains the arguments.
    """

    def __init__(
        self,
        store: Store,
        *,
        near: NearMemory | None = None,
        cache: NodeCache | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        threads: int = 4,
    ) -> None:
        self._store = store
        self._near = near
        self._cache = cache
        self._should_stop = should_stop
        self._threads = threads

    def read_manifest(self, ref: CheckpointRef) -> CheckpointManifest:
        """Read the manifest of ``ref``, whose shards must hold NumPy arrays; raises as `load_manifest` does."""
        return load_manifest(self._store, ref, FRAMEWORK)

    def load(self, manifest: CheckpointManifest, like: Any = None, rank_info: RankInfo = SINGLE_RANK) -> Any:
        """Load the state of one rank, or the state that rank 0 saved for all ranks.

        ``like`` is a state with the classes to build, as in `unflatten_state`.

        Raises:
            IntegrityError: a shard is damaged or missing.
            UsageError: the program's classes differ from those of the state, or
                another number of ranks saved it.
            StoreError: storage did not answer; the checkpoint may be valid.
            LoadStoppedError: ``should_stop`` returned True.
        """
        document, *shards = all_shards = _shards_for_rank(manifest, rank_info)
        near = self._near.find(all_shards, rank_info.rank) if self._near else None
        reader = ShardReader(
            self._store, near=near, cache=self._cache, should_stop=self._should_stop
        )  # one reader per load, so that its buffers are freed
        assembly = StateAssembly(bytes(reader.read(document)))
        map_parallel(lambda _, shard: assembly.add_shard(reader.read(shard)), shards, self._threads)
        if near:
            near.report(manifest.ref)
        if self._cache:
            self._cache.trim({shard.sha256 for shard in manifest.shards})
        return assembly.state(like)


def _shards_for_rank(manifest: CheckpointManifest, rank_info: RankInfo) -> list[Shard]:
    writers = {shard.rank for shard in manifest.shards}
    if writers == {0}:
        return list(manifest.shards)  # one state for all ranks
    if len(writers) != rank_info.world_size:
        raise UsageError(
            f"checkpoint {manifest.ref} contains the states of {len(writers)} ranks, but {rank_info.world_size} are "
            "running, and NumPy states cannot be resharded: start the same number, or save with "
            "tiphys.checkpoint.adapters.dcp"
        )
    return [shard for shard in manifest.shards if shard.rank == rank_info.rank]
