"""The commits of one attempt, and the actions after a commit or a failed save; all off the training thread.

A commit is acknowledged only after its manifest is stored, and retention runs
only after the acknowledgement. Failures of storage are logged and counted, and
never stop the training.
"""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence

from tiphys.checkpoint.lifecycle.preemption import StopSignal
from tiphys.checkpoint.ranks.barrier import RankBarrier
from tiphys.checkpoint.restore.candidates import RestoreCandidates
from tiphys.checkpoint.save.commit import (
    AttemptFence,
    ShardSource,
    ShardUploader,
    commit_checkpoint,
    complete_manifest,
    publish_manifest,
)
from tiphys.checkpoint.save.interval import SaveIntervalController
from tiphys.checkpoint.settings import CheckpointSettings, describe_next_save
from tiphys.checkpoint.telemetry.events import EventLog, log_message
from tiphys.checkpoint.telemetry.metrics import NoMetrics, classify_save_failure
from tiphys.checkpoint.telemetry.progress import SavedStep
from tiphys.errors import (
    FencedError,
    IntegrityError,
    NotFoundError,
    ObjectExistsError,
    StoreError,
    StoreFullError,
    TiphysError,
    UsageError,
)
from tiphys.launch.session_registry import COMMITTED, IMPORTED, note_save
from tiphys.lineage.retention.delete import Retention
from tiphys.records import AttemptClaim, CheckpointManifest, CheckpointRef, Provenance, StartTimes, utc_now
from tiphys.store import RunLayout, Store, find_record
from tiphys.store.format import mark_format


