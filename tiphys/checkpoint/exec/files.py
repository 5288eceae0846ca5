"""The files of a checkpoint as shards: one index, then their bytes, joined and cut.

Joined, because ten thousand small files must not become as many objects; cut,
because a file of any size must pass through little memory. The index keeps
names, modes and times, so that a program that looks for the newest file finds
the one that it wrote last.

What lies in a folder, as far as one look can tell.

A look costs one ``stat`` for each file and opens none: the program owns them.
Whatever a checkpoint cannot hold is noted rather than raised, since most of
what lies around is no part of any checkpoint.
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

OWN = ".tiphys-*"
"""Folders that Tiphys makes below the program's: while it restores, and for what was in the way."""


class Entry(NamedTuple):
    """One name. Two equal entries of a file hold the same bytes, unless somebody sets clocks back."""

    kind: Literal["file", "folder", "link", "unusable"]
    mode: int = 0
    size: int = 0
    modified_ns: int = 0
    changed_ns: int = 0
    """Of the inode (ctime), which no program can set."""
    inode: int = 0
    target: str = ""
    """Of a link."""
    problem: str = ""
    """Why it is ``unusable``."""


Listing = Mapping[str, Entry]
"""Entries by their path below the folder, with ``/`` between names. Names that are not UTF-8 keep their bytes
(``os.fsdecode``)."""


def look(root: Path, ignored: Sequence[str]) -> dict[str, Entry]:
    """Everything below ``root``, folders before what they hold. What vanishes meanwhile is not in it."""
    patterns = (OWN, *ignored)
    return dict(sorted(_below(root, "", patterns)))


def entry_of(found: os.stat_result) -> Entry:
    """The entry of a regular file."""
    mode = stat.S_IMODE(found.st_mode)
    return Entry("file", mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def _below(folder: Path, prefix: str, ignored: Sequence[str]) -> Iterator[tuple[str, Entry]]:
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        yield prefix.rstrip("/") or ".", Entry("unusable", problem=f"cannot be read: {error.strerror}")
        return
    for entry in entries:
        if any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in ignored):
            continue
        try:
            found = entry.stat(follow_symlinks=False)
            yield prefix + entry.name, _stat_entry(entry, found)
        except FileNotFoundError:
            continue
        if stat.S_ISDIR(found.st_mode):
            yield from _below(Path(entry.path), f"{prefix}{entry.name}/", ignored)


def _stat_entry(entry: "os.DirEntry[str]", found: os.stat_result) -> Entry:
    if stat.S_ISREG(found.st_mode):
        return entry_of(found)
    if stat.S_ISDIR(found.st_mode):
        return Entry("folder", stat.S_IMODE(found.st_mode))
    if stat.S_ISLNK(found.st_mode):
        return Entry("link", target=os.readlink(entry.path))  # noqa: PTH115  a Path would tidy the target up
    return Entry("unusable", problem="is neither a file, a folder nor a link")


FRAMEWORK = "files"
SHARD_BYTES = 32 << 20


class ChangedMeanwhileError(TiphysError):
    """The program wrote to a checkpoint while it was read, so it was not whole."""


class Span(NamedTuple):
    """``size`` bytes of the file ``path`` from ``offset`` on."""

    path: str
    offset: int
    size: int


@dataclass(frozen=True)
class IndexShard:
    """Everything but the bytes of the files."""

    document: bytes
    suffix: str = "json"

    @property
    def size_bytes(self) -> int:
        return len(self.document)

    def data(self) -> bytes:
        return self.document


@dataclass(frozen=True)
class ContentShard:
    """Consecutive bytes of some files; read when they are wanted."""

    root: Path
    spans: tuple[Span, ...]
    entries: Listing
    suffix: str = "bin"

    @property
    def size_bytes(self) -> int:
        return sum(span.size for span in self.spans)

    def data(self) -> bytearray:
        content = bytearray()
        for span in self.spans:
            content += _read(self.root / span.path, span, self.entries[span.path])
        return content


def shards_of(root: Path, checkpoint: str, entries: Listing) -> list[IndexShard | ContentShard]:
    """Shards that hold ``entries``, which are those of ``checkpoint``, exactly.

    Raises:
        UsageError: something in it cannot be kept; the message names it.
    """
    for path, entry in entries.items():
        if problem := _problem(path, entry, checkpoint):
            raise UsageError(f"{path!r} {problem}, so the checkpoint that it is in cannot be kept")
    contents = [ContentShard(root, spans, entries) for spans in cut(_sizes(entries), SHARD_BYTES)]
    return [IndexShard(_document(checkpoint, entries)), *contents]


