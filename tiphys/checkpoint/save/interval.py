"""Computes the save interval that loses the least time, from measured save costs and failures.

Frequent saves waste the time of saving; rare saves waste the work that each
failure discards. The optimum follows from the cost of a save and the mean time
between failures. Both are measured, because both change when a run moves to
other nodes or another bucket.

`SaveIntervalController` adjusts the interval of a session that is set to
``auto``.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from tiphys.checkpoint.settings import CheckpointSettings, SaveInterval
from tiphys.protocol.quantities import format_duration
from tiphys.records import AttemptEndOutcome, Cause, utc_now
from tiphys.store import Attempt, Store, read_step_attempts

PRIOR_FAILURES = 0.1
PRIOR_SECONDS = 2.4 * 3600
"""Prior of the failure rate: one failure in a day of training, with the weight of a tenth of a failure.

Saving too rarely where failures come every few minutes costs far more than saving too often where they do not. So one
real failure weighs ten times as much as the prior.
"""

UPLOAD_SLOWDOWN = 0.1
"""Largest share of the training's speed that a background upload takes."""

_REMEMBERED_SAVES = 5
_REPORTED_CHANGE = 0.2


RESTART = "restart"
"""Under which a `FailureHistory` counts the restarts of programs in their pods."""


class FailureHistory(NamedTuple):
    """Failures of the attempts of one step by cause, and their training time in seconds."""

    failures: Mapping[str, int] = {}
    training_seconds: float = 0.0

    def mtbf_seconds(self, more_seconds: float = 0.0) -> float:
        """Return the mean time between failures after ``more_seconds`` of training without a failure.

        The mean of a Poisson process under a Gamma prior of `PRIOR_FAILURES` in
        `PRIOR_SECONDS`: without failures the rate is not zero, and one failure in
        the first minute does not mean one per minute (Gelman et al., Bayesian Data
        Analysis, §2.6).
        """
        seconds = self.training_seconds + more_seconds + PRIOR_SECONDS
        return seconds / (sum(self.failures.values()) + PRIOR_FAILURES)


class SaveCost(NamedTuple):
    stall_seconds: float
    """How long the training was stopped."""
    upload_seconds: float = 0.0
    size_bytes: int = 0

    @property
    def cost_seconds(self) -> float:
        """Training time that the save cost: the stall, and the slowdown by the upload."""
        return self.stall_seconds + UPLOAD_SLOWDOWN * self.upload_seconds


class IntervalChange(NamedTuple):
    """A change of the save interval. ``data`` contains the numbers that it follows from."""

    message: str
    data: dict[str, Any]


def read_failure_history(attempts: Iterable[Attempt]) -> FailureHistory:
    """Count the failures and the training time of ``attempts``, from claim to end.

    An attempt that only lacked an output is no failure here: its program had
    finished, and no checkpoint could have saved time. The times come from the
    clocks that wrote the records; a negative duration counts as zero.
    """
    failures: Counter[str] = Counter()
    seconds = 0.0
    for claim, end in attempts:
        if end is None:
            continue
        seconds += max(0.0, (end.ended_at - claim.written_at).total_seconds())
        if end.incarnations > 1:
            failures[RESTART] += end.incarnations - 1
        if end.outcome is not AttemptEndOutcome.DONE and end.cause is not Cause.OUTPUT_MISSING and not end.stopped:
            failures[end.cause.value if end.cause else end.outcome.value] += 1
    return FailureHistory(dict(failures), seconds)


def young_interval_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """Return √(2·C·M): Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974)."""
    return math.sqrt(2 * cost_seconds * mtbf_seconds)


def daly_interval_seconds(cost_seconds: float, mtbf_seconds: float) -> float:
    """Return the seconds of training between two saves that lose the least time.

    Daly, A higher order estimate of the optimum checkpoint interval for restart
    dumps, Future Generation Computer Systems 22 (2006), equation 37. The restart
    time is not part of it: it is lost once per failure, whatever the interval.
    For C ≥ 2·M no interval helps; there the value of C = 2·M is returned, so that
    the result never falls when M grows.
    """
    ratio = min(1.0, cost_seconds / (2 * mtbf_seconds))
    root = math.sqrt(ratio)
    return 2 * mtbf_seconds * (root * (1 + root / 3 + ratio / 9) - ratio)


