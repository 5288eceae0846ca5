"""Store on a POSIX file system: the default of the local engine, and for checkpoints on a shared volume.

It gives the same guarantees as conditional writes to object storage. An object
is written to a temporary file, flushed, and published by ``link(2)``, which
fails if the name exists and is atomic on local disks and on NFS. A process that
dies before that leaves only a file in ``.tmp/``.
"""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from tiphys.errors import (
    NotFoundError,
    ObjectExistsError,
    ObjectMissingError,
    SettingsError,
    StoreError,
    StoreFullError,
    UsageError,
)
from tiphys.faults import failpoint
from tiphys.store.base import ObjectInfo, check_key, check_read_size, is_unicode, open_source


@contextlib.contextmanager
def translate_os_errors(path: Path, action: str, size_bytes: int = 0) -> Iterator[None]:
    """Raise each `OSError` with the remedy.

    ``action`` is what failed as a verb, such as ``write``.

    Raises:
        SettingsError: the block raised an `OSError` that stays until a person changes the folder or its permissions.
        StoreFullError: the disk or its quota is full.
        StoreError: it raised another one.
    """
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        kind = StoreFullError if is_full else SettingsError if error.errno in _PERMANENT else StoreError
        raise kind(f"cannot {action} {path}: {_reason(error, size_bytes)}") from error


_NO_ACCESS = (errno.EACCES, errno.EPERM)
_PERMANENT = (
    *_NO_ACCESS,
    errno.EROFS,
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EXDEV, errno.EOPNOTSUPP),
)


def _reason(error: OSError, size_bytes: int) -> str:
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return f"the disk or its quota is full and {size_bytes:,} bytes are needed; free some space and try again"
        case code if code in _NO_ACCESS:
            access = f"give uid {os.geteuid()} access to {error.filename or 'it'}"
            return f"{error.strerror}; {access}, or choose another store; it needs a file system with hard links"
        case errno.EROFS:
            return "its file system is mounted read-only; mount it for writing, or choose another store"
        case errno.ENOTDIR | errno.EEXIST:
            return f"there is a file where a folder is needed ({error.filename}); choose another name or store"
        case errno.ENAMETOOLONG:
            return "a part of its name is too long for this file system (usually 255 bytes); choose a shorter one"
        case errno.EXDEV | errno.EOPNOTSUPP:
            return "the store needs one file system that supports hard links; choose another folder, or s3://"
    return f"{error.strerror or error}; check the disk and the mount"


_TEMPORARY = ".tmp"
_STALE_SECONDS = 24 * 3600.0
_COPY_BYTES = 1 << 20
# A folder that a concurrent delete removed is created again; each further attempt needs another delete.
_FOLDER_ATTEMPTS = 10


