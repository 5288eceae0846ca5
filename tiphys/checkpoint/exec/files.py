"""The files of a checkpoint as shards: an index, then the content of the files, joined and cut.

The content is joined, because ten thousand small files must not become as many
objects; it is cut, because a file of any size must fit through little memory.
The index keeps names, modes and times, so that a program that looks for the
newest file finds the one that it wrote last.

`scan_folder` calls ``stat`` once for each file and opens none, because the
program is writing them. A scan records entries that a checkpoint cannot contain
instead of raising, since most of them are not part of any checkpoint.
"""

import fnmatch
import json
import os
import posixpath
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tiphys.errors import IntegrityError, TiphysError, UsageError

TIPHYS_FOLDERS = ".tiphys-*"
"""Folders that Tiphys creates in the program's folder: the staging area of a restore, and files moved aside."""


class FileEntry(NamedTuple):
    """One entry of a folder. Equal entries of a file have equal content, unless the clock was set back."""

    kind: Literal["file", "folder", "link", "unusable"]
    mode: int = 0
    size: int = 0
    modified_ns: int = 0
    changed_ns: int = 0
    """Change time of the inode (ctime), which no program can set."""
    inode: int = 0
    target: str = ""
    """Target of a link."""
    problem: str = ""
    """Why the entry is ``unusable``."""


FolderListing = Mapping[str, FileEntry]
"""Entries by their path in the folder, with ``/`` between names. Names that are not UTF-8 keep their bytes
(``os.fsdecode``)."""


def scan_folder(root: Path, ignored: Sequence[str]) -> dict[str, FileEntry]:
    """Return all entries below ``root``, folders before their content, without names that match ``ignored``.

    Entries that vanish during the scan are left out.
    """
    patterns = (TIPHYS_FOLDERS, *ignored)
    return dict(sorted(_scan_below(root, "", patterns)))


def file_entry(status: os.stat_result) -> FileEntry:
    """The entry of a regular file."""
    mode = stat.S_IMODE(status.st_mode)
    return FileEntry("file", mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def _scan_below(folder: Path, prefix: str, ignored: Sequence[str]) -> Iterator[tuple[str, FileEntry]]:
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        yield prefix.rstrip("/") or ".", FileEntry("unusable", problem=f"cannot be read: {error.strerror}")
        return
    for entry in entries:
        if any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in ignored):
            continue
        try:
            status = entry.stat(follow_symlinks=False)
            yield prefix + entry.name, _make_entry(entry, status)
        except FileNotFoundError:
            continue
        if stat.S_ISDIR(status.st_mode):
            yield from _scan_below(Path(entry.path), f"{prefix}{entry.name}/", ignored)


def _make_entry(entry: "os.DirEntry[str]", status: os.stat_result) -> FileEntry:
    if stat.S_ISREG(status.st_mode):
        return file_entry(status)
    if stat.S_ISDIR(status.st_mode):
        return FileEntry("folder", stat.S_IMODE(status.st_mode))
    if stat.S_ISLNK(status.st_mode):
        return FileEntry("link", target=os.readlink(entry.path))  # noqa: PTH115  a Path would tidy the target up
    return FileEntry("unusable", problem="is neither a file, a folder nor a link")


FRAMEWORK = "files"
SHARD_BYTES = 32 << 20


class FileChangedError(TiphysError):
    """The program changed a checkpoint while it was read, so it was not complete."""


class FileSpan(NamedTuple):
    """``size`` bytes of the file ``path``, starting at ``offset``."""

    path: str
    offset: int
    size: int


@dataclass(frozen=True)
class IndexShard:
    """The first shard: everything except the content of the files."""

    document: bytes
    suffix: str = "json"

    @property
    def size_bytes(self) -> int:
        return len(self.document)

    def data(self) -> bytes:
        return self.document


@dataclass(frozen=True)
class ContentShard:
    """Consecutive content of some files, read on demand."""

    root: Path
    spans: tuple[FileSpan, ...]
    entries: FolderListing
    suffix: str = "bin"

    @property
    def size_bytes(self) -> int:
        return sum(span.size for span in self.spans)

    def data(self) -> bytearray:
        content = bytearray()
        for span in self.spans:
            content += _read_span(self.root / span.path, span, self.entries[span.path])
        return content


def build_shards(root: Path, checkpoint: str, entries: FolderListing) -> list[IndexShard | ContentShard]:
    """Return shards that hold ``entries``, the entries of the checkpoint ``checkpoint``, exactly.

    Raises:
        UsageError: an entry cannot be saved; the message names it.
    """
    for path, entry in entries.items():
        if problem := _find_problem(path, entry, checkpoint):
            raise UsageError(f"{path!r} {problem}, so the checkpoint that contains it cannot be saved")
    contents = [ContentShard(root, spans, entries) for spans in split_into_spans(_file_sizes(entries), SHARD_BYTES)]
    return [IndexShard(_encode_index(checkpoint, entries)), *contents]


