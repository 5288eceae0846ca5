"""Commits of files on a background thread, one at a time.

Scans of the folder must not wait for an upload, and signals must not wait for
storage that does not answer. So a daemon thread uploads: the wrapper can exit
without waiting for it.
"""

from collections.abc import Callable, Collection
from pathlib import Path

from tiphys.checkpoint.exec.arrange import CommitSelection
from tiphys.checkpoint.exec.evidence import find_writers
from tiphys.checkpoint.exec.files import (
    FileChangedError,
    FileUnreadableError,
    build_shards,
    check_unchanged,
    copy_small_files,
)
from tiphys.checkpoint.exec.store import FileCheckpointStore
from tiphys.checkpoint.exec.watch import FolderWatch
from tiphys.checkpoint.telemetry.events import log_message
from tiphys.errors import FencedError, StoreError, TiphysError
from tiphys.threads import BackgroundThread, start_background_thread

_CHANGED_WORD_SECONDS = 180.0
_RETRY_SECONDS, _MAX_RETRY_SECONDS = 5.0, 120.0


class BackgroundCommit:
    """Runs one commit at a time, and keeps the outcome of the last one."""

    def __init__(
        self, checkpoints: FileCheckpointStore, folder: Path, watch: FolderWatch, clock: Callable[[], float]
    ) -> None:
        self._checkpoints = checkpoints
        self._folder = folder
        self._watch = watch
        self._changed_at: float | None = None
        self._clock = clock
        self._thread: BackgroundThread | None = None
        self._retry_seconds = _RETRY_SECONDS
        self._retry_at = clock()
        self.fenced: FencedError | None = None
        self.last_commit_seconds = 0.0
        """Duration of the last successful commit."""

    @property
    def is_busy(self) -> bool:
        """Whether a commit is running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_ready(self) -> bool:
        """Whether a commit can start: none is running, and the pause after the last failure is over."""
        return not self.is_busy and self._clock() >= self._retry_at

    def start(self, selection: CommitSelection, global_step: int, reason: str) -> None:
        """Start to commit ``selection``.

        Args:
            selection: Entries of a complete checkpoint.
            global_step: Steps that are complete.
            reason: ``due`` or ``sigterm``.
        """
        self._thread = start_background_thread(lambda: self._run(selection, global_step, reason))
        if self._thread is None:
            log_message(
                f"no thread could be started to store {selection.checkpoint.name}; the next try follows "
                f"in {self._retry_seconds:g} s"
            )
            self._back_off()

    def _run(self, selection: CommitSelection, global_step: int, reason: str) -> None:
        started = self._clock()
        try:
            copies, entries = copy_small_files(
                self._folder, selection.entries, selection.loose, selection.restless, self._watch.find_open
            )
            selection = selection._replace(entries=entries)
            shards = build_shards(self._folder, selection.roots, selection.entries, copies)
            self._checkpoints.commit(global_step, shards, reason, lambda: self._check_unchanged(selection, copies))
        except FencedError as error:
            self.fenced = error
        except FileChangedError as error:
            # A program that overwrites a file without a pause changes it at each try.
            if self._changed_at is None or self._clock() - self._changed_at > _CHANGED_WORD_SECONDS:
                self._changed_at = self._clock()
                log_message(f"{error}, so it was not committed; it is stored once it is complete again")
        except StoreError as error:
            self._checkpoints.on_failed(global_step, error)
            self._back_off()
        except FileUnreadableError as error:
            self._checkpoints.on_failed(global_step, error)
            self._watch.exclude(error.path)
        except TiphysError as error:
            # Retries cannot help until the files change.
            self._checkpoints.on_failed(global_step, error)
            self._watch.settle(selection.entries)
        else:
            self._retry_seconds = _RETRY_SECONDS
            self.last_commit_seconds = self._clock() - started
            self._watch.settle(selection.entries)

    def _check_unchanged(self, selection: CommitSelection, copied: Collection[str]) -> None:
        own, beside = selection.checkpoint.entries, selection.loose
        fixed = {
            path: entry
            for path, entry in selection.entries.items()
            if path not in beside or (entry.kind == "file" and path not in copied)
        }
        check_unchanged(self._folder, fixed)
        writers = find_writers(self._folder)
        if opened := next((path for path in own if writers and path in writers.names), ""):
            raise FileChangedError(f"{self._folder / opened} was opened for writing while its checkpoint was stored")

    def _back_off(self) -> None:
        self._retry_at = self._clock() + self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, _MAX_RETRY_SECONDS)
