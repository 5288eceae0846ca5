"""Where ``torch.distributed.checkpoint`` (DCP) puts its bytes: into shards that one manifest commits.

DCP plans who writes what, turns items into bytes and reshards on the way back;
all of that stays its own, in the classes for files that it has for this
purpose. Only the files are others: what a rank writes becomes shards, named by
their content, and what it reads was compared with its hash as a whole.

A hash for each shard, none for each item: torch.save puts small items by the
hundred into one object and DCP reads an item whole even if it wants a part, so
items would save little, and ``tiphys verify`` would have to know DCP.
"""

import dataclasses
import io
import math
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tiphys.checkpoint.restore import shard_reader as reading
from tiphys.checkpoint.restore.shard_reader import NodeCache
from tiphys.checkpoint.save.commit import Uploads, publish
from tiphys.errors import IntegrityError, UsageError
from tiphys.lineage.quarantine import quarantine
from tiphys.records import CheckpointManifest, Shard
from tiphys.store import Store
from tiphys.threads import in_parallel

FRAMEWORK = "torch.dcp"
SHARD_BYTES = 64 << 20
HELD_BYTES = 8 << 30

_METADATA = ".metadata"
_MOST_SHARDS = 50_000
"""Of one rank; larger ones where these would not do."""


class ShardWriter(FileSystemWriter):
    """Writes one checkpoint; give each rank one and pass it to ``dcp.save`` or ``dcp.async_save``.

    Every rank stores its own shards, several at a time. The coordinating rank
    then stores DCP's metadata, checks the fence and creates the manifest: a rank
    that dies before means that nothing was committed.
    """

    def __init__(
        self,
        store: Store,
        draft: CheckpointManifest,
        check_fence: Callable[[], None],
        committed: Callable[[CheckpointManifest], None],
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """``committed`` is called in the coordinating rank, with the manifest that stands."""
        super().__init__(str(draft.ref), sync_files=False, per_thread_copy_ahead=0)
        self.fs = _Written()
        self._store = store
        self._draft = draft
        self._check_fence = check_fence
        self._committed = committed
        self._shard_bytes = shard_bytes
        self._began = time.perf_counter()
        self.stage_seconds = 0.0
        """How long the training waited for its state to be copied; set by whoever knows."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if not kwargs.get("use_collectives", True):
            raise UsageError("a checkpoint is committed for all ranks together: leave use_collectives as it is")

    def prepare_local_plan(self, plan: Any) -> Any:
        """Nothing to prepare: there is no folder, and nothing is ever overwritten."""
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: Any, planner: Any) -> Any:
        self._began = time.perf_counter()
        batches = [
            _Batch(f"{index}.distcp", items, lambda name, items: self._written(planner, name, items))
            for index, items in enumerate(_batches(plan.items, self._shard_bytes))
        ]
        shards = Uploads().store(self._store, self._draft, batches, rank=plan.storage_data)
        future: Any = Future()
        future.set_result([result for batch, shard in zip(batches, shards, strict=True) for result in batch.of(shard)])
        return future

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        super().finish(metadata, results)
        written = {result.shard.key: result.shard for rank in results for result in rank}
        index = Uploads().store(self._store, self._draft, [_Metadata(self.fs.take(_METADATA))])
        measured = {
            "shards": (*index, *written.values()),
            "stage_seconds": round(self.stage_seconds, 6),
            "upload_seconds": round(time.perf_counter() - self._began, 6),
        }
        manifest = self._draft.model_copy(update=measured)
        self._committed(publish(self._store, manifest, self._check_fence))

    def storage_meta(self) -> Any:
        """The same for every try, so that a repeated save gives the same bytes."""
        return StorageMeta(checkpoint_id=str(self._draft.ref))

    def _written(self, planner: Any, name: str, items: Sequence[Any]) -> tuple[bytes, Sequence[Any]]:
        files: queue.Queue[Any] = queue.Queue()
        files.put((name, name, list(items)))
        results = self._write_data(planner, files).wait()
        return self.fs.take(name), results


class ShardReader(FileSystemReader):
    """Reads one checkpoint; give each rank one and pass it to ``dcp.load``.

    Each rank reads the shards that hold something for it. All of them are
    verified before the first byte reaches the state; up to ``held_bytes`` stay in
    memory meanwhile, what is beyond is read, and verified, twice. A checkpoint
    that does not match its manifest is quarantined.
    """

    def __init__(
        self,
        store: Store,
        manifest: CheckpointManifest,
        agree: Callable[[Exception | None], None] | None = None,
        held_bytes: int = HELD_BYTES,
        cache: NodeCache | None = None,
    ) -> None:
        """``agree`` is told what a rank found, and raises if some rank found damage; all ranks wait in it."""
        reading.check_framework(manifest, FRAMEWORK)
        super().__init__(str(manifest.ref))
        self.fs = _Verified(store, manifest, held_bytes, cache)
        self._agree = agree or _raise

    def prepare(self) -> Exception | None:
        """Verify DCP's metadata, which it reads first; what is wrong with them, because DCP would not say it."""
        try:
            self.fs.fetch([_METADATA])
        except Exception as error:  # noqa: BLE001  whatever it is, the other ranks must hear of it
            return error
        return None

    def read_data(self, plan: Any, planner: Any) -> Any:
        wanted = {self.storage_data[item.storage_index].relative_path for item in plan.items}
        error: Exception | None = None
        try:
            self.fs.fetch(sorted(wanted))
        except Exception as caught:  # noqa: BLE001  whatever it is, the other ranks must hear of it before it is raised
            error = caught
        self._agree(error)
        return super().read_data(plan, planner)


@dataclasses.dataclass(frozen=True)
class _Result(WriteResult):
    """What a rank tells the coordinating one about an item: also the shard that holds it."""

    shard: Shard


class _Batch:
    """Items that become one shard; see `tiphys.checkpoint.save.commit.ShardSource`."""

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

    def of(self, shard: Shard) -> Iterator[_Result]:
        """What was written, once it is known as ``shard``."""
        name = _file_name(shard)
        for result in self._results:
            place = dataclasses.replace(result.storage_data, relative_path=name)
            yield _Result(index=result.index, size_in_bytes=result.size_in_bytes, storage_data=place, shard=shard)


class _Metadata(NamedTuple):
    """DCP's own index of a checkpoint, as one of its shards."""

    content: bytes
    suffix: str = "metadata"

    @property
    def size_bytes(self) -> int:
        return len(self.content)

    def data(self) -> bytes:
        return self.content


class _Written(FileSystem):
    """Files that DCP writes, in memory until they are shards."""

    def __init__(self) -> None:
        self._files: dict[str, io.BytesIO] = {}

    def take(self, name: str) -> bytes:
        return self._files.pop(name).getvalue()

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:  # noqa: ARG002  only written to
        yield self._files.setdefault(_name(path), _Kept())

    def rename(self, path: Any, new_path: Any) -> None:
        self._files[_name(new_path)] = self._files.pop(_name(path))

    def concat_path(self, path: Any, suffix: str) -> str:  # noqa: ARG002  there are no folders
        return suffix

    def exists(self, path: Any) -> bool:  # noqa: ARG002
        return False


class _Kept(io.BytesIO):
    """Survives its `close`: DCP closes what it has written."""

    def close(self) -> None:
        pass


class _Verified(FileSystem):
    """Shards as the files that DCP reads; no byte of them that was not verified."""

    def __init__(self, store: Store, manifest: CheckpointManifest, held_bytes: int, cache: NodeCache | None) -> None:
        self._store = store
        self._reader = reading.ShardReader(store, cache=cache)
        self._manifest = manifest
        self._shards = {_dcp_name(shard): shard for shard in manifest.shards}
        self._room = held_bytes
        self._held: dict[str, bytes] = {}

    def fetch(self, names: Sequence[str]) -> None:
        """Verify these files, several at a time; keep those for which there is room."""
        keep = set()
        for name in names:
            if self._shard(name).size <= self._room:
                self._room -= self._shard(name).size
                keep.add(name)

        def one(_: int, name: str) -> bytes:
            data = self._read(name)
            return data if name in keep else b""

        fetched = in_parallel(one, names, 4)
        self._held.update({name: data for name, data in zip(names, fetched, strict=True) if name in keep})

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:  # noqa: ARG002  only read from
        name = _name(path)
        yield io.BytesIO(self._held.pop(name) if name in self._held else self._read(name))

    def concat_path(self, path: Any, suffix: str) -> str:  # noqa: ARG002  there are no folders
        return suffix

    def _read(self, name: str) -> bytes:
        try:
            return bytes(self._reader.read(self._shard(name)))
        except IntegrityError as error:
            quarantine(self._store, self._manifest.ref, str(error), by="restore")
            raise

    def _shard(self, name: str) -> Shard:
        if (found := self._shards.get(name)) is None:
            raise IntegrityError(f"checkpoint {self._manifest.ref} has no {name}, which its metadata names")
        return found


def _batches(items: Iterable[Any], shard_bytes: int) -> list[list[Any]]:
    """Items in their order, in batches of about ``shard_bytes``; an item is never cut."""
    listed = list(items)
    limit = max(shard_bytes, sum(map(_item_bytes, listed)) // _MOST_SHARDS)
    batches: list[list[Any]] = []
    room = 0
    for item in listed:
        if not batches or _item_bytes(item) > room:
            batches.append([])
            room = limit
        batches[-1].append(item)
        room -= _item_bytes(item)
    return batches


def _item_bytes(item: Any) -> int:
    """Bytes of a tensor, or of this rank's part of it; 0 for anything else, which is small and known only later."""
    if item.tensor_data is None:
        return 0
    itemsize: int = item.tensor_data.properties.dtype.itemsize
    sizes: Sequence[int] = item.tensor_data.chunk.sizes
    return math.prod(sizes) * itemsize


def _file_name(shard: Shard) -> str:
    return shard.key.rpartition("/")[2]


def _dcp_name(shard: Shard) -> str:
    """What DCP calls this file."""
    name = _file_name(shard)
    return _METADATA if name.endswith(_METADATA) else name


def _name(path: Any) -> str:
    return PurePosixPath(path).name


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
