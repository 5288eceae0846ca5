"""Reads shards and verifies them: no byte reaches the program before its hash was compared.

Storage may return wrong bytes without an error. So `ShardReader` hashes every
shard while it arrives, and returns it only if the hash matches. Hashing releases
the interpreter's lock, so one thread hashes while the others read; a further
thread for the hash would take its core from a reader. Each thread reuses one
buffer, so that a state is never in memory twice.

A `NearCopy` is read before the store: memory or files that an earlier process of
the pod left. `NodeCache` keeps shards on the disk of a node, so that they cross
the network once for all its ranks, and not again after a restart. A cached file
is named by its SHA-256 and verified like any other shard. A cache that is full, read-only
or broken costs time and nothing else, also one in which another pod left links,
pipes or a lock that it holds.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Protocol

from tiphys.checkpoint.telemetry.events import log_message
from tiphys.errors import IntegrityError, ObjectMissingError, UsageError
from tiphys.lineage.validity import read_manifest
from tiphys.records import CheckpointManifest, CheckpointRef, Shard
from tiphys.store import Store

_LIMIT_BYTES = 64 << 30
_LOCK_SECONDS = 60.0
"""How long one process waits for another that fetches the same shard. Any pod with the folder could hold a lock."""
_LOCK_POLL_SECONDS = 0.02


class NodeCache:
    """A cache of shards as files in ``folder``, which is created on first use.

    Args:
        folder: Shared by the processes of a node, such as a host path or an ``emptyDir``.
        limit_bytes: Size that `trim` reduces the cache to, except for the shards in use.
    """

    def __init__(self, folder: Path, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._broken = False
        self._patience_seconds = _LOCK_SECONDS

    @classmethod
    def open(cls, folder: Path | None) -> "NodeCache | None":
        """The cache in ``folder``; None for None."""
        return cls(folder) if folder else None

    @contextlib.contextmanager
    def fetch_lock(self, sha256: str, should_stop: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Return a lock so that one process of the node fetches this shard, and the others read it from the cache.

        The lock is given up if another process holds it for too long, or if ``should_stop`` returns True.
        """
        with contextlib.ExitStack() as stack:
            with self._ignore_os_errors(), self._open_folder() as folder:
                lock = _open_file(folder, f"{sha256}.lock", os.O_RDWR | os.O_CREAT)
                stack.callback(os.close, lock)
                self._await_lock(lock, should_stop)
            yield

    def _await_lock(self, lock: int, should_stop: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._patience_seconds
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            if time.monotonic() >= deadline or should_stop():
                break
            time.sleep(_LOCK_POLL_SECONDS)
        if self._patience_seconds and not should_stop():
            self._patience_seconds = 0.0  # once, and not for each of thousands of shards
            log_message(
                f"another process holds a lock in the cache {self._folder} for more than {_LOCK_SECONDS:g} s; "
                "this process fetches shards without waiting for others from now on"
            )

    def read_into(self, sha256: str, buffer: memoryview) -> bool:
        """Fill ``buffer`` with unverified content; return whether the cache had a file of its size."""
        try:
            with self._open_folder() as folder, os.fdopen(_open_file(folder, sha256, os.O_RDONLY), "rb", 0) as stream:
                if os.fstat(stream.fileno()).st_size != len(buffer):
                    return False
                read = 0
                while read < len(buffer) and (count := stream.readinto(buffer[read:])):
                    read += count
                os.utime(stream.fileno())
                return read == len(buffer)
        except OSError:
            return False

    def has(self, sha256: str, size_bytes: int) -> bool:
        """Whether there is a file of this size, which nobody has verified, and mark it as used."""
        try:
            with self._open_folder() as folder:
                status = os.stat(sha256, dir_fd=folder, follow_symlinks=False)
                os.utime(sha256, dir_fd=folder, follow_symlinks=False)
                return stat.S_ISREG(status.st_mode) and status.st_size == size_bytes
        except OSError:
            return False

    def add(self, sha256: str, data: memoryview) -> None:
        """Store a copy of ``data``; does nothing if the cache is broken."""
        temporary = f"{secrets.token_hex(8)}.tmp"
        with self._ignore_os_errors(), self._open_folder() as folder:
            try:
                with os.fdopen(_open_file(folder, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as stream:
                    stream.write(data)
                os.replace(temporary, sha256, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                _unlink(folder, temporary)

    def discard(self, sha256: str) -> None:
        """Delete a file whose content does not match the hash in its name."""
        log_message(f"{self._folder / sha256} does not match the hash in its name; the shard is fetched again")
        with self._ignore_os_errors(), self._open_folder() as folder:
            _unlink(folder, sha256)

    def trim(self, in_use: Collection[str]) -> None:
        """Delete the least recently used files until the limit is met, except for the hashes ``in_use``."""
        with self._ignore_os_errors(), self._open_folder() as folder:
            files = []
            for name in os.listdir(folder):  # noqa: PTH208  below the descriptor
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and not name.endswith(".lock"):
                        files.append((status.st_mtime, status.st_size, name))
            total = sum(size for _, size, _ in files)
            for _, size, name in sorted(files):
                if total <= self._limit_bytes:
                    return
                if name not in in_use:
                    _unlink(folder, name)
                    _unlink(folder, f"{name.removesuffix('.tmp')}.lock")
                    total -= size

    @contextlib.contextmanager
    def _open_folder(self) -> Iterator[int]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield folder
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _ignore_os_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._broken:
                self._broken = True
                log_message(
                    f"the cache in {self._folder} cannot be used, so shards are fetched each time: {error.strerror}"
                )


def _open_file(folder: int, name: str, flags: int) -> int:
    """Open a regular file of the cache: other pods write there, and a link or a pipe must neither lead nor hold."""
    file = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(file)
        raise OSError(errno.EINVAL, f"{name} is no file of its own")
    return file


def _unlink(folder: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


_TRUSTED_BYTES = 128 << 20
"""Size of the largest shard for which memory is reserved before storage has confirmed its size; several are at once."""
_PIECE_BYTES = 1 << 20
"""Size of a piece that is read, hashed and copied while it is in the processor's cache."""


class LoadStoppedError(Exception):
    """The load was cancelled because the program must stop."""


def load_manifest(store: Store, ref: CheckpointRef, framework: str, reader: str = "this program") -> CheckpointManifest:
    """Read the manifest of ``ref``, whose shards must be of ``framework``.

    ``reader`` names the caller in the error message.

    Raises:
        IntegrityError: the manifest is damaged or missing.
        UsageError: another framework wrote the checkpoint.
        StoreError: storage did not answer; the checkpoint may be valid.
    """
    try:
        manifest = read_manifest(store, ref)
    except ObjectMissingError:
        raise IntegrityError("its manifest is missing") from None
    check_framework(manifest, framework, reader)
    return manifest


def check_framework(manifest: CheckpointManifest, framework: str, reader: str = "this program") -> None:
    """Raise `UsageError` unless ``manifest`` is of ``framework``, which ``reader`` can read."""
    if manifest.framework != framework:
        raise UsageError(
            f"checkpoint {manifest.ref} of {manifest.lineage} was written by the framework {manifest.framework!r}, "
            f"{reader} reads {framework!r}; use the framework that wrote it, or start a new run"
        )


class NearCopy(Protocol):
    """Where the shards of a checkpoint may lie near, in unverified bytes."""

    def view(self, shard: Shard) -> memoryview | None:
        """Return the bytes of ``shard`` in memory that nothing changes meanwhile; None where there is none."""

    def read_into(self, shard: Shard, buffer: memoryview) -> bool:
        """Fill ``buffer``, which has the size of ``shard``; return whether there is so much."""

    def record(self, shard: Shard, *, is_intact: bool) -> None:
        """Receive whether the bytes of ``shard`` have its hash. Several threads call this."""


class ShardReader:
    """Reads and verifies shards of one store.

    Args:
        store: Store of the checkpoints.
        near: Read before cache and store; None for none.
        cache: Cache of the node, read before the store and filled from it; None for no cache.
        should_stop: Called before each shard; True cancels the load.
    """

    def __init__(
        self,
        store: Store,
        *,
        near: NearCopy | None = None,
        cache: NodeCache | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._near = near
        self._cache = cache
        self._should_stop = should_stop
        self._thread_buffers = threading.local()

    def read(self, shard: Shard) -> memoryview:
        """Return the verified bytes of ``shard``; valid until the same thread calls this again.

        Raises:
            IntegrityError: the shard is missing, or does not match its hash or size.
            StoreError: storage did not answer; the checkpoint may be valid.
            LoadStoppedError: ``should_stop`` returned True.
        """
        if self._should_stop():
            raise LoadStoppedError
        # A manifest is a program's word: memory is not reserved by its word alone.
        stored = next(self._store.list(shard.key), None) if shard.size > _TRUSTED_BYTES else None
        if shard.size > _TRUSTED_BYTES and (stored is None or stored[:2] != (shard.key, shard.size)):
            raise IntegrityError(f"shard {shard.key} has not the {shard.size:,} bytes that the manifest says")
        if self._near is not None:
            found = self._near.view(shard)
            if found is None and self._near.read_into(shard, buffer := self._buffer(shard.size)):
                found = buffer
            is_intact = found is not None and hashlib.sha256(found).hexdigest() == shard.sha256
            self._near.record(shard, is_intact=is_intact)
            if found is not None and is_intact:
                return found
        if self._cache is None:
            return self._fetch(shard)
        with self._cache.fetch_lock(shard.sha256, self._should_stop):
            if self._should_stop():  # it may have waited
                raise LoadStoppedError
            cached = self._from_cache(self._cache, shard)
            if cached is None:
                cached = self._fetch(shard)
                self._cache.add(shard.sha256, cached)
        return cached

    def _from_cache(self, cache: NodeCache, shard: Shard) -> memoryview | None:
        buffer = self._buffer(shard.size)
        if not cache.read_into(shard.sha256, buffer):
            return None
        if hashlib.sha256(buffer).hexdigest() != shard.sha256:
            cache.discard(shard.sha256)
            return None
        return buffer

    def _fetch(self, shard: Shard) -> memoryview:
        try:
            return self._read(shard)
        except IntegrityError:
            # A second try: damage in transit must not quarantine a checkpoint that is intact in storage.
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
        """Return a buffer of this thread, which reuses its memory from shard to shard."""
        buffer: bytearray = getattr(self._thread_buffers, "buffer", bytearray())
        if len(buffer) < size_bytes:
            buffer = self._thread_buffers.buffer = bytearray(size_bytes)
        return memoryview(buffer)[:size_bytes]
