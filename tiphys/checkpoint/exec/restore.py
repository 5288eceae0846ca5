"""Restores the folder of the program before it starts, from verified shards only.

`restore_files` writes everything into a staging folder and moves it into place
only after every hash was verified: the program never sees half a checkpoint,
nor a mixture of two.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tiphys.checkpoint.exec.files import CheckpointIndex, FileEntry, FileSpan, read_index
from tiphys.checkpoint.restore.shard_reader import ShardReader
from tiphys.errors import IntegrityError, StoreError
from tiphys.records import CheckpointManifest, Shard
from tiphys.store import Store
from tiphys.threads import map_parallel

_STAGING_FOLDER = ".tiphys-restore"
SET_ASIDE_FOLDER = ".tiphys-set-aside"
"""Folder for files that a restore moves aside; the next restore deletes it."""

_THREADS = 4
_ORDER_SECONDS = 2.0
"""Longest time to spend on change times that differ."""


def restore_files(
    store: Store,
    manifest: CheckpointManifest,
    root: Path,
    before_shard: Callable[[], None],
    obsolete_names: Sequence[str] = (),
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

    Returns:
        What was restored.

    Raises:
        IntegrityError: a shard is damaged or missing; ``root`` is unchanged.
        StoreError: storage did not answer, or the disk is full.
    """
    staging = root / _STAGING_FOLDER
    with _translate_os_errors(root):
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
    try:
        reader = ShardReader(store)
        index = read_index(bytes(reader.read(manifest.shards[0])))
        _fetch_files(reader, manifest.shards[1:], index, staging, before_shard)
        with _translate_os_errors(root):
            _move_into_place(staging, root, index, obsolete_names)
        return index
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _fetch_files(
    reader: ShardReader,
    shards: Sequence[Shard],
    index: CheckpointIndex,
    staging: Path,
    before_shard: Callable[[], None],
) -> None:
    if [sum(span.size for span in spans) for spans in index.pieces] != [shard.size for shard in shards]:
        raise IntegrityError("the sizes of the shards do not match the index")
    with _translate_os_errors(staging):
        for path, entry in index.entries.items():
            _create_entry(staging / path, entry)

    def fetch(_: int, job: tuple[tuple[FileSpan, ...], Shard]) -> None:
        before_shard()
        spans, shard = job
        content = reader.read(shard)
        with _translate_os_errors(staging):
            _write_spans(staging, spans, content)

    map_parallel(fetch, list(zip(index.pieces, shards, strict=True)), _THREADS)
    with _translate_os_errors(staging):
        for path, entry in index.entries.items():
            _apply_metadata(staging / path, entry, staging.parent)


def _create_entry(path: Path, entry: FileEntry) -> None:
    if entry.kind == "folder":
        path.mkdir(parents=True, exist_ok=True)
    elif entry.kind == "file":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def _write_spans(staging: Path, spans: Sequence[FileSpan], content: memoryview) -> None:
    start = 0
    for span in spans:
        with (staging / span.path).open("r+b", buffering=0) as stream:
            stream.seek(span.offset)
            rest = content[start : start + span.size]
            while rest:
                rest = rest[stream.write(rest) :]
        start += span.size


def _apply_metadata(path: Path, entry: FileEntry, root: Path) -> None:
    if entry.kind == "link":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(root / str(entry.inside) if entry.target.startswith("/") else entry.target)
    elif entry.kind == "file":
        path.chmod(entry.mode)


def _move_into_place(staging: Path, root: Path, index: CheckpointIndex, obsolete_names: Sequence[str]) -> None:
    set_aside(root, [*obsolete_names, *index.roots])
    for name in index.roots:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).rename(root / name)
    # Modes are set last and innermost first: a folder without write permission can neither be moved nor filled.
    for path in sorted(index.entries, reverse=True):
        if index.entries[path].kind == "folder":
            (root / path).chmod(index.entries[path].mode)
    _restore_times(root, index)


def _restore_times(root: Path, index: CheckpointIndex) -> None:
    """Set the modification times, in the order of the change times: a program may look for the newest by either."""
    deadline = time.monotonic() + _ORDER_SECONDS
    last_ns = 0
    for path, entry in index.entries.items():
        modified_ns = entry.times_ns[0]
        while True:  # the clock of the file system may tick only a hundred times a second
            os.utime(root / path, ns=(modified_ns, modified_ns), follow_symlinks=False)
            changed_ns = (root / path).lstat().st_ctime_ns
            if changed_ns > last_ns or time.monotonic() > deadline:
                break
            time.sleep(0.0005)
        last_ns = changed_ns


def set_aside(root: Path, names: Sequence[str]) -> None:
    """Move ``names`` to `SET_ASIDE_FOLDER`, and delete what an earlier call moved there."""
    shutil.rmtree(root / SET_ASIDE_FOLDER, ignore_errors=True)
    for name in sorted(set(names)):
        if os.path.lexists(root / name):  # an entry inside a folder has moved with that folder
            target = root / SET_ASIDE_FOLDER / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (root / name).rename(target)


@contextmanager
def _translate_os_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"the checkpoint cannot be restored into {folder}: {error.strerror}; check free space and permissions there"
        ) from error
