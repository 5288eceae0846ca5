"""Decides which checkpoint of a folder to commit, from scans alone and without I/O.

The highest step wins, never the newest time: clocks are set back, and files are
touched. A commit holds all files of that step, and what lies beside the
checkpoints without a step: ``last.ckpt``, the best model, ``latest``, logs.

| sign that a step is complete | how |
|---|---|
| a marker | it is newer than each file that it marks |
| a rename | the layout says that a folder gets its name when it is complete |
| the next step has begun | and no process has a file of this one open for writing |
| the same files as the step before | the same, and what was written after that one is written again |
| one file that is overwritten | the same |
| quiet time | nothing changed, and the same |
| the program ended by itself | at once |
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from tiphys.checkpoint.exec.arrange import CommitSelection, FolderCheckpoint, FolderContents, arrange_folder, parse_step
from tiphys.checkpoint.exec.files import FileEntry, FolderListing
from tiphys.checkpoint.exec.layouts import base_name, find_step, is_best, is_log
from tiphys.checkpoint.exec.options import ExecOptions
from tiphys.checkpoint.exec.rhythm import FileState, split_rhythms

BESIDE_BYTES = 64 << 20
"""Above this size, a log and a file that fits no pattern of the command line are not kept with a checkpoint."""

_TICK_NS = 100_000_000
"""A file that changes twice within a tick of the file system's clock keeps its times; no clock ticks this slowly."""
_OPENING_SECONDS = 1.0
"""For so long an empty file may be one that a process opens to write it: the kernel empties or creates it before the
process has a descriptor of it, and a busy machine stops the process in between."""
_PATIENCE = 6.0
"""Quiet times after which a missing file or another pointer does not count against a checkpoint any more."""
_REMEMBERED_STEPS = 8
_SMALL_CHANGE_SECONDS, _SMALL_CHANGE_PAUSES = 60.0, 20
"""For little files alone, a checkpoint without a step is committed after a minute, and 20 times what a commit took."""
_VERSION_WORDS = re.compile(r"last|latest|best|newest|current|final", re.IGNORECASE)


class FolderWriters(NamedTuple):
    """Processes of the program, and the files that a process has open for writing."""

    names: Mapping[str, str]
    """The process that has each file open."""
    processes: frozenset[int] = frozenset()
    is_certain: bool = True
    """Whether all processes of the scan before still run: one that was killed leaves its file closed, and torn."""


class FolderScan(NamedTuple):
    """What one look at the folder found.

    Attributes:
        listing: The entries.
        now: Seconds of any monotonic clock.
        wall_ns: Time of the clock that stamps files.
        writers: Files that are open for writing; None if that is unknown, as after the end of the program.
        pointers: The path or number in each small file like ``latest``.
    """

    listing: FolderListing
    now: float
    wall_ns: int = 0
    writers: FolderWriters | None = None
    pointers: Mapping[str, str] = {}


class _HinderedError(Exception):
    """A checkpoint cannot be committed now; the message says why, by name."""


