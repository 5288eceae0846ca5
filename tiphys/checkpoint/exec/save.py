"""Commits of files on a background thread, one at a time.

Scans of the folder must not wait for an upload, and signals must not wait for
storage that does not answer. So a daemon thread uploads: the wrapper can exit
without waiting for it.
"""

from collections.abc import Callable

from tiphys.checkpoint.exec.detect import FolderCheckpoint, find_checkpoints
from tiphys.checkpoint.exec.files import ContentShard, FileChangedError, IndexShard, build_shards, scan_folder
from tiphys.checkpoint.exec.options import ExecOptions
from tiphys.checkpoint.exec.store import FileCheckpointStore
from tiphys.checkpoint.telemetry.events import log_message
from tiphys.errors import FencedError, StoreError, TiphysError
from tiphys.threads import BackgroundThread, start_background_thread

_RETRY_SECONDS, _MAX_RETRY_SECONDS = 5.0, 120.0


class FolderSnapshot:
    """A checkpoint of the folder as one scan listed it; its files may change while they are stored."""

    def __init__(self, checkpoint: FolderCheckpoint, options: ExecOptions) -> None:
        self._checkpoint = checkpoint
        self._options = options

    def build_shards(self) -> list[IndexShard | ContentShard]:
        """Return the shards of the listed files; raises `UsageError` if one of them cannot be kept."""
        return build_shards(self._options.folder, self._checkpoint.name, self._checkpoint.entries)

    def check_unchanged(self) -> None:
        """Scan the folder again; raises `FileChangedError` if the checkpoint is not the same any more."""
        rescanned = find_checkpoints(scan_folder(self._options.folder, self._options.ignored), self._options)
        name, entries = self._checkpoint.name, self._checkpoint.entries
        if not any(checkpoint.name == name and checkpoint.entries == entries for checkpoint in rescanned):
            raise FileChangedError(f"{name or self._options.folder} was written to while it was stored")


class BackgroundCommit:
    """Runs one commit at a time, and keeps the outcome of the last one."""

    def __init__(self, checkpoints: FileCheckpointStore, options: ExecOptions, clock: Callable[[], float]) -> None:
        self._checkpoints = checkpoints
        self._options = options
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

    def start(
        self,
        checkpoint: FolderCheckpoint,
        global_step: int,
        reason: str,
        on_settled: Callable[[FolderCheckpoint], None],
    ) -> None:
        """Start to commit ``checkpoint``.

        Args:
            checkpoint: Files of a complete checkpoint.
            global_step: Steps that are complete.
            reason: ``due`` or ``sigterm``.
            on_settled: Called on the background thread once ``checkpoint`` is
                committed, or can never be as it is.
        """
        self._thread = start_background_thread(lambda: self._run(checkpoint, global_step, reason, on_settled))
        if self._thread is None:
            log_message(
                f"no thread could be started to store {checkpoint.name or self._options.folder}; the next try follows "
                f"in {self._retry_seconds:g} s"
            )
            self._back_off()

    def _run(
        self,
        checkpoint: FolderCheckpoint,
        global_step: int,
        reason: str,
        on_settled: Callable[[FolderCheckpoint], None],
    ) -> None:
        started = self._clock()
        try:
            snapshot = FolderSnapshot(checkpoint, self._options)
            self._checkpoints.commit(global_step, snapshot.build_shards(), reason, snapshot.check_unchanged)
        except FencedError as error:
            self.fenced = error
        except FileChangedError as error:
            log_message(f"{error}, so it was not committed; it is stored once it is complete again")
        except StoreError as error:
            self._checkpoints.on_failed(global_step, error)
            self._back_off()
        except TiphysError as error:
            # Retries cannot help until the files change.
            self._checkpoints.on_failed(global_step, error)
            on_settled(checkpoint)
        else:
            self._retry_seconds = _RETRY_SECONDS
            self.last_commit_seconds = self._clock() - started
            on_settled(checkpoint)

    def _back_off(self) -> None:
        self._retry_at = self._clock() + self._retry_seconds
        self._retry_seconds = min(2 * self._retry_seconds, _MAX_RETRY_SECONDS)
