"""What lies in a folder, as far as one look can tell.

A look costs one ``stat`` for each file and opens none: the program owns them.
Whatever a checkpoint cannot hold is noted rather than raised, since most of
what lies around is no part of any checkpoint.
"""

import fnmatch
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

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
