"""Reading shards: no byte reaches the program before its hash was compared.

Storage that returns wrong bytes does so quietly. Every shard is read in pieces,
hashed while it arrives, and only then decoded, by each thread in a buffer of its
own, so that a state is never in memory twice.

Shards on the disk of a node, so that they cross the network once for all ranks, and not again after a restart.

A file is named by the SHA-256 of what it should hold and believed no further
than that: whoever reads it compares the hash. A cache that is full, read-only
or broken costs time and nothing else.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from tiphys.checkpoint.telemetry.events import tell
from tiphys.errors import IntegrityError, ObjectMissingError, UsageError
from tiphys.lineage.validity import read_manifest
from tiphys.records import CheckpointManifest, CheckpointRef, Shard
from tiphys.store import Store

_LIMIT_BYTES = 64 << 30


class NodeCache:
    """Files below ``folder``, which is made when it is needed.

    Args:
        folder: Shared by the processes of a node, such as a host path or an ``emptyDir``.
        limit_bytes: What `trim` leaves at most, besides the checkpoint just read.
    """

    def __init__(self, folder: Path, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._folder = folder
        self._limit = limit_bytes
        self._broken = False

    @contextlib.contextmanager
    def one_reader(self, sha256: str) -> Iterator[None]:
        """Let one process of the node at a time fetch this shard; the next one finds it here."""
        with contextlib.ExitStack() as stack:
            with self._forgiving():
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = stack.enter_context((self._folder / f"{sha256}.lock").open("ab"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def read_into(self, sha256: str, buffer: memoryview) -> bool:
        """Fill ``buffer``; whether there was a file of its size. Its content is unverified."""
        path = self._folder / sha256
        try:
            with path.open("rb", buffering=0) as stream:
                if os.fstat(stream.fileno()).st_size != len(buffer):
                    return False
                read = 0
                while read < len(buffer) and (count := stream.readinto(buffer[read:])):
                    read += count
                os.utime(path)
                return read == len(buffer)
        except OSError:
            return False

    def keep(self, sha256: str, data: memoryview) -> None:
        """Leave a copy of ``data`` for the next reader, if that can be done."""
        temporary = self._folder / f"{secrets.token_hex(8)}.tmp"
        with self._forgiving():
            try:
                temporary.write_bytes(data)
                temporary.replace(self._folder / sha256)
            finally:
                temporary.unlink(missing_ok=True)

    def drop(self, sha256: str) -> None:
        """Remove a file whose content is not what its name says."""
        tell(f"{self._folder / sha256} does not hold what its name says; it is fetched again")
        with self._forgiving():
            (self._folder / sha256).unlink(missing_ok=True)

    def trim(self, in_use: Collection[str]) -> None:
        """Remove the files used longest ago until the others fit; those ``in_use`` stay."""
        with self._forgiving():
            files = [(path.stat(), path) for path in self._folder.iterdir() if path.suffix != ".lock"]
            total = sum(status.st_size for status, _ in files)
            for status, path in sorted(files, key=lambda file: file[0].st_mtime):
                if total <= self._limit:
                    return
                if path.name not in in_use:
                    path.unlink(missing_ok=True)
                    path.with_suffix(".lock").unlink(missing_ok=True)
                    total -= status.st_size

    @contextlib.contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._broken:
                self._broken = True
                tell(f"the cache in {self._folder} cannot be used, so shards are fetched each time: {error.strerror}")


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
