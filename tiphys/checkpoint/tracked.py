"""The session inside a compiled step: restore what is valid, save what is due, stop when told to.

The order of its duties is what keeps promises. A commit is acknowledged only
after its manifest stands; retention runs only after that; a failed save costs a
line in the log and not the training; and an attempt that was replaced stops.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from tiphys.checkpoint.ancestry import Ancestry
from tiphys.checkpoint.commit import ShardSource, Uploads, commit
from tiphys.checkpoint.fence import check_fence
from tiphys.checkpoint.journal import Journal, tell
from tiphys.checkpoint.landing import Approach, Choice, land
from tiphys.checkpoint.loading import load
from tiphys.checkpoint.progress import Progress
from tiphys.checkpoint.save import Save
from tiphys.checkpoint.saving import Saver
from tiphys.checkpoint.schedule import is_due
from tiphys.checkpoint.session import Session
from tiphys.checkpoint.settings import Settings
from tiphys.checkpoint.shards import FRAMEWORK, plan_shards
from tiphys.checkpoint.state import flatten
from tiphys.checkpoint.stopping import StopSignal
from tiphys.errors import FencedError, IntegrityError, ObjectExistsError, StoreError, UsageError
from tiphys.lineage.quarantine import quarantine
from tiphys.lineage.retention import Retention
from tiphys.protocol.environment import EX_FENCED, EX_TEMPFAIL, EX_UNAVAILABLE
from tiphys.records import CheckpointManifest, CheckpointRef, Facts, Skipped
from tiphys.store import RunLayout, Store

_LEAVING_SECONDS = 1.0
"""What a program needs to be gone, once it is told to go."""


class TrackedSession(Session):
    """Checkpoints of one attempt; ``run_store`` keeps attempts and events, ``store`` the checkpoints."""

    def __init__(
        self,
        settings: Settings,
        *,
        run_store: Store,
        store: Store,
        clock: Callable[[], float],
        progress_file: str = "",
        total_steps: int | None = None,
        upload_threads: int = 4,
    ) -> None:
        self._settings = settings
        self._run_store = run_store
        self._store = store
        self._clock = clock
        self._journal = Journal(run_store, settings.run, settings.step, settings.attempt)
        self._progress = Progress(progress_file, total_steps, clock)
        keep, fence = settings.keep, self._check_fence
        self._retention = Retention(store, settings.lineage, keep, recheck=fence) if keep else None
        self._ancestry = Ancestry(settings, run_store, store)
        self._stop = StopSignal(clock)
        self._saver = Saver(
            self._commit,
            self._committed,
            self._failed,
            asynchronous=settings.asynchronous,
            copies=2 if settings.when_busy == "queue" else 1,
            threads=upload_threads,
        )
        self._restored: CheckpointRef | None = None
        self._last_committed: CheckpointRef | None = None
        self._newest: Save | None = None
        self._progress_noted = False
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

    def restore(self, default: Any = None) -> Any:
        sample = flatten(default)  # so that a state which cannot be saved is refused now, not at the first save
        self._check_fence()
        skipped: list[Skipped] = []
        for ref in self._ancestry.candidates():
            try:
                state = load(self._store, ref, default, self._leave_if_told)
            except IntegrityError as error:
                quarantine(self._store, ref, str(error), by="restore")
                skipped.append(Skipped(checkpoint=ref, reason=str(error)))
                continue
            self._continue_from(ref, skipped)
            self._saver.warm(plan_shards(flatten(state)))
            return state
        self._report(skipped, "starting from the beginning")
        self._saver.warm(plan_shards(sample))
        return default

    def step(
        self,
        global_step: int,
        state: Any,
        metrics: Mapping[str, float] | None = None,
        *,
        epoch: int | None = None,
        data_position: Mapping[str, int | float | str] | None = None,
    ) -> Save | None:
        self._progress.report(global_step)
        self._saver.check()
        self._check_order(global_step)
        if self.should_stop:
            self._land(self._draft(global_step, metrics, epoch, data_position), state)
        waited = self._clock() - self._saved_at
        every = self._settings.save_every
        if not is_due(every, seconds_since_save=waited, last_step=self._last_step, global_step=global_step):
            return None
        if self._saver.busy and self._settings.when_busy == "skip":
            self._skipped_saves += 1
            return None  # it stays due, and is tried again after the next step
        draft = self._draft(global_step, metrics, epoch, data_position)
        save = self._save(draft, state, "due")
        if self.should_stop:
            self._land(draft, state)
        return save

    def save(
        self,
        global_step: int,
        state: Any,
        metrics: Mapping[str, float] | None = None,
        *,
        epoch: int | None = None,
        data_position: Mapping[str, int | float | str] | None = None,
    ) -> Save | None:
        self._saver.check()
        self._check_order(global_step)
        return self._save(self._draft(global_step, metrics, epoch, data_position), state, "asked")

    def flush(self, timeout_seconds: float | None = None) -> CheckpointRef | None:
        self._saver.wait(timeout_seconds)
        self._saver.check()
        return self._last_committed

    def __enter__(self) -> "TrackedSession":
        if not self._stop.install():
            tell("the session was not opened in the main thread, so SIGTERM will not save a checkpoint")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not isinstance(error, FencedError | SystemExit):
                self.flush()
        except FencedError as fenced:
            error = fenced
        finally:
            self._stop.uninstall()
        if isinstance(error, FencedError):
            tell(str(error))
            raise SystemExit(EX_FENCED) from error
        if isinstance(error, StoreError):
            tell(str(error))
            raise SystemExit(EX_UNAVAILABLE) from error

    def _continue_from(self, ref: CheckpointRef, skipped: list[Skipped]) -> None:
        self._restored = ref
        self._last_step = ref.global_step
        self._saved_at = self._clock()
        if self._retention:
            self._retention.trust(ref)
        self._report(skipped, f"using {_words(ref)}")
        message = f"attempt {self._settings.attempt} resumes from step {ref.global_step} ({_words(ref)})"
        self._journal.record([self._journal.event("checkpoint.restored", message, checkpoint=str(ref))])

    def _report(self, skipped: list[Skipped], instead: str) -> None:
        events = [
            self._journal.event(
                "checkpoint.skipped",
                f"{_words(skip.checkpoint)} is corrupt: {skip.reason}; {instead}",
                checkpoint=str(skip.checkpoint),
            )
            for skip in skipped
        ]
        self._journal.record(events)

    def _check_order(self, global_step: int) -> None:
        newest = max(known.global_step if known else 0 for known in (self._newest, self._restored))
        if global_step < newest:
            raise UsageError(
                f"global_step {global_step} was given after {newest}; it counts completed steps, so it only grows"
            )

    def _draft(
        self,
        global_step: int,
        metrics: Mapping[str, float] | None,
        epoch: int | None,
        data_position: Mapping[str, int | float | str] | None,
    ) -> CheckpointManifest:
        """The manifest of a save of this step, but for what only the save can know."""
        return CheckpointManifest(
            lineage=self._settings.lineage,
            run=self._settings.run,
            step=self._settings.step,
            attempt=self._settings.attempt,
            global_step=global_step,
            shards=(),
            restored=self._restored,
            metrics=_numbers(metrics or {}),
            facts=Facts(epoch=epoch, data_position=dict(data_position or {})),
            framework=FRAMEWORK,
        )

    def _save(self, draft: CheckpointManifest, state: Any, reason: str, *, copy: bool = True) -> Save:
        newest = self._newest
        if newest and newest.global_step == draft.global_step and not (newest.done and newest.wait() is None):
            return newest  # of this very step: under way, or committed
        plans = plan_shards(flatten(state() if callable(state) else state))
        draft = draft.model_copy(update={"reason": reason})
        try:
            self._newest = self._saver.start(draft, plans, copy=copy)
        except MemoryError:
            tell("there is no memory for a copy of the state, so training waits for its saves from now on")
            self._saver.wait()
            self._saver.asynchronous = False
            self._newest = self._saver.start(draft, plans)
        self._last_step = draft.global_step
        self._saved_at = self._clock()
        return self._newest

    def _commit(self, draft: CheckpointManifest, shards: Sequence[ShardSource], uploads: Uploads) -> CheckpointManifest:
        whole = draft.model_copy(update={"parent": self._last_committed or self._restored})
        return commit(self._store, whole, shards, self._check_fence, uploads)

    def _committed(self, manifest: CheckpointManifest) -> None:
        self._last_committed = manifest.ref
        self._note_progress()
        self._retain(manifest.ref)

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

    def _failed(self, global_step: int, error: Exception) -> None:
        self._failed_saves += 1
        message = f"step {global_step} could not be saved: {error}"
        event = self._journal.event("checkpoint.save_failed", message, failed_saves=self._failed_saves)
        # Storage has just failed: while the grace period runs, no more time is given to it.
        self._journal.record([event], store=not self.should_stop)

    def _retain(self, committed: CheckpointRef) -> None:
        # While the grace period runs, there is no time for tidying.
        if self._retention is None or self.should_stop:
            return
        try:
            self._retention.trust(committed)
            protected = {ref for ref in (self._ancestry.start, self._restored) if ref}
            self._retention.apply(self._ancestry.starts(), protected)
        except (StoreError, IntegrityError) as error:
            tell(f"old checkpoints could not be removed: {error}")

    def _check_fence(self) -> None:
        check_fence(self._run_store, self._settings.run, self._settings.step, self._settings.attempt)

    def _land(self, draft: CheckpointManifest, state: Any) -> None:
        """Save what can be saved before the process is killed, report it, and end the program."""
        plans = plan_shards(flatten(state() if callable(state) else state))
        size = sum(plan.size_bytes for plan in plans)
        running = self._saver.running_bytes
        choice = land(Approach(self._seconds_left(), self._saver.bytes_per_second, size, running))
        before, failed = self._last_committed, self._failed_saves
        if choice is Choice.REPLACE:
            self._saver.cancel()
            self._saver.wait(self._seconds_left())
            self._saver.resume()
        if choice in (Choice.SAVE, Choice.REPLACE):
            # Training has stopped, so the state holds still.
            self._save(draft, state, "sigterm", copy=False)
        if choice is not Choice.LEAVE:
            self._saver.wait(self._seconds_left())
        self._saver.cancel()
        self._report_landing(choice, draft.global_step, size, before, store=self._failed_saves == failed)
        self._saver.check()
        self._leave()

    def _report_landing(
        self, choice: Choice, global_step: int, size: int, before: CheckpointRef | None, *, store: bool
    ) -> None:
        committed = self._last_committed if self._last_committed != before else None
        newest = self._last_committed or self._restored
        lost = global_step - (newest.global_step if newest else 0)
        spent, left = self._seconds_since_told(), self._seconds_left()
        spare = f", {left + _LEAVING_SECONDS:.1f} s before the kill" if left is not None else ""
        if committed and not lost:
            outcome = f"step {global_step} was committed {spent:.1f} s after SIGTERM{spare}"
        elif choice is Choice.LEAVE:
            outcome = f"no time to save step {global_step} ({size:,} bytes); {lost} steps are trained again"
        else:
            outcome = f"step {global_step} was not committed within {spent:.1f} s; {lost} steps are trained again"
        event = self._journal.event(
            "checkpoint.preempted",
            f"told to stop at step {global_step}: {outcome}",
            choice=choice.value,
            global_step=global_step,
            state_bytes=size,
            grace_seconds=self._settings.grace_seconds,
            bytes_per_second=self._saver.bytes_per_second,
            committed=str(committed) if committed else None,
            seconds=round(spent, 3),
            spare_seconds=None if left is None else round(left + _LEAVING_SECONDS, 3),
            steps_lost=lost,
        )
        self._journal.record([event], store=store and (left is None or left > 0))

    def _seconds_since_told(self) -> float:
        return self._clock() - (self._stop.requested_at or 0.0)

    def _seconds_left(self) -> float | None:
        """Until the program must begin to leave; None when nobody said how long the grace period is."""
        grace = self._settings.grace_seconds
        return None if grace is None else max(0.0, grace - _LEAVING_SECONDS - self._seconds_since_told())

    def _leave_if_told(self) -> None:
        if self.should_stop:
            self._leave()

    def _leave(self) -> None:
        last = self._last_committed or self._restored
        have = f"the newest checkpoint is {_words(last)}" if last else "no checkpoint exists yet"
        grace = f" of {self._settings.grace_seconds:g} s" if self._settings.grace_seconds else ""
        told = f"told to stop (SIGTERM) {self._seconds_since_told():.1f} s{grace} ago"
        tell(f"{told}; {have}; exit code {EX_TEMPFAIL} asks to be tried again")
        raise SystemExit(EX_TEMPFAIL)


def _words(ref: CheckpointRef) -> str:
    return f"checkpoint {ref.global_step} of attempt {ref.attempt}"


def _numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in metrics.items()}
    except (TypeError, ValueError) as error:
        raise UsageError(f"metrics must be numbers: {error}") from error
