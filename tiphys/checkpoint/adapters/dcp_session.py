"""The DCP session of each rank inside a compiled step; all ranks decide, save and exit together.

`TrackedDistributedSession` starts saves with ``dcp.async_save``, whose `DcpWriter`
commits through the same `CheckpointCommitter` as a NumPy session. DCP wraps the errors of
all ranks in an exception that is no `Exception`; `unwrap_dcp_error` returns the
cause.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Unpack

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from tiphys.checkpoint.adapters.dcp import DistributedSession
from tiphys.checkpoint.adapters.dcp_storage import FRAMEWORK, DcpReader, DcpWriter
from tiphys.checkpoint.adapters.ranks import RankAgreement
from tiphys.checkpoint.attempt_session import AttemptSession, SessionArguments
from tiphys.checkpoint.lifecycle.crash_report import is_attempt_end, record_crash
from tiphys.checkpoint.lifecycle.incarnation import record_incarnation
from tiphys.checkpoint.lifecycle.session_process import SessionProcess, exit_on
from tiphys.checkpoint.save.data_position import warn_of_lost_position
from tiphys.checkpoint.save.passed_states import check_step_number
from tiphys.checkpoint.save.result import Save
from tiphys.checkpoint.settings import CheckpointSettings
from tiphys.checkpoint.telemetry.events import log_message
from tiphys.errors import FencedError, IntegrityError, StoreError, UsageError
from tiphys.launch.session_registry import PREEMPTED, register_session
from tiphys.lineage.validity import read_manifest
from tiphys.protocol.environment import EX_TEMPFAIL
from tiphys.records import CheckpointManifest, CheckpointRef


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


class TrackedDistributedSession(AttemptSession, DistributedSession):
    """The DCP session of one rank. Rank 0 decides, commits, reports and runs retention."""

    def __init__(
        self, settings: CheckpointSettings, *, ranks: RankAgreement, **others: Unpack[SessionArguments]
    ) -> None:
        super().__init__(settings, framework=FRAMEWORK, is_first=ranks.is_first, world_size=ranks.world_size, **others)
        self._ranks = ranks
        self._event_log.stores = ranks.is_first  # all ranks see the same events
        self._process = SessionProcess(self, self._stop, opens_itself=None)
        self._stager = _make_stager()
        self._running_save: Save | None = None
        self._fenced: FencedError | None = None

    def restore(self, state: dict[str, Any]) -> int:
        self._process.check_call()
        self._ranks.decide_on_first(self._fence.check)
        candidates = self._ranks.decide_on_first(self._list_candidates)
        return self._restore_newest(candidates, lambda ref: self._load(ref, state), 0)

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
            self._is_first and self._is_interval_over(global_step),
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
        draft = self._draft(check_step_number(global_step), metrics, epoch, data_position, "asked")
        return self._begin_save(draft, state)

    def report(self, global_step: int, metrics: Mapping[str, float] | None = None) -> None:
        self._process.check_call()
        self._progress.record_step(check_step_number(global_step), self.total_steps, metrics)

    def writer(self, global_step: int, metrics: Mapping[str, float] | None = None) -> DcpWriter:
        return self._make_writer(self._draft(check_step_number(global_step), metrics))

    def reader(self) -> DcpReader | None:
        if (manifest := self._ranks.decide_on_first(self._find_manifest)) is None:
            return None
        self._committer.record_restore(manifest)
        return DcpReader(self._store, manifest, cache=self._cache)

    def flush(self, timeout_seconds: float | None = None) -> CheckpointRef | None:
        self._wait(timeout_seconds)
        return self._committer.newest_committed

    def __enter__(self) -> "TrackedDistributedSession":
        self._process.open()
        self._stop.install()
        if self._is_first:
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

    def _load(self, ref: CheckpointRef, state: dict[str, Any]) -> tuple[CheckpointManifest, int]:
        """Load ``ref`` into ``state`` in all ranks; return its manifest and step."""
        manifest = self._ranks.decide_on_first(lambda: read_manifest(self._store, ref))
        reader = DcpReader(self._store, manifest, self._raise_in_all_ranks, cache=self._cache)
        try:
            self._raise_in_all_ranks(reader.prepare())
            dcp.load(state, storage_reader=reader, process_group=self._ranks.save_group)
        except CheckpointException as error:
            raise unwrap_dcp_error(error) from error
        return manifest, ref.global_step

    def _list_candidates(self) -> list[CheckpointRef]:
        return list(self._candidates.iter_newest_first())

    def _find_manifest(self) -> CheckpointManifest | None:
        """Return the manifest of the newest checkpoint that has a valid one. Called in the first rank."""
        for ref in self._candidates.iter_newest_first():
            try:
                return read_manifest(self._store, ref)
            except IntegrityError as error:
                super()._quarantine(ref, str(error))
        return None

    def _quarantine(self, ref: CheckpointRef, reason: str) -> None:
        quarantine = super()._quarantine
        self._ranks.decide_on_first(lambda: quarantine(ref, reason))  # if storage fails, all ranks end

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

    def _wait(self, timeout_seconds: float | None = None) -> None:
        """Wait for the running save; raises `FencedError` if it found that another attempt replaced this one."""
        if self._running_save is not None:
            self._running_save.wait(timeout_seconds)
        if self._fenced is not None:
            raise self._fenced

    def _exit_preempted(self, draft: CheckpointManifest, state: Mapping[str, Any]) -> None:
        last = self._committer.newest_committed
        if last is None or last.global_step != draft.global_step:
            self._begin_save(draft.model_copy(update={"reason": "sigterm"}), state)
            self._wait()
        if self._is_first:
            have = self._committer.newest
            log_message(f"stopped by SIGTERM; {have}; exit code {EX_TEMPFAIL} requests another attempt")
        register_session(self._environ, PREEMPTED)
        raise SystemExit(EX_TEMPFAIL)

    def _make_writer(self, draft: CheckpointManifest) -> DcpWriter:
        return DcpWriter(self._store, draft, self._committer, cache=self._cache)


def _make_stager() -> Any:
    """Return a stager whose buffers are reused from save to save, in page-locked memory if there is a GPU."""
    gpu = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=gpu
        )
    )
