"""Watches the folder of the program: scans it, selects what to commit, and says what is not committed, and why."""

import contextlib
import os
import time
from collections.abc import Callable, Collection

from tiphys.checkpoint.exec.arrange import CommitSelection, arrange_folder
from tiphys.checkpoint.exec.detect import CompletenessDetector, FolderScan, FolderWriters
from tiphys.checkpoint.exec.evidence import PointerReader, ends_as_written, find_writers
from tiphys.checkpoint.exec.files import scan_folder
from tiphys.checkpoint.exec.layouts import describe_copy
from tiphys.checkpoint.exec.options import ExecOptions
from tiphys.checkpoint.telemetry.events import log_message

_FIRST_WORD_SECONDS, _NEXT_WORD_SECONDS = 25.0, 180.0
"""When a hindrance is reported first, and how often after that."""
_STARTED = "user.tiphys.started"
"""Attribute of the folder with the time before the program's first file: what is newer when another attempt finds it
is a leftover. A file would do as well, but programs refuse a folder that is not empty."""


class FolderWatch:
    """The folder of one program, from before its start until after its end.

    Args:
        options: The command line of ``tiphys-exec``.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, options: ExecOptions, clock: Callable[[], float]) -> None:
        self._options = options
        self._clock = clock
        self._detector = CompletenessDetector(options)
        self._pointers = PointerReader(options.folder)
        self._began = clock()
        self._reported_at: float | None = None
        self._was_idle = False
        self._has_selected = False
        self._said: set[str] = set()
        self._processes: frozenset[int] = frozenset()
        self.settle = self._detector.settle
        self.exclude = self._detector.exclude

    def find_leftovers(self) -> list[str]:
        """Return the files in the folder that an earlier attempt wrote."""
        try:
            started_ns = int(os.getxattr(self._options.folder, _STARTED))
        except (AttributeError, OSError, ValueError):
            return []
        listing = scan_folder(self._options.folder, ())
        return [path for path, entry in listing.items() if entry.kind != "folder" and entry.changed_ns > started_ns]

    def find_checkpoints(self) -> list[str]:
        """Return the paths of all checkpoints in the folder, complete or not."""
        found = arrange_folder(scan_folder(self._options.folder, self._options.ignored), self._options, {}).checkpoints
        is_named = self._options.takes_names
        return [root for item in found if item.step is not None or is_named for root in item.roots]

    def begin(self, restored: Collection[str]) -> None:
        """Take what is in the folder before the program starts; ``restored`` comes from a commit."""
        stamp = self._options.folder / ".tiphys-clock"  # the file system may be on another machine
        stamp.touch()
        started_ns = stamp.stat().st_ctime_ns
        stamp.unlink()
        with contextlib.suppress(AttributeError, OSError):  # not all file systems have attributes
            os.setxattr(self._options.folder, _STARTED, str(started_ns).encode())
        listing = scan_folder(self._options.folder, self._options.ignored)
        kept = {path: listing[path] for path in restored if path in listing}
        if wrong := describe_copy({path: entry.modified_ns for path, entry in kept.items() if entry.kind != "folder"}):
            log_message(wrong)
        self._detector.begin(listing, restored)

    def end(self) -> None:
        """Forget the start: the program has done its work, so that nothing is a leftover."""
        with contextlib.suppress(AttributeError, OSError):
            os.removexattr(self._options.folder, _STARTED)

    def scan(self, ended_wall_ns: int | None = None) -> None:
        """Look at the folder; ``ended_wall_ns`` is the time at which the program ended, if it has."""
        listing = scan_folder(self._options.folder, self._options.ignored)
        scan = FolderScan(listing, self._clock(), ended_wall_ns or time.time_ns(), None, self._pointers.read(listing))
        if self._detector.is_news(listing) and ended_wall_ns is None:
            scan = scan._replace(writers=self._find_writers())
        self._detector.observe(scan, has_ended=ended_wall_ns is not None)
        is_certain = scan.writers is not None and scan.writers.is_certain
        uncertain = () if is_certain else self._detector.uncertain_files
        self._detector.record_closed(path for path in uncertain if ends_as_written(self._options.folder / path))

    def _find_writers(self) -> FolderWriters | None:
        """Return the files that are open for writing, uncertain if a process ended, which may have left a file torn."""
        writers = find_writers(self._options.folder)
        if writers is None:
            return None
        ended = self._processes - writers.processes
        self._processes = writers.processes
        return writers._replace(is_certain=bool(writers.processes) and not ended)

    def find_open(self) -> Collection[str] | None:
        """Return the files that the processes of the last scan have open for writing; None if that is unknown."""
        writers = find_writers(self._options.folder, pids=self._processes)
        return None if writers is None else writers.names.keys()

    def select(self, now: float, **end: bool) -> CommitSelection | None:
        """Return what to commit, given how the program ended; say once how the folder is read, and what is left out."""
        selection = self._detector.select_complete(now, **end)
        if selection is not None:
            self._has_selected = True
            self._say_layout(selection)
        for path, why in self._detector.left_out.items():
            self._say(f"{path!r} {why}")
        return selection

    def report_hindrance(self, *, has_ended: bool = False) -> str:
        """Say what has hindered a commit for long, by name; return it whenever it is due, else an empty text."""
        now = self._clock()
        seconds, why = self._detector.find_hindrance(now)
        is_idle = not (why or self._has_selected or self._detector.has_commit)
        if is_idle:
            seconds, why = now - self._began, f"the program has written no checkpoint to {self._options.folder}"
        if (not seconds and not has_ended) or is_idle != self._was_idle:
            self._reported_at, self._was_idle = None, is_idle
        is_due = seconds >= _FIRST_WORD_SECONDS and (
            self._reported_at is None or now - self._reported_at >= _NEXT_WORD_SECONDS
        )
        if not why or not (is_due or has_ended):
            return ""
        self._reported_at = now
        how_long = "when the program ended" if has_ended else f"for {seconds:.0f} s"
        remedy = "see the table of --layout, --checkpoint and --marker in docs/checkpoints.md"
        if is_idle and has_ended:
            log_message(f"{why}, so none was committed; check --dir, and {remedy}")
        elif not is_idle and (is_due or not any(message.startswith(why) for message in self._said)):
            log_message(f"new files in {self._options.folder} could not be committed {how_long}: {why}; {remedy}")
        return why

    def _say_layout(self, selection: CommitSelection) -> None:
        checkpoint = selection.checkpoint
        if self._options.checkpoint or self._options.marker:
            return
        if checkpoint.layout is not None:
            self._say(
                f"{self._options.folder} has the layout of {checkpoint.layout.title}; "
                f"checkpoints are {checkpoint.layout.names}, with what lies beside them"
            )
        elif checkpoint.step is None:
            self._say(f"no name in {self._options.folder} holds a step, so what the program writes is one checkpoint")

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            log_message(message)