def split_into_spans(files: dict[str, int], shard_bytes: int) -> Iterator[tuple[FileSpan, ...]]:
    """Cut the concatenated content of ``files`` (path → size) into pieces of ``shard_bytes``."""
    piece: list[FileSpan] = []
    free_bytes = shard_bytes
    for path, size in files.items():
        offset = 0
        while offset < size:
            length = min(free_bytes, size - offset)
            piece.append(FileSpan(path, offset, length))
            offset, free_bytes = offset + length, free_bytes - length
            if not free_bytes:
                yield tuple(piece)
                piece, free_bytes = [], shard_bytes
    if piece:
        yield tuple(piece)


class CheckpointIndex(NamedTuple):
    """The content of the first shard: how the other shards are put together."""

    checkpoint: str
    """Path of the checkpoint in the folder; empty for the folder as a whole."""
    entries: dict[str, FileEntry]
    pieces: list[tuple[FileSpan, ...]]
    """The file spans of each content shard."""


def read_index(document: bytes) -> CheckpointIndex:
    """Read an index shard.

    Raises:
        UsageError: a later version of Tiphys wrote it.
        IntegrityError: it names a path outside of the checkpoint.
    """
    content = json.loads(document)
    if content.get("format") != 1:
        raise UsageError(
            f"the checkpoint's index has format {content.get('format')!r}, this version of Tiphys reads format 1; "
            "use an image with the version that wrote it"
        )
    entries = {fields["path"]: _decode_entry(fields) for fields in content["entries"]}
    for path, entry in entries.items():
        if any(part in ("", ".", "..") for part in path.split("/")) or _find_problem(path, entry, ""):
            raise IntegrityError(f"the index names {path!r}, which cannot be part of a checkpoint")
    return CheckpointIndex(
        content["checkpoint"], entries, list(split_into_spans(_file_sizes(entries), content["shard_bytes"]))
    )


def _file_sizes(entries: FolderListing) -> dict[str, int]:
    return {path: entry.size for path, entry in entries.items() if entry.kind == "file"}


def _encode_index(checkpoint: str, entries: FolderListing) -> bytes:
    # Names that are not UTF-8 contain surrogates; JSON escapes them, which preserves their bytes.
    rows = [{"path": path, **_encode_entry(entry)} for path, entry in entries.items()]
    document = {"format": 1, "checkpoint": checkpoint, "shard_bytes": SHARD_BYTES, "entries": rows}
    return json.dumps(document).encode()


def _encode_entry(entry: FileEntry) -> dict[str, Any]:
    if entry.kind == "link":
        return {"kind": "link", "target": entry.target}
    if entry.kind == "folder":
        return {"kind": "folder", "mode": entry.mode}
    return {"kind": "file", "mode": entry.mode, "size": entry.size, "modified_ns": entry.modified_ns}


def _decode_entry(fields: dict[str, Any]) -> FileEntry:
    return FileEntry(
        kind=fields["kind"],
        mode=fields.get("mode", 0),
        size=fields.get("size", 0),
        modified_ns=fields.get("modified_ns", 0),
        target=fields.get("target", ""),
    )


def _find_problem(path: str, entry: FileEntry, checkpoint: str) -> str:
    """Return why this entry of ``checkpoint`` cannot be saved; empty if it can."""
    if entry.kind == "link":
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), entry.target))
        inside = target.startswith(f"{checkpoint}/") if checkpoint else target.partition("/")[0] not in ("..", "")
        if not inside:
            return f"links to {entry.target!r}, which is outside of it"
    return entry.problem


def _read_span(path: Path, span: FileSpan, expected: FileEntry) -> bytearray:
    """Read a part of a file; raises `FileChangedError` if the file differs from ``expected`` before or after."""
    try:
        # The program may have replaced the file by a link or a pipe since the scan.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb", buffering=0) as stream:
            data = bytearray()
            if same := file_entry(os.fstat(descriptor)) == expected:
                stream.seek(span.offset)
                while len(data) < span.size and (more := stream.read(span.size - len(data))):
                    data += more
                same = file_entry(os.fstat(descriptor)) == expected
    except FileNotFoundError:
        raise FileChangedError(f"{path} vanished while it was being stored") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if not same or len(data) != span.size:
        raise FileChangedError(f"{path} was written to while it was being stored")
    return data
