"""Decides when to save and to stop: in this process alone, or at the same step in all ranks of a training.

Each rank has its own clock, so a rank requests a save at a step ahead, early
enough for every rank to read the request before it reaches that step. A save
that is due by time, and a SIGTERM that only one rank received, therefore reach
all ranks at the same step. A rank that reads a request too late says so, and
the save is abandoned. `SingleProcessCoordinator` and `DistributedCoordinator`
have one interface, so that the session does not depend on the number of ranks.
"""

import math
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from tiphys.checkpoint.lifecycle.preemption import (
    PreemptionSaveChoice,
    PreemptionSaveInputs,
    StopSignal,
    choose_preemption_save,
)
from tiphys.checkpoint.ranks.barrier import RankBarrier, RankInfo
from tiphys.checkpoint.settings import IntervalUnit
from tiphys.checkpoint.telemetry.events import log_message
from tiphys.errors import StoreError, TiphysError, UsageError
from tiphys.records import CheckpointRef, SaveRequest
from tiphys.threads import start_background_thread

T = TypeVar("T")

POLL_SECONDS = 1.0
_SAFETY_FACTOR = 2.5
"""Number of poll intervals between a request and its step."""


def steps_ahead(step_seconds: float, poll_seconds: float) -> int:
    """Return after how many steps every rank that trains at this pace has read a request."""
    return max(1, math.ceil(_SAFETY_FACTOR * poll_seconds / max(step_seconds, 1e-6)))


class SaveRequestListener:
    """The save requests that this rank has read; a thread polls storage while the session is open."""

    def __init__(self, barrier: RankBarrier, clock: Callable[[], float] = time.monotonic) -> None:
        self._barrier = barrier
        self._clock = clock
        # Each poll of each rank is one listing, so larger trainings poll less often: 1000 ranks every 10 s.
        self._poll_seconds = POLL_SECONDS * max(1.0, barrier.rank_info.world_size / 100)
        self._lock = threading.Lock()
        self._requests: dict[str, SaveRequest] = {}
        self._last_step = -1
        self._closed = threading.Event()
        self._measured_from: tuple[int, float] | None = None
        self._step_seconds: float | None = None

    def open(self) -> None:
        """Start the polling thread; raises `UsageError` if no thread can be started."""
        if start_background_thread(self._poll_until_closed) is None:
            raise UsageError(
                f"rank {self._barrier.rank_info.rank} cannot start the thread that reads save requests; raise its "
                "limits of processes (ulimit -u) and of address space (ulimit -v)"
            )

    def close(self) -> None:
        """Stop the polling thread."""
        self._closed.set()

    @property
    def stop_request(self) -> SaveRequest | None:
        """The request to stop; None if this rank has read none."""
        with self._lock:
            return next((request for request in self._requests.values() if request.stop), None)

    def complete_step(self, global_step: int) -> bool:
        """Record that the training completed this step; return whether all ranks are requested to save it.

        A request for it that this rank reads later is too late.
        """
        with self._lock:
            self._last_step = global_step
            return any(request.global_step == global_step for request in self._requests.values())

    def has_pending(self, global_step: int) -> bool:
        """Return whether this rank has read a request for a later step."""
        with self._lock:
            return any(request.global_step > global_step for request in self._requests.values())

    def request_save(self, global_step: int, *, stop: bool = False) -> None:
        """Request a save some steps after ``global_step``; the request of another rank may win.

        Does nothing until the step time is measured, which takes one poll interval.
        """
        if self._step_seconds is None:
            return
        target = global_step + steps_ahead(self._step_seconds, self._poll_seconds)
        self._receive(self._barrier.request_save(target, stop=stop))

    def poll(self) -> None:
        """Read the requests in storage once."""
        for request in self._barrier.read_save_requests():
            self._receive(request)

    def _poll_until_closed(self) -> None:
        while not self._closed.is_set():
            try:
                if not self._closed.wait(self._poll_seconds):
                    self._poll_once()
            except MemoryError:  # memory may be free again at the next poll
                time.sleep(self._poll_seconds)

    def _poll_once(self) -> None:
        try:
            self.poll()
        except TiphysError as error:
            log_message(
                f"save requests of other ranks could not be read; the next try is in {self._poll_seconds:g} s: {error}"
            )

    def _receive(self, request: SaveRequest) -> None:
        with self._lock:
            late = request.nonce not in self._requests and request.global_step <= self._last_step
            self._requests[request.nonce] = request
        if late:
            self._barrier.abandon_save(request.global_step, "it had passed the step when it read the request")

    def measure_step_time(self, global_step: int) -> None:
        """Update the step time, averaged over at least one poll interval, because single steps vary."""
        now = self._clock()
        if self._measured_from is None:
            self._measured_from = global_step, now
        first_step, started_at = self._measured_from
        if global_step > first_step and now - started_at >= min(self._poll_seconds, POLL_SECONDS):
            self._step_seconds = (now - started_at) / (global_step - first_step)
            self._measured_from = global_step, now


class Agreement(Protocol):
    """Collective decisions of ranks that all call it at the same points of the program."""

    world_size: int

    def any_rank(self, *own: bool) -> list[bool]:
        """Return for each flag whether it is set in any rank."""

    def decide_on_first(self, decide: Callable[[], T]) -> T:
        """Call ``decide`` in rank 0 and return its result in every rank."""

    def gather_all(self, own: T) -> list[T]:
        """Return the values of all ranks in their order."""