def advised_interval_seconds(
    costs: Iterable[SaveCost], mtbf_seconds: float, min_seconds: float, max_seconds: float
) -> float:
    """Return the best interval for the median cost of ``costs``, from ``min_seconds`` to ``max_seconds``.

    It is never shorter than the slowest upload, even beyond ``max_seconds``:
    otherwise the next save would be due before the upload ended.
    """
    measured = list(costs)
    best = daly_interval_seconds(median(save.cost_seconds for save in measured), mtbf_seconds)
    return max(min_seconds, min(max_seconds, best), *(save.upload_seconds for save in measured))


def initial_interval(configured: SaveInterval, history: FailureHistory) -> SaveInterval:
    """Return the interval until a save is measured: shorter with more failures, as in `young_interval_seconds`.

    Otherwise attempts that all fail before their first save would never measure a cost.
    """
    if configured.auto is None:
        return configured
    expected = history.mtbf_seconds() / FailureHistory().mtbf_seconds()
    return replace(
        configured, amount=max(configured.auto.lowest_seconds, configured.amount * min(1.0, math.sqrt(expected)))
    )


class SaveIntervalController:
    """The save interval of a session: fixed, or adjusted to the measured costs if it is set to ``auto``."""

    def __init__(
        self,
        configured: SaveInterval,
        history: FailureHistory | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._history = history or FailureHistory()
        self._current = initial_interval(configured, self._history)
        self._clock = clock
        self._opened_at = clock()
        self._saves: deque[SaveCost] = deque(maxlen=_REMEMBERED_SAVES)
        self._reported_seconds = self._current.amount

    @property
    def current(self) -> SaveInterval:
        """The current interval, for `tiphys.checkpoint.settings.is_save_due`."""
        return self._current

    def observe_save(self, stall_seconds: float, upload_seconds: float, size_bytes: int) -> IntervalChange | None:
        """Adjust the interval to a committed save; return the change to report if it exceeds a fifth, else None."""
        self._saves.append(SaveCost(stall_seconds, upload_seconds, size_bytes))
        if self._current.auto is None:
            return None
        mtbf = self._history.mtbf_seconds(self._clock() - self._opened_at)
        seconds = advised_interval_seconds(self._saves, mtbf, *self._current.auto)
        self._current = replace(self._current, amount=seconds)
        if abs(seconds - self._reported_seconds) <= _REPORTED_CHANGE * self._reported_seconds:
            return None
        before, self._reported_seconds = self._reported_seconds, seconds
        return self._describe_change(before, seconds, mtbf)

    def _describe_change(self, before_seconds: float, seconds: float, mtbf_seconds: float) -> IntervalChange:
        save = self._saves[-1]
        failures = sum(self._history.failures.values())
        stall, upload = format_duration(save.stall_seconds), format_duration(save.upload_seconds)
        message = (
            f"a save is due every {format_duration(seconds)} from now on, {format_duration(before_seconds)} until now: "
            f"the last one stopped the training for {stall} and uploaded for {upload}, and a failure is "
            f"expected every {format_duration(mtbf_seconds)} ({failures} so far)"
        )
        data = {
            "interval_seconds": round(seconds, 3),
            "before_seconds": round(before_seconds, 3),
            "stall_seconds": round(save.stall_seconds, 6),
            "upload_seconds": round(save.upload_seconds, 6),
            "size_bytes": save.size_bytes,
            "cost_seconds": round(median(cost.cost_seconds for cost in self._saves), 6),
            "mtbf_seconds": round(mtbf_seconds, 1),
            "failures": dict(self._history.failures),
        }
        return IntervalChange(message, data)


def open_interval_controller(
    settings: CheckpointSettings, run_store: Store, clock: Callable[[], float]
) -> SaveIntervalController:
    """Open the controller of an attempt. Only an automatic interval reads how earlier attempts of the step ended."""
    is_fixed = settings.save_every.auto is None
    attempts = [] if is_fixed else read_step_attempts(run_store, settings.run, settings.step)
    history = read_failure_history(attempts)
    own = next((attempt.claim for attempt in attempts if attempt.claim.attempt == settings.attempt), None)
    if own is not None and settings.incarnation > 1:
        failures = {**history.failures, RESTART: history.failures.get(RESTART, 0) + settings.incarnation - 1}
        seconds = max(0.0, (utc_now() - own.written_at).total_seconds())
        history = FailureHistory(failures, history.training_seconds + seconds)
    return SaveIntervalController(settings.save_every, history, clock=clock)
