"""The session of each rank inside a compiled step: decide together, save together, leave together."""

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from tiphys.checkpoint.adapters.dcp import DistributedSession
from tiphys.checkpoint.adapters.dcp_storage import FRAMEWORK, ShardReader, ShardWriter
from tiphys.checkpoint.adapters.failures import cause_of
from tiphys.checkpoint.adapters.ranks import Ranks
from tiphys.checkpoint.ancestry import Ancestry
from tiphys.checkpoint.facts import gather
from tiphys.checkpoint.fence import check_fence
from tiphys.checkpoint.journal import Journal, tell
from tiphys.checkpoint.progress import Progress
from tiphys.checkpoint.save import Save
from tiphys.checkpoint.schedule import is_due
from tiphys.checkpoint.settings import Settings
from tiphys.checkpoint.stopping import StopSignal
from tiphys.errors import FencedError, IntegrityError, ObjectExistsError, StoreError
from tiphys.lineage.quarantine import quarantine
from tiphys.lineage.retention import Retention
from tiphys.lineage.verify import read_manifest
from tiphys.protocol.environment import EX_FENCED, EX_TEMPFAIL, EX_UNAVAILABLE
from tiphys.records import CheckpointManifest, CheckpointRef, Skipped
from tiphys.store import RunLayout, Store


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
        total_steps: int | None = None,
    ) -> None:
        self._settings = settings
        self._run_store = run_store
        self._store = store
        self._ranks = ranks
        self._environ = environ
        self._clock = clock
        self._journal = Journal(run_store, settings.run, settings.step, settings.attempt)
        self._progress = Progress(environ.get("ARGO_PROGRESS_FILE", "") if ranks.is_first else "", total_steps, clock)
        keep, fence = settings.keep, self._check_fence
        self._retention = Retention(store, settings.lineage, keep, recheck=fence) if keep else None
        self._ancestry = Ancestry(settings, run_store, store)
        self._stop = StopSignal(clock)
        self._stager = _stager()
        self._running: Save | None = None
        self._fenced: FencedError | None = None
        self._restored: CheckpointRef | None = None
        self._last_committed: CheckpointRef | None = None
        self._failed_saves = 0
        self._skipped_saves = 0
        self._last_step = 0
        self._saved_at = clock()

    @property
    def should_stop(self) -> bool:
        return self._stop.requested

    @property
    def last_committed(self) -> CheckpointRef | None:
        return self._last_committed

    @property
    def failed_saves(self) -> int:
        return self._failed_saves

    @property
    def skipped_saves(self) -> int:
        return self._skipped_saves

    def restore(self, state: dict[str, Any]) -> int:
        self._ranks.first(self._check_fence)
        skipped: list[Skipped] = []
        for ref in self._ranks.first(self._ancestry.candidates):
            if (fault := self._load(ref, state)) is None:
                self._continue_from(ref, skipped)
                return ref.global_step
            skipped.append(Skipped(checkpoint=ref, reason=fault))
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
        self._progress.report(global_step)
        draft = self._draft(global_step, metrics, epoch, data_position)
        busy = self._running is not None and not self._running.done
        stop, due, busy, fenced = self._ranks.any(
            self._stop.requested, self._ranks.is_first and self._due(global_step), busy, self._fenced is not None
        )
        if fenced:
            self._wait()
        if stop:
            self._leave(draft, state)
        if due and busy:
            self._skipped_saves += 1  # it stays due, and is tried again after the next step
        return self._begin(draft, state) if due and not busy else None

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
        for ref in self._ranks.first(self._ancestry.candidates):
            manifest, _ = self._ranks.first(lambda ref=ref: self._open(ref))  # type: ignore[misc]
            if manifest is not None:
                self._restored = ref
                return ShardReader(self._store, manifest)
        return None

    def flush(self) -> CheckpointRef | None:
        self._wait()
        return self._last_committed

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
        cause = cause_of(error) if error else None
        for kind_of_error, code in ((FencedError, EX_FENCED), (StoreError, EX_UNAVAILABLE)):
            if isinstance(cause, kind_of_error):
                tell(str(cause))
                raise SystemExit(code) from error

    def _load(self, ref: CheckpointRef, state: dict[str, Any]) -> str | None:
        """Load ``ref`` in all ranks; answer why it cannot be used, None if it was loaded."""
        manifest, fault = self._ranks.first(lambda: self._open(ref))
        if manifest is None:
            return fault
        reader = ShardReader(self._store, manifest, self._agree)
        try:
            self._agree(reader.prepare())
            dcp.load(state, storage_reader=reader, process_group=self._ranks.saves)
        except (dcp.api.CheckpointException, IntegrityError) as error:
            cause = cause_of(error)
            if not isinstance(cause, IntegrityError):
                raise cause from error
            return str(cause)
        return None

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
        save = Save(draft.global_step)
        future: Future[Any] = dcp.async_save(
            state, storage_writer=self._writer(draft), async_stager=self._stager, process_group=self._ranks.saves
        )
        self._running = save
        self._last_step = draft.global_step
        self._saved_at = self._clock()
        future.add_done_callback(lambda ended: self._ended(save, draft.ref, ended.exception()))
        return save

    def _ended(self, save: Save, ref: CheckpointRef, error: BaseException | None) -> None:
        cause = cause_of(error) if error else None
        if cause is None:
            self._last_committed = ref
        elif isinstance(cause, FencedError):
            self._fenced = cause
        else:
            self._failed(save.global_step, cause)
        save.end(ref if cause is None else None)

    def _wait(self) -> None:
        """Wait for the save under way; raise if it learned that this attempt was replaced."""
        if self._running is not None:
            self._running.wait()
        if self._fenced is not None:
            raise self._fenced

    def _leave(self, draft: CheckpointManifest, state: Mapping[str, Any]) -> None:
        self._wait()
        last = self._last_committed
        if last is None or last.global_step != draft.global_step:
            self._begin(draft.model_copy(update={"reason": "sigterm"}), state)
            self._wait()
        if self._ranks.is_first:
            last = self._last_committed or self._restored
            have = f"the newest checkpoint is {_words(last)}" if last else "no checkpoint exists yet"
            tell(f"told to stop (SIGTERM); {have}; exit code {EX_TEMPFAIL} asks to be tried again")
        raise SystemExit(EX_TEMPFAIL)

    def _due(self, global_step: int) -> bool:
        waited = self._clock() - self._saved_at
        every = self._settings.save_every
        return is_due(every, seconds_since_save=waited, last_step=self._last_step, global_step=global_step)

    def _draft(
        self,
        global_step: int,
        metrics: Mapping[str, float] | None,
        epoch: int | None,
        data_position: Mapping[str, int | float | str] | None,
    ) -> CheckpointManifest:
        world = self._ranks.world_size
        return CheckpointManifest(
            lineage=self._settings.lineage,
            run=self._settings.run,
            step=self._settings.step,
            attempt=self._settings.attempt,
            global_step=global_step,
            shards=(),
            parent=self._last_committed or self._restored,
            restored=self._restored,
            metrics={name: float(value) for name, value in (metrics or {}).items()},
            facts=gather(self._environ, epoch=epoch, data_position=data_position, world_size=world),
            framework=FRAMEWORK,
        )

    def _writer(self, draft: CheckpointManifest) -> ShardWriter:
        return ShardWriter(self._store, draft, self._check_fence, self._committed)

    def _check_fence(self) -> None:
        check_fence(self._run_store, self._settings.run, self._settings.step, self._settings.attempt)

    def _committed(self, manifest: CheckpointManifest) -> None:
        """In the first rank, once the commit stands: whatever fails now takes nothing back."""
        try:
            if self._settings.has_volume:
                self._note_progress()
            if self._retention is not None and not self.should_stop:
                self._retention.trust(manifest.ref)
                protected = {ref for ref in (self._ancestry.start, self._restored) if ref}
                self._retention.apply(self._ancestry.starts(), protected)
        except (StoreError, IntegrityError) as error:
            tell(f"after the commit of step {manifest.global_step}, storage refused: {error}")

    def _note_progress(self) -> None:
        """Leave with the run that this attempt got on: retry budgets depend on it, and nobody else sees a volume."""
        with contextlib.suppress(ObjectExistsError):
            self._run_store.create(
                RunLayout(self._settings.run).progress(self._settings.step, self._settings.attempt), b""
            )

    def _failed(self, global_step: int, error: BaseException) -> None:
        self._failed_saves += 1
        if self._ranks.is_first:
            message = f"step {global_step} could not be saved: {error}"
            event = self._journal.event("checkpoint.save_failed", message, failed_saves=self._failed_saves)
            self._journal.record([event], store=not self.should_stop)

    def _continue_from(self, ref: CheckpointRef, skipped: list[Skipped]) -> None:
        self._restored = ref
        self._last_step = ref.global_step
        self._saved_at = self._clock()
        if self._retention:
            self._retention.trust(ref)
        self._report(skipped, f"using {_words(ref)}")
        if self._ranks.is_first:
            message = f"attempt {self._settings.attempt} resumes from step {ref.global_step} ({_words(ref)})"
            self._journal.record([self._journal.event("checkpoint.restored", message, checkpoint=str(ref))])

    def _report(self, skipped: list[Skipped], instead: str) -> None:
        if self._ranks.is_first:
            self._journal.record(
                [
                    self._journal.event(
                        "checkpoint.skipped",
                        f"{_words(skip.checkpoint)} is corrupt: {skip.reason}; {instead}",
                        checkpoint=str(skip.checkpoint),
                    )
                    for skip in skipped
                ]
            )


def _stager() -> Any:
    """Copies into buffers that are kept from save to save; in page-locked memory where there is a GPU."""
    gpu = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=gpu
        )
    )


def _words(ref: CheckpointRef) -> str:
    return f"checkpoint {ref.global_step} of attempt {ref.attempt}"
