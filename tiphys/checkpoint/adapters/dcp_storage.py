"""Storage of ``torch.distributed.checkpoint`` (DCP): its files become shards that one manifest commits.

DCP plans which rank writes which items, serializes them, and reshards them when
it loads. This module reuses DCP's own classes for files and replaces only the
file system: the file that a rank writes becomes a shard, named by its content,
and a file that it reads is a shard whose hash was verified.

Shards are hashed as a whole, not item by item. torch.save writes hundreds of
small items into one object, and DCP reads an item whole even for a part of it.
So hashes of items would save little, and ``tiphys verify`` would have to know
DCP.
"""

import dataclasses
import io
import math
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tiphys.checkpoint.restore.shard_reader import NodeCache, ShardReader, check_framework
from tiphys.checkpoint.save.commit import BufferedShard, ShardUploader
from tiphys.checkpoint.save.commit_policy import CheckpointCommitter
from tiphys.errors import IntegrityError, UsageError
from tiphys.lineage.quarantine import quarantine_checkpoint
from tiphys.records import CheckpointManifest, Shard
from tiphys.store import Store
from tiphys.threads import map_parallel

FRAMEWORK = "torch.dcp"
SHARD_BYTES = 64 << 20
HELD_BYTES = 8 << 30
"""Default of `DcpReader` for the verified bytes in memory."""

_METADATA = ".metadata"
_MAX_SHARDS = 50_000
"""Most shards of one rank; beyond that the shards grow."""


class DcpWriter(FileSystemWriter):
    """Writes one checkpoint; each rank passes its own to ``dcp.save`` or ``dcp.async_save``.

    Every rank stores its own shards in parallel. The coordinating rank then
    stores DCP's metadata, checks the fence and creates the manifest. If a rank
    dies before that, nothing is committed.

    Args:
        committer: Publishes the manifest and receives the commit, in the coordinating rank.
    """

    def __init__(
        self, store: Store, draft: CheckpointManifest, committer: CheckpointCommitter, cache: NodeCache | None = None
    ) -> None:
        super().__init__(str(draft.ref), sync_files=False, per_thread_copy_ahead=0)
        self.fs = _PendingFiles()
        self._store = store
        self._draft = draft
        self._committer = committer
        self._cache = cache
        self._started_at = time.perf_counter()
        self.stage_seconds = 0.0
        """How long the training waited while its state was copied; set by the session after staging."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if not kwargs.get("use_collectives", True):
            raise UsageError("one manifest commits the shards of all ranks, so dcp.save needs use_collectives=True")

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return ``plan`` unchanged: there is no folder to create, and shards are never overwritten."""
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: Any, planner: Any) -> Any:
        self._started_at = time.perf_counter()
        batches = [
            _Batch(f"{index}.distcp", items, lambda name, items: self._write_items(planner, name, items))
            for index, items in enumerate(_batch_items(plan.items, SHARD_BYTES))
        ]
        shards = ShardUploader(cache=self._cache).store(self._store, self._draft, batches, rank=plan.storage_data)
        future: Any = Future()
        future.set_result(
            [result for batch, shard in zip(batches, shards, strict=True) for result in batch.results_in(shard)]
        )
        return future

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        super().finish(metadata, results)
        written = {result.shard.key: result.shard for rank in results for result in rank}
        index = ShardUploader(cache=self._cache).store(
            self._store, self._draft, [BufferedShard("metadata", self.fs.take(_METADATA))]
        )
        measured = {
            "shards": (*index, *written.values()),
            "stage_seconds": round(self.stage_seconds, 6),
            "upload_seconds": round(time.perf_counter() - self._started_at, 6),
        }
        manifest = self._draft.model_copy(update=measured)
        self._committer.on_committed(self._committer.publish(manifest))

    def storage_meta(self) -> Any:
        """Return metadata that is equal for every try, so that a repeated save gives the same bytes."""
        return StorageMeta(checkpoint_id=str(self._draft.ref))

    def _write_items(self, planner: Any, name: str, items: Sequence[Any]) -> tuple[bytes, Sequence[Any]]:
        files: queue.Queue[Any] = queue.Queue()
        files.put((name, name, list(items)))
        results = self._write_data(planner, files).wait()
        return self.fs.take(name), results


class DcpReader(FileSystemReader):
    """Reads one checkpoint; each rank passes its own to ``dcp.load``.

    Each rank reads the shards with items of its plan, and verifies all of them
    before the first byte reaches the state. Verified shards stay in memory up to
    ``held_bytes``; shards beyond that are read and verified twice. A checkpoint
    that does not match its manifest is quarantined.

    Args:
        agree: Called by every rank with its error or None; waits for all ranks, and
            raises in every rank if one of them failed. None for a single process.
    """

    def __init__(
        self,
        store: Store,
        manifest: CheckpointManifest,
        agree: Callable[[Exception | None], None] | None = None,
        held_bytes: int = HELD_BYTES,
        cache: NodeCache | None = None,
    ) -> None:
        check_framework(manifest, FRAMEWORK)
        super().__init__(str(manifest.ref))
        self.fs = _VerifiedFiles(store, manifest, held_bytes, cache)
        self._agree = agree or _raise_error

    def prepare(self) -> Exception | None:
        """Verify DCP's metadata, which DCP reads first; return the error, which DCP itself would hide."""
        try:
            self.fs.fetch([_METADATA])
        except Exception as error:  # noqa: BLE001  `agree` passes any error to the other ranks
            return error
        return None

    def read_data(self, plan: Any, planner: Any) -> Any:
        files = {self.storage_data[item.storage_index].relative_path for item in plan.items}
        error: Exception | None = None
        try:
            self.fs.fetch(sorted(files))
        except Exception as caught:  # noqa: BLE001  `agree` passes any error to the other ranks
            error = caught
        self._agree(error)
        return super().read_data(plan, planner)


