"""What every session of an attempt has, whatever it saves: who chooses, commits and reports its checkpoints.

`TrackedSession` saves states in arrays, `TrackedDistributedSession` through DCP, and `FileCheckpointStore` the files
of a program. They differ in what they copy and upload, and in how the ranks agree.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NotRequired, TypedDict, TypeVar

from tiphys.checkpoint.lifecycle.preemption import StopSignal
from tiphys.checkpoint.restore.candidates import RestoreCandidates
from tiphys.checkpoint.restore.shard_reader import NodeCache
from tiphys.checkpoint.save.commit import AttemptFence
from tiphys.checkpoint.save.commit_policy import CheckpointCommitter
from tiphys.checkpoint.save.interval import SaveIntervalController, open_interval_controller
from tiphys.checkpoint.settings import CheckpointSettings, is_save_due
from tiphys.checkpoint.telemetry.events import EventLog
from tiphys.checkpoint.telemetry.metrics import NoMetrics
from tiphys.checkpoint.telemetry.progress import ProgressReporter
from tiphys.checkpoint.telemetry.provenance import gather_provenance
from tiphys.errors import IntegrityError
from tiphys.lineage.quarantine import quarantine_checkpoint
from tiphys.records import CheckpointManifest, CheckpointRef, SkippedCheckpoint
from tiphys.store import Store

LoadedT = TypeVar("LoadedT")


class SessionArguments(TypedDict):
    """Arguments of `AttemptSession` that the sessions of a program hand on."""

    run_store: Store
    store: Store
    environ: Mapping[str, str]
    clock: Callable[[], float]
    metrics: NotRequired[NoMetrics | None]
    total_steps: NotRequired[int | None]


class AttemptSession:
    """The checkpoints of one attempt, in one of its processes.

    Args:
        framework: What the shards are in, as manifests name it.
        is_first: Whether this is the rank that reports for all.
        world_size: Processes that train together; None for what the launcher says.
        interval: Decides when a save is due; None: as ``settings`` say.
        fence: Refuses commits once another attempt has replaced this one; None: that of ``environ``.
        stop_signal: Whether SIGTERM arrived; None for a handler of this session.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        *,
        run_store: Store,
        store: Store,
        framework: str,
        environ: Mapping[str, str],
        clock: Callable[[], float],
        metrics: NoMetrics | None = None,
        total_steps: int | None = None,
        is_first: bool = True,
        world_size: int | None = None,
        interval: SaveIntervalController | None = None,
        fence: AttemptFence | None = None,
        stop_signal: StopSignal | None = None,
    ) -> None:
        self._settings = settings
        self._run_store = run_store
        self._store = store
        self._framework = framework
        self._environ = environ
        self._clock = clock
        self._metrics = metrics or NoMetrics()
        self.total_steps = total_steps
        self._is_first = is_first
        self._world_size = world_size
        self._event_log = EventLog(run_store, settings.run, settings.step, settings.attempt)
        self._interval = interval or open_interval_controller(settings, run_store, clock)
        self._candidates = RestoreCandidates(settings, run_store, store)
        self._cache = NodeCache.open(settings.cache)
        self._stop = stop_signal or StopSignal(clock, settings.grace_seconds)
        self._fence = fence or AttemptFence.of(settings, run_store, environ)
        self._committer = CheckpointCommitter(
            settings,
            run_store=run_store,
            store=store,
            event_log=self._event_log,
            metrics=self._metrics,
            interval=self._interval,
            candidates=self._candidates,
            fence=self._fence,
            stop_signal=self._stop,
        )
        self._progress = ProgressReporter(
            run_store if is_first else None, settings.lineage, settings.attempt, environ, self._committer, clock
        )
        self._restoring: CheckpointRef | None = None
        self._completed_step: int | None = None
        self._skipped_saves = self._last_step = 0
        self._saved_at = clock()

    @property
    def should_stop(self) -> bool:
        return self._stop.is_requested

    @property
    def last_committed(self) -> CheckpointRef | None:
        return self._committer.newest_committed

    @property
    def failed_saves(self) -> int:
        return self._committer.failed_saves

    @property
    def skipped_saves(self) -> int:
        return self._skipped_saves

    def _restore_newest(
        self,
        candidates: Iterable[CheckpointRef],
        load: Callable[[CheckpointRef], tuple[CheckpointManifest, LoadedT]],
        default: LoadedT,
    ) -> LoadedT:
        """Continue from the first of ``candidates`` that ``load`` finds intact; return ``default`` if that is none.

        A damaged one is quarantined.
        """
        skipped: list[SkippedCheckpoint] = []
        for ref in candidates:
            before, self._restoring = self._clock(), ref
            try:
                manifest, loaded = load(ref)
            except IntegrityError as error:
                self._metrics.record_verify_failure()
                self._quarantine(ref, str(error))
                skipped.append(SkippedCheckpoint(checkpoint=ref, reason=str(error)))
                continue
            self._restoring = None
            self._metrics.record_restore(self._clock() - before, manifest.size_bytes, ref.global_step)
            self._committer.record_restore(manifest)
            self._last_step, self._saved_at = ref.global_step, self._clock()
            self._report_restore(skipped, ref)
            return loaded
        self._restoring = None
        self._report_restore(skipped, None)
        return default

    def _quarantine(self, ref: CheckpointRef, reason: str) -> None:
        quarantine_checkpoint(self._store, ref, reason, by="restore")

    def _report_restore(self, skipped: list[SkippedCheckpoint], restored: CheckpointRef | None) -> None:
        log, fallback = self._event_log, f"using {restored.display_name}" if restored else "starting from the beginning"
        events = [log.skipped_event(skip, fallback) for skip in skipped]
        log.record([*events, log.restored_event(restored)] if restored else events, store=self._is_first)

    def _is_interval_over(self, global_step: int) -> bool:
        waited = self._clock() - self._saved_at
        return is_save_due(
            self._interval.current, seconds_since_save=waited, last_step=self._last_step, global_step=global_step
        )

    def _draft(
        self,
        global_step: int,
        metrics: Mapping[str, float] | None = None,
        epoch: int | None = None,
        data_position: Mapping[str, Any] | None = None,
        reason: str = "due",
    ) -> CheckpointManifest:
        """Return the manifest of a save of this step, without its shards and times."""
        made_with = gather_provenance(
            self._environ, epoch=epoch, data_position=data_position, world_size=self._world_size
        )
        return self._committer.draft_manifest(global_step, self._framework, made_with, metrics, reason)
