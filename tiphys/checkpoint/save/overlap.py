"""Copies what only updates change beside the next step, and waits for that copy before the next update.

An update is the optimizer's step in PyTorch, or a ``with session.updating():`` block in NumPy. The forward and
backward pass before it read the weights and write none of them, so these are copied meanwhile (CheckFreq, FAST 2021).
BatchNorm statistics, averaged weights and generators change in a forward pass or between steps; they are copied
before `Saver.start` returns, as is everything of which nothing says that only updates change it.

A program may break the rule, for example by clamping its weights after `Session.step`. So the first save of a process
copies everything at once, and its copy is compared with the state at the next update. Only if nothing has changed,
later saves use the time. Each of them is still checked: by the version counters of PyTorch's tensors, which count
changes in place, and by samples of the bytes, because a change through ``tensor.data`` is not counted. A save that they
show to be inexact is never committed, and from then on the process copies everything at once.

Arrays that cannot change, as those of JAX, are copied whenever the thread that saves comes to it, and nothing waits.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tiphys.checkpoint.save.commit import StepLostError
from tiphys.checkpoint.save.optimizers import OptimizerWatch
from tiphys.checkpoint.state.arrays import Array, Bytes, FrozenMemory, find_owner
from tiphys.checkpoint.state.shards import PieceCopy
from tiphys.checkpoint.telemetry.events import log_message
from tiphys.threads import map_parallel

VersionReader = Callable[[], int]
"""Reads a number that changes whenever a tensor is changed in place."""

MIN_BYTES = 16 << 10
"""Smaller arrays are copied at once: that takes no longer than taking samples of them."""
_SAMPLES, _WORD_BYTES = 64, 8
"""Words of a piece that are compared, evenly spaced. A single byte would miss that 2.0 has become 1.0."""
_SMALL_BYTES = 1 << 20
"""Starting threads takes longer than copying so little."""
_COMPARED_BYTES = 1 << 20
"""Compared at a time, which bounds the memory of a comparison."""
_SETTLE_SECONDS = 10.0
"""Wait of a save for the training thread. A change that was under way when the copy ended is counted only when the
operator returns; the training thread itself has none under way when it calls the session or steps an optimizer."""


class LatePiece(NamedTuple):
    """A piece of the state that only updates change. ``version`` and ``sample`` are those of the moment of the save."""

    copy: PieceCopy
    read_version: VersionReader
    version: int
    sample: Bytes

    @property
    def path(self) -> str:
        return self.copy.name.rpartition("@")[0]

    def is_copied_exactly(self) -> bool:
        """Copy the piece; return whether no sample has changed."""
        self.copy.run()
        return np.array_equal(_take_sample(self.copy.target), self.sample)

    def is_unchanged(self) -> bool:
        """Whether the piece still has the version and each byte of its copy."""
        source, target = self.copy.source, self.copy.target
        return self.read_version() == self.version and all(
            np.array_equal(source[start : start + _COMPARED_BYTES], target[start : start + _COMPARED_BYTES])
            for start in range(0, len(source), _COMPARED_BYTES)
        )


class LateCopy:
    """The part of one save's copy that is made after the save has started, by each thread that calls `finish`.

    These are the thread that saves and, once it cannot wait, the training thread.

    Args:
        awaits_update: Whether an update may change a piece, so that the training thread is to call `settle`.
    """

    def __init__(self, pieces: Sequence[LatePiece], *, awaits_update: bool) -> None:
        self.thread = threading.get_ident()
        self._awaits_update = awaits_update
        self._pieces = pieces
        self._pending = iter(pieces)
        self._missing = len(pieces)
        self._inexact: list[str] = []
        self._copied = threading.Condition()
        self._copied_at = 0.0
        self._awaited_at: float | None = None
        self._settled = threading.Event()
        self.changed_path = ""
        """The first part of the state that changed too early; empty if there is none. Known once settled."""

    @property
    def stall_seconds(self) -> float:
        """How long the training waited for this copy, once it is complete."""
        return max(0.0, self._copied_at - self._awaited_at) if self._awaited_at else 0.0

    def finish(self) -> None:
        """Copy what is left, and wait for what other threads are copying."""
        while True:
            with self._copied:
                if (piece := next(self._pending, None)) is None:
                    self._copied.wait_for(lambda: not self._missing)
                    return
            is_exact = False
            try:
                with contextlib.suppress(MemoryError):
                    is_exact = piece.is_copied_exactly()
            finally:  # the handler of a signal may raise here, and others wait for this piece
                with self._copied:
                    self._inexact += [] if is_exact else [piece.path]
                    self._missing -= 1
                    self._copied_at = time.perf_counter()
                    self._copied.notify_all()

    def settle(self) -> None:
        """Finish the copy and decide whether it is exact; for the training thread, before it changes the state."""
        if self._missing:
            self._awaited_at = self._awaited_at or time.perf_counter()
        self._decide()

    def confirm(self) -> None:
        """Return if the copy is exact; raises `StepLostError` otherwise. For the thread that saves."""
        if not self._awaits_update or not self._settled.wait(_SETTLE_SECONDS):
            self._decide()
        if self.changed_path:
            raise StepLostError(
                f"{self.changed_path} changed while it was copied beside the next step, or memory ran out; "
                "the next step is saved"
            )

    def _decide(self) -> None:
        self.finish()
        with self._copied:
            if not self._settled.is_set():
                changed = (piece.path for piece in self._pieces if piece.read_version() != piece.version)
                self.changed_path = next(iter(self._inexact), "") or next(changed, "")
                self._pieces = ()
                self._settled.set()


class StepOverlap:
    """Decides for one session what its saves copy beside the next step. Its training thread calls all but `settle`."""

    def __init__(self, on_wait: Callable[[float], object] = lambda _: None) -> None:
        self._on_wait = on_wait
        self._process = os.getpid()
        self._optimizers: OptimizerWatch | None = None
        self._has_updates = False
        """Whether the program encloses its updates in `updating`."""
        self._is_updating = False
        self._is_trusted = False
        self._has_changed = False
        self._compared: Sequence[LatePiece] = ()
        """What the next update is to find unchanged, before this program is trusted."""
        self._late: LateCopy | None = None
        self.owes_save = False
        """Whether a save was dropped, so that the next step is to be saved."""

    def watch_optimizers(self) -> None:
        """Observe the optimizers of PyTorch, once the program has imported it."""
        if self._optimizers is None and "torch" in sys.modules:
            self._optimizers = OptimizerWatch(self.before_update)

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Enclose the code that changes the arrays of the state."""
        self.before_update()
        self._has_updates = self._is_updating = True
        try:
            yield
        finally:
            self._is_updating = False

    def forget_first_copy(self) -> None:
        """Compare the first copy no more, because its buffers are used again."""
        self._compared = ()

    def copy(self, copies: Sequence[PieceCopy], threads: int) -> LateCopy | None:
        """Copy a state with ``threads`` threads; return what is copied later, None if nothing is."""
        observe = self._make_observer()
        now: list[PieceCopy] = []
        late: list[LatePiece] = []
        frozen: list[LatePiece] = []
        for copy in copies:
            if copy.array.nbytes >= MIN_BYTES and isinstance(find_owner(copy.array), FrozenMemory):
                frozen.append(LatePiece(copy, _no_version, 0, _take_sample(copy.source)))
            elif (read_version := observe(copy.array)) is None:
                now.append(copy)
            else:
                late.append(LatePiece(copy, read_version, read_version(), _take_sample(copy.source)))
        if not self._is_trusted:
            now += [piece.copy for piece in late]
            self._compared, late = late, []
        is_small = sum(len(copy.source) for copy in now) <= _SMALL_BYTES
        map_parallel(lambda _, copy: copy.run(), now, 1 if is_small else threads)
        self.owes_save = False
        if not (late or frozen):
            return None
        later = LateCopy([*late, *frozen], awaits_update=bool(late))
        if late:
            self._late = later
        return later

    def before_update(self) -> None:
        """Wait for the running copy, or compare the first one."""
        if os.getpid() != self._process:
            return  # a forked child changes its own memory
        if self._late:
            self._settle(self._late)
        pieces, self._compared = self._compared, ()
        unchanged = map_parallel(lambda _, piece: piece.is_unchanged(), pieces, 2)
        for piece, is_unchanged in zip(pieces, unchanged, strict=True):
            if not is_unchanged:
                self._give_up(piece.path)
                return
        self._is_trusted = self._is_trusted or bool(pieces)

    def settle(self) -> None:
        """Wait for the running copy; called by the session where the training thread waits, saves or ends."""
        if self._late and self._late.thread == threading.get_ident():
            self._settle(self._late)

    def _make_observer(self) -> Callable[[Array], VersionReader | None]:
        """Return what finds, for the save that begins, how to observe an array; None for one to be copied at once."""
        if self._has_changed or self._is_updating:
            return lambda _: None
        find_version = self._optimizers.prepare() if self._optimizers else None

        def observe(array: Array) -> VersionReader | None:
            if array.nbytes < MIN_BYTES:
                return None
            owner = find_owner(array)
            if not isinstance(owner, np.ndarray | bytearray):
                return find_version(owner) if find_version else None
            return _no_version if self._has_updates else None

        return observe

    def close(self) -> None:
        """Observe nothing more."""
        self.settle()
        self._compared = ()
        if self._optimizers:
            self._optimizers.close()

    def _settle(self, late: LateCopy) -> None:
        late.settle()
        self._late = None
        if late.stall_seconds:
            self._on_wait(late.stall_seconds)
        if late.changed_path:
            self.owes_save = True
            self._give_up(late.changed_path)

    def _give_up(self, path: str) -> None:
        if not self._has_changed:
            self._has_changed = True
            log_message(
                f"{path} changed after the call that saved it and before the next update, so each save stops the "
                "training for a copy of the whole state from now on; to copy it beside the next step, change it "
                "before that call, or in the step of the optimizer"
            )


def _no_version() -> int:
    return 0


def _take_sample(content: Bytes) -> Bytes:
    words = content[: len(content) // _WORD_BYTES * _WORD_BYTES].reshape(-1, _WORD_BYTES)
    return words[:: max(1, len(words) // _SAMPLES)].copy()
