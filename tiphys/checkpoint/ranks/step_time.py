"""Measures how long this rank works for a step, without the time in which it waits for other ranks.

In a synchronous training all ranks take the same time for a step, because they
wait for the slowest. Only the own time of each rank shows which one is slow.
The program marks where it waits (`Session.waiting`); without marks the own time
is unknown and nothing is published. NVIDIA's resiliency extension measures
inside the GPU, and MegaScale (NSDI 2024) with timers around its kernels; this
module needs neither.

Each rank publishes the median of a window of some minutes as an empty object
whose key contains the number, so that one listing shows all ranks. It writes in
the background, and deletes its objects except for the last `KEPT_WINDOWS`.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from tiphys.checkpoint.ranks.barrier import RankInfo
from tiphys.errors import TiphysError
from tiphys.store import LineageLayout, Store
from tiphys.store.layout import STEP_TIME_WINDOW_SECONDS, RankStepTime
from tiphys.threads import BackgroundThread, start_background_thread

KEPT_WINDOWS = 6
_MIN_STEPS = 5
"""Fewest steps that a median is published of."""
_MAX_STEPS = 10_000


class NoStepTimer:
    """Measures nothing, for a training of one process."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Exclude the block, which waits for other ranks, from the own time."""
        yield

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude the block, such as a save, from the own time."""
        yield

    def record_step(self) -> None:
        """Record that a step is complete."""


class StepTimer(NoStepTimer):
    """Measures the own time of one rank.

    Args:
        publish: Called at the end of each window, with its number and the median own seconds of its steps.
        wall_clock: Seconds since the epoch; windows are equal on all nodes whose clocks agree.
    """

    def __init__(
        self,
        publish: Callable[[int, float], None],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._publish = publish
        self._clock = clock
        self._wall_clock = wall_clock
        self._window = self._current_window()
        self._own_seconds: list[float] = []
        self._step_began_at: float | None = None
        self._excluded_seconds = 0.0
        self._depth = 0
        self._has_waited = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._has_waited = True
        with self.excluded():
            yield

    @contextmanager
    def excluded(self) -> Iterator[None]:
        started_at, self._depth = self._clock(), self._depth + 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._excluded_seconds += self._clock() - started_at

    def record_step(self) -> None:
        now, window = self._clock(), self._current_window()
        if self._step_began_at is not None and self._has_waited and len(self._own_seconds) < _MAX_STEPS:
            self._own_seconds.append(max(0.0, now - self._step_began_at - self._excluded_seconds))
        if window != self._window:
            if len(self._own_seconds) >= _MIN_STEPS:
                self._publish(self._window, statistics.median(self._own_seconds))
            self._window, self._own_seconds = window, []
        self._step_began_at, self._excluded_seconds, self._has_waited = now, 0.0, False

    def _current_window(self) -> int:
        return int(self._wall_clock() // STEP_TIME_WINDOW_SECONDS)


class StepTimePublisher:
    """Stores the medians of one rank in the background; a median that cannot be stored is skipped."""

    def __init__(self, store: Store, lineage: str, attempt: int, member: int, rank: int) -> None:
        self._store = store
        self._layout = LineageLayout(lineage)
        self._attempt = attempt
        self._member = member
        self._rank = rank
        self._published_keys: list[str] = []
        self._writer: BackgroundThread | None = None

    def __call__(self, window: int, own_seconds: float) -> None:
        if self._writer is not None and self._writer.is_alive():
            return
        measured = RankStepTime(window, self._member, self._rank, own_seconds)
        self._writer = start_background_thread(lambda: self._write(measured))

    def wait(self, timeout_seconds: float) -> None:
        """Wait until the last median is stored, or the timeout."""
        if self._writer is not None:
            self._writer.join(timeout_seconds)

    def _write(self, measured: RankStepTime) -> None:
        key = self._layout.step_time(self._attempt, measured)
        try:
            self._store.create(key, b"")
            self._published_keys.append(key)
            for old in self._published_keys[:-KEPT_WINDOWS]:
                self._store.delete(old)
            del self._published_keys[:-KEPT_WINDOWS]
        except TiphysError:
            return  # the next window is published in some minutes; the training does not stop for this one


def open_step_timer(
    store: Store,
    lineage: str,
    attempt: int,
    rank_info: RankInfo,
    environ: Mapping[str, str],
    clock: Callable[[], float],
) -> NoStepTimer:
    """Return the step timer of this process; one that measures nothing if it trains alone."""
    if rank_info.world_size < 2:
        return NoStepTimer()
    return StepTimer(
        StepTimePublisher(store, lineage, attempt, member_index(rank_info, environ), rank_info.rank), clock
    )


def member_index(rank_info: RankInfo, environ: Mapping[str, str]) -> int:
    """Return the number of this rank's pod: from the launcher or the Job if set, else from the ranks per node."""
    for name in ("PET_NODE_RANK", "JOB_COMPLETION_INDEX"):
        if (text := environ.get(name, "")).isdecimal():
            return int(text)
    return rank_info.rank // max(1, rank_info.local_world_size)
