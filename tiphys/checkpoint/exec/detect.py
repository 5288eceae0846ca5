"""Decides which checkpoints of a folder are complete, from scans alone and without I/O.

A program marks a checkpoint as complete by writing a marker file last. Without
a marker, a checkpoint is complete when nothing has changed for a while. Both
rules need two equal scans, because a file that changes twice within one tick of
the file system's clock keeps the same time.
"""

import fnmatch
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tiphys.checkpoint.exec.files import FileEntry, FolderListing
from tiphys.checkpoint.exec.options import ExecOptions


class FolderCheckpoint(NamedTuple):
    """A checkpoint in the folder, complete or not. ``name`` is its path, empty for the folder itself."""

    name: str
    entries: FolderListing
    has_marker: bool

    @property
    def modified_ns(self) -> int:
        """Time of its newest change, in nanoseconds since the epoch."""
        return max((entry.modified_ns for entry in self.entries.values()), default=0)


def find_checkpoints(listing: FolderListing, options: ExecOptions) -> list[FolderCheckpoint]:
    """Group the entries of a folder into checkpoints; those without a file are left out."""
    groups: dict[str, dict[str, FileEntry]] = {}
    for path, entry in listing.items():
        if (name := _checkpoint_name(path, options.checkpoint)) is not None:
            groups.setdefault(name, {})[path] = entry
    return [
        FolderCheckpoint(name, entries, any(matches_pattern(path, options.marker) for path in entries))
        for name, entries in groups.items()
        if any(entry.kind != "folder" for entry in entries.values())
    ]


def matches_pattern(path: str, pattern: str) -> bool:
    """Return whether ``path`` matches ``pattern``; ``*`` does not match a slash."""
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def parse_global_step(checkpoint: FolderCheckpoint, pattern: re.Pattern[str]) -> int | None:
    """Return the highest number that ``pattern`` finds in the checkpoint's name, or in its paths if it has none."""
    names = [checkpoint.name] if checkpoint.name else list(checkpoint.entries)
    steps = [
        int(text) for name in names for text in _matched_texts(pattern, name) if text.isascii() and text.isdecimal()
    ]
    return max(steps, default=None)


class CompletenessDetector:
    """Remembers across scans since when each checkpoint is unchanged."""

    def __init__(self, options: ExecOptions) -> None:
        self._options = options
        self._observations: dict[str, _CheckpointObservation] = {}
        self._ignored: dict[str, FolderListing] = {}

    def ignore_until_changed(self, checkpoints: Iterable[FolderCheckpoint]) -> None:
        """Ignore these checkpoints, which are committed or cannot be, until their entries change."""
        self._ignored |= {checkpoint.name: checkpoint.entries for checkpoint in checkpoints}

    def observe(self, checkpoints: Iterable[FolderCheckpoint], now: float) -> None:
        """Record a scan that was taken at ``now``, in seconds of any monotonic clock."""
        previous, self._observations = self._observations, {}
        for checkpoint in checkpoints:
            last = previous.get(checkpoint.name)
            unchanged = last is not None and last.checkpoint.entries == checkpoint.entries
            self._observations[checkpoint.name] = (
                _CheckpointObservation(checkpoint, last.unchanged_since, last.scans + 1)
                if last and unchanged
                else _CheckpointObservation(checkpoint, now, 1)
            )

    def select_complete(
        self, now: float, *, has_ended: bool = False, has_finished: bool = False
    ) -> list[FolderCheckpoint]:
        """Return the checkpoints that can be committed now, the newest last.

        Args:
            now: Current time; the time at which the program ended, if it has.
            has_ended: The program has ended, so nothing changes any more.
            has_finished: It ended by itself, so no file is half written.
        """
        changed = [
            observation
            for observation in self._observations.values()
            if self._ignored.get(observation.checkpoint.name) != observation.checkpoint.entries
        ]
        complete = [
            observation.checkpoint
            for observation in changed
            if self._is_complete(observation, now, has_ended, has_finished)
        ]
        return sorted(complete, key=lambda checkpoint: checkpoint.modified_ns)

    def _is_complete(
        self, observation: "_CheckpointObservation", now: float, has_ended: bool, has_finished: bool
    ) -> bool:
        if self._options.marker:
            return observation.checkpoint.has_marker and (has_ended or observation.scans > 1)
        return has_finished or (
            observation.scans > 1 and now - observation.unchanged_since >= self._options.quiet_seconds
        )


@dataclass(frozen=True)
class _CheckpointObservation:
    checkpoint: FolderCheckpoint
    unchanged_since: float
    scans: int


def _checkpoint_name(path: str, pattern: str) -> str | None:
    """Return the name of the checkpoint that contains ``path``; None if no checkpoint contains it."""
    if not pattern:
        return ""
    parts = path.split("/")
    name = "/".join(parts[: pattern.count("/") + 1])
    return name if matches_pattern(name, pattern) else None


def _matched_texts(pattern: re.Pattern[str], name: str) -> Iterator[str]:
    for match in pattern.finditer(name):
        yield (match[1] if pattern.groups else match[0]) or ""