class DirectoryStore:
    """A store in a folder.

    Args:
        path: The folder. It must be on one file system that supports hard links.

    Raises:
        NotFoundError: the folder is missing and ``create`` is False.
        StoreError: the folder cannot be created, or is a file.
    """

    def __init__(self, path: Path | str, create: bool = True, *, namespace: str = "") -> None:
        self._root = Path(path).absolute()
        self.namespace = namespace
        self._stale_files_removed = False
        with translate_os_errors(self._root, "open the store"):
            if not create and not self._root.exists():
                raise NotFoundError(
                    f"there is no store at {self._root}: the folder does not exist; "
                    "check the path, and that the volume is mounted"
                )
            self._root.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return self._root.as_uri()

    def create(
        self,
        key: str,
        data: bytes | bytearray,
        *,
        sha256: str | None = None,  # noqa: ARG002  a file system needs no checksum
    ) -> None:
        self._create(key, len(data), lambda stream: stream.write(data))

    def create_from_file(self, key: str, path: Path) -> None:
        with open_source(path) as source:
            size = os.fstat(source.fileno()).st_size
            self._create(key, size, lambda stream: shutil.copyfileobj(source, stream, _COPY_BYTES))

    def read(self, key: str) -> bytes:
        with self._open(key) as stream:
            check_read_size(self, key, os.fstat(stream.fileno()).st_size)
            return stream.read()

    def chunks(self, key: str, size_bytes: int = 8 << 20) -> Iterator[bytes]:
        with self._open(key) as stream:
            while chunk := stream.read(size_bytes):
                yield chunk

    @contextlib.contextmanager
    def _open(self, key: str) -> Iterator[BinaryIO]:
        path = self._path(key)
        with translate_os_errors(path, "read"):
            try:
                stream = path.open("rb")
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                self._check_mounted()
                raise ObjectMissingError(f"{self.url} has no object {key}") from None
            with stream:
                yield stream

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for entry, key in self._children(prefix):
            if key.endswith("/"):
                yield from self.list(key)
            else:
                try:
                    status = entry.stat()
                except FileNotFoundError:
                    continue  # the object was deleted since the folder was listed
                except OSError as error:
                    with translate_os_errors(Path(entry.path), "read the size of"):
                        raise error
                # No program can set the change time, so no program can write a file again unnoticed.
                yield ObjectInfo(key, status.st_size, f"{status.st_ctime_ns:x}-{status.st_ino:x}")

    def prefixes(self, prefix: str) -> Iterator[str]:
        for _, key in self._children(prefix):
            if key.endswith("/") and next(self.list(key), None):
                yield key

    def delete(self, key: str) -> None:
        path = self._path(key)
        with translate_os_errors(path, "delete"):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                return
            self._prune(path.parent)

    @property
    def folder(self) -> Path:
        return self._root

    @property
    def temporary_folder(self) -> Path:
        """Folder of the files that are not published yet."""
        return self._root / _TEMPORARY

    def artifact_key(self, key: str) -> str:
        return check_key(key)

    def from_artifact_key(self, key: str) -> str | None:
        try:
            return check_key(key)
        except UsageError:
            return None

    def _path(self, key: str) -> Path:
        if check_key(key).partition("/")[0] == _TEMPORARY:
            raise UsageError(f"key {key!r} is not valid: {_TEMPORARY}/ is reserved for temporary files of the store")
        return self._root / key

    def _create(self, key: str, size_bytes: int, write: Callable[[BinaryIO], object]) -> None:
        path = self._path(key)
        temporary = self.temporary_folder / secrets.token_hex(16)
        with translate_os_errors(path, "write", size_bytes):
            try:
                self._write_temporary(temporary, write)
                failpoint("store.before_publish")
                published = self._publish(temporary, path)
                failpoint("store.after_publish")
            finally:
                temporary.unlink(missing_ok=True)
        if not published:
            raise ObjectExistsError(f"{self.url} already has an object {key}; objects are never overwritten")

    def _write_temporary(self, temporary: Path, write: Callable[[BinaryIO], object]) -> None:
        if not temporary.parent.is_dir():
            self._check_mounted()
            temporary.parent.mkdir(exist_ok=True)
        with temporary.open("xb") as stream:
            self._remove_stale_files(os.fstat(stream.fileno()).st_mtime)
            write(stream)
            stream.flush()
            os.fsync(stream.fileno())

    def _publish(self, temporary: Path, path: Path) -> bool:
        """Link the finished file to its name, durably; False if the name exists."""
        linked = self._link(temporary, path)
        # Flushed even if the name exists: the caller relies on the winner's name, so it must survive a power failure.
        self._flush_folders(path.parent)
        # NFS may repeat a link after a lost reply, and then reports the name as existing.
        return linked or temporary.stat().st_nlink > 1

    def _link(self, temporary: Path, path: Path) -> bool:
        for _ in range(_FOLDER_ATTEMPTS):
            with contextlib.suppress(FileNotFoundError):
                if not _make_folder(path.parent):
                    continue
                try:
                    os.link(temporary, path)
                except FileExistsError:
                    if path.is_dir():
                        raise StoreError(f"cannot write {path}: there are keys below it, so it is a folder") from None
                    return False
                return True
        raise StoreError(f"cannot write {path}: its folder keeps being removed; is something else cleaning the store?")

    def _flush_folders(self, folder: Path) -> None:
        """Flush all folders on the path of an object; another process may have created one without flushing it yet."""
        while folder != self._root.parent:
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            folder = folder.parent

    def _remove_stale_files(self, now: float) -> None:
        """Remove the files of dead writers, once per process. ``now`` is the time of the file system."""
        if self._stale_files_removed:
            return
        self._stale_files_removed = True
        for path in (self._root / _TEMPORARY).iterdir():
            with contextlib.suppress(FileNotFoundError):
                if now - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()

    def _children(self, prefix: str) -> Iterator[tuple[os.DirEntry[str], str]]:
        """Entries of one folder whose key begins with ``prefix``, in order of key; a folder's key ends in ``/``.

        A folder sorts as ``name/``, because the keys below it begin with that.
        """
        start, slash, _ = prefix.rpartition("/")
        start += slash
        if not _may_hold_objects(start):
            return
        rows = [(f"{start}{entry.name}{'/' if entry.is_dir() else ''}", entry) for entry in self._scan(start)]
        for key, entry in sorted(rows, key=lambda row: os.fsencode(row[0])):
            # The parts of ``start`` were checked, and no name of an entry is empty, ``.`` or ``..``.
            if key.startswith(prefix) and is_unicode(key) and (start or _may_hold_objects(key)):
                yield entry, key

    def _scan(self, folder: str) -> tuple[os.DirEntry[str], ...]:
        path = self._root / folder
        with translate_os_errors(path, "list"):
            try:
                with os.scandir(path) as entries:
                    return tuple(entries)
            except (FileNotFoundError, NotADirectoryError):
                self._check_mounted()
                return ()

    def _check_mounted(self) -> None:
        """Raise `StoreError` if the folder is gone, because a missing volume must not look like an empty store."""
        if not self._root.is_dir():
            raise StoreError(f"the store's folder {self._root} is gone; check that its volume is still mounted")

    def _prune(self, folder: Path) -> None:
        """Remove empty folders, because object storage has none."""
        while folder != self._root:
            try:
                folder.rmdir()
            except OSError:
                return
            folder = folder.parent


def _make_folder(folder: Path) -> bool:
    """Create a folder; False if a concurrent delete removed it before it could be checked."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        if folder.is_file():
            raise
        return False
    return True


def _may_hold_objects(folder: str) -> bool:
    """Whether a valid key can begin with ``folder``, which is empty, ends in ``/``, or is a key."""
    parts = folder.split("/")
    return parts[0] != _TEMPORARY and not any(part in ("", ".", "..") for part in parts[:-1])
