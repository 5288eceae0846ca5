"""The session inside a compiled step: restore what is valid, save what is due, stop when told to.

The order of its duties is what keeps promises. A commit is acknowledged only
after its manifest stands; retention runs only after that; a failed save costs a
line in the log and not the training; and an attempt that was replaced stops.
"""

import contextlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from tiphys.checkpoint.ancestry import Ancestry
from tiphys.checkpoint.commit import commit
from tiphys.checkpoint.fence import check_fence
from tiphys.checkpoint.journal import Journal, tell
from tiphys.checkpoint.loading import load
from tiphys.checkpoint.progress import Progress
from tiphys.checkpoint.retention import Retention
from tiphys.checkpoint.schedule import is_due
from tiphys.checkpoint.session import Session
from tiphys.checkpoint.settings import Settings
from tiphys.checkpoint.shards import FRAMEWORK, pack
from tiphys.checkpoint.state import flatten
from tiphys.checkpoint.stopping import StopSignal
from tiphys.errors import FencedError, IntegrityError, ObjectExistsError, StoreError, UsageError
from tiphys.lineage.quarantine import quarantine
from tiphys.protocol.environment import EX_FENCED, EX_TEMPFAIL, EX_UNAVAILABLE
from tiphys.records import CheckpointManifest, CheckpointRef, Skipped
from tiphys.store import RunLayout, Store


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
    ) -> None:
        self._settings = settings
        self._run_store = run_store
        self._store = store
        self._clock = clock
        self._journal = Journal(run_store, settings.run, settings.step, settings.attempt)
        self._progress = Progress(progress_file, total_steps, clock)
        self._retention = Retention(store, settings.lineage, settings.keep_last) if settings.keep_last else None
        self._ancestry = Ancestry(settings, run_store, store)
        self._stop = StopSignal(clock)
        self._restored: CheckpointRef | None = None
        self._last_committed: CheckpointRef | None = None
        self._progress_noted = False
        self._failed_saves = 0
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

    def restore(self, default: Any = None) -> Any:
        flatten(default)  # so that a state which cannot be saved is refused now, not at the first save
        self._check_fence()
        skipped: list[Skipped] = []
        for ref in self._ancestry.candidates():
            try:
                state = load(self._store, ref, default, self._exit_if_told)
            except IntegrityError as error:
                quarantine(self._store, ref, str(error), by="restore")
                skipped.append(Skipped(checkpoint=ref, reason=str(error)))
                continue
            self._continue_from(ref, skipped)
            return state
        self._report(skipped, "starting from the beginning")
        return default

    def step(self, global_step: int, state: Any, metrics: Mapping[str, float] | None = None) -> CheckpointRef | None:
        self._progress.report(global_step)
        if self.should_stop:
            self._save(global_step, state, metrics, "sigterm")
            self._exit()
        waited = self._clock() - self._saved_at
        every = self._settings.save_every
        if not is_due(every, seconds_since_save=waited, last_step=self._last_step, global_step=global_step):
            return None
        committed = self._save(global_step, state, metrics, "due")
        self._exit_if_told()
        return committed

    def save(self, global_step: int, state: Any, metrics: Mapping[str, float] | None = None) -> CheckpointRef | None:
        return self._save(global_step, state, metrics, "asked")

    def __enter__(self) -> "TrackedSession":
        if not self._stop.install():
            tell("the session was not opened in the main thread, so SIGTERM will not save a checkpoint")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def _save(
        self, global_step: int, state: Any, metrics: Mapping[str, float] | None, reason: str
    ) -> CheckpointRef | None:
        last = self._last_committed
        if last and last.global_step == global_step:
            return last
        newest = max((ref.global_step for ref in (last, self._restored) if ref), default=0)
        if global_step < newest:
            raise UsageError(
                f"global_step {global_step} was given after {newest}; it counts completed steps, so it only grows"
            )
        draft = CheckpointManifest(
            lineage=self._settings.lineage,
            run=self._settings.run,
            step=self._settings.step,
            attempt=self._settings.attempt,
            global_step=global_step,
            shards=(),
            parent=last or self._restored,
            restored=self._restored,
            metrics=_numbers(metrics or {}),
            framework=FRAMEWORK,
            reason=reason,
        )
        try:
            self._last_committed = commit(self._store, draft, pack(state), self._check_fence).ref
        except (StoreError, IntegrityError) as error:
            self._failed(global_step, error)
        else:
            self._note_progress()
            self._retain(self._last_committed)
        self._last_step = global_step
        self._saved_at = self._clock()
        return self._last_committed if self._last_committed != last else None

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
        if self._retention is None:
            return
        try:
            self._retention.trust(committed)
            protected = {ref for ref in (self._ancestry.start, self._restored) if ref}
            self._retention.apply(self._ancestry.starts(), protected)
        except (StoreError, IntegrityError) as error:
            tell(f"old checkpoints could not be removed: {error}")

    def _check_fence(self) -> None:
        check_fence(self._run_store, self._settings.run, self._settings.step, self._settings.attempt)

    def _exit_if_told(self) -> None:
        if self.should_stop:
            self._exit()

    def _exit(self) -> None:
        last = self._last_committed or self._restored
        have = f"the newest checkpoint is {_words(last)}" if last else "no checkpoint exists yet"
        spent = self._clock() - (self._stop.requested_at or 0.0)
        grace = f" of {self._settings.grace_seconds:g} s" if self._settings.grace_seconds else ""
        tell(f"told to stop (SIGTERM) {spent:.1f} s{grace} ago; {have}; exit code {EX_TEMPFAIL} asks to be tried again")
        raise SystemExit(EX_TEMPFAIL)


def _words(ref: CheckpointRef) -> str:
    return f"checkpoint {ref.global_step} of attempt {ref.attempt}"


def _numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in metrics.items()}
    except (TypeError, ValueError) as error:
        raise UsageError(f"metrics must be numbers: {error}") from error