class CompletenessDetector:
    """Remembers across scans which files are unchanged, closed and committed."""

    def __init__(self, options: ExecOptions) -> None:
        self._options = options
        self._files: dict[str, FileState] = {}
        self._before: FolderListing = {}
        self._settled: FolderListing = {}
        self._restored: FolderListing = {}
        self._contents = FolderContents()
        self._scan = FolderScan({}, 0.0)
        self._steps: dict[int, FolderCheckpoint] = {}
        self._pace = FileState(FileEntry("file"), 0.0, 0.0)
        """Changes whenever a higher step appears: what does not outpace it may be written with the steps."""
        self._pointers: set[str] = set()
        self._excluded: dict[str, FileEntry] = {}
        self._waiting_since: float | None = None
        self._why = ""
        self._now, self._has_ended, self._has_finished, self._has_killed = 0.0, False, False, False
        self._rests_until = 0.0
        """Time until which little files that are written all the time are not worth another commit."""
        self._alive_at = 0.0
        """Time of the last scan at which the program certainly ran: after its death a torn file is quiet, too."""
        self.left_out: dict[str, str] = {}
        """Paths that are not part of the checkpoints, and why."""

    def begin(self, listing: FolderListing, restored: Collection[str]) -> None:
        """Take the folder before the program starts: what was restored is committed, the rest is not the program's."""
        self._settled = self._restored = {path: entry for path, entry in listing.items() if path in restored}
        self._before = {path: entry for path, entry in listing.items() if path not in restored}

    def settle(self, entries: FolderListing) -> None:
        """Do not select these entries, which are committed or cannot be, until they change; callable on any thread."""
        pause_seconds = max(_SMALL_CHANGE_SECONDS, _SMALL_CHANGE_PAUSES * (self._scan.now - self._now))
        self._settled, self._rests_until = entries, self._scan.now + pause_seconds

    def observe(self, scan: FolderScan, *, has_ended: bool = False) -> None:
        """Record a scan; ``has_ended`` if the program had ended before."""
        previous, self._files = self._files, {}
        for path, entry in scan.listing.items():
            state = previous.get(path)
            if state is None or state.entry != entry:
                old = state or FileState(entry, scan.now, scan.now)
                state = FileState(entry, old.first_seen, scan.now, 1, old.writer, old.writer_seen, changes=old.changes)
                if old.was_closed:
                    state.record_change(scan.now)
            else:
                state.scans += 1
            if scan.writers is not None:
                if path in scan.writers.names or scan.writers.is_certain:
                    state.writer, state.writer_seen = scan.writers.names.get(path, ""), scan.now
                state.is_doubtful |= not (scan.writers.is_certain or state.was_closed or state.writer)
                state.was_closed = not (state.writer or state.is_doubtful)
            self._files[path] = state
        if not has_ended and (scan.writers is None or scan.writers.is_certain):
            self._alive_at = scan.now
        self._scan = scan
        self._contents = arrange_folder(scan.listing, self._options, self._before)
        if not self._options.checkpoint:
            self._contents = split_rhythms(self._contents, self._files, scan.now)
        steps = {item.step: item for item in self._contents.checkpoints if item.step is not None}
        if max(steps, default=-1) > max(self._steps, default=-1):
            self._pace.record_change(scan.now)
        self._steps = dict(sorted((self._steps | steps).items())[-_REMEMBERED_STEPS:])

    @property
    def uncertain_files(self) -> list[str]:
        """Files that may have been open for writing when the program ended."""
        return [path for path, state in self._files.items() if state.entry.kind == "file" and not state.was_closed]

    def record_closed(self, paths: Iterable[str]) -> None:
        """Note that the content of these files shows that they were written to their end."""
        for path in paths:
            state = self._files[path]
            state.writer, state.was_closed, state.is_doubtful = "", True, False

    @property
    def has_commit(self) -> bool:
        """Whether a checkpoint was restored or committed."""
        return bool(self._settled)

    def exclude(self, path: str) -> None:
        """Leave this file out until it changes, because it cannot be read; callable on any thread."""
        self._excluded[path] = self._files[path].entry

    def is_news(self, listing: FolderListing) -> bool:
        """Return whether ``listing`` holds a file of the program that is not committed."""
        return any(
            entry.kind == "file"
            and self._settled.get(path) != entry
            and self._before.get(path) != entry
            and not is_log(base_name(path))
            and path not in self.left_out
            for path, entry in listing.items()
        )

    def select_complete(
        self, now: float, *, has_ended: bool = False, has_finished: bool = False, has_killed: bool = False
    ) -> CommitSelection | None:
        """Return what can be committed now, of the highest complete step; None if that is nothing new.

        Args:
            now: Current time; the time at which the program ended, if it has.
            has_ended: The program has ended, so nothing changes any more.
            has_finished: It ended by itself, so no file is half written.
            has_killed: Except for files of a process that it had left behind and that was killed.
        """
        self._now, self._has_ended, self._why = now, has_ended, ""
        self._has_finished, self._has_killed = has_finished, has_killed
        selection = following = None
        for checkpoint in reversed(self._contents.checkpoints):
            try:
                selection = self._select(checkpoint, following)
                break
            except _HinderedError as error:
                self._why = self._why or str(error)
                if _is_in(self._settled, checkpoint):
                    break  # a lower step would take the place of a committed one
                if not any(path in self.left_out for path in checkpoint.entries):
                    following = None if self._are_quiet(checkpoint.files, _PATIENCE) else checkpoint
        if selection is not None and not self._is_news(selection):
            self._why = self._why or self._find_lower(selection.checkpoint)
            selection = None
        # At the end nothing follows: that a lower step is committed does not keep what is above it.
        is_kept = selection is not None and not has_ended
        if is_kept or not (self.is_news(self._scan.listing) and self._hindrance):
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now
        return selection

    def find_hindrance(self, now: float) -> tuple[float, str]:
        """Return since how many seconds new files are not committed, and why; 0 if there are none."""
        return (0.0, "") if self._waiting_since is None else (now - self._waiting_since, self._hindrance)

    @property
    def _hindrance(self) -> str:
        return self._why or ("" if self._contents.checkpoints else f"no name fits {self._options.wanted_names}")

    def _find_lower(self, newest: FolderCheckpoint) -> str:
        """Return what was written after ``newest`` and is of a lower step; empty if nothing was."""
        newest_ns = max((newest.entries[path].changed_ns for path in newest.files), default=0)
        why = "was restored: the program has not resumed from it" if _is_in(self._restored, newest) else "is older"
        for item in self._contents.checkpoints:
            for root in item.roots:
                files = [path for path in item.files if path == root or path.startswith(f"{root}/")]
                if files and min(item.entries[path].changed_ns for path in files) > newest_ns:
                    return (
                        f"{root} is of a lower step than {newest.name}, which {why}; a program that counts its "
                        "steps anew, as for each fold, needs --layout whole"
                    )
        return ""

    def _is_news(self, selection: CommitSelection) -> bool:
        files = {path: entry for path, entry in selection.entries.items() if entry.kind != "folder"}
        changed = {path: entry for path, entry in files.items() if self._settled.get(path) != entry}
        is_due = selection.checkpoint.step is None and (self._has_ended or self._now >= self._rests_until)
        if any(path in selection.checkpoint.entries or (is_due and not is_log(base_name(path))) for path in changed):
            return True
        # A small file beside a large checkpoint is not worth storing both again.
        changed_bytes = sum(entry.size for path, entry in changed.items() if not is_log(base_name(path)))
        return 0 < sum(entry.size for entry in files.values()) <= 10 * changed_bytes

    def _select(self, checkpoint: FolderCheckpoint, following: FolderCheckpoint | None) -> CommitSelection:
        """Return what to commit as ``checkpoint``; raises `_HinderedError` if something hinders that."""
        for path, entry in checkpoint.entries.items():
            if problem := self._find_problem(path, entry):
                self.left_out[path] = f"{problem}, so the checkpoint that contains it cannot be saved"
                raise _HinderedError(f"{path!r} {problem}")
        step = checkpoint.step
        if not (self._options.takes_names or checkpoint.may_hold_state(self._is_rewritten)):
            raise _HinderedError("" if step is None else f"{checkpoint.name} holds settings, and no state yet")
        lower = [number for number in self._steps if step is not None and number < step]
        previous = self._steps[max(lower)] if lower else None
        self._check_complete(checkpoint, previous, following)
        entries, roots = dict(checkpoint.entries), [*checkpoint.roots]
        for path, entry in self._contents.beside.items():
            if entry.kind != "folder" and self._belongs_to(checkpoint, path, entry, previous, following):
                entries[path] = entry
                roots.append(path)
        self._check_pointers(checkpoint, entries)
        self._add_targets(entries, roots)
        parents = {str(parent) for root in roots for parent in PurePosixPath(root).parents}
        entries |= {path: entry for path, entry in self._scan.listing.items() if path in parents}
        restless = {path for path in entries.keys() & self._contents.beside.keys() if self._is_restless(path)}
        return CommitSelection(checkpoint, tuple(roots), dict(sorted(entries.items())), restless)

    def _is_rewritten(self, path: str) -> bool:
        state = self._files[path]
        return bool(state.changes) or self._settled.get(path, state.entry) != state.entry

    def _check_complete(
        self, checkpoint: FolderCheckpoint, previous: FolderCheckpoint | None, following: FolderCheckpoint | None
    ) -> None:
        """Return if there is a sign that ``checkpoint`` is complete; raises `_HinderedError` if there is none."""
        files = checkpoint.files
        is_marked = self._check_markers(checkpoint)
        if self._are_finished(files):
            return
        pointers = self._find_newer_pointers(checkpoint)
        if held := next((path for path in files if self._is_held(path, checkpoint, pointers)), ""):
            tense = "was" if self._has_ended else "is"
            raise _HinderedError(f"{held} {tense} held open for writing by {self._files[held].writer}")
        if is_marked:
            changing = next((path for path in files if self._files[path].scans < 2 and not self._has_ended), "")
            if changing and not self._are_sure(files):
                raise _HinderedError(f"{changing} changes")
            return
        is_alike = previous is None or previous.kinds <= checkpoint.kinds
        if pointers or (
            self._are_sure(files)
            and (following is not None or (previous is not None and is_alike) or self._stands_alone(checkpoint))
        ):
            return
        if not self._are_quiet(files, 1.0 if is_alike else _PATIENCE):
            newest = max(files, key=lambda path: self._files[path].since)
            why = f"changed less than --quiet {self._options.quiet_seconds:g}s before"
            raise _HinderedError(f"{newest} {'may be half written' if self._has_ended else why}")

    def _check_markers(self, checkpoint: FolderCheckpoint) -> bool:
        """Return whether ``checkpoint`` is marked as complete; raises `_HinderedError` if it cannot be complete."""
        why = checkpoint.missing_marker
        for path, marker in checkpoint.markers.items():
            # The clock may have been set back. A file and its marker may change between two looks of one scan.
            if self._files[marker].scans > self._files[path].scans + 1:
                why = why or f"{marker} is older than {path}, so it marks nothing"
        is_marked = all(path in checkpoint.markers for path in checkpoint.files)
        # A callback or another rank may write into a library's folder after its marker, and nothing of it again.
        if why and (self._options.marker or not is_marked or any(map(self._is_rewritten, checkpoint.files))):
            raise _HinderedError(why)
        for marker in set(checkpoint.markers.values()):
            committed = self._settled.get(marker)
            was_emptied = committed is not None and committed.size > self._files[marker].entry.size == 0
            may_be_torn = self._has_ended and not self._are_finished([marker]) and not self._are_sure([marker])
            if may_be_torn and (was_emptied or marker.endswith(".json")):
                raise _HinderedError(f"{marker} may be half written")
        return is_marked and not why

    def _find_newer_pointers(self, checkpoint: FolderCheckpoint) -> list[str]:
        """Return the files like ``latest`` that name ``checkpoint``, and are newer than all of it."""
        newest_ns = max(entry.changed_ns for entry in checkpoint.entries.values())
        return [
            path
            for path, entry in self._contents.beside.items()
            if entry.kind != "folder"
            and not is_best(base_name(path))
            and entry.changed_ns >= newest_ns
            and self._find_target(path, entry) == checkpoint.step is not None
        ]

    def _is_held(self, path: str, checkpoint: FolderCheckpoint, pointers: Sequence[str]) -> bool:
        """Whether a process has a file open for writing, or had when the program ended."""
        state = self._files[path]
        marker = checkpoint.markers.get(path)
        # A program may end before a scan sees its file closed: a marker or pointer that came later shows that it was.
        signs = [*pointers, *([marker] if marker else [])]
        was_closed = self._has_ended and any(self._files[sign].since > state.writer_seen for sign in signs)
        return bool(state.writer) and not was_closed

    def _stands_alone(self, checkpoint: FolderCheckpoint) -> bool:
        """Whether ``checkpoint`` is complete once its files are: it is one file, or appeared under its name at once."""
        files = checkpoint.files
        if checkpoint.step is None:
            versions = {path: len(self._files[path].changes) for path in files}
            # What is still the first while another file is the third, such as a configuration, is not written with it.
            again = [path for path in files if versions[path] or max(versions.values()) < 2]
            # Beside files that are written all the time, the first one does not show whether others follow.
            beside = [path for path, entry in self._contents.beside.items() if entry.kind == "file"]
            is_first = not any(versions.values()) and not all(is_log(base_name(path)) for path in beside)
            return len({_VERSION_WORDS.sub("", path) for path in again}) == 1 and not is_first
        if checkpoint.layout is not None and checkpoint.layout.is_renamed:
            return True
        # Another file of the first step would have followed at once.
        age_ns = self._scan.wall_ns - max(self._files[path].entry.changed_ns for path in files)
        return self._has_ended and len(files) == 1 and age_ns >= self._options.quiet_seconds * 2e8

    def _belongs_to(
        self,
        checkpoint: FolderCheckpoint,
        path: str,
        entry: FileEntry,
        previous: FolderCheckpoint | None,
        following: FolderCheckpoint | None,
    ) -> bool:
        """Return whether what lies at ``path`` is kept with ``checkpoint``; raises `_HinderedError` to wait for it."""
        name = base_name(path)
        if entry.size > BESIDE_BYTES and (is_log(name) or self._options.checkpoint):
            self.left_out[path] = f"is larger than {BESIDE_BYTES >> 20} MiB and has no step, so it is not kept"
            return False
        if problem := self._find_problem(path, entry):
            self.left_out[path] = f"{problem}, so it is not kept"
            return False
        if is_log(name):
            return True
        if checkpoint.step is not None and not self._has_finished and path not in self._scan.pointers:
            if following and entry.changed_ns >= following.began_ns and not self._has_ended:
                raise _HinderedError(f"{path} is newer than {checkpoint.name}")
            is_of_previous = previous and previous.began_ns <= entry.changed_ns < checkpoint.began_ns
            if is_of_previous and not self._has_ended and not self._are_quiet([*checkpoint.files, path]):
                raise _HinderedError(f"{path} was written with {previous and previous.name}, and not yet again")
        is_whole = self._are_finished([path]) or self._are_sure([path]) or self._are_quiet([path])
        if is_whole or entry.kind == "link" or self._is_restless(path):
            return True
        if path in self._scan.pointers and self._find_target(path, entry) == checkpoint.step is not None:
            return True
        state = self._files[path]
        # What changes at all times, such as a database, is not waited for.
        began = min(self._files[file].first_seen for file in checkpoint.files)
        is_expected = path in self._settled or state.first_seen >= began or _VERSION_WORDS.search(name)
        if is_expected:
            held = f"is held open for writing by {state.writer}" if state.writer else "changes"
            raise _HinderedError(f"{path} {'may be half written' if self._has_ended else held}")
        why = "may be half written" if self._has_ended else "is written to at all times"
        self.left_out[path] = f"{why}, so it is not kept"
        return False

    def _check_pointers(self, checkpoint: FolderCheckpoint, entries: FolderListing) -> None:
        """Wait until each pointer that names the newest checkpoint names this one."""
        if checkpoint.step is None:
            return
        beside = [path for path in entries if path in self._contents.beside]
        targets = {path: step for path in beside if (step := self._find_target(path, entries[path])) is not None}
        layout = checkpoint.layout
        required = {} if layout is None else {name: name for name in [layout.pointer] if name}
        present = {base_name(path) for path in entries}
        for path in sorted({*self._pointers, *(name for name in required if name not in present)}):
            is_known = path in self._pointers
            if (
                path not in entries
                and not self._has_finished
                and (is_known or not (self._has_ended or self._are_quiet(checkpoint.files)))
            ):
                raise _HinderedError(f"there is no {path} that names {checkpoint.name}")
        for path, step in targets.items():
            if step == checkpoint.step:
                if not is_best(base_name(path)):
                    self._pointers.add(path)
            elif (
                not is_best(base_name(path))
                and not self._has_finished
                and (
                    self._has_ended
                    or base_name(path) in required
                    or not self._are_quiet([*checkpoint.files, path], _PATIENCE)
                )
            ):
                raise _HinderedError(f"{path} names step {step}, not {checkpoint.name}")

    def _find_target(self, path: str, entry: FileEntry) -> int | None:
        """Return the step that a pointer names; None if it is none."""
        text = self._scan.pointers.get(path, "") if entry.kind == "file" else entry.inside or ""
        if text.isdecimal():
            return int(text)
        last = base_name(text)
        for name in filter(None, reversed(text.split("/"))):  # it may name a file in the folder of a step
            for item in self._contents.checkpoints:
                names = map(base_name, item.roots)
                if any(root == name or (name == last and root.startswith(f"{name}.")) for root in names):
                    return item.step
        return parse_step(last, self._options.step_from) if self._options.step_from else find_step(last)

    def _add_targets(self, entries: dict[str, FileEntry], roots: list[str]) -> None:
        """Add the checkpoints and files that a link or pointer in ``entries`` names."""
        waiting = list(entries)
        while waiting:
            path = waiting.pop()
            is_pointer = path in self._contents.beside or path in self._scan.pointers
            step = self._find_target(path, entries[path]) if is_pointer else None
            target = entries[path].inside
            for item in self._contents.checkpoints:
                is_named = item.step is not None and item.step == step
                if (is_named or target in item.entries) and not item.entries.keys() <= entries.keys():
                    problems = [entry.problem for entry in item.entries.values() if entry.problem]
                    if problems or (item.missing_marker and not item.markers):
                        continue
                    files = item.files
                    if not (self._are_finished(files) or self._are_sure(files) or self._are_quiet(files)):
                        raise _HinderedError(f"{path} names {item.name}, which is not complete")
                    waiting += [name for name in item.entries if name not in entries]
                    entries.update(item.entries)
                    roots += [root for root in item.roots if root not in roots]

    def _find_problem(self, path: str, entry: FileEntry) -> str:
        return entry.problem or ("cannot be read" if self._excluded.get(path) == entry else "")

    def _are_finished(self, paths: Sequence[str]) -> bool:
        """Whether the program ended by itself, after all that it left behind had written these files."""
        states = [self._files[path] for path in paths]
        # A scan when the program had ended showed what they had open, and the last one shows what has changed since.
        is_left = self._has_killed and any(state.writer or state.scans < 2 for state in states)
        return self._has_finished and not is_left

    def _are_sure(self, paths: Sequence[str]) -> bool:
        """Whether each file was closed, and cannot have changed since without a change of its times."""
        states = [self._files[path] for path in paths]
        return all(
            state.was_closed
            and (self._has_ended or state.scans > 1 or self._scan.wall_ns - state.entry.changed_ns > _TICK_NS)
            and (state.entry.size or state.entry.kind != "file" or self._lived_for(state) >= _OPENING_SECONDS)
            for state in states
        )

    def _is_restless(self, path: str) -> bool:
        """Whether a file, such as metrics, is closed, and is neither ever quiet nor written with the steps."""
        state, is_of_step = self._files[path], path in self._scan.pointers or _VERSION_WORDS.search(base_name(path))
        is_ever_quiet = not state.is_restless(self._options.quiet_seconds)
        return state.was_closed and not (is_of_step or is_ever_quiet) and state.outpaces(self._pace)

    def _are_quiet(self, paths: Sequence[str], times: float = 1.0) -> bool:
        """Whether no file changed for the quiet time, nor is open for writing."""
        seconds = times * self._options.quiet_seconds
        states = [self._files[path] for path in paths]
        return all(state.scans > 1 and self._lived_for(state) >= seconds and not state.writer for state in states)

    def _lived_for(self, state: FileState) -> float:
        """Return for how many seconds the program has left a file as it is."""
        writers = self._scan.writers
        is_dying = writers is not None and not writers.processes  # the kernel takes time to free a large process
        return (min(self._now, self._alive_at) if self._has_ended or is_dying else self._now) - state.since


def _is_in(listing: FolderListing, checkpoint: FolderCheckpoint) -> bool:
    return all(listing.get(path) == checkpoint.entries[path] for path in checkpoint.files)
