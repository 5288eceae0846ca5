"""Where the bytes of a new object come from: memory, or a file that need not fit into it."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tiphys.errors import UsageError


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
