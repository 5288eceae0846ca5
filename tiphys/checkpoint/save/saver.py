"""Asynchronous saves: training waits for a copy in memory; a background thread hashes, uploads and commits it.

What only updates change, or nothing, is copied beside the next step instead (`tiphys.checkpoint.save.overlap`).

One save is committed at a time, so that commits keep the order of their steps.
A save that fails is retried from its copy, and then reported to the
`CheckpointCommitter`. An error that must stop the training, such as `FencedError`, is
raised by the next call of the training.

The copies reuse their buffers from save to save: copying into pages that were
touched before is about eight times as fast as into fresh memory, whose pages
the kernel first has to find and clear. `StagingBuffers.preallocate` touches the
pages before the first save.
"""

import contextlib
import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from tiphys.checkpoint.ranks.barrier import SaveAbandonedError
from tiphys.checkpoint.restore.shard_reader import NodeCache
from tiphys.checkpoint.save.commit import BufferedShard, ShardSource, ShardUploader, StepLostError, UploadCancelledError
from tiphys.checkpoint.save.commit_policy import CheckpointCommitter
from tiphys.checkpoint.save.overlap import LateCopy, StepOverlap
from tiphys.checkpoint.save.result import Save
from tiphys.checkpoint.state.near_copy import NearMemory
from tiphys.checkpoint.state.shards import PieceCopy, ShardPlan
from tiphys.checkpoint.telemetry.events import log_message
from tiphys.errors import IntegrityError, StoreError
from tiphys.faults import failpoint
from tiphys.records import CheckpointManifest
from tiphys.threads import BackgroundThread, start_background_thread

_PAGE_BYTES = 4096
_THREADS = min(4, os.cpu_count() or 1)
"""Threads that copy: one core alone does not use all of a machine's memory bandwidth."""


class StagingBuffers:
    """Buffers for one copy of the state, used by one save at a time; in ``near`` memory if that has room."""

    def __init__(self, near: NearMemory | None = None) -> None:
        self._near = near
        self._buffers: list[bytearray | memoryview] = []
        self._preallocation: BackgroundThread | None = None

    def stage(self, plans: Sequence[ShardPlan]) -> tuple[list[BufferedShard], list[PieceCopy]]:
        """Lay out the shards ``plans`` in the buffers; return them, and the copies of arrays that complete them.

        Raises:
            MemoryError: there is no memory for a second copy of the state.
        """
        self._resize(plans)
        copies: list[PieceCopy] = []
        for plan, buffer in zip(plans, self._buffers, strict=True):
            failpoint("checkpoint.before_copy")
            copies += plan.lay_out(buffer)
        return [BufferedShard(plan.suffix, buffer) for plan, buffer in zip(plans, self._buffers, strict=True)], copies

    def preallocate(self, plans: Sequence[ShardPlan]) -> None:
        """Allocate buffers for ``plans`` in the background, before the first `stage`; later calls do nothing."""
        if self._preallocation is None and not self._buffers:
            sizes = [plan.size_bytes for plan in plans]
            self._preallocation = start_background_thread(lambda: self._touch_pages(sizes))

    def close(self, *, is_complete: bool) -> None:
        """Free the memory; of the near memory only if no restart will read it."""
        if self._near is not None:
            if self._preallocation is not None:
                self._preallocation.join()
            self._near.close(is_complete=is_complete)
        self._buffers.clear()

    def _touch_pages(self, sizes: Sequence[int]) -> None:
        with contextlib.suppress(MemoryError):  # `stage` raises it if memory is still short then
            if self._near is not None:
                self._buffers += self._near.allocate(sizes)
            for size in sizes[len(self._buffers) :]:
                buffer = bytearray(size)
                np.frombuffer(buffer, dtype=np.uint8)[::_PAGE_BYTES] = 0
                self._buffers.append(buffer)

    def _resize(self, plans: Sequence[ShardPlan]) -> None:
        if self._preallocation is not None:
            self._preallocation.join()
            self._preallocation = None
        sizes = [plan.size_bytes for plan in plans]
        if self._near is not None and sizes != [len(buffer) for buffer in self._buffers]:
            own = [buffer for buffer in self._buffers if isinstance(buffer, bytearray)]
            self._buffers = [*(self._near.allocate(sizes) or own)]
        for index, plan in enumerate(plans):
            if index == len(self._buffers):
                self._buffers.append(bytearray(plan.size_bytes))
            elif len(self._buffers[index]) != plan.size_bytes:
                self._buffers[index] = bytearray(plan.size_bytes)
        del self._buffers[len(plans) :]


