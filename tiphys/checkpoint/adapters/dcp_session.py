"""The DCP session of each rank inside a compiled step; all ranks decide, save and exit together.

`TrackedDistributedSession` starts saves with ``dcp.async_save``, whose `DcpWriter`
commits through the same `CommitSink` as a NumPy session. DCP wraps the errors of
all ranks in an exception that is no `Exception`; `unwrap_dcp_error` returns the
cause.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from tiphys.checkpoint.adapters.dcp import DistributedSession
from tiphys.checkpoint.adapters.dcp_storage import FRAMEWORK, DcpReader, DcpWriter
from tiphys.checkpoint.adapters.ranks import RankAgreement
from tiphys.checkpoint.lifecycle.crash_report import is_attempt_end, record_crash
from tiphys.checkpoint.lifecycle.incarnation import record_incarnation
from tiphys.checkpoint.lifecycle.preemption import StopSignal
from tiphys.checkpoint.lifecycle.session_process import SessionProcess, exit_on
from tiphys.checkpoint.restore.candidates import RestoreCandidates
from tiphys.checkpoint.restore.shard_reader import NodeCache
from tiphys.checkpoint.save.commit import AttemptFence
from tiphys.checkpoint.save.commit_policy import CheckpointCommitter
from tiphys.checkpoint.save.data_position import warn_of_lost_position
from tiphys.checkpoint.save.interval import open_interval_controller
from tiphys.checkpoint.save.passed_states import check_step_number
from tiphys.checkpoint.save.result import Save
from tiphys.checkpoint.settings import CheckpointSettings, is_save_due
from tiphys.checkpoint.telemetry.events import EventLog, log_message
from tiphys.checkpoint.telemetry.metrics import NoMetrics
from tiphys.checkpoint.telemetry.progress import ProgressReporter
from tiphys.checkpoint.telemetry.provenance import gather_provenance
from tiphys.errors import FencedError, IntegrityError, StoreError, UsageError
from tiphys.launch.session_registry import PREEMPTED, register_session
from tiphys.lineage.quarantine import quarantine_checkpoint
from tiphys.lineage.validity import read_manifest
from tiphys.protocol.environment import EX_TEMPFAIL
from tiphys.records import CheckpointManifest, CheckpointRef, Event, SkippedCheckpoint
from tiphys.store import Store


def unwrap_dcp_error(error: BaseException) -> BaseException:
    """Return the error of Tiphys that a rank raised, the same one in all ranks; else ``error`` itself.

    An `IntegrityError` is returned only if no rank raised anything else, since it
    quarantines the checkpoint.
    """
    if not isinstance(error, CheckpointException):
        return error
    causes: list[BaseException] = [failure[0] for _, failure in sorted(error.failures.items())]
    for error_type in (FencedError, UsageError, StoreError):
        for cause in causes:
            if isinstance(cause, error_type):
                return cause
    return causes[0] if causes and all(isinstance(cause, IntegrityError) for cause in causes) else error


class TrackedDistributedSession(DistributedSession):
    """The DCP session of one rank. Rank 0 decides, commits, reports and runs retention.

    Args:
        settings: Identity of the attempt, and when and how it saves.
        run_store: Store of the run: attempts and events.
        store: Store of the checkpoints.
        ranks: Agreement between the ranks.
        environ: Environment of the program.
        clock: Monotonic clock, in seconds.
        metrics: Metrics of the training loop; None for none.
        total_steps: Steps of the whole training; None if unknown.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        *,
        run_store: Store,
        store: Store,
        ranks: RankAgreement,
        environ: Mapping[str, str],
        clock: Callable[[], float],
        metrics: NoMetrics | None = None,
        total_steps: int | None = None,
    ) -> None:
        self._settings = settings
        self._run_store = run_store
        self._store = store
        self._ranks = ranks
        self._environ = environ
        self._clock = clock
        self._metrics = metrics or NoMetrics()
        self._event_log = (EventLog if ranks.is_first else _LogOnlyEventLog)(
            run_store, settings.run, settings.step, settings.attempt
        )
        self.total_steps = total_steps
        self._interval = open_interval_controller(settings, run_store, clock)
        self._candidate_source = RestoreCandidates(settings, run_store, store)
        self._stop = StopSignal(clock)
        self._process = SessionProcess(self, self._stop, opens_itself=None)
        self._fence = AttemptFence.of(settings, run_store, environ)
        self._committer = CheckpointCommitter(
            settings,
            run_store=run_store,
            store=store,
            event_log=self._event_log,
            metrics=self._metrics,
            interval=self._interval,
            candidates=self._candidate_source,
            fence=self._fence,
            stop_signal=self._stop,
        )
        progress_store = run_store if ranks.is_first else None
        self._progress = ProgressReporter(
            progress_store, settings.lineage, settings.attempt, environ, self._committer, clock
        )
        self._stager = _make_stager()
        self._cache = NodeCache.open(settings.cache)
        self._running_save: Save | None = None
        self._restoring: CheckpointRef | None = None
        self._fenced: FencedError | None = None
        self._skipped_saves = 0
        self._completed_step: int | None = None
        self._last_step = 0
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

    def restore(self, state: dict[str, Any]) -> int:
        self._process.check_call()
        self._ranks.decide_on_first(self._fence.check)
        skipped: list[SkippedCheckpoint] = []
        for ref in self._ranks.decide_on_first(self._list_candidates):
            self._restoring, before = ref, self._clock()
            manifest, fault = self._load(ref, state)
            if manifest is not None:
                self._metrics.record_restore(self._clock() - before, manifest.size_bytes, ref.global_step)
                self._continue_from(manifest, skipped)
                return ref.global_step
            self._metrics.record_verify_failure()
            skipped.append(SkippedCheckpoint(checkpoint=ref, reason=fault))
        self._restoring = None
        self._report_skipped(skipped, "starting from the beginning")
        return 0

    def step(
        self,
        global_step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        *,
        epoch: int | None = None,
        data_position: Mapping[str, int | float | str] | None = None,
    ) -> Save | None:
        self._process.check_call()
        if self._completed_step is None and data_position is None:
            warn_of_lost_position()
        self._completed_step = global_step = check_step_number(global_step)
        self._committer.record_step()
        self._progress.record_step(global_step, self.total_steps, metrics)
        self._metrics.record_step(global_step)
        busy = self._running_save is not None and not self._running_save.done
        stop, due, busy, fenced = self._ranks.any_rank(
            self._stop.is_requested,
            self._ranks.is_first and self._is_save_due(global_step),
            busy,
            self._fenced is not None,
        )
        if fenced:
            self._wait()
        if stop:
            self._wait()
            self._exit_preempted(self._draft(global_step, metrics, epoch, data_position), state)
        if due and busy and self._settings.busy_rule == "skip":
            self._metrics.record_skip()
            self._skipped_saves += 1
            return None  # the save stays due at the next step
        if not due:
            return None
        self._wait()
        return self._begin_save(self._draft(global_step, metrics, epoch, data_position), state)

    def save(
        self,
        global_step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        *,
        epoch: int | None = None,
        data_position: Mapping[str, int | float | str] | None = None,
    ) -> Save | None:
        self._process.check_call()
        self._wait()
        draft = self._draft(check_step_number(global_step), metrics, epoch, data_position)
        return self._begin_save(draft.model_copy(update={"reason": "asked"}), state)

    def writer(self, global_step: int, metrics: Mapping[str, float] | None = None) -> DcpWriter:
        return self._make_writer(self._draft(check_step_number(global_step), metrics, None, None))

    def reader(self) -> DcpReader | None:
        for ref in self._ranks.decide_on_first(self._list_candidates):
            manifest, _ = self._ranks.decide_on_first(lambda ref=ref: self._open_manifest(ref))  # type: ignore[misc]
            if manifest is not None:
                self._committer.record_restore(manifest)
                return DcpReader(self._store, manifest, cache=self._cache)
        return None

    def flush(self) -> CheckpointRef | None:
        self._wait()
        return self._committer.newest_committed

    def __enter__(self) -> "TrackedDistributedSession":
        self._process.open()
        self._stop.install()
        if self._ranks.is_first:
            record_incarnation(self._run_store, self._settings, self._environ, self._event_log)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._process.close():
            return
        try:
            if error is None:
                self._wait()
        except FencedError as fenced:
            error = fenced
        finally:
            self._stop.uninstall()
            self._stager.close()
            self._progress.close()
            self._metrics.close()
        cause = unwrap_dcp_error(error) if error else None
        restored = self._restoring or self._committer.restored
        if is_attempt_end(self._environ):
            record_crash(self._run_store, self._settings, cause, self._completed_step, restored)
        exit_on(cause)

    def _load(self, ref: CheckpointRef, state: dict[str, Any]) -> tuple[CheckpointManifest | None, str]:
        """Load ``ref`` into ``state`` in all ranks; return its manifest, or None and why it cannot be used."""
        manifest, fault = self._ranks.decide_on_first(lambda: self._open_manifest(ref))
        if manifest is None:
            return None, fault
        reader = DcpReader(self._store, manifest, self._raise_in_all_ranks, cache=self._cache)
        try:
            self._raise_in_all_ranks(reader.prepare())
            dcp.load(state, storage_reader=reader, process_group=self._ranks.save_group)
        except (dcp.api.CheckpointException, IntegrityError) as error:
            cause = unwrap_dcp_error(error)
            if not isinstance(cause, IntegrityError):
                raise cause from error
            return None, str(cause)
        return manifest, ""

    def _list_candidates(self) -> list[CheckpointRef]:
        return list(self._candidate_source.iter_newest_first())

    def _open_manifest(self, ref: CheckpointRef) -> tuple[CheckpointManifest | None, str]:
        try:
            return read_manifest(self._store, ref), ""
        except IntegrityError as error:
            quarantine_checkpoint(self._store, ref, str(error), by="restore")
            return None, str(error)

    def _raise_in_all_ranks(self, own_error: Exception | None) -> None:
        """Raise one rank's error in every rank; an `IntegrityError`, which quarantines, only if there is no other."""
        errors = [error for error in self._ranks.gather_all(own_error) if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, IntegrityError)):
            raise error

    def _begin_save(self, draft: CheckpointManifest, state: Mapping[str, Any]) -> Save:
        save, writer, before = Save(draft.global_step), self._make_writer(draft), time.perf_counter()
        future: Future[Any] = dcp.async_save(
            state, storage_writer=writer, async_stager=self._stager, process_group=self._ranks.save_group
        )
        writer.stage_seconds = time.perf_counter() - before
        self._metrics.record_stall(writer.stage_seconds)
        self._running_save = save
        self._last_step = draft.global_step
        self._saved_at = self._clock()
        future.add_done_callback(lambda ended: self._on_save_end(save, draft.ref, ended.exception()))
        if not self._settings.asynchronous:
            self._wait()
        return save

    def _on_save_end(self, save: Save, ref: CheckpointRef, error: BaseException | None) -> None:
        cause = unwrap_dcp_error(error) if error else None
        try:
            if isinstance(cause, FencedError):
                self._fenced = cause
            elif cause is not None:
                failure = cause if isinstance(cause, Exception) else StoreError(str(cause))
                self._committer.on_failed(save.global_step, failure)
            elif not self._ranks.is_first:  # rank 0 recorded it in `on_committed`
                self._committer.newest_committed = ref
                self._metrics.record_save(ref.global_step)
        finally:  # threads in `Save.wait` must be released, even if reporting failed
            save.end(ref if cause is None else None)

    def _wait(self) -> None:
        """Wait for the running save; raises `FencedError` if it found that another attempt replaced this one."""
        if self._running_save is not None:
            self._running_save.wait()
        if self._fenced is not None:
            raise self._fenced

    def _exit_preempted(self, draft: CheckpointManifest, state: Mapping[str, Any]) -> None:
        last = self._committer.newest_committed
        if last is None or last.global_step != draft.global_step:
            self._begin_save(draft.model_copy(update={"reason": "sigterm"}), state)
            self._wait()
        if self._ranks.is_first:
            last = self._committer.base_checkpoint
            have = f"the newest checkpoint is {last.display_name}" if last else "no checkpoint exists yet"
            log_message(f"stopped by SIGTERM; {have}; exit code {EX_TEMPFAIL} requests another attempt")
        register_session(self._environ, PREEMPTED)
        raise SystemExit(EX_TEMPFAIL)

    def _is_save_due(self, global_step: int) -> bool:
        waited = self._clock() - self._saved_at
        return is_save_due(
            self._interval.current, seconds_since_save=waited, last_step=self._last_step, global_step=global_step
        )

    def _draft(
        self,
        global_step: int,
        metrics: Mapping[str, float] | None,
        epoch: int | None,
        data_position: Mapping[str, int | float | str] | None,
    ) -> CheckpointManifest:
        claim = self._committer.read_claim() if self._ranks.is_first else None
        world = self._ranks.world_size
        facts = gather_provenance(
            self._environ, epoch=epoch, data_position=data_position, world_size=world, claim=claim
        )
        return self._committer.draft_manifest(global_step, FRAMEWORK, facts, metrics)

    def _make_writer(self, draft: CheckpointManifest) -> DcpWriter:
        return DcpWriter(self._store, draft, self._committer, cache=self._cache)

    def _continue_from(self, manifest: CheckpointManifest, skipped: list[SkippedCheckpoint]) -> None:
        self._restoring, ref = None, manifest.ref
        self._committer.record_restore(manifest)
        self._last_step = ref.global_step
        self._saved_at = self._clock()
        self._report_skipped(skipped, f"using {ref.display_name}")
        self._event_log.record([self._event_log.restored_event(ref)])

    def _report_skipped(self, skipped: list[SkippedCheckpoint], fallback: str) -> None:
        self._event_log.record([self._event_log.skipped_event(skip, fallback) for skip in skipped])


class _LogOnlyEventLog(EventLog):
    """For ranks above 0: they only log events, which rank 0 also reports and stores."""

    def record(
        self,
        events: Sequence[Event],
        *,
        store: bool = True,  # noqa: ARG002
        timeout_seconds: float | None = None,  # noqa: ARG002
    ) -> None:
        super().record(events, store=False)


def _make_stager() -> Any:
    """Return a stager whose buffers are reused from save to save, in page-locked memory if there is a GPU."""
    gpu = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=gpu
        )
    )
