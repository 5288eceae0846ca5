"""When do all ranks save, although each has a clock of its own? At a step that one of them called in advance.

A call names a step far enough ahead for every rank to hear of it before it gets
there. So a save that is due by time, and a SIGTERM that reached one rank only,
meet all ranks at the same step. A rank that hears too late says so, and the
save is given up rather than waited for.

Who decides when to save and to stop: this process alone, or all ranks of a training together.

Both have one face, so that the session need not know how many it is.
"""

import math
import threading
import time
from collections.abc import Callable

from tiphys.checkpoint.lifecycle.preemption import Approach, Choice, StopSignal, land
from tiphys.checkpoint.ranks.barrier import Gang, Place
from tiphys.checkpoint.settings import Unit
from tiphys.checkpoint.telemetry.events import tell
from tiphys.errors import StoreError, TiphysError, UsageError
from tiphys.records import CheckpointRef, SaveCall
from tiphys.threads import in_background

POLL_SECONDS = 1.0
_CAUTION = 2.5
"""Polls that a call has time to be heard in."""


def steps_ahead(step_seconds: float, poll_seconds: float) -> int:
    """How many steps later a call has been heard by everybody who trains at this pace."""
    return max(1, math.ceil(_CAUTION * poll_seconds / max(step_seconds, 1e-6)))


class Calls:
    """The calls that this rank has heard of; a thread listens while the session is open."""

    def __init__(self, gang: Gang, clock: Callable[[], float] = time.monotonic) -> None:
        self._gang = gang
        self._clock = clock
        # A listing for each rank and poll: a thousand ranks ask ten times less often than a hundred.
        self._poll_seconds = POLL_SECONDS * max(1.0, gang.place.world_size / 100)
        self._lock = threading.Lock()
        self._heard: dict[str, SaveCall] = {}
        self._passed = -1
        self._over = threading.Event()
        self._since: tuple[int, float] | None = None
        self._step_seconds: float | None = None

    def open(self) -> None:
        """Begin to listen; raises `UsageError` if no thread can be started for it."""
        if in_background(self._keep_listening) is None:
            raise UsageError(
                f"rank {self._gang.place.rank} cannot start a thread to hear when all ranks save; leave it room for "
                "some threads and their stacks (limits of processes and of address space)"
            )

    def close(self) -> None:
        """Listen no more."""
        self._over.set()

    @property
    def stop(self) -> SaveCall | None:
        """The call to stop, if one was heard."""
        with self._lock:
            return next((call for call in self._heard.values() if call.stop), None)

    def passes(self, global_step: int) -> bool:
        """The training has completed this step; whether all ranks were called to save it.

        A call for it that is heard later comes too late.
        """
        with self._lock:
            self._passed = global_step
            return any(call.global_step == global_step for call in self._heard.values())

    def is_pending(self, global_step: int) -> bool:
        """Whether a call for a later step was heard."""
        with self._lock:
            return any(call.global_step > global_step for call in self._heard.values())

    def call(self, global_step: int, *, stop: bool = False) -> None:
        """Call for a step ahead of ``global_step``; another rank's call may be heard instead.

        Does nothing until the pace of the training is known, which takes a poll.
        """
        if self._step_seconds is None:
            return
        target = global_step + steps_ahead(self._step_seconds, self._poll_seconds)
        self._hear(self._gang.call(target, stop=stop))

    def listen(self) -> None:
        """Hear of the calls that are in storage."""
        for call in self._gang.calls():
            self._hear(call)

    def _keep_listening(self) -> None:
        while not self._over.is_set():
            try:
                if not self._over.wait(self._poll_seconds):
                    self._listen_again()
            except MemoryError:  # who survives it goes on to hear of the others
                time.sleep(self._poll_seconds)

    def _listen_again(self) -> None:
        try:
            self.listen()
        except TiphysError as error:
            tell(f"calls of other ranks could not be read, the next try is in {self._poll_seconds:g} s: {error}")

    def _hear(self, call: SaveCall) -> None:
        with self._lock:
            late = call.nonce not in self._heard and call.global_step <= self._passed
            self._heard[call.nonce] = call
        if late:
            self._gang.give_up(call.global_step, "it had passed the step when the call was heard")

    def keep_pace(self, global_step: int) -> None:
        """Seconds per step over the last poll or more; the first steps of a training are often its slowest."""
        now = self._clock()
        if self._since is None:
            self._since = global_step, now
        step, began = self._since
        if global_step > step and now - began >= min(self._poll_seconds, POLL_SECONDS):
            self._step_seconds = (now - began) / (global_step - step)
            self._since = global_step, now


class Alone:
    """One process, which decides for itself."""

    place = Place()
    saves = True
    """Whether this process has a state to save."""
    may_skip = True
    """Whether it may put a save off to another step."""
    reports = True
    """Whether it tells the run's events what happened."""

    def open(self) -> None:
        """The session begins."""

    def close(self) -> None:
        """The session is over."""

    def agree(self, ref: CheckpointRef) -> bool:  # noqa: ARG002  nobody else is asked
        """This process has read ``ref`` and found it valid; whether it is restored."""
        return True

    def stops_at(self, global_step: int, stop: StopSignal, seconds_left: float | None) -> bool:  # noqa: ARG002
        """Whether the training ends after this step."""
        return stop.requested

    def saves_at(self, global_step: int, due: bool, unit: Unit) -> bool:  # noqa: ARG002
        """Whether a save is made after this step, which is ``due`` by this process's own clock or count."""
        return due

    def choose(self, seen: Approach, global_step: int) -> Choice:  # noqa: ARG002
        """What to do with the rest of the grace period."""
        return land(seen)


class Together(Alone):
    """One of several ranks: what one of them does, all do at the same step."""

    may_skip = False

    def __init__(self, gang: Gang, calls: Calls) -> None:
        self._gang = gang
        self._calls = calls
        self.place = gang.place
        self.saves = gang.sharded or gang.is_first
        self.reports = gang.is_first

    def open(self) -> None:
        self._gang.open()
        self._calls.open()

    def close(self) -> None:
        self._calls.close()

    def agree(self, ref: CheckpointRef) -> bool:
        """As `Gang.agree`."""
        return self._gang.agree(ref)

    def stops_at(self, global_step: int, stop: StopSignal, seconds_left: float | None) -> bool:
        self._calls.keep_pace(global_step)
        if stop.requested and self._calls.stop is None:
            try:
                self._calls.call(global_step, stop=True)
            except StoreError as error:
                tell(f"the other ranks could not be told to stop, the next step tries again: {error}")
        if self._calls.stop:
            stop.request()
            return global_step >= self._calls.stop.global_step or seconds_left == 0
        return seconds_left == 0

    def saves_at(self, global_step: int, due: bool, unit: Unit) -> bool:
        called = self._calls.passes(global_step)
        if unit == "steps":
            return due or called
        if due and self._gang.is_first and not self._calls.is_pending(global_step):
            self._calls.call(global_step)
        return called

    def choose(self, seen: Approach, global_step: int) -> Choice:
        # What one rank leaves out, no rank has saved; so all of them try, or none that has passed the step.
        call = self._calls.stop
        return Choice.SAVE if call and call.global_step == global_step and seen.seconds_left != 0 else Choice.LEAVE
