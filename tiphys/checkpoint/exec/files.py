"""The files of a checkpoint as shards: an index, then the content of the files, joined and cut.

The content is joined, because ten thousand small files must not become as many
objects; it is cut, because a file of any size must fit through little memory.
The index keeps names, modes and times, so that a program that looks for the
newest file finds the one that it wrote last.

`scan_folder` calls ``stat`` once for each file and opens none, because the
program is writing them. A scan records entries that a checkpoint cannot contain
instead of raising, since most of them are not part of any checkpoint.
"""

import contextlib
import fnmatch
import json
import os
import posixpath
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from tiphys.checkpoint.exec.layouts import base_name, is_log
from tiphys.checkpoint.save.commit import BufferedShard
from tiphys.errors import IntegrityError, TiphysError, UsageError

TIPHYS_FOLDERS = ".tiphys-*"
"""Folders that Tiphys creates in the program's folder: the staging area of a restore, and files moved aside."""


@dataclass(frozen=True, slots=True)
class FileEntry:
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
    inside: str | None = None
    """Path in the folder that a link leads to; None if that is outside."""
    problem: str = ""
    """Why the entry cannot be part of a checkpoint."""
    folder_ns: tuple[int, int] = field(default=(0, 0), compare=False)
    """Modification and change time of a folder: an entry that appears in it changes them, and not the checkpoint."""

    @property
    def times_ns(self) -> tuple[int, int]:
        """Modification and change time."""
        return self.folder_ns if self.kind == "folder" else (self.modified_ns, self.changed_ns)


FolderListing = Mapping[str, FileEntry]
"""Entries by their path in the folder, with ``/`` between names. Names that are not UTF-8 keep their bytes
(``os.fsdecode``)."""


def scan_folder(root: Path, ignored: Sequence[str]) -> dict[str, FileEntry]:
    """Return all entries below ``root``, folders before their content, without names that match ``ignored``.

    Entries that vanish during the scan are left out.
    """
    patterns = (TIPHYS_FOLDERS, *ignored)
    roots = (os.path.abspath(root), os.path.realpath(root))  # noqa: PTH100  a link into either is inside
    return dict(sorted(_scan_below(root, "", patterns, roots), key=itemgetter(0)))


