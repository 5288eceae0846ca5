"""The session inside a compiled step: restores the newest valid checkpoint, saves when due, stops after SIGTERM.

`TrackedSession` runs on the training thread and only decides; its collaborators
do the slow work. `Saver` uploads in the background, `CheckpointCommitter`
commits and runs retention, `CheckpointLoader` reads, the coordinator agrees
with the other ranks. An attempt that another one replaced stops.
"""

import functools
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar, Unpack

from tiphys.checkpoint.attempt_session import AttemptSession, SessionArguments
from tiphys.checkpoint.lifecycle.crash_report import is_attempt_end, record_crash, record_hang
from tiphys.checkpoint.lifecycle.hang_watchdog import CrashLog, HangReport, HangWatchdog, NoHangWatchdog
from tiphys.checkpoint.lifecycle.incarnation import record_incarnation
from tiphys.checkpoint.lifecycle.out_of_memory import DRAIN_TIMEOUT_SECONDS, MemoryReserve, OutOfMemoryGuard
from tiphys.checkpoint.lifecycle.preemption import PreemptionReport, PreemptionSaveChoice, PreemptionSaveInputs
from tiphys.checkpoint.lifecycle.session_process import SessionProcess, exit_on
from tiphys.checkpoint.ranks.barrier import SINGLE_RANK, RankBarrier, RankInfo
from tiphys.checkpoint.ranks.coordination import DistributedCoordinator, SaveRequestListener, SingleProcessCoordinator
from tiphys.checkpoint.ranks.step_time import open_step_timer
from tiphys.checkpoint.restore.loader import CheckpointLoader
from tiphys.checkpoint.restore.shard_reader import LoadStoppedError
from tiphys.checkpoint.save.commit import UploadCancelledError
from tiphys.checkpoint.save.passed_states import PassedStates, check_step_number
from tiphys.checkpoint.save.result import Save
from tiphys.checkpoint.save.saver import Saver
from tiphys.checkpoint.session import Session
from tiphys.checkpoint.settings import CheckpointSettings
from tiphys.checkpoint.state.near_copy import NearMemory
from tiphys.checkpoint.state.serialization import flatten_state
from tiphys.checkpoint.state.shards import FRAMEWORK, ShardPlan
from tiphys.checkpoint.telemetry.events import log_message
from tiphys.checkpoint.telemetry.provenance import package_versions
from tiphys.errors import FencedError, IntegrityError
from tiphys.launch.session_registry import PREEMPTED, register_session
from tiphys.protocol.environment import EX_HANG, EX_TEMPFAIL
from tiphys.records import CheckpointManifest, CheckpointRef

_POLL_SECONDS = 0.02
_REPORT_SECONDS = 10.0
"""Longest wait for storage to take the report of a preemption, if the grace period allows it."""

P = ParamSpec("P")
R = TypeVar("R")


