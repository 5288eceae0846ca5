"""The session inside a compiled step: restore what is valid, save what is due, stop when told to.

It runs on the thread of the training and decides; what takes time happens
elsewhere (`saving`, `commits`). An attempt that was replaced stops.
"""

import functools
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from tiphys.checkpoint.lifecycle.crash_report import ends_the_attempt, record_crash, record_hang
from tiphys.checkpoint.lifecycle.hang_watchdog import LastWords, NoWatch, Stuck, Watch
from tiphys.checkpoint.lifecycle.out_of_memory import PATIENCE_SECONDS, Ending, Reserve
from tiphys.checkpoint.lifecycle.preemption import Approach, Choice, ReportCard, StopSignal, shell_above
from tiphys.checkpoint.ranks.barrier import Gang, Place
from tiphys.checkpoint.ranks.coordination import Alone, Calls, Together
from tiphys.checkpoint.ranks.step_time import open_pace
from tiphys.checkpoint.restore.candidates import Ancestry
from tiphys.checkpoint.restore.loader import Loader
from tiphys.checkpoint.restore.shard_reader import LoadStoppedError, NodeCache
from tiphys.checkpoint.save.commit import UploadCancelledError, check_fence
from tiphys.checkpoint.save.commit_policy import Commits
from tiphys.checkpoint.save.interval import History, Interval, history
from tiphys.checkpoint.save.result import Save
from tiphys.checkpoint.save.saver import Saver
from tiphys.checkpoint.session import Session
from tiphys.checkpoint.settings import Settings, is_due
from tiphys.checkpoint.state.serialization import flatten
from tiphys.checkpoint.state.shards import FRAMEWORK, ShardPlan, plan_shards
from tiphys.checkpoint.telemetry.events import Journal, Progress, tell
from tiphys.checkpoint.telemetry.metrics import NoMetrics
from tiphys.checkpoint.telemetry.provenance import gather, versions
from tiphys.errors import FencedError, IntegrityError, StoreError, UsageError
from tiphys.lineage.quarantine import quarantine
from tiphys.protocol.environment import EX_FENCED, EX_HANG, EX_TEMPFAIL, EX_UNAVAILABLE
from tiphys.records import CheckpointManifest, CheckpointRef, Skipped
from tiphys.store import Store, step_attempts

_LEAVING_SECONDS = 1.0
_LEAVING_SHARE = 0.1
"""What a program needs to be gone, once it is told to go: so many seconds, or this share of a short grace period."""
_LOOK_SECONDS = 0.02

P = ParamSpec("P")
R = TypeVar("R")