def file_entry(status: os.stat_result) -> FileEntry:
    """The entry of a regular file."""
    mode = stat.S_IMODE(status.st_mode)
    return FileEntry("file", mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def check_unchanged(root: Path, entries: FolderListing) -> None:
    """Look at ``entries`` again; raises `FileChangedError` if one of them is not as it was."""
    for path, expected in entries.items():
        try:
            status = (root / path).lstat()
            if expected.kind == "file" and stat.S_ISREG(status.st_mode):
                is_same = is_unchanged(base_name(path), file_entry(status), expected)
            else:
                is_same = expected.kind != "file" and (status.st_ino, stat.S_ISLNK(status.st_mode)) == (
                    expected.inode or status.st_ino,
                    expected.kind == "link",
                )
        except OSError:
            is_same = False
        if not is_same:
            raise FileChangedError(f"{root / path} was written to while its checkpoint was stored")


def is_unchanged(name: str, entry: FileEntry, expected: FileEntry) -> bool:
    """Return whether the content of ``expected`` is still there: a log may have grown since."""
    grew = entry.inode == expected.inode and entry.size >= expected.size
    return entry == expected or (is_log(name) and grew)


def _scan_below(
    folder: Path, prefix: str, ignored: Sequence[str], roots: Sequence[str]
) -> Iterator[tuple[str, FileEntry]]:
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
            yield prefix + entry.name, _make_entry(entry, status, prefix, roots)
        except FileNotFoundError:
            continue
        if stat.S_ISDIR(status.st_mode):
            yield from _scan_below(Path(entry.path), f"{prefix}{entry.name}/", ignored, roots)


def _make_entry(entry: "os.DirEntry[str]", status: os.stat_result, prefix: str, roots: Sequence[str]) -> FileEntry:
    if stat.S_ISREG(status.st_mode):
        return file_entry(status)
    if stat.S_ISDIR(status.st_mode):
        return FileEntry("folder", stat.S_IMODE(status.st_mode), folder_ns=(status.st_mtime_ns, status.st_ctime_ns))
    if stat.S_ISLNK(status.st_mode):
        target = os.readlink(entry.path)  # noqa: PTH115  a Path would tidy the target up
        return make_link(prefix + entry.name, target, roots, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    return FileEntry("unusable", problem="is neither a file, a folder nor a link")


def make_link(
    path: str, target: str, roots: Sequence[str], modified_ns: int, changed_ns: int = 0, inode: int = 0
) -> FileEntry:
    """Return the entry of the link ``path`` in a folder that has the absolute paths ``roots``."""
    inside: str | None = target
    if target.startswith("/"):
        inside = next((target[len(root) + 1 :] for root in roots if target.startswith(f"{root}/")), None)
    else:
        inside = posixpath.join(posixpath.dirname(path), target)
    if inside is not None:
        inside = posixpath.normpath(inside)
        inside = None if inside.partition("/")[0] == ".." else inside
    problem = "" if inside else f"links to {target!r}, which is outside of the folder"
    if inside and not target.startswith("/") and "/../" in f"{target.lstrip('./')}/":
        # Through another link, such a way up leads out of the folder.
        problem = f"links to {target!r}, which goes up after a name; let it link to the shortest path"
    return FileEntry("link", 0, 0, modified_ns, changed_ns, inode, target, inside, problem)


FindOpen = Callable[[], Collection[str] | None]
"""Returns the files that are open for writing; None if that is unknown."""

FRAMEWORK = "files"
_FORMAT = 2
SHARD_BYTES = 32 << 20
_COPIED_BYTES = 16 << 20
_COPY_TRIES = 20
_MAX_PIECES = 1 << 16
"""More shards than a manifest can name."""
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4095
_INT64 = range(-(1 << 63), 1 << 63)


class FileChangedError(TiphysError):
    """The program changed a checkpoint while it was read, so it was not complete."""


class FileUnreadableError(UsageError):
    """The file ``path`` of a checkpoint cannot be read."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


class FileSpan(NamedTuple):
    """``size`` bytes of the file ``path``, starting at ``offset``."""

    path: str
    offset: int
    size: int


@dataclass(frozen=True)
class ContentShard:
    """Consecutive content of some files, read on demand."""

    root: Path
    spans: tuple[FileSpan, ...]
    entries: FolderListing
    copies: Mapping[str, bytearray]
    suffix: str = "bin"

    @property
    def size_bytes(self) -> int:
        return sum(span.size for span in self.spans)

    def data(self) -> bytearray:
        content = bytearray()
        for span in self.spans:
            if (copy := self.copies.get(span.path)) is None:
                content += _read_span(self.root / span.path, span, self.entries[span.path])
            else:
                content += memoryview(copy)[span.offset : span.offset + span.size]
        return content


def copy_small_files(
    root: Path, entries: FolderListing, paths: Collection[str], restless: Collection[str], find_open: FindOpen
) -> tuple[dict[str, bytearray], FolderListing]:
    """Return the content of those of ``paths`` that are files and fit into little memory, the smallest first.

    Returns:
        The content by path, and ``entries`` with those of the content: a file of ``restless`` may be newer.

    Raises:
        FileChangedError: another file is not as in ``entries``, or one of ``restless`` cannot be read in a whole state.
        FileUnreadableError: a file cannot be read.
    """
    files = sorted((entries[path].size, path) for path in paths if entries[path].kind == "file")
    copies, found, total_bytes = dict[str, bytearray](), dict(entries), 0
    for size, path in files:
        total_bytes += size
        if total_bytes > _COPIED_BYTES:
            break
        for tries_left in range(_COPY_TRIES if path in restless else 1, 0, -1):
            try:
                copies[path] = _read_span(root / path, FileSpan(path, 0, found[path].size), found[path])
                if found[path] != entries[path]:
                    # No process has it open, and it is as it was: it had been written to its end.
                    open_files = find_open()
                    if open_files is None or path in open_files:
                        raise FileChangedError(f"{root / path} was written to while it was being stored")
                    check_unchanged(root, {path: found[path]})
                break
            except FileChangedError:
                if tries_left == 1:
                    raise
                with contextlib.suppress(OSError):
                    found[path] = file_entry((root / path).lstat())
    return copies, found


def build_shards(
    root: Path, roots: Sequence[str], entries: FolderListing, copies: Mapping[str, bytearray] | None = None
) -> list[BufferedShard | ContentShard]:
    """Return shards that hold ``entries`` exactly; ``roots`` are the paths that a restore puts in place.

    The first is the index: everything except the content of the files, which is read later where ``copies`` lacks it.

    Raises:
        UsageError: an entry cannot be saved; the message names it.
    """
    for path, entry in entries.items():
        if entry.problem:
            raise UsageError(f"{path!r} {entry.problem}, so the checkpoint that contains it cannot be saved")
    # Nothing but the order of its rows keeps the change times, which cannot be set.
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].times_ns[1], item[0])))
    pieces = split_into_spans(_file_sizes(entries), SHARD_BYTES)
    contents = [ContentShard(root, spans, entries, copies or {}) for spans in pieces]
    return [BufferedShard("json", _encode_index(roots, entries)), *contents]


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

    roots: list[str]
    """Paths that a restore puts in place, each with all that is below it."""
    entries: dict[str, FileEntry]
    """In the order of their change times."""
    pieces: list[tuple[FileSpan, ...]]
    """The file spans of each content shard."""


def read_index(document: bytes) -> CheckpointIndex:
    """Read an index shard, which any program of the tenant may have written.

    Raises:
        UsageError: a later version of Tiphys wrote it.
        IntegrityError: it is none, or names what cannot be part of a checkpoint.
    """
    try:
        content = json.loads(document)
        version, shard_bytes = content["format"], content.get("shard_bytes")
        if isinstance(version, int) and version > _FORMAT:
            raise UsageError(
                f"the checkpoint's index has format {version!r}, this version of Tiphys reads {_FORMAT}; "
                "use an image with the version that wrote it"
            )
        rows, roots = content["entries"], content["roots"]
        entries = {_checked_path(row["path"]): _decode_entry(row) for row in rows}
        roots = [_checked_path(root) for root in roots]
        total_bytes = sum(entry.size for entry in entries.values())
        is_valid = version == _FORMAT and type(shard_bytes) is int and shard_bytes > 0
        if (
            not is_valid
            or not isinstance(content["roots"], list)
            or len(entries) != len(rows)
            or total_bytes > shard_bytes * _MAX_PIECES
        ):
            raise ValueError("its format, its sizes or its paths cannot be those of a checkpoint")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError) as error:
        raise IntegrityError(f"the index of the checkpoint is damaged: {error}") from None
    _check_tree(roots, entries)
    return CheckpointIndex(roots, entries, list(split_into_spans(_file_sizes(entries), shard_bytes)))


def _checked_path(path: object) -> str:
    """Return ``path`` if it is the path of an entry below a folder, for which nothing reads ``..`` or links.

    Raises:
        IntegrityError: it is not.
    """
    try:
        parts = os.fsencode(path).split(b"/") if isinstance(path, str) else [b""]
    except UnicodeEncodeError:
        parts = [b""]
    is_usable = all(part not in (b"", b".", b"..") and len(part) <= _MAX_NAME_BYTES for part in parts)
    if not is_usable or sum(map(len, parts)) + len(parts) > _MAX_PATH_BYTES or any(b"\0" in part for part in parts):
        raise IntegrityError(f"the index names {str(path)[:200]!r}, which cannot be part of a checkpoint")
    if fnmatch.fnmatchcase(os.fsdecode(parts[0]), TIPHYS_FOLDERS):
        raise IntegrityError(f"the index names {path!r}, which cannot be part of a checkpoint: Tiphys uses that folder")
    return os.fsdecode(b"/".join(parts))


def _check_tree(roots: Sequence[str], entries: FolderListing) -> None:
    """Raise `IntegrityError` unless the roots contain all entries, and no entry lies below a link or a file."""
    others = {path for path, entry in entries.items() if entry.kind != "folder"}
    own, above = set(roots), set[str]()
    for path in [*roots, *entries]:
        parents = list(map(str, PurePosixPath(path).parents))[:-1]
        is_below_other = not others.isdisjoint(parents)
        if path in own:
            above.update(parents)
        is_loose = path not in above and own.isdisjoint([path, *parents])
        is_root_twice = path in own and (path not in entries or not own.isdisjoint(parents))
        if is_below_other or is_loose or is_root_twice or (path in entries and entries[path].problem):
            raise IntegrityError(f"the index names {path!r}, which cannot be part of a checkpoint")
    if len(own) != len(roots):
        raise IntegrityError("the index names a root twice, which cannot be part of a checkpoint")


def _file_sizes(entries: FolderListing) -> dict[str, int]:
    return {path: entry.size for path, entry in entries.items() if entry.kind == "file"}


def _encode_index(roots: Sequence[str], entries: FolderListing) -> bytes:
    # Names that are not UTF-8 contain surrogates; JSON escapes them, which preserves their bytes.
    rows = [{"path": path, **_encode_entry(entry)} for path, entry in entries.items()]
    document = {"format": _FORMAT, "roots": list(roots), "shard_bytes": SHARD_BYTES, "entries": rows}
    return json.dumps(document).encode()


def _encode_entry(entry: FileEntry) -> dict[str, Any]:
    fields: dict[str, Any] = {"kind": entry.kind, "mode": entry.mode, "modified_ns": entry.times_ns[0]}
    if entry.kind == "file":
        return {**fields, "size": entry.size}
    if entry.kind == "link":
        # The folder may have another path when it is restored.
        return {**fields, **({"inside": entry.inside} if entry.target.startswith("/") else {"target": entry.target})}
    return fields


def _decode_entry(fields: dict[str, Any]) -> FileEntry:
    """The entry of a row; raises `ValueError` for a value that no entry can have."""
    kind, modified_ns = fields["kind"], _number(fields, "modified_ns", _INT64)
    if kind == "link":
        target = fields.get("target", f"//{fields.get('inside')}")
        if not isinstance(target, str) or "\0" in target or not 0 < len(os.fsencode(target)) <= _MAX_PATH_BYTES:
            raise ValueError(f"{str(target)[:200]!r} cannot be the target of a link")
        return make_link(fields["path"], target, ("/",), modified_ns)
    if kind not in ("file", "folder"):
        raise ValueError(f"{str(kind)[:200]!r} is no kind of entry")
    size = _number(fields, "size", range(_INT64.stop)) if kind == "file" else 0
    return FileEntry(kind, _number(fields, "mode", range(0o10000)), size, modified_ns, folder_ns=(modified_ns, 0))


def _number(fields: dict[str, Any], name: str, limits: range) -> int:
    value = fields.get(name, 0)
    if type(value) is not int or value not in limits:
        raise ValueError(f"{name} cannot be {str(value)[:200]!r}")
    return value


def _read_span(path: Path, span: FileSpan, expected: FileEntry) -> bytearray:
    """Read a part of a file; raises `FileChangedError` if the file differs from ``expected`` before or after."""
    try:
        # The program may have replaced the file by a link or a pipe since the scan.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb", buffering=0) as stream:
            data = bytearray()
            if same := is_unchanged(path.name, file_entry(os.fstat(descriptor)), expected):
                stream.seek(span.offset)
                while len(data) < span.size and (more := stream.read(span.size - len(data))):
                    data += more
                same = is_unchanged(path.name, file_entry(os.fstat(descriptor)), expected)
    except FileNotFoundError:
        raise FileChangedError(f"{path} vanished while it was being stored") from None
    except OSError as error:
        raise FileUnreadableError(span.path, f"{path} cannot be read: {error.strerror}") from error
    if not same or len(data) != span.size:
        raise FileChangedError(f"{path} was written to while it was being stored")
    return data