PAUSES_SECONDS = (5.0, 20.0)
"""Pauses between tries of a save. They are long, because the store has already retried each request several times."""
_MEMORY_RETRY_SECONDS = 0.1
"""Pause before the end of a save is reported again after a `MemoryError`."""


class _SaveJob:
    """A save with its shards, and the progress of its upload. ``staging`` is None if the state was not copied.

    Before ``late`` is finished, the copy is not complete; None if it was from the beginning.
    """

    def __init__(
        self,
        save: Save,
        draft: CheckpointManifest,
        shards: Sequence[ShardSource],
        staging: StagingBuffers | None = None,
        late: LateCopy | None = None,
    ):
        self.save = save
        self.draft = draft
        self.shards = shards
        self.staging = staging
        self.late = late
        self.size_bytes = sum(shard.size_bytes for shard in shards)
        self.largest_bytes = max((shard.size_bytes for shard in shards), default=0)
        self.stored_bytes = 0
        self.digests: list[str] = []
        """SHA-256 of each shard, once they are committed."""

    def progress_bytes(self, threads: int) -> float | None:
        """Bytes uploaded so far, with half of the shards in flight; None while too few are stored to measure.

        The first shard is a small document whose upload time says nothing about
        bandwidth, so at least the bytes of the largest shard must be stored.
        """
        if not 0 < self.largest_bytes <= self.stored_bytes:
            return None
        in_flight = min(self.size_bytes - self.stored_bytes, threads * self.largest_bytes)
        return self.stored_bytes + in_flight / 2