def _excluded_from_step_time(
    method: Callable[Concatenate["TrackedSession", P], R],
) -> Callable[Concatenate["TrackedSession", P], R]:
    """Open the session at its first call, and exclude the call from the step times of the watchdog and the timer."""

    @functools.wraps(method)
    def call(self: "TrackedSession", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._process.call(), self._watchdog.paused(), self._step_timer.excluded():
            return method(self, *args, **kwargs)

    return call


class TrackedSession(AttemptSession, Session):
    """The session of one attempt, in one of its processes."""

    def __init__(
        self,
        settings: CheckpointSettings,
        *,
        rank_info: RankInfo | None = None,
        sharded: bool = False,
        opens_itself: bool = False,
        near: NearMemory | None = None,
        upload_threads: int = 4,
        **others: Unpack[SessionArguments],
    ) -> None:
        rank_info = rank_info or SINGLE_RANK
        self._is_restarted = settings.incarnation > 1 or rank_info.incarnation > 0
        super().__init__(settings, framework=FRAMEWORK, is_first=rank_info.rank == 0, **others)
        self._seconds_left, self._seconds_since_stop = self._stop.seconds_left, self._stop.seconds_since_request
        barrier = self._make_barrier(rank_info, sharded=sharded) if rank_info.world_size > 1 else None
        self._committer.barrier = self._barrier = barrier
        self._coordinator: SingleProcessCoordinator = (
            DistributedCoordinator(barrier, SaveRequestListener(barrier, self._clock))
            if barrier
            else SingleProcessCoordinator()
        )
        self._saver = Saver(
            self._committer,
            asynchronous=settings.asynchronous,
            copies=2 if settings.busy_rule == "queue" else 1,
            threads=upload_threads,
            near=near,
            cache=self._cache if settings.fills_cache else None,
            on_wait=self._metrics.record_stall,
        )
        self._states = PassedStates(lambda: self._coordinator.has_state, self._saver)
        self._loader = CheckpointLoader(
            self._store, near=near, cache=self._cache, should_stop=lambda: self.should_stop, threads=upload_threads
        )
        self._watchdog = self._make_watchdog()
        self._step_timer = open_step_timer(
            self._run_store, settings.lineage, settings.attempt, rank_info, self._environ, self._clock
        )
        self._crash_log, self._memory_reserve = CrashLog(), MemoryReserve()
        self._process = SessionProcess(self, self._stop, opens_itself=opens_itself)
        self._is_exiting = False
        self._newest_save: Save | None = None
        package_versions()  # cached now, so that the first save does not wait for it

    def waiting(self) -> AbstractContextManager[None]:
        return self._step_timer.waiting()

    def updating(self) -> AbstractContextManager[None]:
        return self._saver.overlap.updating()

    def agree_by(self, agreement: Any, *, restores: bool) -> None:
        self._process.check_call()
        self._coordinator = self._coordinator.agree_by(agreement)
        if self._barrier:
            self._barrier.voters = [rank for rank, votes in enumerate(agreement.gather_all(restores)) if votes]

    @_excluded_from_step_time
    def restore(self, default: Any = None) -> Any:
        sample = flatten_state(default)  # refuses a state that cannot be saved now, not at the first save
        self._states.known, self._states.is_restored = sample.classes, True
        self._fence.check()

        def load(ref: CheckpointRef) -> tuple[CheckpointManifest, Any]:
            manifest = self._loader.read_manifest(ref)
            state = self._loader.load(manifest, default, self._coordinator.rank_info)
            if not self._coordinator.vote_valid(ref):
                raise IntegrityError("another rank found it corrupt")
            self._saver.assume_bandwidth(manifest)
            return manifest, state

        try:
            state = self._restore_newest(self._candidates.iter_newest_first(), load, default)
        except LoadStoppedError:
            self._exit_preempted()
        restored = self._committer.restored
        if restored and restored.attempt == self._settings.attempt and self._is_first and not self._is_restarted:
            log_message(
                f"restore() returned step {restored.global_step}, saved by an earlier session of this attempt; if "
                "the program trains several models, keep them in one state, or make a step of each"
            )
        self._saver.preallocate(self._states.plan(state))
        return state

    @_excluded_from_step_time
    def step(
        self,
        global_step: int,
        state: Any,
        metrics: Mapping[str, float] | None = None,
        *,
        epoch: int | None = None,
        data_position: Mapping[str, int | float | str] | None = None,
    ) -> Save | None:
        self._step_timer.record_step()
        global_step = self._record_step(global_step, state, data_position)
        self._progress.record_step(global_step, self.total_steps, metrics)
        self._metrics.record_step(global_step)
        save = None
        due = not self._should_stop_at(global_step) and self._is_save_due(global_step)
        if due and self._wait_for_saver():
            save = self._save(self._draft(global_step, metrics, epoch, data_position), self._states.plan(state), "due")
        if self._should_stop_at(global_step):
            self._save_before_kill(self._draft(global_step, metrics, epoch, data_position), state)
        if due and not save:
            # The other ranks save this step, and would wait for the shards of this one until the grace period ends.
            self._last_step = global_step
            self._committer.abandon_save(global_step, "SIGTERM arrived while an earlier save was running")
        return save

    @_excluded_from_step_time
    def save(
        self,
        global_step: int,
        state: Any,
        metrics: Mapping[str, float] | None = None,
        *,
        epoch: int | None = None,
        data_position: Mapping[str, int | float | str] | None = None,
    ) -> Save | None:
        global_step = self._record_step(global_step, state, data_position)
        return self._save(self._draft(global_step, metrics, epoch, data_position), self._states.plan(state), "asked")

    def report(self, global_step: int, metrics: Mapping[str, float] | None = None) -> None:
        self._process.check_call()
        self._progress.record_step(check_step_number(global_step), self.total_steps, metrics)

    @_excluded_from_step_time
    def flush(self, timeout_seconds: float | None = None) -> CheckpointRef | None:
        self._saver.wait(timeout_seconds)
        self._saver.raise_error()
        return self._committer.newest_committed

    def __enter__(self) -> "TrackedSession":
        if not self._process.open():
            return self
        self._coordinator.open()
        self._stop.install()
        if self._is_first:
            record_incarnation(self._run_store, self._settings, self._environ, self._event_log)
        self._crash_log.open()
        self._memory_reserve.allocate()
        self._watchdog.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._memory_reserve.release()  # first, because everything below may need memory
        if not self._process.close():
            return
        self._watchdog.close()
        with OutOfMemoryGuard(error, self._crash_log) as guard:
            self._close(error, guard)

    def _close(self, error: BaseException | None, guard: OutOfMemoryGuard) -> None:
        if error is None and self._is_first and self._completed_step is None and not self._committer.restored:
            log_message(
                "the session ended without a call of step() or save(), so it has saved nothing; call session.step() "
                "after every optimizer step"
            )
        if not self.should_stop and is_attempt_end(self._environ):
            loaded = self._restoring or self._committer.restored
            record_crash(self._run_store, self._settings, error, self._completed_step, loaded)
        elif error and not self._is_exiting:
            have = self._committer.newest
            log_message(f"the program ended after SIGTERM without a step() that could have saved; {have}")
        try:
            if not self._is_exiting and not isinstance(error, FencedError):
                self._flush_before_exit(guard)
        except FencedError as fenced:
            error = fenced
        finally:
            self._stop.uninstall()
            self._saver.close(is_complete=error is None)
            self._coordinator.close()
            self._progress.close()
            self._metrics.close()
            self._crash_log.close()
        exit_on(error)

    def _flush_before_exit(self, guard: OutOfMemoryGuard) -> None:
        seconds_left = self._seconds_left()
        if seconds_left is not None or not guard.is_out_of_memory:
            self._saver.wait(seconds_left)
        else:
            self._saver.close()  # frees unused copies of the state, and ends the pauses between tries
            self._saver.drain(DRAIN_TIMEOUT_SECONDS, guard.extend_deadline)
        self._saver.raise_error()

    def _make_barrier(self, rank_info: RankInfo, *, sharded: bool) -> RankBarrier:
        settings, check, sleep = self._settings, self._fence.check, self._wait_for_ranks
        return RankBarrier(
            self._store, settings.lineage, settings.attempt, rank_info, sharded=sharded, check_fence=check, sleep=sleep
        )

    def _make_watchdog(self) -> NoHangWatchdog:
        limit = self._settings.hang_after_seconds
        if limit is None:
            return NoHangWatchdog()
        return HangWatchdog(
            limit, self._exit_hung, clock=self._clock, is_excused=lambda: self.should_stop or self._saver.is_busy
        )

    def _exit_hung(self, hang: HangReport) -> None:
        """Record the hang and end the process; runs on the watchdog's thread, since the training thread is stuck."""
        log_message(f"{hang.message}, so it is ended with exit code {EX_HANG}; stacks of its threads:\n{hang.stacks}")
        if is_attempt_end(self._environ):
            loaded = self._restoring or self._committer.restored
            record_hang(self._run_store, self._settings, hang, self._completed_step, loaded)
        os._exit(EX_HANG)

    def _wait_for_ranks(self, seconds: float) -> None:
        """Sleep between two polls of the barrier; raises if the grace period leaves no time for other ranks."""
        time.sleep(seconds)
        if self._restoring and self.should_stop:
            raise LoadStoppedError
        if self._saver.is_abandoned or self._seconds_left() == 0:
            raise UploadCancelledError("the grace period leaves no time to wait for the other ranks")

    def _record_step(self, global_step: Any, state: Any, position: Mapping[str, Any] | None) -> int:
        """Record a completed step, and return its number, once it and ``state`` are checked."""
        self._saver.begin_step()
        newest = max(save.global_step if save else 0 for save in (self._newest_save, self._committer.restored))
        number = self._states.check(global_step, state, newest, has_position=position is not None)
        self._committer.record_step()
        self._watchdog.record_step()
        self._completed_step = number
        return number

    def _should_stop_at(self, global_step: int) -> bool:
        return self._coordinator.should_stop_at(global_step, self._stop, self._seconds_left())

    def _is_save_due(self, global_step: int) -> bool:
        due = self._is_interval_over(global_step)
        due = due or (self._saver.overlap.owes_save and not (self._barrier and self._barrier.sharded))
        if not self._coordinator.should_save_at(global_step, due, self._interval.current.unit):
            return False
        if not self._coordinator.has_state:
            self._committer.record_save_of_others()
            return False
        if self._saver.is_busy and self._settings.busy_rule == "skip" and self._coordinator.can_skip:
            self._skipped_saves += 1
            self._metrics.record_skip()
            return False  # the save stays due at the next step
        return True

    def _wait_for_saver(self) -> bool:
        """Wait until another save can start; return False if SIGTERM arrives before that, and a later step is saved."""
        while self._saver.is_busy:
            if self.should_stop and (self._coordinator.stops_by(self.total_steps) or self._seconds_left() == 0):
                return False
            self._saver.wait_until_free(_POLL_SECONDS)
        return True

    def _save(self, draft: CheckpointManifest, plans: list[ShardPlan], reason: str, *, copy: bool = True) -> Save:
        newest = self._newest_save
        if newest and newest.global_step == draft.global_step and not (newest.done and newest.wait() is None):
            return newest  # this step is being saved, or is committed
        before = self._clock()
        draft = draft.model_copy(update={"reason": reason})
        try:
            self._newest_save = self._saver.start(draft, plans, copy=copy)
        except MemoryError:
            log_message("there is no memory for a copy of the state, so the training waits for each save from now on")
            self._saver.wait()
            self._saver.asynchronous = False
            self._newest_save = self._saver.start(draft, plans)
        self._last_step = draft.global_step
        self._saved_at = self._clock()
        self._metrics.record_stall(self._saved_at - before)
        return self._newest_save

    def _save_before_kill(self, draft: CheckpointManifest, state: Any) -> NoReturn:
        """Commit what the grace period allows, report it, and end the program."""
        noticed_seconds = self._seconds_since_stop()
        newest_before, failures_before = self._committer.newest_committed, self._committer.failed_saves
        plans = self._states.plan(state)
        state_bytes = sum(plan.size_bytes for plan in plans)
        # The choice depends on the bandwidth, which is unknown until enough of the running save is stored.
        while self._saver.running_bytes and not self._saver.bytes_per_second and self._seconds_left() != 0:
            self._saver.wait(_POLL_SECONDS)
        inputs = PreemptionSaveInputs(
            self._seconds_left(), self._saver.bytes_per_second, state_bytes, self._saver.running_bytes
        )
        choice = self._coordinator.choose_save(inputs, draft.global_step)
        if choice is PreemptionSaveChoice.REPLACE:
            self._saver.abandon(self._seconds_left())
        if choice in (PreemptionSaveChoice.SAVE, PreemptionSaveChoice.REPLACE):
            # Training has stopped, so the state does not change and need not be copied.
            self._save(draft, plans, "sigterm", copy=False)
        staged_seconds = self._seconds_since_stop()
        if choice is not PreemptionSaveChoice.LEAVE:
            self._saver.wait(self._seconds_left())
        self._saver.abandon(0)
        newest = self._committer.newest_committed
        report = PreemptionReport(
            choice=choice,
            global_step=draft.global_step,
            state_bytes=state_bytes,
            grace_seconds=self._settings.grace_seconds,
            noticed_seconds=noticed_seconds,
            staged_seconds=staged_seconds,
            ended_seconds=self._seconds_since_stop(),
            bytes_per_second=inputs.bytes_per_second,
            committed=newest if newest != newest_before else None,
            newest_step=self._committer.base_checkpoint.global_step if self._committer.base_checkpoint else 0,
        )
        event = self._event_log.make_event("checkpoint.preempted", report.message(), **report.data())
        # Storage that has just failed gets no more time; slow storage gets half of the exit margin at least.
        storage_answers = self._committer.failed_saves == failures_before
        spare_seconds = min(self._seconds_left() or 0.0, _REPORT_SECONDS)
        self._event_log.record(
            [event],
            store=storage_answers and self._is_first,
            timeout_seconds=max(self._stop.exit_margin_seconds / 2, spare_seconds),
        )
        self._saver.raise_error()
        self._exit_preempted()

    def _exit_preempted(self) -> NoReturn:
        self._is_exiting = True
        if error := self._stop.held_back:
            log_message(f"the program's own handler of SIGTERM raised {error!r}, which was held back for the save")
        grace = f" (grace period {self._settings.grace_seconds:g} s)" if self._settings.grace_seconds else ""
        stopped = f"stopped by SIGTERM {self._seconds_since_stop():.1f} s ago{grace}"
        log_message(f"{stopped}; {self._committer.newest}; exit code {EX_TEMPFAIL} requests another attempt")
        register_session(self._environ, PREEMPTED)
        raise SystemExit(EX_TEMPFAIL)
