"""What went wrong between the store and its file system, in words a person can act on."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from tiphys.errors import StoreError


@contextlib.contextmanager
def explained(path: Path, verb: str, size_bytes: int = 0) -> Iterator[None]:
    """Raise every error of the operating system as a `StoreError` that says what to do.

    Args:
        path: What was worked on.
        verb: What was tried, such as ``write``.
        size_bytes: How much was to be written.
    """
    try:
        yield
    except OSError as error:
        raise StoreError(f"cannot {verb} {path}: {_reason(error, size_bytes)}") from error


def _reason(error: OSError, size_bytes: int) -> str:
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return f"the disk or its quota is full and {size_bytes:,} bytes are needed; free some space and try again"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return f"{error.strerror}; give uid {os.geteuid()} write access, and use a file system with hard links"
        case errno.ENOTDIR | errno.EEXIST:
            return f"there is a file where a folder is needed ({error.filename}); choose another name or store"
        case errno.ENAMETOOLONG:
            return "a part of its name is too long for this file system (usually 255 bytes); choose a shorter one"
        case errno.EXDEV | errno.EOPNOTSUPP:
            return "the store must lie on one file system that knows hard links; choose another folder, or s3://"
    return f"{error.strerror or error}; check the disk and the mount"
