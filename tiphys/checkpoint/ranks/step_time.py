"""How long this rank works for a step, without the time in which it waits for the others.

In a synchronous training all ranks take the same time for a step, since they
wait for the slowest: only what each does by itself tells which one that is. A
program says where it waits (`Session.waiting`); who never says it tells nothing
here, because its own time cannot be known. NVIDIA's resiliency extension looks
into the GPU for it, and MegaScale (NSDI 2024) puts timers around its kernels;
this is the part of it that needs neither.

Told is the median of some minutes, as an object without content whose name
holds the number: a listing shows all ranks. It is written in the background,
and each rank removes what it has told before the last few.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from tiphys.checkpoint.ranks.barrier import Place
from tiphys.errors import TiphysError
from tiphys.store import LineageLayout, Store
from tiphys.store.layout import PACE_WINDOW_SECONDS, RankPace
from tiphys.threads import Background, in_background

KEPT_WINDOWS = 6
_FEWEST_STEPS = 5
"""A median of fewer says little."""
_MOST_STEPS = 10_000


class NoPace:
    """A training of one process has nobody to be compared with."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time in here is not the rank's own."""
        yield

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Time in here belongs to no step, such as that of a save."""
        yield

    def stepped(self) -> None:
        """A step is complete."""


class Pace(NoPace):
    """The own time of one rank. ``tell`` stores what a window has shown."""

    def __init__(
        self,
        tell: Callable[[int, float], None],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._wall = wall
        self._window = self._now()
        self._own: list[float] = []
        self._since: float | None = None
        self._waited = 0.0
        self._depth = 0
        self._has_said = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._has_said = True
        with self.apart():
            yield

    @contextmanager
    def apart(self) -> Iterator[None]:
        began, self._depth = self._clock(), self._depth + 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._waited += self._clock() - began

    def stepped(self) -> None:
        now, window = self._clock(), self._now()
        if self._since is not None and self._has_said and len(self._own) < _MOST_STEPS:
            self._own.append(max(0.0, now - self._since - self._waited))
        if window != self._window:
            if len(self._own) >= _FEWEST_STEPS:
                self._tell(self._window, statistics.median(self._own))
            self._window, self._own = window, []
        self._since, self._waited, self._has_said = now, 0.0, False

    def _now(self) -> int:
        return int(self._wall() // PACE_WINDOW_SECONDS)


class Teller:
    """Stores what one rank tells, in the background: what cannot be stored is left out."""

    def __init__(self, store: Store, lineage: str, attempt: int, member: int, rank: int) -> None:
        self._store = store
        self._layout = LineageLayout(lineage)
        self._attempt = attempt
        self._member = member
        self._rank = rank
        self._told: list[str] = []
        self._writer: Background | None = None

    def __call__(self, window: int, own_seconds: float) -> None:
        if self._writer is not None and self._writer.is_alive():
            return
        told = RankPace(window, self._member, self._rank, own_seconds)
        self._writer = in_background(lambda: self._store_it(told))

    def wait(self, timeout_seconds: float) -> None:
        """Wait until what was told is stored."""
        if self._writer is not None:
            self._writer.join(timeout_seconds)

    def _store_it(self, told: RankPace) -> None:
        key = self._layout.pace(self._attempt, told)
        try:
            self._store.create(key, b"")
            self._told.append(key)
            for old in self._told[:-KEPT_WINDOWS]:
                self._store.delete(old)
            del self._told[:-KEPT_WINDOWS]
        except TiphysError:
            return  # it is told again in some minutes; a training does not stop for it


def open_pace(
    store: Store, lineage: str, attempt: int, place: Place, environ: Mapping[str, str], clock: Callable[[], float]
) -> NoPace:
    """What keeps the pace of this process; nothing for one that trains alone."""
    if place.world_size < 2:
        return NoPace()
    return Pace(Teller(store, lineage, attempt, member_of(place, environ), place.rank), clock)


def member_of(place: Place, environ: Mapping[str, str]) -> int:
    """Number of the pod of this rank: its index where the launcher or the Job says it."""
    for name in ("PET_NODE_RANK", "JOB_COMPLETION_INDEX"):
        if (told := environ.get(name, "")).isdecimal():
            return int(told)
    return place.rank // max(1, place.local_world_size)