class CheckpointCommitter:
    """Commits the checkpoints of one attempt, for a session of any kind, and acts on the outcome of each save.

    The path of a checkpoint is ``session.step()`` → `Saver.start` → `commit` on
    the saver's thread → `publish`, which creates the manifest → `on_committed`.

    Args:
        candidates: Checkpoints that the attempt may restore, which retention protects.
        fence: Checked before each commit and each deletion.
        stop_signal: After SIGTERM a commit triggers neither retention nor an interval
            change, and a failure is not stored as an event.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        *,
        run_store: Store,
        store: Store,
        event_log: EventLog,
        metrics: NoMetrics,
        interval: SaveIntervalController,
        candidates: RestoreCandidates,
        fence: AttemptFence,
        stop_signal: StopSignal,
    ) -> None:
        self._settings = settings
        self._run_store = run_store
        self._store = store
        self._event_log = event_log
        self._metrics = metrics
        self._interval = interval
        self._candidates = candidates
        self._fence = fence
        self._stop_signal = stop_signal
        self.barrier: RankBarrier | None = None
        """Coordinates the ranks of a distributed training, set before the first save; None: this process saves alone.
        """
        self._retention = Retention(store, settings.lineage, settings.keep, recheck=fence.check)
        self._claim: AttemptClaim | None = None
        self._progress_recorded = False
        self.restored: CheckpointRef | None = None
        self.newest_committed: CheckpointRef | None = None
        self.newest_saved: SavedStep | None = None
        """The newest checkpoint that the attempt restored or committed."""
        self.failed_saves = 0
        self._last_failure = ""
        self._is_commit_noted = False
        self._began_at = utc_now()
        self._start_times = StartTimes(opened_at=self._began_at)

    @property
    def base_checkpoint(self) -> CheckpointRef | None:
        """The newest checkpoint with the progress of this attempt: its last commit, else the restored one."""
        return self.newest_committed or self.restored

    @property
    def newest(self) -> str:
        """The newest checkpoint as the end of a sentence."""
        base = self.base_checkpoint
        return f"the newest checkpoint is {base.display_name}" if base else "no checkpoint exists yet"

    def explain_missing_commit(self, global_step: int) -> str:
        """Why this attempt has committed no checkpoint yet, or none since saves began to fail; else empty."""
        if self._last_failure or self.newest_committed is not None:
            return self._last_failure
        seconds = (utc_now() - self._began_at).total_seconds()
        return describe_next_save(self._interval.current, seconds_since_save=seconds, global_step=global_step)

    def record_restore(self, manifest: CheckpointManifest) -> None:
        """Record that the attempt continues from the checkpoint of ``manifest``, whose hashes were all verified."""
        self.restored = ref = manifest.ref
        self.newest_saved = SavedStep(ref.global_step, manifest.written_at)
        self._began_at = utc_now()
        if self._settings.incarnation > 1 and (ref.lineage, ref.attempt) == (
            self._settings.lineage,
            self._settings.attempt,
        ):
            self._start_times = manifest.began.add_restart(manifest.written_at, self._began_at)
        else:
            self._start_times = self._start_times.model_copy(update={"restored_at": self._began_at})
        self._retention.trust(ref)

    def record_step(self) -> None:
        """Record the time of the first completed step; later calls do nothing."""
        if self._start_times.first_step_at is None:
            self._start_times = self._start_times.model_copy(update={"first_step_at": utc_now()})

    def draft_manifest(
        self,
        global_step: int,
        framework: str,
        provenance: Provenance,
        metrics: Mapping[str, float] | None = None,
        reason: str = "due",
    ) -> CheckpointManifest:
        """Return the manifest of a save, without shards and without the times that the save measures.

        ``framework`` names the adapter that can read the shards; ``reason`` is ``due``, ``asked`` or ``sigterm``.

        Raises:
            UsageError: a value of ``metrics`` is not a number, or its name no text.
        """
        return CheckpointManifest(
            lineage=self._settings.lineage,
            run=self._settings.run,
            step=self._settings.step,
            attempt=self._settings.attempt,
            global_step=global_step,
            shards=(),
            parent=self.base_checkpoint,
            restored=self.restored,
            metrics=_metric_values(metrics or {}),
            facts=provenance,
            framework=framework,
            reason=reason,
            began=self._start_times,
        )

    def commit(
        self, draft: CheckpointManifest, shards: Sequence[ShardSource], uploader: ShardUploader
    ) -> CheckpointManifest:
        """Store ``shards`` and commit ``draft`` with them, as the child of the previous commit.

        The caller reports the outcome afterwards: `on_committed` after a return,
        `on_failed` once it gives up after errors. A repeated call is safe: shards
        that are stored already are not stored again.

        Returns:
            The manifest that is stored, which the same attempt may have committed before.

        Raises:
            FencedError: another attempt replaced this one; nothing was committed.
            UploadCancelledError: ``uploader`` was cancelled; nothing was committed.
            StepLostError: this step of the attempt is stored with other content.
            StoreError: storage failed. The manifest may exist if only the answer to the last write was lost.
        """
        # The save before this one had no outcome yet when the draft was made; a save that failed is no parent.
        draft = draft.model_copy(update={"parent": self.base_checkpoint, "facts": self._provenance(draft)})
        try:
            return self._commit(draft, shards, uploader)
        except StoreFullError:
            if not self._make_room(draft.ref):
                raise
        return self._commit(draft, shards, uploader)

    def _commit(
        self, draft: CheckpointManifest, shards: Sequence[ShardSource], uploader: ShardUploader
    ) -> CheckpointManifest:
        if self.barrier is None:
            return commit_checkpoint(self._store, draft, shards, self._fence.check, uploader)
        return self._commit_with_ranks(self.barrier, draft, shards, uploader)

    def publish(self, manifest: CheckpointManifest) -> CheckpointManifest:
        """Check the fence and create ``manifest``, whose shards are all stored; raises as `commit` does."""
        manifest = manifest.model_copy(update={"facts": self._provenance(manifest)})
        return publish_manifest(self._store, manifest, self._fence.check)

    def record_save_of_others(self) -> None:
        """Tell the launcher, at the first save that other ranks make for this one, what the program has imported."""
        if not self._is_commit_noted:
            self._is_commit_noted = True
            note_save(os.environ, IMPORTED)

    def on_committed(self, manifest: CheckpointManifest) -> None:
        """Acknowledge a commit, adjust the save interval and run retention. Called once per committed save.

        Raises:
            FencedError: retention found that another attempt replaced this one.
        """
        self.newest_committed = manifest.ref
        self.newest_saved = SavedStep(manifest.global_step, manifest.written_at)
        self._last_failure = ""
        if not self._is_commit_noted and manifest.global_step > (self.restored.global_step if self.restored else -1):
            self._is_commit_noted = True  # the same step again is no progress that a restart may rely on
            note_save(os.environ, COMMITTED)
        self._metrics.record_upload(manifest.upload_seconds, manifest.size_bytes)
        self._metrics.record_save(manifest.global_step)
        if self.barrier and not self.barrier.is_first:
            return
        self._record_progress()
        if not self._stop_signal.is_requested:
            self._adjust_interval(manifest)
            self._retain(manifest.ref)

    def on_failed(self, global_step: int, error: Exception) -> None:
        """Count and report that the save of ``global_step`` failed with ``error`` and is not retried.

        Not called for saves that were cancelled, nor for `FencedError`, which ends the program.
        """
        self.failed_saves += 1
        reason = str(error) or type(error).__name__
        if isinstance(error, StoreFullError) and not self._stop_signal.is_requested:
            # For writers that do not save by `commit`: their next try, or their next save, finds the room.
            saving = CheckpointRef(
                lineage=self._settings.lineage, attempt=self._settings.attempt, global_step=global_step
            )
            with contextlib.suppress(FencedError):  # the next commit raises it
                reason += "" if self._make_room(saving) else "; nothing in it that this training keeps has expired"
        self.abandon_save(global_step, reason)
        self._metrics.record_failure(classify_save_failure(error))
        message = self._last_failure = f"step {global_step} could not be saved: {reason}"
        event = self._event_log.make_event("checkpoint.save_failed", message, failed_saves=self.failed_saves)
        # Storage has just failed: the rest of the grace period is not spent on storing the event.
        self._event_log.record([event], store=not self._stop_signal.is_requested)

    def abandon_save(self, global_step: int, reason: str) -> None:
        """Tell the other ranks that this rank stores no shards of ``global_step``, so that they stop waiting."""
        if self.barrier is None:
            return
        try:
            self.barrier.abandon_save(global_step, reason)
        except TiphysError as error:
            log_message(
                f"the other ranks wait for step {global_step} until their timeout, because storage did not accept the "
                f"message that this rank does not save it: {error}"
            )

    def _commit_with_ranks(
        self, barrier: RankBarrier, draft: CheckpointManifest, shards: Sequence[ShardSource], uploader: ShardUploader
    ) -> CheckpointManifest:
        before = time.perf_counter()
        own_shards = uploader.store(self._store, draft, shards, rank=barrier.rank_info.rank)
        if barrier.sharded:
            barrier.store_rank_shards(draft, own_shards)
        if not barrier.is_first:
            return barrier.await_commit(draft.ref)
        all_shards = barrier.collect_shards(draft) if barrier.sharded else own_shards
        return self.publish(complete_manifest(draft, all_shards, time.perf_counter() - before))

    def _provenance(self, draft: CheckpointManifest) -> Provenance:
        """Return the provenance of ``draft``, completed with the data and parameters from the attempt's claim."""
        if self._claim is None:
            key = RunLayout(self._settings.run).attempt(self._settings.step, self._settings.attempt)
            self._claim = find_record(self._run_store, key, AttemptClaim)
        if (claim := self._claim) is None:
            return draft.facts
        known = {"dataset": claim.dataset, "data": claim.data, "parameters": claim.parameters}
        return draft.facts.model_copy(update=known)

    def _record_progress(self) -> None:
        """Store a progress marker with the run, and mark the format of the checkpoint store, once per attempt.

        Retry budgets depend on progress, and the plugin may not reach a separate checkpoint store.
        """
        if self._progress_recorded or not self._settings.has_own_store:
            return
        key = RunLayout(self._settings.run).progress(self._settings.step, self._settings.attempt)
        try:
            with contextlib.suppress(ObjectExistsError):  # an earlier process of this attempt stored it
                self._run_store.create(key, b"")
            mark_format(self._store)  # no run begins in a separate store, so nothing else marks it
        except StoreError as error:
            log_message(f"the progress marker of this attempt could not be stored; the next save tries again: {error}")
        else:
            self._progress_recorded = True

    def _adjust_interval(self, manifest: CheckpointManifest) -> None:
        size = manifest.size_bytes
        if change := self._interval.observe_save(manifest.stage_seconds, manifest.upload_seconds, size):
            self._event_log.record([self._event_log.make_event("checkpoint.interval", change.message, **change.data)])

    def _make_room(self, saving: CheckpointRef) -> bool:
        """Delete what has expired, without its delay; return whether that may have made room for ``saving``."""
        try:
            deleted = self._retention.make_room(self._candidates.start_checkpoints(), self._protected(), saving)
        except (StoreError, IntegrityError, NotFoundError) as error:
            log_message(f"the store is full, and what has expired in it could not be removed: {error}")
            return False
        if deleted:
            log_message(f"the store is full, so {deleted} expired checkpoints and shards were removed at once")
        return deleted > 0

    def _protected(self) -> set[CheckpointRef]:
        return {ref for ref in (self._candidates.start_checkpoint, self.restored) if ref}

    def _retain(self, committed: CheckpointRef) -> None:
        if self._settings.keep is None:
            return
        try:
            self._retention.trust(committed)
            self._retention.apply(self._candidates.start_checkpoints(), self._protected())
        except (StoreError, IntegrityError) as error:
            log_message(f"old checkpoints could not be removed; the next commit tries again: {error}")


def _metric_values(metrics: Mapping[str, float]) -> dict[str, float]:
    if unnamed := [name for name in metrics if not isinstance(name, str)]:
        raise UsageError(f"metrics must have names, but one is {unnamed[0]!r}; pass text such as 'loss'")
    try:
        return {name: float(value) for name, value in metrics.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"metrics must be numbers: {error}") from error
