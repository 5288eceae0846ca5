"""Saves that go on behind the training: copied at once, hashed, uploaded and committed by a thread of their own.

One save is under way at a time, so that commits keep the order of their steps.
A save that fails is tried again from its copy, and then counted and told; what
must stop the training, that another attempt has taken its place, waits for the
training to come by.

A copy of the state in memory that is kept from save to save, so that training waits for a memcpy and no more.

Memory that was touched before takes bytes some eight times as fast as fresh
memory, whose pages the kernel first has to find and clear. So the buffers stay,
and are touched ahead of the first save where somebody has time for it.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tiphys.checkpoint.save.commit import LostSaveError, ShardSource, UploadCancelledError, Uploads
from tiphys.checkpoint.save.result import Save
from tiphys.checkpoint.state.shards import ShardPlan
from tiphys.checkpoint.telemetry.events import tell
from tiphys.errors import IntegrityError, StoreError
from tiphys.faults import failpoint
from tiphys.records import CheckpointManifest
from tiphys.threads import Background, in_background, in_parallel

_PAGE_BYTES = 4096
_THREADS = min(4, os.cpu_count() or 1)
"""One core alone does not use all of a machine's memory bandwidth."""


class StagedShard(NamedTuple):
    """A shard whose bytes stand in the staging buffer until the save is over."""

    suffix: str
    buffer: bytearray

    @property
    def size_bytes(self) -> int:
        return len(self.buffer)

    def data(self) -> bytearray:
        return self.buffer


class Staging:
    """Buffers for one copy of the state; in use by one save at a time."""

    def __init__(self) -> None:
        self._buffers: list[bytearray] = []
        self._warming: Background | None = None

    def stage(self, plans: Sequence[ShardPlan]) -> list[StagedShard]:
        """Copy what the plans name; later changes of the state do not reach the copy.

        Raises:
            MemoryError: there is no room for a second copy of the state.
        """
        self._fit(plans)
        in_parallel(lambda index, plan: plan.write_into(self._buffers[index]), plans, _THREADS)
        return [StagedShard(plan.suffix, buffer) for plan, buffer in zip(plans, self._buffers, strict=True)]

    def warm(self, plans: Sequence[ShardPlan]) -> None:
        """Make room for such shards in the background, ahead of the first `stage`."""
        if self._warming is None and not self._buffers:
            sizes = [plan.size_bytes for plan in plans]
            self._warming = in_background(lambda: self._touch(sizes))

    def _touch(self, sizes: Sequence[int]) -> None:
        with contextlib.suppress(MemoryError):  # `stage` says so, if there is none then either
            for size in sizes:
                buffer = bytearray(size)
                np.frombuffer(buffer, dtype=np.uint8)[::_PAGE_BYTES] = 0
                self._buffers.append(buffer)

    def _fit(self, plans: Sequence[ShardPlan]) -> None:
        if self._warming is not None:
            self._warming.join()
            self._warming = None
        for index, plan in enumerate(plans):
            if index == len(self._buffers):
                self._buffers.append(bytearray(plan.size_bytes))
            elif len(self._buffers[index]) != plan.size_bytes:
                self._buffers[index] = bytearray(plan.size_bytes)
        del self._buffers[len(plans) :]


PAUSES_SECONDS = (5.0, 20.0)
"""Between tries of a save, each of which has already tried every request several times."""
_SCARCE_SECONDS = 0.1
"""Until it is looked whether there is memory again."""


class _Job:
    def __init__(self, save: Save, draft: CheckpointManifest, shards: Sequence[ShardSource], staging: Staging | None):
        self.save = save
        self.draft = draft
        self.shards = shards
        self.staging = staging
        self.size_bytes = sum(shard.size_bytes for shard in shards)
        self.largest_bytes = max((shard.size_bytes for shard in shards), default=0)
        self.arrived_bytes = 0

    def progress_bytes(self, threads: int) -> float | None:
        """What has been sent, where shards that are on their way count half; None as long as that tells nothing.

        The first shard is a small document that may arrive at once, or late.
        """
        if not 0 < self.largest_bytes <= self.arrived_bytes:
            return None
        travelling = min(self.size_bytes - self.arrived_bytes, threads * self.largest_bytes)
        return self.arrived_bytes + travelling / 2