def _no_part_of_a_step(
    method: Callable[Concatenate["TrackedSession", P], R],
) -> Callable[Concatenate["TrackedSession", P], R]:
    """Time in here does not make a training look stuck; see `tiphys.checkpoint.lifecycle.hang_watchdog`."""

    @functools.wraps(method)
    def call(self: "TrackedSession", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._watch.not_counted(), self._pace.apart():
            return method(self, *args, **kwargs)

    return call


class TrackedSession(Session):
    """Checkpoints of one attempt; ``run_store`` keeps attempts and events, ``store`` the checkpoints."""

    def __init__(
        self,
        settings: Settings,
        *,
        run_store: Store,
        store: Store,
        clock: Callable[[], float],
        environ: Mapping[str, str],
        total_steps: int | None = None,
        metrics: NoMetrics | None = None,
        place: Place | None = None,
        sharded: bool = False,
        upload_threads: int = 4,
    ) -> None:
        self._settings = settings
        self._run_store = run_store
        self._store = store
        self._clock = clock
        self._environ = environ
        self._metrics = metrics or NoMetrics()
        self._journal = Journal(run_store, settings.run, settings.step, settings.attempt)
        self._progress = Progress(environ.get("ARGO_PROGRESS_FILE", ""), total_steps, clock)
        self._interval = Interval(settings.save_every, self._past(), clock=clock)
        self._ancestry = Ancestry(settings, run_store, store)
        self._stop = StopSignal(clock)
        gang = self._gang(place, sharded=sharded) if place and place.world_size > 1 else None
        self._ranks = Together(gang, Calls(gang, clock)) if gang else Alone()
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
            gang=gang,
        )
        self._saver = Saver(
            self._commits.commit,
            self._commits.committed,
            self._commits.failed,
            asynchronous=settings.asynchronous,
            copies=2 if settings.busy_rule == "queue" else 1,
            threads=upload_threads,
        )
        self._loader = Loader(
            store,
            cache=NodeCache(settings.cache) if settings.cache else None,
            stopping=lambda: self.should_stop,
            threads=upload_threads,
        )
        self._watch = self._watching()
        place = self._ranks.place
        self._pace = open_pace(run_store, settings.lineage, settings.attempt, place, environ, clock)
        self._last_words = LastWords()
        self._reserve = Reserve()
        self._loading: CheckpointRef | None = None
        self._leaving = False
        self._newest: Save | None = None
        self._skipped_saves = 0
        self._told_step: int | None = None
        self._last_step = 0
        self._saved_at = clock()
        versions()  # looked up now, rather than during the first save

    def waiting(self) -> AbstractContextManager[None]:
        return self._pace.waiting()

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

    @_no_part_of_a_step
    def restore(self, default: Any = None) -> Any:
        sample = flatten(default)  # so that a state which cannot be saved is refused now, not at the first save
        self._check_fence()
        skipped: list[Skipped] = []
        for ref in self._ancestry.candidates():
            before, self._loading = self._clock(), ref
            try:
                manifest = self._loader.manifest(ref)
                state = self._loader.load(manifest, default, self._ranks.place)
                if not self._ranks.agree(ref):
                    raise IntegrityError("another rank found it damaged")
            except IntegrityError as error:
                self._metrics.verify_failed()
                quarantine(self._store, ref, str(error), by="restore")
                skipped.append(Skipped(checkpoint=ref, reason=str(error)))
                continue
            except LoadStoppedError:
                self._leave()
            self._loading = None
            self._metrics.restored(self._clock() - before, manifest.size_bytes, ref.global_step)
            self._continue_from(manifest, skipped)
            self._saver.warm(plan_shards(flatten(state)))
            return state
        self._loading = None
        self._report(skipped, "starting from the beginning")
        self._saver.warm(plan_shards(sample))
        return default

    @_no_part_of_a_step
    def step(
        self,
        global_step: int,
        state: Any,
        metrics: Mapping[str, float] | None = None,
        *,
        epoch: int | None = None,
        data_position: Mapping[str, int | float | str] | None = None,
    ) -> Save | None:
        self._pace.stepped()
        self._note_step(global_step)
        self._progress.report(global_step)
        self._metrics.step(global_step)
        save = None
        due = not self._stops_at(global_step) and self._due(global_step)
        if due and self._has_turn():
            save = self._save(self._draft(global_step, metrics, epoch, data_position), self._plans(state), "due")
        if self._stops_at(global_step):
            self._land(self._draft(global_step, metrics, epoch, data_position), state)
        if due and not save:
            # The other ranks save this step, and would wait for this one's share until the grace period is over.
            self._last_step = global_step
            self._commits.leave_out(global_step, "it was told to stop while an earlier save was under way")
        return save

    @_no_part_of_a_step
    def save(
        self,
        global_step: int,
        state: Any,
        metrics: Mapping[str, float] | None = None,
        *,
        epoch: int | None = None,
        data_position: Mapping[str, int | float | str] | None = None,
    ) -> Save | None:
        self._note_step(global_step)
        return self._save(self._draft(global_step, metrics, epoch, data_position), self._plans(state), "asked")

    @_no_part_of_a_step
    def flush(self, timeout_seconds: float | None = None) -> CheckpointRef | None:
        self._saver.wait(timeout_seconds)
        self._saver.check()
        return self._commits.newest

    def __enter__(self) -> "TrackedSession":
        self._ranks.open()
        if not self._stop.install():
            tell("the session was not opened in the main thread, so SIGTERM will not save a checkpoint")
        elif (shell := shell_above()) and self._environ.get("ARGO_CONTAINER_NAME"):
            tell(f"started by {shell}, which SIGTERM ends before this program can save; write exec before its command")
        self._last_words.open()
        self._reserve.put_aside()
        self._watch.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reserve.give_back()  # before anything that may need it
        self._watch.close()
        with Ending(error, self._last_words) as ending:
            self._end(error, ending)

    def _end(self, error: BaseException | None, ending: Ending) -> None:
        if not self.should_stop and ends_the_attempt(self._environ):
            loaded = self._loading or self._commits.restored
            record_crash(self._run_store, self._settings, error, self._told_step, loaded)
        try:
            if not self._leaving and not isinstance(error, FencedError):
                self._flush_at_the_end(ending)
        except FencedError as fenced:
            error = fenced
        finally:
            self._stop.uninstall()
            self._saver.close()
            self._ranks.close()
            self._metrics.close()
            self._last_words.close()
        if isinstance(error, FencedError):
            tell(str(error))
            raise SystemExit(EX_FENCED) from error
        if isinstance(error, StoreError):
            tell(str(error))
            raise SystemExit(EX_UNAVAILABLE) from error

    def _flush_at_the_end(self, ending: Ending) -> None:
        left = self._seconds_left()
        if left is not None or not ending.out_of_memory:
            self.flush(left)
            return
        self._saver.close()  # copies of the state that no save needs, and pauses between tries
        self._saver.drain(PATIENCE_SECONDS, ending.put_off)
        self._saver.check()

    def _gang(self, place: Place, *, sharded: bool) -> Gang:
        settings = self._settings
        return Gang(
            self._store,
            settings.lineage,
            settings.attempt,
            place,
            sharded=sharded,
            check_fence=self._check_fence,
            pause=self._wait_for_ranks,
        )

    def _watching(self) -> NoWatch:
        limit = self._settings.hang_after_seconds
        if limit is None:
            return NoWatch()
        return Watch(limit, self._end_stuck, clock=self._clock, excused=lambda: self.should_stop or self._saver.busy)

    def _end_stuck(self, stuck: Stuck) -> None:
        """Called in a thread of the watch, since the one of the training will not do it."""
        tell(f"{stuck.words}, so it is ended with exit code {EX_HANG}; its threads were here:\n{stuck.stacks}")
        if ends_the_attempt(self._environ):
            loaded = self._loading or self._commits.restored
            record_hang(self._run_store, self._settings, stuck, self._told_step, loaded)
        os._exit(EX_HANG)

    def _wait_for_ranks(self, seconds: float) -> None:
        """Wait a little, unless there is no more time to wait for others."""
        time.sleep(seconds)
        if self._loading and self.should_stop:
            raise LoadStoppedError
        if self._saver.given_up or self._seconds_left() == 0:
            raise UploadCancelledError("there is no more time to wait for the other ranks")

    def _past(self) -> History | None:
        """How often attempts of this step have failed, where the interval follows it."""
        settings = self._settings
        if settings.save_every.auto is None:
            return None
        return history(step_attempts(self._run_store, settings.run, settings.step))

    def _continue_from(self, manifest: CheckpointManifest, skipped: list[Skipped]) -> None:
        ref = manifest.ref
        self._commits.restored_from(ref)
        self._saver.expect(manifest)
        self._last_step = ref.global_step
        self._saved_at = self._clock()
        self._report(skipped, f"using {ref.words}")
        self._journal.record([self._journal.restored(ref)], store=self._ranks.reports)

    def _report(self, skipped: list[Skipped], instead: str) -> None:
        events = [self._journal.skipped(skip, instead) for skip in skipped]
        self._journal.record(events, store=self._ranks.reports)

    def _note_step(self, global_step: int) -> None:
        self._saver.check()
        self._commits.stepped()
        self._watch.stepped()
        self._told_step = global_step
        newest = max(known.global_step if known else 0 for known in (self._newest, self._commits.restored))
        if global_step < newest:
            raise UsageError(
                f"global_step {global_step} was given after {newest}; it counts completed steps, so it only grows"
            )

    def _stops_at(self, global_step: int) -> bool:
        return self._ranks.stops_at(global_step, self._stop, self._seconds_left())

    def _due(self, global_step: int) -> bool:
        every = self._interval.every
        waited = self._clock() - self._saved_at
        due = is_due(every, seconds_since_save=waited, last_step=self._last_step, global_step=global_step)
        if not self._ranks.saves_at(global_step, due, every.unit) or not self._ranks.saves:
            return False
        if self._saver.busy and self._settings.busy_rule == "skip" and self._ranks.may_skip:
            self._skipped_saves += 1
            self._metrics.skipped()
            return False  # it stays due, and is tried again after the next step
        return True

    def _has_turn(self) -> bool:
        """Wait until another save can be begun; False if the program is told to stop before that."""
        while self._saver.busy:
            if self.should_stop:
                return False
            self._saver.wait_turn(_LOOK_SECONDS)
        return True

    def _draft(
        self,
        global_step: int,
        metrics: Mapping[str, float] | None,
        epoch: int | None,
        data_position: Mapping[str, int | float | str] | None,
    ) -> CheckpointManifest:
        """The manifest of a save of this step, but for what only the save can know."""
        facts = gather(self._environ, epoch=epoch, data_position=data_position)
        return self._commits.draft(global_step, FRAMEWORK, facts, metrics)

    def _save(self, draft: CheckpointManifest, plans: list[ShardPlan], reason: str, *, copy: bool = True) -> Save:
        newest = self._newest
        if newest and newest.global_step == draft.global_step and not (newest.done and newest.wait() is None):
            return newest  # of this very step: under way, or committed
        before = self._clock()
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
        self._metrics.stalled(self._saved_at - before)
        return self._newest

    def _plans(self, state: Any) -> list[ShardPlan]:
        """The shards that this rank has to save; none where the first saves for all."""
        if not self._ranks.saves:
            return []
        return plan_shards(flatten(state() if callable(state) else state))

    def _check_fence(self) -> None:
        check_fence(self._run_store, self._settings.run, self._settings.step, self._settings.attempt)

    def _land(self, draft: CheckpointManifest, state: Any) -> None:
        """Commit what can be committed before the process is killed, report it, and end the program."""
        noticed = self._seconds_since_told()
        before, failures = self._commits.newest, self._commits.failures
        plans = self._plans(state)
        size = sum(plan.size_bytes for plan in plans)
        # The first shard to arrive tells the bandwidth, which all depends on.
        while self._saver.running_bytes and not self._saver.bytes_per_second and self._seconds_left() != 0:
            self._saver.wait(_LOOK_SECONDS)
        seen = Approach(self._seconds_left(), self._saver.bytes_per_second, size, self._saver.running_bytes)
        choice = self._ranks.choose(seen, draft.global_step)
        if choice is Choice.REPLACE:
            self._saver.give_up(self._seconds_left())
        if choice in (Choice.SAVE, Choice.REPLACE):
            # Training has stopped, so the state holds still and need not be copied.
            self._save(draft, plans, "sigterm", copy=False)
        staged = self._seconds_since_told()
        if choice is not Choice.LEAVE:
            self._saver.wait(self._seconds_left())
        self._saver.give_up(0)
        newest = self._commits.newest
        card = ReportCard(
            choice=choice,
            global_step=draft.global_step,
            state_bytes=size,
            grace_seconds=self._settings.grace_seconds,
            noticed_seconds=noticed,
            staged_seconds=staged,
            ended_seconds=self._seconds_since_told(),
            bytes_per_second=seen.bytes_per_second,
            committed=newest if newest != before else None,
            newest_step=self._commits.base.global_step if self._commits.base else 0,
        )
        event = self._journal.event("checkpoint.preempted", card.message(), **card.data())
        # No time is lost on storage that has just failed; one that is slow gets half of what leaving takes.
        answers = self._commits.failures == failures
        self._journal.record([event], store=answers and self._ranks.reports, timeout_seconds=self._leaving_seconds / 2)
        self._saver.check()
        self._leave()

    def _seconds_since_told(self) -> float:
        return self._clock() - (self._stop.requested_at or 0.0)

    def _seconds_left(self) -> float | None:
        """Until the program must begin to leave; None when it need not, or nobody said how long the grace period is."""
        if not self.should_stop or self._settings.grace_seconds is None:
            return None
        return max(0.0, self._settings.grace_seconds - self._leaving_seconds - self._seconds_since_told())

    @property
    def _leaving_seconds(self) -> float:
        return min(_LEAVING_SECONDS, _LEAVING_SHARE * (self._settings.grace_seconds or math.inf))

    def _leave(self) -> None:
        self._leaving = True
        base = self._commits.base
        have = f"the newest checkpoint is {base.words}" if base else "no checkpoint exists yet"
        grace = f" of {self._settings.grace_seconds:g} s" if self._settings.grace_seconds else ""
        told = f"told to stop (SIGTERM) {self._seconds_since_told():.1f} s{grace} ago"
        tell(f"{told}; {have}; exit code {EX_TEMPFAIL} asks to be tried again")
        raise SystemExit(EX_TEMPFAIL)
