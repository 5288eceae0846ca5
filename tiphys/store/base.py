"""What Tiphys asks of object storage: create-only writes, reads, ordered listings.

Nothing is ever overwritten, so no reader sees a half state. Keys are relative
to the store's prefix, use ``/`` between parts and never begin with one.

Where the bytes of a new object come from: memory, or a file that need not fit into it.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from tiphys.errors import UsageError

_LONGEST_KEY_BYTES = 1024
_NO_PARTS = frozenset(("", ".", ".."))


class ObjectInfo(NamedTuple):
    """One row of a listing."""

    key: str
    size: int


class Store(Protocol):
    """A place for immutable objects. Implementations are safe to share between threads.

    Every method raises `StoreError` when storage is out of reach, out of space
    or refuses, after its own retries.
    """

    @property
    def url(self) -> str:
        """What `open_store` needs to open it again; never holds a secret."""

    def create(self, key: str, data: bytes | bytearray, *, sha256: str | None = None) -> None:
        """Write an object durably if no object has this key. ``sha256`` is that of ``data``, if it is known.

        Raises:
            ObjectExistsError: one has; nothing was changed. After a lost reply
                it may be our own (see `tiphys.store.claims`).
        """

    def create_from_file(self, key: str, path: Path) -> None:
        """Like `create`, for bytes that need not fit in memory."""

    def read(self, key: str) -> bytes:
        """The whole object.

        Raises:
            ObjectMissingError: no object has this key.
        """

    def chunks(self, key: str, size_bytes: int = 8 << 20) -> Iterator[bytes]:
        """The object in pieces of at most ``size_bytes``. Raises like `read`, at the first piece.

        For large objects: the caller compares a hash of its own, so no store
        computes another one.
        """

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose key begins with ``prefix``, in ascending order of key (bytewise).

        Pages are fetched as they are consumed: stop early and pay less.
        """

    def prefixes(self, prefix: str) -> Iterator[str]:
        """Each distinct start of a key, up to the first ``/`` after ``prefix``, in ascending order.

        With ``runs/a/x`` and ``runs/b/y`` stored, ``prefixes("runs/")`` gives
        ``runs/a/`` and ``runs/b/``, without listing what lies below them.
        """

    def delete(self, key: str) -> None:
        """Remove an object; no error if it is absent. What decisions rest on is removed by retention alone."""

    def artifact_key(self, key: str) -> str:
        """``key`` as Argo sees it in the bucket (with the store's prefix)."""

    def from_artifact_key(self, key: str) -> str | None:
        """The inverse of `artifact_key`; None for a key outside this store."""


def check_key(key: str) -> str:
    """Return ``key`` if every store can hold it; `UsageError` otherwise.

    A key is at most 1,024 bytes of UTF-8 (the limit of S3) and names a place
    below the store: no empty part, ``.`` or ``..``.
    """
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise UsageError(f"key {key!r} is not valid Unicode; rename the file it comes from") from error
    if size > _LONGEST_KEY_BYTES:
        raise UsageError(f"key {key[:60]!r}… has {size} bytes; storage takes at most {_LONGEST_KEY_BYTES}")
    if "\0" in key or not _NO_PARTS.isdisjoint(key.split("/")):
        raise UsageError(f"key {key!r} is not valid: its parts must not be empty, '.' or '..'")
    return key


class Source(NamedTuple):
    """Bytes to upload; ``read(offset, size)`` may be called from several threads."""

    size: int
    read: Callable[[int, int], bytes | bytearray]
    sha256: str | None = None
    """Of all of it, in hexadecimal, where somebody has computed it already."""


def bytes_source(data: bytes | bytearray, sha256: str | None = None) -> Source:
    """Bytes in memory, as something to upload; the whole of them is not copied."""

    def read(offset: int, size: int) -> bytes | bytearray:
        return data if size == len(data) else bytes(memoryview(data)[offset : offset + size])

    return Source(len(data), read, sha256)


@contextlib.contextmanager
def file_source(path: Path) -> Iterator[Source]:
    """A file, as something to upload. Raises `UsageError` if it cannot be read, or shrinks meanwhile."""
    with open_source(path) as stream:
        descriptor = stream.fileno()

        def read(offset: int, size: int) -> bytes:
            data = os.pread(descriptor, size, offset)
            if len(data) != size:
                raise UsageError(f"{path} changed while it was being stored; store it once it is complete")
            return data

        yield Source(os.fstat(descriptor).st_size, read)


def open_source(path: Path) -> BinaryIO:
    """Open a file that is to be stored; `UsageError` if it cannot be read."""
    try:
        return path.open("rb")
    except OSError as error:
        raise UsageError(f"cannot read {path}, which was to be stored: {error.strerror}") from error