class Saver:
    """Runs the saves of one session.

    Args:
        committer: Commits each save and receives its outcome, on the thread that saves.
        asynchronous: Whether a background thread saves a copy of the state.
            Otherwise the state is not copied, and the training waits for each save.
        copies: Copies of the state that may exist; a second one waits in the queue while the first is saved.
        near: Memory for a copy that a restart in the pod can read; None for none.
        on_wait: Called with the seconds for which an update waited for the rest of a copy.
    """

    def __init__(
        self,
        committer: CheckpointCommitter,
        *,
        asynchronous: bool = True,
        copies: int = 1,
        threads: int = 4,
        near: NearMemory | None = None,
        cache: NodeCache | None = None,
        on_wait: Callable[[float], object] = lambda _: None,
    ) -> None:
        self._committer = committer
        self.overlap = StepOverlap(on_wait)
        self.asynchronous = asynchronous
        self._free = [*(StagingBuffers() for _ in range(copies - 1)), StagingBuffers(near)]
        self._threads = threads
        self._cache = cache
        self._pauses: Sequence[float] = PAUSES_SECONDS if asynchronous else ()
        self._jobs: queue.SimpleQueue[_SaveJob | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending: list[_SaveJob] = []
        self._newest: _SaveJob | None = None
        self._running: ShardUploader | None = None
        self._abandoned = threading.Event()
        self._error: Exception | None = None
        self._failing = False
        self._worker: BackgroundThread | None = None
        self._closed = False
        self._measured: float | None = None
        self._begun_at = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a new save would have to wait for a running one."""
        return self.asynchronous and not self._free

    @property
    def bytes_per_second(self) -> float | None:
        """Bandwidth of the running save once enough of it is stored, else of the newest commit; None if unknown."""
        with self._changed:
            for job in self._pending:
                if (uploaded := job.progress_bytes(self._threads)) is not None:
                    return uploaded / max(time.perf_counter() - self._begun_at, 1e-6)
            return self._measured

    @property
    def is_abandoned(self) -> bool:
        """Whether running and queued saves are to end without a commit."""
        return self._abandoned.is_set()

    @property
    def running_bytes(self) -> int:
        """Bytes that running and queued saves have not stored yet."""
        with self._changed:
            return sum(job.size_bytes - job.stored_bytes for job in self._pending)

    def preallocate(self, plans: Sequence[ShardPlan]) -> None:
        """Allocate the copy of a state with the shards ``plans`` in the background, before its first save."""
        if self.asynchronous and plans and self._free:
            self._free[-1].preallocate(plans)

    def start(self, draft: CheckpointManifest, plans: Sequence[ShardPlan], *, copy: bool = True) -> Save:
        """Start a save; return once the state is copied, or once the save ended if this saver is synchronous.

        What only updates change may be copied until the next update begins.

        Waits while earlier saves use all copies.

        ``copy=False`` promises that the state does not change until the save ends, so that it is not copied.

        Raises:
            MemoryError: there is no memory for a copy of the state.
            FencedError: a synchronous save found that another attempt replaced this one.
        """
        save = Save(draft.global_step, self.overlap.settle)
        if not self.asynchronous:
            self.overlap.owes_save = False
            self._newest = _SaveJob(save, draft, plans)
            self._run_job(self._newest)
            self._newest.shards = ()
            self.raise_error()
            return save
        if not copy:
            return self._enqueue(_SaveJob(save, draft, plans))
        self.overlap.settle()
        with self._changed:
            self._changed.wait_for(lambda: self._free)
            staging = self._free.pop()
        before = time.perf_counter()
        try:
            self.overlap.forget_first_copy()
            staged, copies = staging.stage(plans)
            late = self.overlap.copy(copies, _THREADS)
        except BaseException:
            self._give_back(staging)
            raise
        failpoint("checkpoint.after_stage")
        draft = draft.model_copy(update={"stage_seconds": round(time.perf_counter() - before, 6)})
        return self._enqueue(_SaveJob(save, draft, staged, staging, late))

    def shard_digests(self, global_step: int) -> list[str]:
        """Return the SHA-256 of each shard of ``global_step``, if it was saved last; empty if that failed."""
        self.overlap.settle()
        job = self._newest
        if job is None or job.save.global_step != global_step:
            return []
        staged = job.shards  # read first: the end of the save sets the digests, then frees the shards
        if job.save.done:
            return job.digests if job.save.wait() else []
        if late := job.late:
            late.finish()
        return job.digests or [hashlib.sha256(shard.data()).hexdigest() for shard in staged]

    def wait_until_free(self, timeout_seconds: float) -> None:
        """Wait until a save can start at once, or until the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._free, timeout_seconds)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until no save is running or queued; return False after ``timeout_seconds``."""
        self.overlap.settle()
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_seconds)

    def drain(self, stall_timeout_seconds: float, on_progress: Callable[[], object]) -> bool:
        """Wait until no save is running or queued; return False if nothing was stored for ``stall_timeout_seconds``.

        ``on_progress`` is called at the start and after each period in which shards were stored.
        """
        bytes_before = None
        while (bytes_left := self.running_bytes) != bytes_before:
            bytes_before = bytes_left
            on_progress()
            if self.wait(stall_timeout_seconds):
                return True
        return False

    def assume_bandwidth(self, manifest: CheckpointManifest) -> None:
        """Use the bandwidth that ``manifest`` was saved with until the next commit of this session."""
        if manifest.upload_seconds > 0:
            self._measured = manifest.size_bytes / manifest.upload_seconds

    def abandon(self, timeout_seconds: float | None) -> None:
        """Cancel all saves before their next shard, without retries, and wait until they ended.

        After ``timeout_seconds`` the saver stays abandoned: saves that start later are cancelled too.
        """
        self._abandoned.set()
        with self._changed:
            if self._running:
                self._running.cancel()
            self._changed.notify_all()
        if self.wait(timeout_seconds):
            self._abandoned.clear()

    def close(self, *, is_complete: bool = False) -> None:
        """End the worker after the queued saves, and free the memory of the copies.

        A near copy stays for a restart of the program, unless ``is_complete``.
        """
        self.overlap.close()
        if self._worker:
            self._jobs.put(None)
            self._worker = None
        with self._changed:
            self._closed = True
            for staging in self._free:
                staging.close(is_complete=is_complete)
            self._free.clear()
            self._changed.notify_all()

    def raise_error(self) -> None:
        """Raise the error of a save that must stop the training, such as `FencedError`; return if there is none."""
        if self._error:
            raise self._error

    def begin_step(self) -> None:
        """Begin a call of the training, which completed a step; raises as `raise_error` does."""
        self.raise_error()
        self.overlap.settle()
        if self.asynchronous:
            self.overlap.watch_optimizers()

    def _enqueue(self, job: _SaveJob) -> Save:
        if self._worker is None:
            # A daemon thread: a program that must exit does not wait for storage. `wait` is how to wait.
            self._worker = start_background_thread(self._work)
        self._newest = job
        with self._changed:
            self._pending.append(job)
        if self._worker:
            self._jobs.put(job)
        else:
            log_message("no thread could be started, so the training waits for this save")
            self._finish_job(job)
        return job.save

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._finish_job(job)

    def _finish_job(self, job: _SaveJob) -> None:
        """Run ``job`` and end its `Save`, so that no caller waits forever; retries that while memory is short."""
        with contextlib.suppress(MemoryError):
            self._run_job(job)
        while True:
            try:
                if not job.save.done:
                    job.save.end(None)
                self._give_back(job.staging, job)
                return
            except MemoryError:
                time.sleep(_MEMORY_RETRY_SECONDS)

    def _give_back(self, staging: StagingBuffers | None, job: _SaveJob | None = None) -> None:
        with self._changed:
            if job:
                self._running = None  # the uploader references the job, and through it the copy
            if staging and not self._closed and staging not in self._free:
                self._free.append(staging)
            if job in self._pending:
                self._pending.remove(job)
            if job:
                job.shards, job.staging, job.late = (), None, None
            self._changed.notify_all()

    def _run_job(self, job: _SaveJob) -> None:
        try:
            if job.late:
                job.late.finish()
                stalled = round(job.draft.stage_seconds + job.late.stall_seconds, 6)
                job.draft = job.draft.model_copy(update={"stage_seconds": stalled})
            manifest = self._commit_with_retries(job)
        except UploadCancelledError:
            job.save.end(None)
        except (StoreError, IntegrityError, MemoryError) as error:
            self._committer.on_failed(job.draft.global_step, error)
            self.overlap.owes_save |= isinstance(error, StepLostError)
            job.save.end(None)
        except Exception as error:  # noqa: BLE001  the training raises it in its next call: fenced, or a bug
            self._error = error
            job.save.end(None)
        else:
            self.assume_bandwidth(manifest)
            job.save.end(manifest.ref)
            if self._failing:
                self._failing = False
                log_message(f"step {manifest.global_step} is saved, after saves had failed")
            self._acknowledge(manifest)

    def _acknowledge(self, manifest: CheckpointManifest) -> None:
        try:
            self._committer.on_committed(manifest)
        except MemoryError:
            log_message(
                f"there was no memory for retention and events after the commit of step {manifest.global_step}; "
                "they follow after the next commit"
            )
        except Exception as error:  # noqa: BLE001  as above
            self._error = error

    def _commit_with_retries(self, job: _SaveJob) -> CheckpointManifest:
        pauses = iter(self._pauses)
        while True:
            job.stored_bytes, self._begun_at = 0, time.perf_counter()
            uploader = ShardUploader(
                self._threads,
                lambda size_bytes: self._on_shard_stored(job, size_bytes),
                cache=self._cache,
                confirm=job.late.confirm if job.late else None,
            )
            with self._changed:
                self._running = uploader
            if self._abandoned.is_set():
                uploader.cancel()
            try:
                manifest = self._committer.commit(job.draft, job.shards, uploader)
                job.digests = uploader.digests
                return manifest
            except (UploadCancelledError, SaveAbandonedError):
                raise
            except (StoreError, MemoryError) as error:
                self._failing = True
                pause = next(pauses, None)
                if pause is None or self.is_abandoned:
                    raise
                step = job.draft.global_step
                log_message(f"step {step} is not saved yet: {error}; the next try follows in {pause:g} s")
                if self._is_abandoned_within(pause):
                    raise

    def _is_abandoned_within(self, seconds: float) -> bool:
        """Pause before the next try and return whether the saver was abandoned; a closed saver does not pause."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.is_abandoned, seconds)
        return self.is_abandoned

    def _on_shard_stored(self, job: _SaveJob, size_bytes: int) -> None:
        with self._changed:
            job.stored_bytes += size_bytes
