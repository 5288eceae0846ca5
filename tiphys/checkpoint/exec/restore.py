"""Filling the folder before the program starts, with bytes that were all verified.

Everything is written below a folder of our own first, and only takes its place
once every hash was compared: the program never sees half a checkpoint, nor one
that is mixed from two.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tiphys.checkpoint.exec.files import Entry, Index, Span, read_index
from tiphys.checkpoint.restore.shard_reader import ShardReader
from tiphys.errors import IntegrityError, StoreError
from tiphys.records import CheckpointManifest, Shard
from tiphys.store import Store
from tiphys.threads import in_parallel

_ARRIVING = ".tiphys-restore"
ASIDE = ".tiphys-set-aside"
"""Where things go that were in the way; what an earlier attempt had put there goes for good."""

_THREADS = 4


def restore(
    store: Store,
    manifest: CheckpointManifest,
    root: Path,
    before_shard: Callable[[], None],
    in_the_way: Sequence[str] = (),
) -> None:
    """Write the files of a checkpoint below ``root``. ``before_shard`` may raise to give up.

    What has the same name, and the names ``in_the_way``, are moved out of the
    program's sight, to `ASIDE`; what an attempt before had put there is deleted.

    Raises:
        IntegrityError: some shard is damaged or missing; ``root`` is as it was.
        StoreError: storage did not answer, or the disk is full.
    """
    arriving = root / _ARRIVING
    with _explained(root):
        shutil.rmtree(arriving, ignore_errors=True)
        arriving.mkdir()
    try:
        reader = ShardReader(store)
        index = read_index(bytes(reader.read(manifest.shards[0])))
        _fetch(reader, manifest.shards[1:], index, arriving, before_shard)
        with _explained(root):
            _take_place(arriving, root, index, in_the_way)
    finally:
        shutil.rmtree(arriving, ignore_errors=True)


def _fetch(
    reader: ShardReader, shards: Sequence[Shard], index: Index, arriving: Path, before_shard: Callable[[], None]
) -> None:
    if [sum(span.size for span in spans) for spans in index.pieces] != [shard.size for shard in shards]:
        raise IntegrityError("the shards are not those that the index tells of")
    with _explained(arriving):
        for path, entry in index.entries.items():
            _make(arriving / path, entry)

    def fetch(_: int, job: tuple[tuple[Span, ...], Shard]) -> None:
        before_shard()
        spans, shard = job
        content = reader.read(shard)
        with _explained(arriving):
            _write(arriving, spans, content)

    in_parallel(fetch, list(zip(index.pieces, shards, strict=True)), _THREADS)
    with _explained(arriving):
        for path, entry in index.entries.items():
            _dress(arriving / path, entry)


def _make(place: Path, entry: Entry) -> None:
    if entry.kind == "folder":
        place.mkdir(parents=True, exist_ok=True)
    elif entry.kind == "file":
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()


def _write(arriving: Path, spans: Sequence[Span], content: memoryview) -> None:
    start = 0
    for span in spans:
        with (arriving / span.path).open("r+b", buffering=0) as stream:
            stream.seek(span.offset)
            rest = content[start : start + span.size]
            while rest:
                rest = rest[stream.write(rest) :]
        start += span.size


def _dress(place: Path, entry: Entry) -> None:
    if entry.kind == "link":
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(entry.target)
    elif entry.kind == "file":
        os.utime(place, ns=(entry.modified_ns, entry.modified_ns))
        place.chmod(entry.mode)


def _take_place(arriving: Path, root: Path, index: Index, in_the_way: Sequence[str]) -> None:
    names = [index.checkpoint] if index.checkpoint else sorted({path.partition("/")[0] for path in index.entries})
    _set_aside(root, sorted({*in_the_way, *names}))
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (arriving / name).rename(root / name)
    # The innermost first, and last of all: a folder that may not be written cannot be moved either.
    for path, entry in reversed(index.entries.items()):
        if entry.kind == "folder":
            (root / path).chmod(entry.mode)


def _set_aside(root: Path, names: Sequence[str]) -> None:
    shutil.rmtree(root / ASIDE, ignore_errors=True)
    for name in names:
        if os.path.lexists(root / name):  # it may have gone with the folder that it was in
            place = root / ASIDE / name
            place.parent.mkdir(parents=True, exist_ok=True)
            (root / name).rename(place)


@contextmanager
def _explained(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"the checkpoint cannot be restored into {place}: {error.strerror}; see to space and permissions there"
        ) from error
