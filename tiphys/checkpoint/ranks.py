"""Who decides when to save and to stop: this process alone, or all ranks of a training together.

Both have one face, so that the session need not know how many it is.
"""

from tiphys.checkpoint.calls import Calls
from tiphys.checkpoint.gang import Gang, Place
from tiphys.checkpoint.journal import tell
from tiphys.checkpoint.landing import Approach, Choice, land
from tiphys.checkpoint.settings import Unit
from tiphys.checkpoint.stopping import StopSignal
from tiphys.errors import StoreError
from tiphys.records import CheckpointRef


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