Commit = Callable[[CheckpointManifest, Sequence[ShardSource], Uploads], CheckpointManifest]


class Saver:
    """The saves of one session.

    Args:
        commit: Stores shards and commits them, as `tiphys.checkpoint.save.commit.commit` does.
        committed: Told of each commit, on the thread that made it.
        failed: Told of each save that failed for good: its step and why.
        asynchronous: Whether saves go on behind the training. Otherwise nothing
            is copied, and the training waits.
        copies: Copies of the state that may exist; the second waits while the first is under way.
        threads: Shards that travel at once.
    """

    def __init__(
        self,
        commit: Commit,
        committed: Callable[[CheckpointManifest], None],
        failed: Callable[[int, Exception], None],
        *,
        asynchronous: bool = True,
        copies: int = 1,
        threads: int = 4,
    ) -> None:
        self._commit = commit
        self._committed = committed
        self._failed = failed
        self.asynchronous = asynchronous
        self._free = [Staging() for _ in range(copies)]
        self._threads = threads
        self._pauses: Sequence[float] = PAUSES_SECONDS if asynchronous else ()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending: list[_Job] = []
        self._running: Uploads | None = None
        self._given_up = threading.Event()
        self._error: Exception | None = None
        self._worker: Background | None = None
        self._closed = False
        self._measured: float | None = None
        self._begun_at = 0.0

    @property
    def busy(self) -> bool:
        """Whether a save would have to wait for one that is under way."""
        return self.asynchronous and not self._free

    @property
    def bytes_per_second(self) -> float | None:
        """Bandwidth of the save under way once enough of it has arrived, else of the newest that was committed."""
        with self._changed:
            for job in self._pending:
                if (sent := job.progress_bytes(self._threads)) is not None:
                    return sent / max(time.perf_counter() - self._begun_at, 1e-6)
            return self._measured

    @property
    def given_up(self) -> bool:
        """Whether what is under way is to end without a commit."""
        return self._given_up.is_set()

    @property
    def running_bytes(self) -> int:
        """What saves under way have still to send."""
        with self._changed:
            return sum(job.size_bytes - job.arrived_bytes for job in self._pending)

    def warm(self, plans: Sequence[ShardPlan]) -> None:
        """Make room for such a state ahead of its first save."""
        if self.asynchronous:
            self._free[0].warm(plans)

    def start(self, draft: CheckpointManifest, plans: Sequence[ShardPlan], *, copy: bool = True) -> Save:
        """Begin a save; returns once the state is copied, or was committed if this is not asynchronous.

        Waits while the saves under way hold every copy. ``copy=False`` promises
        that the state will not change until the save is over.
        """
        save = Save(draft.global_step)
        if not self.asynchronous:
            self._carry_out(_Job(save, draft, plans, None))
            self.check()
            return save
        if not copy:
            return self._enqueue(_Job(save, draft, plans, None))
        with self._changed:
            self._changed.wait_for(lambda: self._free)
            staging = self._free.pop()
        before = time.perf_counter()
        try:
            staged = staging.stage(plans)
        except BaseException:
            self._give_back(staging)
            raise
        failpoint("checkpoint.after_stage")
        draft = draft.model_copy(update={"stage_seconds": round(time.perf_counter() - before, 6)})
        return self._enqueue(_Job(save, draft, staged, staging))

    def wait_turn(self, timeout_seconds: float) -> None:
        """Wait until a save can be begun at once, or time runs out."""
        with self._changed:
            self._changed.wait_for(lambda: self._free, timeout_seconds)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until no save is under way; whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_seconds)

    def drain(self, patience_seconds: float, moved: Callable[[], object]) -> bool:
        """Wait as `wait` does, while a shard arrives every ``patience_seconds``; ``moved`` is called for each time."""
        before = None
        while (now := self.running_bytes) != before:
            before = now
            moved()
            if self.wait(patience_seconds):
                return True
        return False

    def expect(self, manifest: CheckpointManifest) -> None:
        """Take the bandwidth that ``manifest`` was saved with, until a save of this session has measured it."""
        if manifest.upload_seconds > 0:
            self._measured = manifest.size_bytes / manifest.upload_seconds

    def give_up(self, timeout_seconds: float | None) -> None:
        """End the saves under way before their next shard, try none again, and wait until they are over.

        If that takes too long, saves that are begun later end at once, too.
        """
        self._given_up.set()
        with self._changed:
            if self._running:
                self._running.cancel()
            self._changed.notify_all()
        if self.wait(timeout_seconds):
            self._given_up.clear()

    def close(self) -> None:
        """Begin no save any more, and give the memory of the copies back once none is under way."""
        if self._worker:
            self._jobs.put(None)
            self._worker = None
        with self._changed:
            self._closed = True
            self._free.clear()
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what a save has met that must stop the training, such as `FencedError`."""
        if self._error:
            raise self._error

    def _enqueue(self, job: _Job) -> Save:
        if self._worker is None:
            # A daemon, so that a program which must be gone need not wait for storage; `wait` is how to wait.
            self._worker = in_background(self._work)
        with self._changed:
            self._pending.append(job)
        if self._worker:
            self._jobs.put(job)
        else:
            tell("no thread could be started, so the training waits for this save")
            self._see_through(job)
        return job.save

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._see_through(job)

    def _see_through(self, job: _Job) -> None:
        """Carry ``job`` out; whoever waits for it hears of its end, if need be once there is memory for that."""
        with contextlib.suppress(MemoryError):
            self._carry_out(job)
        while True:
            try:
                if not job.save.done:
                    job.save.end(None)
                self._give_back(job.staging, job)
                return
            except MemoryError:
                time.sleep(_SCARCE_SECONDS)

    def _give_back(self, staging: Staging | None, job: _Job | None = None) -> None:
        with self._changed:
            if job:
                self._running = None  # which knows of the job, and so of its copy
            if staging and not self._closed and staging not in self._free:
                self._free.append(staging)
            if job in self._pending:
                self._pending.remove(job)
            self._changed.notify_all()

    def _carry_out(self, job: _Job) -> None:
        try:
            manifest = self._try(job)
        except UploadCancelledError:
            job.save.end(None)
        except (StoreError, IntegrityError, MemoryError) as error:
            self._failed(job.draft.global_step, error)
            job.save.end(None)
        except Exception as error:  # noqa: BLE001  the worker goes on; the training raises it: fenced, or a bug
            self._error = error
            job.save.end(None)
        else:
            self.expect(manifest)
            job.save.end(manifest.ref)
            self._follow_up(manifest)

    def _follow_up(self, manifest: CheckpointManifest) -> None:
        try:
            self._committed(manifest)
        except MemoryError:
            tell(f"no memory for what follows the commit of step {manifest.global_step}; the next commit sees to it")
        except Exception as error:  # noqa: BLE001  as above
            self._error = error

    def _try(self, job: _Job) -> CheckpointManifest:
        pauses = iter(self._pauses)
        while True:
            job.arrived_bytes, self._begun_at = 0, time.perf_counter()
            uploads = Uploads(self._threads, lambda size: self._arrived(job, size))
            with self._changed:
                self._running = uploads
            if self._given_up.is_set():
                uploads.cancel()
            try:
                return self._commit(job.draft, job.shards, uploads)
            except (UploadCancelledError, LostSaveError):
                raise
            except (StoreError, MemoryError):
                pause = next(pauses, None)
                if pause is None or self._given_up_within(pause):
                    raise

    def _given_up_within(self, seconds: float) -> bool:
        """Wait before the next try, which is the last chance once the session is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.given_up, seconds)
        return self.given_up

    def _arrived(self, job: _Job, size_bytes: int) -> None:
        with self._changed:
            job.arrived_bytes += size_bytes
