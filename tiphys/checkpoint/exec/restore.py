"""Restores the folder of the program before it starts, from verified shards only.

`restore_files` writes everything into a staging folder and moves it into place
only after every hash was verified: the program never sees half a checkpoint,
nor a mixture of two.
"""

import os
import shutil
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


def restore_files(
    store: Store,
    manifest: CheckpointManifest,
    root: Path,
    before_shard: Callable[[], None],
    obsolete_names: Sequence[str] = (),
) -> None:
    """Write the files of a checkpoint into ``root``.

    Files of the same names, and ``obsolete_names``, are moved to
    `SET_ASIDE_FOLDER`, whose content from an earlier attempt is deleted.

    Args:
        store: Store of the checkpoints.
        manifest: The checkpoint.
        root: Folder of the program.
        before_shard: Called before each shard is read; may raise to cancel.
        obsolete_names: Names in ``root`` to move aside.

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
            _apply_metadata(staging / path, entry)


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


def _apply_metadata(path: Path, entry: FileEntry) -> None:
    if entry.kind == "link":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(entry.target)
    elif entry.kind == "file":
        os.utime(path, ns=(entry.modified_ns, entry.modified_ns))
        path.chmod(entry.mode)


def _move_into_place(staging: Path, root: Path, index: CheckpointIndex, obsolete_names: Sequence[str]) -> None:
    names = [index.checkpoint] if index.checkpoint else sorted({path.partition("/")[0] for path in index.entries})
    _set_aside(root, sorted({*obsolete_names, *names}))
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).rename(root / name)
    # Modes are set last and innermost first: a folder without write permission can neither be moved nor filled.
    for path, entry in reversed(index.entries.items()):
        if entry.kind == "folder":
            (root / path).chmod(entry.mode)


def _set_aside(root: Path, names: Sequence[str]) -> None:
    shutil.rmtree(root / SET_ASIDE_FOLDER, ignore_errors=True)
    for name in names:
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
