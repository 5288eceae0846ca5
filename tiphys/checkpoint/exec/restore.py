"""Restores the folder of the program before it starts, from verified shards only.

`restore_files` writes everything into a staging folder and moves it into place
only after every hash was verified: the program never sees half a checkpoint,
nor a mixture of two. What an earlier process of the pod left in the folder is read
there where its hash is that of the shard, and not from the store.

Checkpoints, and what lies in the folder already, are written by programs. So every
file is opened below the descriptor of the folder, one name after the other, and no
link is followed: what is in the way of a path is moved aside.
"""

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tiphys.checkpoint.exec.files import CheckpointIndex, FileEntry, FileSpan, read_index
from tiphys.checkpoint.restore.shard_reader import NodeCache, ShardReader
from tiphys.checkpoint.telemetry.events import log_message
from tiphys.errors import IntegrityError, StoreError
from tiphys.records import CheckpointManifest, CheckpointRef, Shard
from tiphys.store import Store
from tiphys.threads import map_parallel

_STAGING_FOLDER = ".tiphys-restore"
SET_ASIDE_FOLDER = ".tiphys-set-aside"
"""Folder for files that a restore moves aside; the next restore deletes it."""

_THREADS = 4
_ORDER_SECONDS = 2.0
"""Longest time to spend on change times that differ."""
_MAX_INDEX_BYTES = 256 << 20
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW
# With O_PATH, a folder that may be searched and not read can be opened, too.
_SEARCH = _FOLDER | getattr(os, "O_PATH", os.O_RDONLY)


def restore_files(
    store: Store,
    manifest: CheckpointManifest,
    root: Path,
    before_shard: Callable[[], None],
    obsolete_names: Sequence[str] = (),
    cache: NodeCache | None = None,
) -> CheckpointIndex:
    """Write the files of a checkpoint into ``root``.

    Files of the same names, and ``obsolete_names``, are moved to
    `SET_ASIDE_FOLDER`, whose content from an earlier attempt is deleted.

    Args:
        store: Store of the checkpoints.
        manifest: The checkpoint.
        root: Folder of the program.
        before_shard: Called before each shard is read; may raise to cancel.
        obsolete_names: Names in ``root`` to move aside.
        cache: Cache of the node; None for no cache.

    Returns:
        What was restored.

    Raises:
        IntegrityError: a shard is damaged or missing; ``root`` is unchanged.
        StoreError: storage did not answer, or the disk is full.
    """
    staging = root / _STAGING_FOLDER
    with _translate_os_errors(root):
        _remove(staging)
        staging.mkdir()
    try:
        if manifest.shards[0].size > _MAX_INDEX_BYTES:
            raise IntegrityError(
                f"its index has {manifest.shards[0].size:,} bytes, at most {_MAX_INDEX_BYTES:,} are read"
            )
        index = read_index(bytes(ShardReader(store, cache=cache).read(manifest.shards[0])))
        shards = manifest.shards[1:]
        with _open_folder(root) as folder:
            left = _FilesLeft(folder, dict(zip([shard.key for shard in shards], index.pieces, strict=False)))
            _fetch_files(ShardReader(store, near=left, cache=cache), shards, index, staging, before_shard)
        left.report(manifest.ref, root)
        if cache:
            cache.trim({shard.sha256 for shard in manifest.shards})
        with _translate_os_errors(root):
            _move_into_place(staging, root, index, obsolete_names)
        return index
    finally:
        shutil.rmtree(staging, ignore_errors=True)


class _FilesLeft:
    """The files of a folder as a near copy of a checkpoint (`tiphys.checkpoint.restore.shard_reader.NearCopy`).

    Args:
        folder: Descriptor of the folder.
        pieces: What each shard consists of, by its key.
    """

    def __init__(self, folder: int, pieces: Mapping[str, Sequence[FileSpan]]) -> None:
        self._folder = folder
        self._pieces = pieces
        self._intact: list[str] = []

    def view(self, shard: Shard) -> None:  # noqa: ARG002  the files may be written to
        return None

    def read_into(self, shard: Shard, buffer: memoryview) -> bool:
        start = 0
        try:
            for span in self._pieces[shard.key]:
                with _open_parent(self._folder, span.path) as (parent, name):
                    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
                try:
                    if os.preadv(descriptor, [buffer[start : start + span.size]], span.offset) != span.size:
                        return False
                finally:
                    os.close(descriptor)
                start += span.size
        except OSError:
            return False
        return start == shard.size

    def record(self, shard: Shard, *, is_intact: bool) -> None:
        if is_intact:
            self._intact.append(shard.key)

    def report(self, ref: CheckpointRef, root: Path) -> None:
        """Log how much of ``ref`` was in the folder, if anything was."""
        if self._intact:
            log_message(
                f"{len(self._intact)} of {len(self._pieces)} shards of {ref.display_name} were still in {root}, and "
                "not read from the store"
            )


def _fetch_files(
    reader: ShardReader,
    shards: Sequence[Shard],
    index: CheckpointIndex,
    staging: Path,
    before_shard: Callable[[], None],
) -> None:
    if [sum(span.size for span in spans) for spans in index.pieces] != [shard.size for shard in shards]:
        raise IntegrityError("the sizes of the shards do not match the index")
    with _open_folder(staging) as folder:
        for path, entry in index.entries.items():
            _create_entry(folder, path, entry)

        def fetch(_: int, job: tuple[tuple[FileSpan, ...], Shard]) -> None:
            before_shard()
            spans, shard = job
            content = reader.read(shard)
            with _translate_os_errors(staging):
                _write_spans(folder, spans, content)

        map_parallel(fetch, list(zip(index.pieces, shards, strict=True)), _THREADS)
        for path, entry in index.entries.items():
            _apply_metadata(folder, path, entry, staging.parent)


