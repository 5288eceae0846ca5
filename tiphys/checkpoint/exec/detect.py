"""Which checkpoints of a folder are whole? Decided from looks at it alone, without I/O.

A program says that a checkpoint is whole by writing a marker last, or not at
all; then nothing changing for a while must do. Either way two looks must agree:
a file that changes twice within one tick of its clock shows the same time.
"""

import fnmatch
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tiphys.checkpoint.exec.files import Entry, Listing
from tiphys.checkpoint.exec.options import Options


class Found(NamedTuple):
    """A checkpoint in the folder, whole or not. ``name`` is its path, empty for the folder itself."""

    name: str
    entries: Listing
    marked: bool

    @property
    def modified_ns(self) -> int:
        """When its newest file was written."""
        return max((entry.modified_ns for entry in self.entries.values()), default=0)


def checkpoints_in(listing: Listing, options: Options) -> list[Found]:
    """The checkpoints of a folder that hold at least one file."""
    groups: dict[str, dict[str, Entry]] = {}
    for path, entry in listing.items():
        if (name := _owner(path, options.checkpoint)) is not None:
            groups.setdefault(name, {})[path] = entry
    return [
        Found(name, entries, any(matches(path, options.marker) for path in entries))
        for name, entries in groups.items()
        if any(entry.kind != "folder" for entry in entries.values())
    ]


def matches(path: str, pattern: str) -> bool:
    """Whether ``path`` fits ``pattern``, part by part: ``*`` does not reach over a slash."""
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def global_step(found: Found, pattern: re.Pattern[str]) -> int | None:
    """The highest number that ``pattern`` finds in the name of a checkpoint, or in its paths if it has no name."""
    names = [found.name] if found.name else list(found.entries)
    steps = [int(text) for name in names for text in _texts(pattern, name) if text.isascii() and text.isdecimal()]
    return max(steps, default=None)


class Watch:
    """Remembers from look to look since when each checkpoint has been as it is."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._seen: dict[str, _Seen] = {}
        self._settled: dict[str, Listing] = {}

    def settle(self, found: Iterable[Found]) -> None:
        """These are committed, or refused for good: they are of no interest until they change."""
        self._settled |= {one.name: one.entries for one in found}

    def observe(self, found: Iterable[Found], now: float) -> None:
        """Take note of another look."""
        before, self._seen = self._seen, {}
        for one in found:
            last = before.get(one.name)
            same = last is not None and last.found.entries == one.entries
            self._seen[one.name] = _Seen(one, last.since, last.looks + 1) if last and same else _Seen(one, now, 1)

    def whole(self, now: float, *, ended: bool = False, finished: bool = False) -> list[Found]:
        """Checkpoints that can be committed now, the newest last.

        ``ended`` says that the program runs no more, at ``now``, and
        ``finished`` that it did so on its own, with nothing left half written.
        """
        fresh = [seen for seen in self._seen.values() if self._settled.get(seen.found.name) != seen.found.entries]
        whole = [seen.found for seen in fresh if self._is_whole(seen, now, ended, finished)]
        return sorted(whole, key=lambda found: found.modified_ns)

    def _is_whole(self, seen: "_Seen", now: float, ended: bool, finished: bool) -> bool:
        if self._options.marker:
            return seen.found.marked and (ended or seen.looks > 1)
        return finished or (seen.looks > 1 and now - seen.since >= self._options.quiet_seconds)


@dataclass(frozen=True)
class _Seen:
    found: Found
    since: float
    looks: int


def _owner(path: str, pattern: str) -> str | None:
    """Name of the checkpoint that ``path`` belongs to; None if it belongs to none."""
    if not pattern:
        return ""
    parts = path.split("/")
    name = "/".join(parts[: pattern.count("/") + 1])
    return name if matches(name, pattern) else None


def _texts(pattern: re.Pattern[str], name: str) -> Iterator[str]:
    for match in pattern.finditer(name):
        yield (match[1] if pattern.groups else match[0]) or ""
