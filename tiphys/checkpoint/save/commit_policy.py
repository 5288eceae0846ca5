"""What an attempt commits, and what follows a commit or a failure; all of it away from the training.

A commit is acknowledged only after its manifest stands, and retention runs only
after that. What fails costs a line in the log and not the training.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence

from tiphys.checkpoint.ranks.barrier import Gang
from tiphys.checkpoint.restore.candidates import Ancestry
from tiphys.checkpoint.save.commit import ShardSource, Uploads, commit, complete, publish
from tiphys.checkpoint.save.interval import Interval
from tiphys.checkpoint.settings import Settings
from tiphys.checkpoint.telemetry.events import Journal, tell
from tiphys.checkpoint.telemetry.metrics import NoMetrics, cause_of
from tiphys.errors import IntegrityError, ObjectExistsError, StoreError, TiphysError, UsageError
from tiphys.lineage.retention.delete import Retention
from tiphys.records import AttemptClaim, Began, CheckpointManifest, CheckpointRef, Facts, utc_now
from tiphys.store import RunLayout, Store, find_record


class Commits:
    """The checkpoints of one attempt. Its methods are called on the thread that saves."""

    def __init__(
        self,
        settings: Settings,
        *,
        run_store: Store,
        store: Store,
        journal: Journal,
        metrics: NoMetrics,
        interval: Interval,
        ancestry: Ancestry,
        check_fence: Callable[[], None],
        in_a_hurry: Callable[[], bool],
        gang: Gang | None = None,
    ) -> None:
        self._settings = settings
        self._run_store = run_store
        self._store = store
        self._journal = journal
        self._metrics = metrics
        self._interval = interval
        self._ancestry = ancestry
        self._check_fence = check_fence
        self._in_a_hurry = in_a_hurry
        self._gang = gang
        self._retention = Retention(store, settings.lineage, settings.keep, recheck=check_fence)
        self._claim: AttemptClaim | None = None
        self._progress_noted = False
        self.restored: CheckpointRef | None = None
        self.newest: CheckpointRef | None = None
        self.failures = 0
        self._began = Began(opened_at=utc_now())

    @property
    def base(self) -> CheckpointRef | None:
        """The newest checkpoint that holds what this attempt knows."""
        return self.newest or self.restored

    def restored_from(self, ref: CheckpointRef) -> None:
        """The attempt goes on from ``ref``, whose every hash was compared."""
        self.restored = ref
        self._began = self._began.model_copy(update={"restored_at": utc_now()})
        self._retention.trust(ref)

    def stepped(self) -> None:
        """Note that a step is complete; only the first one counts."""
        if self._began.first_step_at is None:
            self._began = self._began.model_copy(update={"first_step_at": utc_now()})

    def draft(
        self,
        global_step: int,
        framework: str,
        facts: Facts,
        metrics: Mapping[str, float] | None = None,
        reason: str = "due",
    ) -> CheckpointManifest:
        """The manifest of a save of this step, but for what only the save can know.

        Raises:
            UsageError: ``metrics`` are no numbers.
        """
        return CheckpointManifest(
            lineage=self._settings.lineage,
            run=self._settings.run,
            step=self._settings.step,
            attempt=self._settings.attempt,
            global_step=global_step,
            shards=(),
            parent=self.base,
            restored=self.restored,
            metrics=_numbers(metrics or {}),
            facts=facts,
            framework=framework,
            reason=reason,
            began=self._began,
        )

    def claim(self) -> AttemptClaim | None:
        """The claim of this attempt, read once; it knows what no process of the attempt does."""
        if self._claim is None:
            key = RunLayout(self._settings.run).attempt(self._settings.step, self._settings.attempt)
            self._claim = find_record(self._run_store, key, AttemptClaim)
        return self._claim

    def commit(self, draft: CheckpointManifest, shards: Sequence[ShardSource], uploads: Uploads) -> CheckpointManifest:
        """Store ``shards`` and commit them as the child of what was committed before; raises as `commit` does."""
        whole = draft.model_copy(update={"parent": self.base, "facts": self._facts(draft)})
        if self._gang is None:
            return commit(self._store, whole, shards, self._check_fence, uploads)
        return self._commit_together(self._gang, whole, shards, uploads)

    def committed(self, manifest: CheckpointManifest) -> None:
        """Acknowledge a commit, then see to what may follow it."""
        self.newest = manifest.ref
        self._metrics.uploaded(manifest.upload_seconds, manifest.size_bytes)
        self._metrics.saved(manifest.global_step)
        if self._gang and not self._gang.is_first:
            return
        self._note_progress()
        if not self._in_a_hurry():
            self._adjust_interval(manifest)
            self._retain(manifest.ref)

    def failed(self, global_step: int, error: Exception) -> None:
        """Count and tell a save that will not be tried again."""
        self.failures += 1
        why = str(error) or type(error).__name__
        self.leave_out(global_step, why)
        self._metrics.failed(cause_of(error))
        message = f"step {global_step} could not be saved: {why}"
        event = self._journal.event("checkpoint.save_failed", message, failed_saves=self.failures)
        # Storage has just failed: while the grace period runs, no more time is given to it.
        self._journal.record([event], store=not self._in_a_hurry())

    def leave_out(self, global_step: int, reason: str) -> None:
        """Tell the other ranks, if there are any, that this one has no share in the checkpoint of ``global_step``."""
        if self._gang is None:
            return
        try:
            self._gang.give_up(global_step, reason)
        except TiphysError as error:
            tell(f"the other ranks could not be told, and will wait for step {global_step}: {error}")

    def _commit_together(
        self, gang: Gang, whole: CheckpointManifest, shards: Sequence[ShardSource], uploads: Uploads
    ) -> CheckpointManifest:
        before = time.perf_counter()
        stored = uploads.store(self._store, whole, shards, rank=gang.place.rank)
        if gang.sharded:
            gang.store_part(whole, stored)
        if not gang.is_first:
            return gang.await_commit(whole.ref)
        together = gang.collect(whole) if gang.sharded else stored
        return publish(self._store, complete(whole, together, time.perf_counter() - before), self._check_fence)

    def _facts(self, draft: CheckpointManifest) -> Facts:
        """The facts of ``draft``, and those that only the attempt's claim knows."""
        claim = self.claim()
        if claim is None:
            return draft.facts
        return draft.facts.model_copy(update={"dataset": claim.dataset, "parameters": claim.parameters})

    def _note_progress(self) -> None:
        """Leave with the run, once, that this attempt got on: retry budgets depend on it, and nobody else can see."""
        if self._progress_noted or not self._settings.has_volume:
            return
        key = RunLayout(self._settings.run).progress(self._settings.step, self._settings.attempt)
        try:
            with contextlib.suppress(ObjectExistsError):  # an earlier process of this attempt did
                self._run_store.create(key, b"")
        except StoreError as error:
            tell(f"the next save notes again that checkpoints are made, since it could not be stored: {error}")
        else:
            self._progress_noted = True

    def _adjust_interval(self, manifest: CheckpointManifest) -> None:
        size = manifest.size_bytes
        if change := self._interval.observe_save(manifest.stage_seconds, manifest.upload_seconds, size):
            self._journal.record([self._journal.event("checkpoint.interval", change.message, **change.data)])

    def _retain(self, committed: CheckpointRef) -> None:
        if self._settings.keep is None:
            return
        try:
            self._retention.trust(committed)
            protected = {ref for ref in (self._ancestry.start, self.restored) if ref}
            self._retention.apply(self._ancestry.starts(), protected)
        except (StoreError, IntegrityError) as error:
            tell(f"old checkpoints could not be removed: {error}")


def _numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in metrics.items()}
    except (TypeError, ValueError) as error:
        raise UsageError(f"metrics must be numbers: {error}") from error