class SingleProcessCoordinator:
    rank_info = RankInfo()
    has_state = True
    """Whether this process has a state to save."""
    can_skip = True
    """Whether this process may postpone a save to another step."""

    def agree_by(self, agreement: Agreement) -> "SingleProcessCoordinator":
        """Return a coordinator that decides by ``agreement``.

        Raises:
            UsageError: ``agreement`` is one of several processes, and this session of none.
        """
        if agreement.world_size > 1:
            raise UsageError(
                f"{agreement.world_size} processes train together, but each opened a session of its own: start them "
                "by a launcher that sets RANK and WORLD_SIZE, such as torchrun, and open it without alone=True"
            )
        return self

    def open(self) -> None:
        """Start the coordination; called when the session opens."""

    def close(self) -> None:
        """End the coordination; called when the session closes."""

    def vote_valid(self, ref: CheckpointRef) -> bool:  # noqa: ARG002  there are no other ranks
        """Vote that ``ref`` is valid; return whether all ranks agree, so that it is restored."""
        return True

    def should_stop_at(self, global_step: int, stop: StopSignal, seconds_left: float | None) -> bool:  # noqa: ARG002
        """Return whether the training ends after this step. ``seconds_left`` is None before SIGTERM."""
        return stop.is_requested

    def stops_by(self, last_step: int | None) -> bool:  # noqa: ARG002
        """Return whether a training that got SIGTERM is sure to save and stop before its ``last_step``."""
        return True

    def should_save_at(self, global_step: int, due: bool, unit: IntervalUnit) -> bool:  # noqa: ARG002
        """Return whether to save after this step, which is ``due`` by this process's own clock or step count."""
        return due

    def choose_save(self, inputs: PreemptionSaveInputs, global_step: int) -> PreemptionSaveChoice:  # noqa: ARG002
        """Choose what to save in the rest of the grace period."""
        return choose_preemption_save(inputs)


class DistributedCoordinator(SingleProcessCoordinator):
    """Decides for one of several ranks, so that all ranks save and stop at the same step."""

    can_skip = False

    def __init__(self, barrier: RankBarrier, save_requests: SaveRequestListener) -> None:
        self._barrier = barrier
        self._save_requests = save_requests
        self.rank_info = barrier.rank_info
        self.has_state = barrier.sharded or barrier.is_first

    def agree_by(self, agreement: Agreement) -> SingleProcessCoordinator:
        self.close()
        return _AgreementCoordinator(self._barrier, agreement)

    def open(self) -> None:
        self._barrier.open()
        self._save_requests.open()

    def close(self) -> None:
        self._save_requests.close()

    def vote_valid(self, ref: CheckpointRef) -> bool:
        """As `RankBarrier.vote_valid`."""
        return self._barrier.vote_valid(ref)

    def should_stop_at(self, global_step: int, stop: StopSignal, seconds_left: float | None) -> bool:
        self._save_requests.measure_step_time(global_step)
        if stop.is_requested and self._save_requests.stop_request is None:
            try:
                self._save_requests.request_save(global_step, stop=True)
            except StoreError as error:
                log_message(f"the request that all ranks stop could not be stored; the next step tries again: {error}")
        if self._save_requests.stop_request:
            stop.request()
            return global_step >= self._save_requests.stop_request.global_step or seconds_left == 0
        return seconds_left == 0

    def stops_by(self, last_step: int | None) -> bool:
        request = self._save_requests.stop_request
        return request is not None and last_step is not None and request.global_step <= last_step

    def should_save_at(self, global_step: int, due: bool, unit: IntervalUnit) -> bool:
        requested = self._save_requests.complete_step(global_step)
        if unit == "steps":
            return due or requested
        if due and self._barrier.is_first and not self._save_requests.has_pending(global_step):
            self._save_requests.request_save(global_step)
        return requested

    def choose_save(self, inputs: PreemptionSaveInputs, global_step: int) -> PreemptionSaveChoice:
        # Without the shards of every rank nothing is committed, so all ranks save the requested step or none does.
        request = self._save_requests.stop_request
        return (
            PreemptionSaveChoice.SAVE
            if request and request.global_step == global_step and inputs.seconds_left != 0
            else PreemptionSaveChoice.LEAVE
        )


class _AgreementCoordinator(SingleProcessCoordinator):
    """Decides for one of several ranks, which all call the session at the same steps; no rank need look ahead."""

    def __init__(self, barrier: RankBarrier, agreement: Agreement) -> None:
        self._barrier = barrier
        self._agreement = agreement
        self.rank_info = barrier.rank_info
        self.has_state = barrier.is_first

    def vote_valid(self, ref: CheckpointRef) -> bool:
        return self._barrier.vote_valid(ref)

    def should_stop_at(self, global_step: int, stop: StopSignal, seconds_left: float | None) -> bool:  # noqa: ARG002
        (stops,) = self._agreement.any_rank(stop.is_requested)
        if stops:
            stop.request()
        return stops

    def should_save_at(self, global_step: int, due: bool, unit: IntervalUnit) -> bool:  # noqa: ARG002
        return self._agreement.decide_on_first(lambda: due)

    def choose_save(self, inputs: PreemptionSaveInputs, global_step: int) -> PreemptionSaveChoice:  # noqa: ARG002
        # The state is that of rank 0; the other ranks wait for its commit.
        return self._agreement.decide_on_first(lambda: choose_preemption_save(inputs))