def cut(files: dict[str, int], shard_bytes: int) -> Iterator[tuple[Span, ...]]:
    """The bytes of ``files`` (path → size), one behind the other, in pieces of ``shard_bytes``."""
    piece: list[Span] = []
    room = shard_bytes
    for path, size in files.items():
        offset = 0
        while offset < size:
            taken = min(room, size - offset)
            piece.append(Span(path, offset, taken))
            offset, room = offset + taken, room - taken
            if not room:
                yield tuple(piece)
                piece, room = [], shard_bytes
    if piece:
        yield tuple(piece)


class Index(NamedTuple):
    """What the first shard of a checkpoint tells of the others."""

    checkpoint: str
    """Its path in the folder; empty if it is the folder as a whole."""
    entries: dict[str, Entry]
    pieces: list[tuple[Span, ...]]
    """What each of the other shards holds."""


def read_index(document: bytes) -> Index:
    """Read an index shard.

    Raises:
        UsageError: a later version of Tiphys wrote it.
        IntegrityError: it names places that no checkpoint of a folder holds.
    """
    content = json.loads(document)
    if content.get("format") != 1:
        raise UsageError(
            f"the checkpoint's index has format {content.get('format')!r}, this version of Tiphys reads format 1; "
            "use an image with the version that wrote it"
        )
    entries = {fields["path"]: _parse_entry(fields) for fields in content["entries"]}
    for path, entry in entries.items():
        if any(part in ("", ".", "..") for part in path.split("/")) or _problem(path, entry, ""):
            raise IntegrityError(f"the index names {path!r}, which cannot lie in a checkpoint")
    return Index(content["checkpoint"], entries, list(cut(_sizes(entries), content["shard_bytes"])))


def _sizes(entries: Listing) -> dict[str, int]:
    return {path: entry.size for path, entry in entries.items() if entry.kind == "file"}


def _document(checkpoint: str, entries: Listing) -> bytes:
    # Names that are not UTF-8 hold surrogates, which JSON escapes, so that their bytes survive.
    rows = [{"path": path, **_fields(entry)} for path, entry in entries.items()]
    document = {"format": 1, "checkpoint": checkpoint, "shard_bytes": SHARD_BYTES, "entries": rows}
    return json.dumps(document).encode()


def _fields(entry: Entry) -> dict[str, Any]:
    if entry.kind == "link":
        return {"kind": "link", "target": entry.target}
    if entry.kind == "folder":
        return {"kind": "folder", "mode": entry.mode}
    return {"kind": "file", "mode": entry.mode, "size": entry.size, "modified_ns": entry.modified_ns}


def _parse_entry(fields: dict[str, Any]) -> Entry:
    return Entry(
        kind=fields["kind"],
        mode=fields.get("mode", 0),
        size=fields.get("size", 0),
        modified_ns=fields.get("modified_ns", 0),
        target=fields.get("target", ""),
    )


def _problem(path: str, entry: Entry, checkpoint: str) -> str:
    """Why this entry of ``checkpoint`` cannot be kept; empty if it can."""
    if entry.kind == "link":
        place = posixpath.normpath(posixpath.join(posixpath.dirname(path), entry.target))
        inside = place.startswith(f"{checkpoint}/") if checkpoint else place.partition("/")[0] not in ("..", "")
        if not inside:
            return f"links to {entry.target!r}, which is no part of it"
    return entry.problem


def _read(path: Path, span: Span, expected: Entry) -> bytearray:
    """Bytes of a file that is still the one that was seen."""
    try:
        # What was a file may be a link or a pipe by now.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb", buffering=0) as stream:
            data = bytearray()
            if same := entry_of(os.fstat(descriptor)) == expected:
                stream.seek(span.offset)
                while len(data) < span.size and (more := stream.read(span.size - len(data))):
                    data += more
                same = entry_of(os.fstat(descriptor)) == expected
    except FileNotFoundError:
        raise ChangedMeanwhileError(f"{path} vanished while it was being stored") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if not same or len(data) != span.size:
        raise ChangedMeanwhileError(f"{path} was written to while it was being stored")
    return data
