"""Groups the entries of a folder into checkpoints by their step, and what lies beside them; without I/O."""

import fnmatch
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from tiphys.checkpoint.exec.files import FileEntry, FolderListing
from tiphys.checkpoint.exec.layouts import (
    AUTO,
    WHOLE,
    Layout,
    base_name,
    find_last_number,
    find_step,
    fit_layout,
    is_log,
    may_be_state,
)
from tiphys.checkpoint.exec.options import ExecOptions


@dataclass(frozen=True)
class FolderCheckpoint:
    """All entries of one step, complete or not.

    Attributes:
        step: The number in the names; None if they hold none.
        roots: Paths of the folders and files that make up the checkpoint.
        entries: Their entries.
        layout: How the library writes it; None for a pattern of the command line.
        markers: The marker of each file that has one.
        missing_marker: Why a marker does not mark its files; empty if all do.
    """

    step: int | None
    roots: tuple[str, ...]
    entries: FolderListing
    layout: Layout | None = None
    markers: Mapping[str, str] = field(default_factory=dict)
    missing_marker: str = ""

    @property
    def name(self) -> str:
        """Its paths, for messages."""
        more = f" and {len(self.roots) - 3} more" if len(self.roots) > 3 else ""
        return ", ".join(self.roots[:3]) + more

    @cached_property
    def files(self) -> list[str]:
        """Paths of its files."""
        return [path for path, entry in self.entries.items() if entry.kind == "file"]

    def may_hold_state(self, is_rewritten: Callable[[str], bool]) -> bool:
        """Whether one of its files may be what a training resumes from; a file whose own name has a step is."""
        own = self.roots if self.step is not None else ()
        names = {path: base_name(path) for path in self.files if path not in own}
        return len(names) < len(self.files) or any(
            may_be_state(name, is_rewritten=is_rewritten(path)) for path, name in names.items()
        )

    @cached_property
    def began_ns(self) -> int:
        """Time of its oldest file, by the clock of the file system."""
        return min((self.entries[path].changed_ns for path in self.files), default=0)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Its paths without their numbers: the same for each step of a program."""
        return frozenset(re.sub(r"\d+", "#", path) for path in self.files)


@dataclass(frozen=True)
class FolderContents:
    """The checkpoints of a folder, the lowest step first, and the entries that belong to no step."""

    checkpoints: tuple[FolderCheckpoint, ...] = ()
    beside: FolderListing = field(default_factory=dict)


class CommitSelection(NamedTuple):
    """Entries to commit together."""

    checkpoint: FolderCheckpoint
    roots: tuple[str, ...]
    """Paths that a restore puts in place, each with all that is below it."""
    entries: FolderListing
    restless: Collection[str] = ()
    """Paths of what is written all the time, of which a later state is as good."""

    @property
    def loose(self) -> set[str]:
        """Paths of what lies beside the checkpoint, which the program may change while it is stored."""
        return self.entries.keys() - self.checkpoint.entries.keys()


@dataclass(frozen=True)
class _Unit:
    """A folder or file that is a checkpoint, or a part of one."""

    root: str
    step: int | None
    layout: Layout | None = None
    marker: str = ""


def arrange_folder(listing: FolderListing, options: ExecOptions, before: FolderListing) -> FolderContents:
    """Group ``listing``; entries that are as in ``before``, when the program started, are not its own."""
    if options.layout == WHOLE or (options.marker and not options.checkpoint):
        return _arrange_whole(listing, options, before)
    groups: dict[_Unit, dict[str, FileEntry]] = defaultdict(dict)
    beside = {}
    for path, unit in _find_units(listing, options).items():
        if unit is not None:
            groups[unit][path] = listing[path]
        elif before.get(path) != listing[path]:
            beside[path] = listing[path]
    own = {
        unit: entries
        for unit, entries in groups.items()
        if any(entry.kind != "folder" and before.get(path) != entry for path, entry in entries.items())
    }
    steps: dict[int | None, list[_Unit]] = defaultdict(list)
    for unit in own:
        steps[unit.step].append(unit)
    numbered = [_combine(step, steps[step], own) for step in sorted(step for step in steps if step is not None)]
    loose = {path: entry for unit in steps[None] for path, entry in own[unit].items()}
    if numbered:
        return _join_numbers(numbered, dict(sorted({**beside, **loose}.items())))
    if not options.checkpoint:  # everything that the program wrote is one checkpoint
        for path in [path for path, entry in beside.items() if entry.kind != "folder" and not is_log(base_name(path))]:
            unit = _Unit(path, None)
            steps[None].append(unit)
            own[unit] = {path: beside.pop(path)}
    return FolderContents((_combine(None, steps[None], own),) if steps[None] else (), beside)


def matches_pattern(path: str, pattern: str) -> bool:
    """Return whether ``path`` matches ``pattern``; ``*`` does not match a slash."""
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def parse_step(name: str, pattern: re.Pattern[str]) -> int | None:
    """Return the highest number that ``pattern`` finds in ``name``."""
    texts = ((match[1] if pattern.groups else match[0]) or "" for match in pattern.finditer(name))
    return max((int(text) for text in texts if text.isascii() and text.isdecimal()), default=None)


def _arrange_whole(listing: FolderListing, options: ExecOptions, before: FolderListing) -> FolderContents:
    logs = {path for path, entry in listing.items() if entry.kind == "file" and is_log(base_name(path))}
    entries = {path: entry for path, entry in listing.items() if path not in logs}
    if not any(entry.kind != "folder" and before.get(path) != entry for path, entry in entries.items()):
        return FolderContents()
    pattern = options.step_from
    steps = [step for path in entries if pattern and (step := parse_step(path, pattern)) is not None]
    roots = tuple(sorted({path.partition("/")[0] for path in entries}))
    markers, why = _find_markers(entries, options.marker)
    checkpoint = FolderCheckpoint(max(steps, default=None), roots, entries, markers=markers, missing_marker=why)
    return FolderContents((checkpoint,), {path: listing[path] for path in listing if path in logs})


def _find_units(listing: FolderListing, options: ExecOptions) -> dict[str, _Unit | None]:
    """Return the unit of each path; None for paths that are no part of any."""
    children: dict[str, list[str]] = defaultdict(list)
    for path in listing:
        parent, _, name = path.rpartition("/")
        children[parent].append(name)
    units: dict[str, _Unit | None] = {}
    for path, entry in listing.items():
        unit = units.get(path.rpartition("/")[0])
        if unit is None and entry.kind in ("file", "folder"):
            unit = _make_unit(path, tuple(children[path]) if entry.kind == "folder" else None, options)
        units[path] = unit
    return units


def _make_unit(path: str, children: tuple[str, ...] | None, options: ExecOptions) -> _Unit | None:
    name = base_name(path)
    if options.checkpoint:
        if not matches_pattern(path, options.checkpoint):
            return None
        known = fit_layout(name, children, AUTO)
        layout = known if known and known.holds else None
        # Orbax writes its metadata first: the rename is its marker, whatever the command line says.
        marker = "" if layout and layout.is_renamed else options.marker
        step = parse_step(path, options.step_from) if options.step_from else find_step(name)
        if step is None and not options.step_from:
            step = find_last_number(name)
        return _Unit(path, step, layout, marker)
    if children is None and is_log(name):
        return None
    layout = fit_layout(name, children, options.layout)
    if options.step_from:
        step = parse_step(name, options.step_from)
    else:
        step = find_step(name)
        if step is None and layout and layout.holds:
            step = find_last_number(name)
    if layout is None or (step is None and not layout.holds):
        return None
    return _Unit(path, step, layout, f"{path}/{layout.marker}" if layout.marker else "")


def _combine(step: int | None, units: list[_Unit], entries: dict[_Unit, dict[str, FileEntry]]) -> FolderCheckpoint:
    found = [_find_markers(entries[unit], unit.marker) for unit in units]
    return FolderCheckpoint(
        step,
        tuple(unit.root for unit in units),
        dict(sorted((path, entry) for unit in units for path, entry in entries[unit].items())),
        next((unit.layout for unit in units if unit.layout), None),
        markers={path: marker for markers, _ in found for path, marker in markers.items()},
        missing_marker=next((why for _, why in found if why), ""),
    )


def _find_markers(entries: FolderListing, pattern: str) -> tuple[dict[str, str], str]:
    """Return the marker of each file in ``entries``, and why it marks nothing; empty if it marks them."""
    if not pattern:
        return {}, ""
    found = [path for path in entries if matches_pattern(path, pattern)]
    if not found:
        return {}, f"there is no {pattern} yet"
    marker = max(found, key=lambda path: entries[path].changed_ns)
    newer = (path for path, entry in entries.items() if entry.changed_ns > entries[marker].changed_ns)
    stale = next(newer, "")
    why = f"{marker} is older than {stale}, so it marks nothing" if stale else ""
    return {path: marker for path, entry in entries.items() if entry.kind == "file"}, why


def _join_numbers(numbered: list[FolderCheckpoint], beside: dict[str, FileEntry]) -> FolderContents:
    """Give each file beside that has the number of a step, and was written at its time, to that step."""
    times = [checkpoint.began_ns for checkpoint in numbered]
    starts = dict(zip((checkpoint.step for checkpoint in numbered), [0, *times], strict=False))
    ends = {earlier.step: later.began_ns for earlier, later in pairwise(numbered)}
    joined: dict[int | None, dict[str, FileEntry]] = defaultdict(dict)
    for path, entry in list(beside.items()):
        step = find_last_number(base_name(path)) if entry.kind == "file" and not is_log(base_name(path)) else None
        if step in starts and starts[step] <= entry.changed_ns < ends.get(step, entry.changed_ns + 1):
            joined[step][path] = beside.pop(path)
    return FolderContents(
        tuple(
            replace(
                checkpoint,
                roots=(*checkpoint.roots, *joined[checkpoint.step]),
                entries=dict(sorted({**checkpoint.entries, **joined[checkpoint.step]}.items())),
            )
            if joined[checkpoint.step]
            else checkpoint
            for checkpoint in numbered
        ),
        beside,
    )
