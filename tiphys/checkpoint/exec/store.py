"""Where the wrapper meets storage: choose and restore, commit, and tell what happened."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tiphys.checkpoint.exec.files import FRAMEWORK
from tiphys.checkpoint.exec.restore import restore
from tiphys.checkpoint.restore.candidates import Ancestry
from tiphys.checkpoint.restore.shard_reader import manifest_of
from tiphys.checkpoint.save.commit import ShardSource, Uploads, check_fence
from tiphys.checkpoint.save.commit_policy import Commits
from tiphys.checkpoint.save.interval import Interval
from tiphys.checkpoint.settings import Settings
from tiphys.checkpoint.telemetry.events import Journal
from tiphys.checkpoint.telemetry.metrics import NoMetrics
from tiphys.checkpoint.telemetry.provenance import gather
from tiphys.errors import IntegrityError
from tiphys.lineage.quarantine import quarantine
from tiphys.records import CheckpointManifest, CheckpointRef, Event, Skipped
from tiphys.store import Store


class Keeper:
    """The checkpoints of one attempt, as files. ``in_a_hurry`` tells whether SIGTERM has come."""

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        *,
        run_store: Store,
        store: Store,
        metrics: NoMetrics,
        in_a_hurry: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._environ = environ
        self._run_store = run_store
        self._store = store
        self._metrics = metrics
        self._ancestry = Ancestry(settings, run_store, store)
        self._check_unchanged: Callable[[], None] | None = None
        self.journal = Journal(run_store, settings.run, settings.step, settings.attempt)
        self._commits = Commits(
            settings,
            run_store=run_store,
            store=store,
            journal=self.journal,
            metrics=metrics,
            # The program alone decides when it writes; there is no interval that could be adjusted.
            interval=Interval(replace(settings.save_every, auto=None)),
            ancestry=self._ancestry,
            check_fence=self._check_fence,
            in_a_hurry=in_a_hurry,
        )

    @property
    def base(self) -> CheckpointRef | None:
        """What a failure now would go back to."""
        return self._commits.base

    def restore(self, root: Path, in_the_way: Sequence[str], before_shard: Callable[[], None]) -> None:
        """Fill ``root`` with the newest valid checkpoint, if there is any; what is damaged is passed over.

        Raises:
            FencedError: another attempt took this one's place.
            UsageError: a session, and not this wrapper, wrote the checkpoints.
            StoreError: storage did not answer, or the folder cannot be written.
        """
        self._check_fence()
        events: list[Event] = []
        for ref in self._ancestry.candidates():
            started = time.monotonic()
            try:
                manifest = manifest_of(self._store, ref, FRAMEWORK, "and tiphys-exec")
                restore(self._store, manifest, root, before_shard, in_the_way)
            except IntegrityError as error:
                events.append(self._passed_over(ref, error))
                continue
            self._commits.restored_from(ref)
            self._metrics.restored(time.monotonic() - started, manifest.size_bytes, ref.global_step)
            events.append(self.journal.restored(ref))
            break
        self.journal.record(events)

    def commit(
        self, global_step: int, shards: Sequence[ShardSource], reason: str, check_unchanged: Callable[[], None]
    ) -> CheckpointManifest:
        """Store ``shards`` and commit them, unless ``check_unchanged`` raises once all of them have arrived.

        Raises:
            FencedError: another attempt took this one's place.
            StoreError, IntegrityError: it could not be stored; another try may help.
        """
        draft = self._commits.draft(global_step, FRAMEWORK, gather(self._environ), reason=reason)
        with self._before_publishing(check_unchanged):
            manifest = self._commits.commit(draft, shards, Uploads())
        self._commits.committed(manifest)
        return manifest

    def failed(self, global_step: int, error: Exception) -> None:
        """Count and tell a commit that did not come about."""
        self._commits.failed(global_step, error)

    @contextlib.contextmanager
    def _before_publishing(self, check: Callable[[], None]) -> Iterator[None]:
        self._check_unchanged = check
        try:
            yield
        finally:
            self._check_unchanged = None

    def _check_fence(self) -> None:
        if self._check_unchanged:
            self._check_unchanged()
        check_fence(self._run_store, self._settings.run, self._settings.step, self._settings.attempt)

    def _passed_over(self, ref: CheckpointRef, error: IntegrityError) -> Event:
        quarantine(self._store, ref, str(error), by="restore")
        self._metrics.verify_failed()
        return self.journal.skipped(Skipped(checkpoint=ref, reason=str(error)), "the one before it is looked at")
