"""How often the files of a folder are written again: what outpaces all others, such as metrics, is no part of them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tiphys.checkpoint.exec.arrange import FolderContents
from tiphys.checkpoint.exec.files import FileEntry
from tiphys.checkpoint.exec.layouts import base_name, may_be_state

_RESTLESS_CHANGES = 3
"""So often a file is written again, without a quiet time in between, before it counts as one that never rests."""
_REMEMBERED_CHANGES = 16
_MOST_RESTLESS = 16


@dataclass
class FileState:
    """What scans have shown of one file."""

    entry: FileEntry
    first_seen: float
    since: float
    """Time of the scan that found this entry first."""
    scans: int = 1
    writer: str = ""
    writer_seen: float = 0.0
    """Time of the scan that found ``writer``."""
    was_closed: bool = False
    """Whether a scan found this entry, and no process that had it open for writing."""
    is_doubtful: bool = False
    """Whether a process that ended may have left it torn."""
    changes: tuple[float, ...] = ()
    """Times of the last scans that found it changed, where the scan before had found it closed."""

    def record_change(self, now: float) -> None:
        """Note that it was written again."""
        self.changes = (*self.changes, now)[-_REMEMBERED_CHANGES:]

    def changes_per_second(self, now: float) -> float:
        """How often it was written again lately."""
        began = self.changes[0] if len(self.changes) == _REMEMBERED_CHANGES else self.first_seen
        return len(self.changes) / max(now - began, 1e-9)

    def is_restless(self, quiet_seconds: float) -> bool:
        """Whether it was lately written again without a quiet time in between."""
        last = self.changes[-_RESTLESS_CHANGES:]
        return len(last) == _RESTLESS_CHANGES and last[-1] - last[0] < (_RESTLESS_CHANGES - 1) * quiet_seconds

    def outpaces(self, other: "FileState") -> bool:
        """Whether it is written again so much more often than ``other`` that the two are not written together.

        Scans may find one of two files that are written in turn a few times more often than the other.
        """
        full = (state.changes[0] for state in (self, other) if len(state.changes) == _REMEMBERED_CHANGES)
        since = max(self.first_seen, other.first_seen, *full)
        own, others = (sum(at > since for at in state.changes) for state in (self, other))
        return own >= 1.5 * others + _RESTLESS_CHANGES


def split_rhythms(contents: FolderContents, files: Mapping[str, FileState], now: float) -> FolderContents:
    """Move what is written far more often than a checkpoint without a step, such as metrics, beside it."""
    checkpoint = next(iter(contents.checkpoints), None)
    if checkpoint is None or checkpoint.step is not None or checkpoint.markers:
        return contents
    states = {path: files[path] for path in checkpoint.files}
    fastest = max(states.values(), key=lambda state: state.changes_per_second(now), default=None)
    if fastest is None or len(fastest.changes) < _RESTLESS_CHANGES:
        return contents
    slow = {path: state for path, state in states.items() if fastest.outpaces(state)}
    fast = {path: state for path, state in states.items() if path not in slow}
    if not slow or not fast.keys() <= set(checkpoint.roots) or len(fast) > _MOST_RESTLESS:
        return contents
    # What is older and was never written again, such as data, may be no part of what the program saves.
    is_saved = any(
        may_be_state(base_name(path), is_rewritten=bool(state.changes))
        and (state.changes or state.first_seen > fastest.first_seen)
        for path, state in slow.items()
    )
    is_apart = all(state.outpaces(other) for state in fast.values() for other in slow.values())
    # Several may be a state that is saved often, beside the best one: only little files are none.
    fast_bytes, slow_bytes = (sum(state.entry.size for state in part.values()) for part in (fast, slow))
    if not is_saved or not is_apart or (len(fast) > 1 and 10 * fast_bytes > slow_bytes):
        return contents
    rest = replace(
        checkpoint,
        roots=tuple(root for root in checkpoint.roots if root not in fast),
        entries={path: entry for path, entry in checkpoint.entries.items() if path not in fast},
    )
    beside = {path: state.entry for path, state in fast.items()}
    return split_rhythms(FolderContents((rest,), dict(sorted({**contents.beside, **beside}.items()))), files, now)
