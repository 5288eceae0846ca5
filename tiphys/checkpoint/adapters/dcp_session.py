"""The session of each rank inside a compiled step: decide together, save together, leave together.

What is behind an exception of DCP, which wraps what its ranks have met and is no `Exception` itself.
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
from tiphys.checkpoint.adapters.dcp_storage import FRAMEWORK, ShardReader, ShardWriter
from tiphys.checkpoint.adapters.ranks import Ranks
from tiphys.checkpoint.lifecycle.crash_report import ends_the_attempt, record_crash
from tiphys.checkpoint.lifecycle.preemption import StopSignal
from tiphys.checkpoint.restore.candidates import Ancestry
from tiphys.checkpoint.restore.shard_reader import NodeCache
from tiphys.checkpoint.save.commit import check_fence
from tiphys.checkpoint.save.commit_policy import Commits
from tiphys.checkpoint.save.interval import Interval, history
from tiphys.checkpoint.save.result import Save
from tiphys.checkpoint.settings import Settings, is_due
from tiphys.checkpoint.telemetry.events import Journal, Progress, tell
from tiphys.checkpoint.telemetry.metrics import NoMetrics
from tiphys.checkpoint.telemetry.provenance import gather
from tiphys.errors import FencedError, IntegrityError, StoreError, UsageError
from tiphys.lineage.quarantine import quarantine
from tiphys.lineage.validity import read_manifest
from tiphys.protocol.environment import EX_FENCED, EX_TEMPFAIL, EX_UNAVAILABLE
from tiphys.records import CheckpointManifest, CheckpointRef, Event, Skipped
from tiphys.store import Store, step_attempts


def cause_of(error: BaseException) -> BaseException:
    """The error of Tiphys that some rank met, the same in all ranks; else ``error`` itself.

    Damage counts only if no rank met anything else: then it is what failed.
    """
    if not isinstance(error, CheckpointException):
        return error
    met: list[BaseException] = [failure[0] for _, failure in sorted(error.failures.items())]
    for kind in (FencedError, UsageError, StoreError):
        for cause in met:
            if isinstance(cause, kind):
                return cause
    return met[0] if met and all(isinstance(cause, IntegrityError) for cause in met) else error


class TrackedRanks(DistributedSession):
    """Checkpoints of one attempt, in one of its ranks. The first rank decides, commits, tells and removes."""

    def __init__(
        self,
        settings: Settings,
        *,
        run_store: Store,
        store: Store,
        ranks: Ranks,
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
        self._journal = (Journal if ranks.is_first else _LogOnly)(
            run_store, settings.run, settings.step, settings.attempt
        )
        self._progress = Progress(environ.get("ARGO_PROGRESS_FILE", "") if ranks.is_first else "", total_steps, clock)
        past = history(step_attempts(run_store, settings.run, settings.step)) if settings.save_every.auto else None
        self._interval = Interval(settings.save_every, past, clock=clock)
        self._ancestry = Ancestry(settings, run_store, store)
        self._stop = StopSignal(clock)
        self._commits = Commits(
            settings,
            run_store=run_store,
            store=store,
            journal=self._journal,
            metrics=self._metrics,
            interval=self._interval,
            ancestry=self._ancestry,
            check_fence=self._check_fence,
            in_a_hurry=lambda: self.should_stop,
        )
        self._stager = _stager()
        self._cache = NodeCache(settings.cache) if settings.cache else None
        self._running: Save | None = None
        self._loading: CheckpointRef | None = None
        self._fenced: FencedError | None = None
        self._skipped_saves = 0
        self._told_step: int | None = None
        self._last_step = 0
        self._saved_at = clock()

    @property
    def should_stop(self) -> bool:
        return self._stop.requested

    @property
    def last_committed(self) -> CheckpointRef | None:
        return self._commits.newest

    @property
    def failed_saves(self) -> int:
        return self._commits.failures

    @property
    def skipped_saves(self) -> int:
        return self._skipped_saves

    def restore(self, state: dict[str, Any]) -> int:
        self._ranks.first(self._check_fence)
        skipped: list[Skipped] = []
        for ref in self._ranks.first(self._candidates):
            self._loading, before = ref, self._clock()
            manifest, fault = self._load(ref, state)
            if manifest is not None:
                self._metrics.restored(self._clock() - before, manifest.size_bytes, ref.global_step)
                self._continue_from(ref, skipped)
                return ref.global_step
            self._metrics.verify_failed()
            skipped.append(Skipped(checkpoint=ref, reason=fault))
        self._loading = None
        self._report(skipped, "starting from the beginning")
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
        self._told_step = global_step
        self._commits.stepped()
        self._progress.report(global_step)
        self._metrics.step(global_step)
        busy = self._running is not None and not self._running.done
        stop, due, busy, fenced = self._ranks.any(
            self._stop.requested, self._ranks.is_first and self._due(global_step), busy, self._fenced is not None
        )
        if fenced:
            self._wait()
        if stop:
            self._wait()
            self._leave(self._draft(global_step, metrics, epoch, data_position), state)
        if due and busy and self._settings.busy_rule == "skip":
            self._metrics.skipped()
            self._skipped_saves += 1
            return None  # it stays due, and is tried again after the next step
        if not due:
            return None
        self._wait()
        return self._begin(self._draft(global_step, metrics, epoch, data_position), state)

    def save(
        self,
        global_step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        *,
        epoch: int | None = None,
        data_position: Mapping[str, int | float | str] | None = None,
    ) -> Save | None:
        self._wait()
        draft = self._draft(global_step, metrics, epoch, data_position)
        return self._begin(draft.model_copy(update={"reason": "asked"}), state)

    def writer(self, global_step: int, metrics: Mapping[str, float] | None = None) -> ShardWriter:
        return self._writer(self._draft(global_step, metrics, None, None))

    def reader(self) -> ShardReader | None:
        for ref in self._ranks.first(self._candidates):
            manifest, _ = self._ranks.first(lambda ref=ref: self._open(ref))  # type: ignore[misc]
            if manifest is not None:
                self._commits.restored_from(ref)
                return ShardReader(self._store, manifest, cache=self._cache)
        return None

    def flush(self) -> CheckpointRef | None:
        self._wait()
        return self._commits.newest

    def __enter__(self) -> "TrackedRanks":
        if not self._stop.install():
            tell("the session was not opened in the main thread, so SIGTERM will not save a checkpoint")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._wait()
        except FencedError as fenced:
            error = fenced
        finally:
            self._stop.uninstall()
            self._stager.close()
            self._metrics.close()
        cause = cause_of(error) if error else None
        restored = self._loading or self._commits.restored
        if ends_the_attempt(self._environ):
            record_crash(self._run_store, self._settings, cause, self._told_step, restored)
        for kind_of_error, code in ((FencedError, EX_FENCED), (StoreError, EX_UNAVAILABLE)):
            if isinstance(cause, kind_of_error):
                tell(str(cause))
                raise SystemExit(code) from error

    def _load(self, ref: CheckpointRef, state: dict[str, Any]) -> tuple[CheckpointManifest | None, str]:
        """Load ``ref`` in all ranks; answer its manifest, or why it cannot be used."""
        manifest, fault = self._ranks.first(lambda: self._open(ref))
        if manifest is None:
            return None, fault
        reader = ShardReader(self._store, manifest, self._agree, cache=self._cache)
        try:
            self._agree(reader.prepare())
            dcp.load(state, storage_reader=reader, process_group=self._ranks.saves)
        except (dcp.api.CheckpointException, IntegrityError) as error:
            cause = cause_of(error)
            if not isinstance(cause, IntegrityError):
                raise cause from error
            return None, str(cause)
        return manifest, ""

    def _candidates(self) -> list[CheckpointRef]:
        return list(self._ancestry.candidates())

    def _open(self, ref: CheckpointRef) -> tuple[CheckpointManifest | None, str]:
        try:
            return read_manifest(self._store, ref), ""
        except IntegrityError as error:
            quarantine(self._store, ref, str(error), by="restore")
            return None, str(error)

    def _agree(self, mine: Exception | None) -> None:
        """Raise in every rank what some rank has met; what says nothing about the checkpoint comes first."""
        met = [error for error in self._ranks.all(mine) if error is not None]
        for error in sorted(met, key=lambda error: isinstance(error, IntegrityError)):
            raise error

    def _begin(self, draft: CheckpointManifest, state: Mapping[str, Any]) -> Save:
        save, writer, before = Save(draft.global_step), self._writer(draft), time.perf_counter()
        future: Future[Any] = dcp.async_save(
            state, storage_writer=writer, async_stager=self._stager, process_group=self._ranks.saves
        )
        writer.stage_seconds = time.perf_counter() - before
        self._metrics.stalled(writer.stage_seconds)
        self._running = save
        self._last_step = draft.global_step
        self._saved_at = self._clock()
        future.add_done_callback(lambda ended: self._ended(save, draft.ref, ended.exception()))
        if not self._settings.asynchronous:
            self._wait()
        return save

    def _ended(self, save: Save, ref: CheckpointRef, error: BaseException | None) -> None:
        cause = cause_of(error) if error else None
        try:
            if isinstance(cause, FencedError):
                self._fenced = cause
            elif cause is not None:
                failure = cause if isinstance(cause, Exception) else StoreError(str(cause))
                self._commits.failed(save.global_step, failure)
            elif not self._ranks.is_first:  # which knows since its commit
                self._commits.newest = ref
                self._metrics.saved(ref.global_step)
        finally:  # whoever waits must hear of the end, whatever could not be told of it
            save.end(ref if cause is None else None)

    def _wait(self) -> None:
        """Wait for the save under way; raise if it learned that this attempt was replaced."""
        if self._running is not None:
            self._running.wait()
        if self._fenced is not None:
            raise self._fenced

    def _leave(self, draft: CheckpointManifest, state: Mapping[str, Any]) -> None:
        last = self._commits.newest
        if last is None or last.global_step != draft.global_step:
            self._begin(draft.model_copy(update={"reason": "sigterm"}), state)
            self._wait()
        if self._ranks.is_first:
            last = self._commits.base
            have = f"the newest checkpoint is {last.words}" if last else "no checkpoint exists yet"
            tell(f"told to stop (SIGTERM); {have}; exit code {EX_TEMPFAIL} asks to be tried again")
        raise SystemExit(EX_TEMPFAIL)

    def _due(self, global_step: int) -> bool:
        waited = self._clock() - self._saved_at
        every = self._interval.every
        return is_due(every, seconds_since_save=waited, last_step=self._last_step, global_step=global_step)

    def _draft(
        self,
        global_step: int,
        metrics: Mapping[str, float] | None,
        epoch: int | None,
        data_position: Mapping[str, int | float | str] | None,
    ) -> CheckpointManifest:
        claim = self._commits.claim() if self._ranks.is_first else None
        world = self._ranks.world_size
        facts = gather(self._environ, epoch=epoch, data_position=data_position, world_size=world, claim=claim)
        return self._commits.draft(global_step, FRAMEWORK, facts, metrics)

    def _writer(self, draft: CheckpointManifest) -> ShardWriter:
        return ShardWriter(self._store, draft, self._check_fence, self._commits.committed)

    def _check_fence(self) -> None:
        check_fence(self._run_store, self._settings.run, self._settings.step, self._settings.attempt)

    def _continue_from(self, ref: CheckpointRef, skipped: list[Skipped]) -> None:
        self._loading = None
        self._commits.restored_from(ref)
        self._last_step = ref.global_step
        self._saved_at = self._clock()
        self._report(skipped, f"using {ref.words}")
        self._journal.record([self._journal.restored(ref)])

    def _report(self, skipped: list[Skipped], instead: str) -> None:
        self._journal.record([self._journal.skipped(skip, instead) for skip in skipped])


class _LogOnly(Journal):
    """For all ranks but the first: what they tell is told by the first one, too, and stored once."""

    def record(
        self,
        events: Sequence[Event],
        *,
        store: bool = True,  # noqa: ARG002
        timeout_seconds: float | None = None,  # noqa: ARG002
    ) -> None:
        super().record(events, store=False)


def _stager() -> Any:
    """Copies into buffers that are kept from save to save; in page-locked memory where there is a GPU."""
    gpu = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=gpu
        )
    )