@dataclasses.dataclass(frozen=True)
class _Result(WriteResult):
    """Result of one item for the coordinating rank, extended by the shard that contains the item."""

    shard: Shard


class _Batch:
    """Items of one shard, as a `tiphys.checkpoint.save.commit.ShardSource`."""

    def __init__(
        self, name: str, items: Sequence[Any], write: Callable[[str, Sequence[Any]], tuple[bytes, Sequence[Any]]]
    ) -> None:
        self.suffix = name.rpartition(".")[2]
        self._name = name
        self._items = items
        self._write = write
        self._results: Sequence[Any] = ()

    @property
    def size_bytes(self) -> int:
        return sum(map(_item_bytes, self._items))

    def data(self) -> bytes:
        data, self._results = self._write(self._name, self._items)
        return data

    def results_in(self, shard: Shard) -> Iterator[_Result]:
        """Yield the results of the items, which are stored in ``shard``."""
        name = _file_name(shard)
        for result in self._results:
            storage_data = dataclasses.replace(result.storage_data, relative_path=name)
            yield _Result(
                index=result.index, size_in_bytes=result.size_in_bytes, storage_data=storage_data, shard=shard
            )


class _PendingFiles(FileSystem):
    """Files that DCP writes, kept in memory until they are stored as shards."""

    def __init__(self) -> None:
        self._files: dict[str, io.BytesIO] = {}

    def take(self, name: str) -> bytes:
        return self._files.pop(name).getvalue()

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:  # noqa: ARG002  only written to
        yield self._files.setdefault(_base_name(path), _UnclosedBuffer())

    def rename(self, path: Any, new_path: Any) -> None:
        self._files[_base_name(new_path)] = self._files.pop(_base_name(path))

    def concat_path(self, path: Any, suffix: str) -> str:  # noqa: ARG002  there are no folders
        return suffix

    def exists(self, path: Any) -> bool:  # noqa: ARG002
        return False


class _UnclosedBuffer(io.BytesIO):
    """A buffer that stays readable after `close`, which DCP calls after writing."""

    def close(self) -> None:
        pass


class _VerifiedFiles(FileSystem):
    """Verified shards as the files that DCP reads."""

    def __init__(self, store: Store, manifest: CheckpointManifest, held_bytes: int, cache: NodeCache | None) -> None:
        self._store = store
        self._reader = ShardReader(store, cache=cache)
        self._manifest = manifest
        self._shards = {_dcp_name(shard): shard for shard in manifest.shards}
        self._free_bytes = held_bytes
        self._held: dict[str, bytes] = {}

    def fetch(self, names: Sequence[str]) -> None:
        """Read and verify these files in parallel; keep as many in memory as the limit allows."""
        keep = set()
        for name in names:
            if self._shard(name).size <= self._free_bytes:
                self._free_bytes -= self._shard(name).size
                keep.add(name)

        def read(_: int, name: str) -> bytes:
            data = self._read(name)
            return data if name in keep else b""

        contents = map_parallel(read, names, 4)
        self._held.update({name: data for name, data in zip(names, contents, strict=True) if name in keep})

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:  # noqa: ARG002  only read from
        name = _base_name(path)
        yield io.BytesIO(self._held.pop(name) if name in self._held else self._read(name))

    def concat_path(self, path: Any, suffix: str) -> str:  # noqa: ARG002  there are no folders
        return suffix

    def _read(self, name: str) -> bytes:
        try:
            return bytes(self._reader.read(self._shard(name)))
        except IntegrityError as error:
            quarantine_checkpoint(self._store, self._manifest.ref, str(error), by="restore")
            raise

    def _shard(self, name: str) -> Shard:
        if (shard := self._shards.get(name)) is None:
            raise IntegrityError(f"checkpoint {self._manifest.ref} has no shard {name}, which DCP's metadata names")
        return shard


def _batch_items(items: Iterable[Any], shard_bytes: int) -> list[list[Any]]:
    """Group items in their order into batches of about ``shard_bytes``; an item is never cut."""
    listed = list(items)
    limit = max(shard_bytes, sum(map(_item_bytes, listed)) // _MAX_SHARDS)
    batches: list[list[Any]] = []
    free_bytes = 0
    for item in listed:
        if not batches or _item_bytes(item) > free_bytes:
            batches.append([])
            free_bytes = limit
        batches[-1].append(item)
        free_bytes -= _item_bytes(item)
    return batches


def _item_bytes(item: Any) -> int:
    """Bytes of a tensor, or of this rank's part; 0 for other items, which are small and not serialized yet."""
    if item.tensor_data is None:
        return 0
    itemsize: int = item.tensor_data.properties.dtype.itemsize
    sizes: Sequence[int] = item.tensor_data.chunk.sizes
    return math.prod(sizes) * itemsize


def _file_name(shard: Shard) -> str:
    return shard.key.rpartition("/")[2]


def _dcp_name(shard: Shard) -> str:
    """Return the name that DCP uses for this file."""
    name = _file_name(shard)
    return _METADATA if name.endswith(_METADATA) else name


def _base_name(path: Any) -> str:
    return PurePosixPath(path).name


def _raise_error(error: Exception | None) -> None:
    if error is not None:
        raise error
