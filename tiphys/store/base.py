"""Interface of object storage: create-only writes, reads, and ordered listings.

Objects are never overwritten, so readers never see a partial change. Keys are
relative to the store's prefix, use ``/`` between parts, and never begin with
one. `UploadSource` gives an upload its bytes, from memory or from a file that
need not fit into memory.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from tiphys.errors import IntegrityError, UsageError
from tiphys.records.base import MAX_RECORD_BYTES

LONGEST_KEY_BYTES = 1024
"""Limit of S3."""
_NO_PARTS = frozenset(("", ".", ".."))


class ObjectInfo(NamedTuple):
    """One row of a listing."""

    key: str
    size: int
    version: str = ""
    """What the store keeps about these bytes, such as the ETag: it differs once an object was written again. Empty if
    the store keeps nothing of this kind."""


class Store(Protocol):
    """A store of immutable objects. Implementations are thread-safe.

    Every method raises `StoreError` if storage is unavailable, is full, or
    refuses the request, after the implementation's own retries.
    """

    @property
    def url(self) -> str:
        """URL with which `open_store` opens this store; contains no secret."""

    @property
    def namespace(self) -> str:
        """The namespace whose runs it holds. Records that name another are damaged. Empty if it is not known."""

    def create(self, key: str, data: bytes | bytearray, *, sha256: str | None = None) -> None:
        """Write an object durably if no object has this key.

        ``sha256`` is that of ``data`` in hex, if the caller has computed it.

        Raises:
            ObjectExistsError: an object has this key; nothing was changed. After a
                lost reply it may be the caller's own (see `tiphys.store.claims`).
        """

    def create_from_file(self, key: str, path: Path) -> None:
        """Like `create`, for bytes that need not fit in memory."""

    def read(self, key: str) -> bytes:
        """The whole object, of at most `MAX_RECORD_BYTES`; `chunks` reads larger ones.

        Raises:
            ObjectMissingError: no object has this key.
            IntegrityError: the object is larger.
        """

    def chunks(self, key: str, size_bytes: int = 8 << 20) -> Iterator[bytes]:
        """The object in pieces of at most ``size_bytes``.

        Meant for large objects: the caller verifies its own hash, so the store
        does not compute another one.

        Raises:
            ObjectMissingError: no object has this key; raised at the first piece.
        """

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects whose key begins with ``prefix``, in ascending bytewise order of key.

        Pages are fetched as they are consumed, so a caller that stops early saves requests.
        """

    def prefixes(self, prefix: str) -> Iterator[str]:
        """Each distinct prefix of keys, up to the first ``/`` after ``prefix``, in ascending order.

        With ``runs/a/x`` and ``runs/b/y`` stored, ``prefixes("runs/")`` gives
        ``runs/a/`` and ``runs/b/``, without listing the objects below them.
        """

    def delete(self, key: str) -> None:
        """Remove an object; no error if it is absent. Only retention removes checkpoints."""

    def artifact_key(self, key: str) -> str:
        """``key`` as Argo uses it in the bucket, with the store's prefix."""

    def from_artifact_key(self, key: str) -> str | None:
        """The inverse of `artifact_key`; None for a key outside this store."""


def check_key(key: str) -> str:
    """Return ``key`` if it is valid in every store.

    A key has at most 1,024 bytes of UTF-8 (the limit of S3) and no part that is
    empty, ``.`` or ``..``.

    Raises:
        UsageError: the key is not valid.
    """
    if not is_unicode(key):
        raise UsageError(f"key {key!r} is not valid Unicode; rename the file it comes from")
    if (size := len(key.encode())) > LONGEST_KEY_BYTES:
        raise UsageError(f"key {key[:60]!r}… has {size} bytes; storage takes at most {LONGEST_KEY_BYTES}")
    if "\0" in key or not _NO_PARTS.isdisjoint(key.split("/")):
        raise UsageError(f"key {key!r} is not valid: its parts must not be empty, '.' or '..'")
    return key


def is_unicode(name: str) -> bool:
    """Whether a file name is valid Unicode; files with other names have no valid key."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_read_size(store: Store, key: str, size_bytes: int) -> None:
    """Check the size of an object that is to be read as a whole.

    Raises:
        IntegrityError: it has more than `MAX_RECORD_BYTES`.
    """
    if size_bytes > MAX_RECORD_BYTES:
        raise IntegrityError(
            f"{store.url}: {key} has {size_bytes:,} bytes, and no record has more than {MAX_RECORD_BYTES:,}; it was "
            "not read: restore the object or remove the run"
        )


class UploadSource(NamedTuple):
    """Bytes to upload. ``read(offset, size)`` is thread-safe."""

    size: int
    read: Callable[[int, int], bytes | bytearray]
    sha256: str | None = None
    """SHA-256 of all bytes in hex, if already computed."""


def bytes_source(data: bytes | bytearray, sha256: str | None = None) -> UploadSource:
    """An upload source for bytes in memory. One read of all bytes makes no copy."""

    def read(offset: int, size: int) -> bytes | bytearray:
        return data if size == len(data) else bytes(memoryview(data)[offset : offset + size])

    return UploadSource(len(data), read, sha256)


@contextlib.contextmanager
def file_source(path: Path) -> Iterator[UploadSource]:
    """An upload source for a file.

    Raises:
        UsageError: the file cannot be read, or becomes shorter during the upload.
    """
    with open_source(path) as stream:
        descriptor = stream.fileno()

        def read(offset: int, size: int) -> bytes:
            data = os.pread(descriptor, size, offset)
            if len(data) != size:
                raise UsageError(f"{path} changed while it was being stored; store it once it is complete")
            return data

        yield UploadSource(os.fstat(descriptor).st_size, read)


def open_source(path: Path) -> BinaryIO:
    """Open a file for an upload.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        return path.open("rb")
    except OSError as error:
        raise UsageError(f"cannot read {path} to store it: {error.strerror}") from error
