"""Shards on the disk of a node, so that they cross the network once for all ranks, and not again after a restart.

A file is named by the SHA-256 of what it should hold and believed no further
than that: whoever reads it compares the hash. A cache that is full, read-only
or broken costs time and nothing else.
"""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Collection, Iterator
from pathlib import Path

from tiphys.checkpoint.journal import tell

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