def _create_entry(folder: int, path: str, entry: FileEntry) -> None:
    if entry.kind == "folder":
        with _open_parent(folder, f"{path}/.", creates=True):
            return
    with _open_parent(folder, path, creates=True) as (parent, name):
        if entry.kind == "file":
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=parent))


def _write_spans(folder: int, spans: Sequence[FileSpan], content: memoryview) -> None:
    start = 0
    for span in spans:
        with _open_parent(folder, span.path) as (parent, name):
            descriptor = os.open(name, os.O_WRONLY | os.O_NOFOLLOW, dir_fd=parent)
        with os.fdopen(descriptor, "wb", buffering=0) as stream:
            stream.seek(span.offset)
            rest = content[start : start + span.size]
            while rest:
                rest = rest[stream.write(rest) :]
        start += span.size


def _apply_metadata(folder: int, path: str, entry: FileEntry, root: Path) -> None:
    if entry.kind == "link":
        target = os.path.join(root, str(entry.inside)) if entry.target.startswith("/") else entry.target  # noqa: PTH118
        with _open_parent(folder, path) as (parent, name):
            os.symlink(target, name, dir_fd=parent)
    elif entry.kind == "file":
        _set_mode(folder, path, entry.mode, 0)


def _move_into_place(staging: Path, root: Path, index: CheckpointIndex, obsolete_names: Sequence[str]) -> None:
    set_aside(root, [*obsolete_names, *index.roots])
    with _open_folder(staging) as source, _open_folder(root) as folder:
        for name in index.roots:
            _move(source, name, folder, name)
        # Modes are set last and innermost first: a folder without write permission can neither be moved nor filled.
        for path in sorted(index.entries, reverse=True):
            if index.entries[path].kind == "folder":
                _set_mode(folder, path, index.entries[path].mode, _FOLDER)
        _restore_times(folder, index)


def _restore_times(folder: int, index: CheckpointIndex) -> None:
    """Set the modification times, in the order of the change times: a program may look for the newest by either."""
    deadline = time.monotonic() + _ORDER_SECONDS
    last_ns = 0
    for path, entry in index.entries.items():
        modified_ns = entry.times_ns[0]
        with _open_parent(folder, path) as (parent, name):
            while True:  # the clock of the file system may tick only a hundred times a second
                os.utime(name, ns=(modified_ns, modified_ns), dir_fd=parent, follow_symlinks=False)
                changed_ns = os.stat(name, dir_fd=parent, follow_symlinks=False).st_ctime_ns
                if changed_ns > last_ns or time.monotonic() > deadline:
                    break
                time.sleep(0.0005)
        last_ns = changed_ns


def set_aside(root: Path, names: Sequence[str]) -> None:
    """Move ``names`` to `SET_ASIDE_FOLDER`, and delete what an earlier call moved there.

    A link or file where the path of a name has a folder is moved instead.
    """
    _remove(root / SET_ASIDE_FOLDER)
    with _open_folder(root) as folder:
        for name in sorted(set(names)):
            if obstacle := _find_obstacle(folder, name):  # an entry inside a folder has moved with that folder
                _move(folder, obstacle, folder, f"{SET_ASIDE_FOLDER}/{obstacle}")


def _find_obstacle(folder: int, path: str) -> str:
    """``path`` if something is there; the first part of it that is no folder; empty if neither exists."""
    parts = path.split("/")
    for number in range(1, len(parts) + 1):
        head = "/".join(parts[:number])
        with _open_parent(folder, head) as (parent, name):
            try:
                status = os.stat(name, dir_fd=parent, follow_symlinks=False)
            except FileNotFoundError:
                return ""
        if number == len(parts) or not stat.S_ISDIR(status.st_mode):
            return head
    return ""


def _move(source: int, path: str, target: int, new_path: str) -> None:
    with (
        _open_parent(source, path) as (parent, name),
        _open_parent(target, new_path, creates=True) as (new_parent, new_name),
    ):
        os.rename(name, new_name, src_dir_fd=parent, dst_dir_fd=new_parent)


def _set_mode(folder: int, path: str, mode: int, flags: int) -> None:
    with _open_parent(folder, path) as (parent, name):
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | flags, dir_fd=parent)
    try:
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Delete a folder with its content, or what lies there under its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _open_folder(root: Path) -> Iterator[int]:
    with _translate_os_errors(root):
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _open_parent(folder: int, path: str, *, creates: bool = False) -> Iterator[tuple[int, str]]:
    """Open the folder that holds ``path`` below ``folder``, without following a link; return it with the last name.

    Args:
        folder: Descriptor of a folder.
        path: Relative path of valid names.
        creates: Whether to create missing folders.
    """
    *parents, name = path.split("/")
    current = os.open(".", _SEARCH, dir_fd=folder)
    try:
        for part in parents:
            if creates:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=current)
            parent, current = current, os.open(part, _SEARCH, dir_fd=current)
            os.close(parent)
        yield current, name
    finally:
        os.close(current)


@contextlib.contextmanager
def _translate_os_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"the checkpoint cannot be restored into {folder}: {error.strerror}; check free space and permissions there"
        ) from error
