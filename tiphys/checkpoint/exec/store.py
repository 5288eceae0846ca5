"""The checkpoints of a wrapped program in storage: which one to restore, how to commit one, what to report."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tiphys.checkpoint.attempt_session import AttemptSession
from tiphys.checkpoint.exec.files import FRAMEWORK, CheckpointIndex
from tiphys.checkpoint.exec.restore import restore_files
from tiphys.checkpoint.lifecycle.preemption import StopSignal
from tiphys.checkpoint.restore.shard_reader import load_manifest
from tiphys.checkpoint.save.commit import AttemptFence, ShardSource, ShardUploader, complete_manifest
from tiphys.checkpoint.save.interval import SaveIntervalController
from tiphys.checkpoint.settings import CheckpointSettings
from tiphys.checkpoint.telemetry.metrics import NoMetrics
from tiphys.records import CheckpointManifest, CheckpointRef
from tiphys.store import Store


class FileCheckpointStore(AttemptSession):
    """Restores and commits the checkpoints of one attempt, whose program writes files.

    Args:
        settings: Identity of the attempt.
        environ: Environment that the provenance of each checkpoint is read from.
        run_store: Store of the run: attempts and events.
        store: Store of the checkpoints.
        metrics: Receives the times of saves and restores.
        stop_signal: Requested once SIGTERM arrived.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        environ: Mapping[str, str],
        *,
        run_store: Store,
        store: Store,
        metrics: NoMetrics,
        stop_signal: StopSignal,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            settings,
            run_store=run_store,
            store=store,
            framework=FRAMEWORK,
            environ=environ,
            clock=clock,
            metrics=metrics,
            # The program decides when it writes a checkpoint, so there is no interval to adjust.
            interval=SaveIntervalController(replace(settings.save_every, auto=None)),
            fence=AttemptFence(run_store, settings.run, settings.step, settings.attempt),
            stop_signal=stop_signal,
        )
        self.event_log, self.committer = self._event_log, self._committer
        self.report_hindrance, self.close = self._progress.report_hindrance, self._progress.close

    def restore(
        self, root: Path, obsolete_names: Sequence[str], before_shard: Callable[[], None]
    ) -> CheckpointIndex | None:
        """Restore the newest valid checkpoint into ``root``, if there is one; quarantine damaged ones.

        Args:
            root: Folder of the program.
            obsolete_names: Names in ``root`` to move aside, besides those that the checkpoint contains.
            before_shard: Called before each shard is read; may raise to cancel.

        Returns:
            What was restored; None if there is no checkpoint.

        Raises:
            FencedError: another attempt replaced this one.
            UsageError: a session wrote the checkpoints, not this wrapper.
            StoreError: storage did not answer, or the folder cannot be written.
        """
        self._fence.check()

        def load(ref: CheckpointRef) -> tuple[CheckpointManifest, CheckpointIndex]:
            manifest = load_manifest(self._store, ref, FRAMEWORK, "and tiphys-exec")
            return manifest, restore_files(self._store, manifest, root, before_shard, obsolete_names, self._cache)

        return self._restore_newest(self._candidates.iter_newest_first(), load, None)

    def commit(
        self, global_step: int, shards: Sequence[ShardSource], reason: str, check_unchanged: Callable[[], None]
    ) -> CheckpointManifest:
        """Store ``shards`` and commit them as the checkpoint of ``global_step``.

        Args:
            global_step: Steps that are complete.
            shards: The files of the checkpoint.
            reason: ``due`` or ``sigterm``.
            check_unchanged: Called once all shards are stored; raises if the
                files changed meanwhile, which prevents the commit.

        Raises:
            FencedError: another attempt replaced this one.
            IntegrityError: a shard's key exists with other content.
            StoreError: storage failed; another try may help.
        """
        draft = self._draft(global_step, reason=reason)
        before = time.perf_counter()
        stored = ShardUploader(cache=self._cache).store(self._store, draft, shards)
        check_unchanged()
        manifest = self._committer.publish(complete_manifest(draft, stored, time.perf_counter() - before))
        self._committer.on_committed(manifest)
        self._progress.record_step(global_step, None, None)
        return manifest

    def on_failed(self, global_step: int, error: Exception) -> None:
        """Count and report a commit that failed."""
        self._committer.on_failed(global_step, error)
        self.report_hindrance(self._committer.explain_missing_commit(global_step))
