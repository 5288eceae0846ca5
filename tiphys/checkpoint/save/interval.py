"""How often is a checkpoint worth its cost?

Saving too often wastes the time of saving, too rarely the work that a failure
takes. Between the two lies an optimum that follows from what a save costs and
how often attempts die. Both are measured here; neither is known beforehand, and
both change when a run moves to other nodes or another bucket.

What a run has measured about its checkpoints, and how often it had better saved.

The trainer decides by the same numbers where it may (`tiphys.checkpoint.save.interval`);
this is for the person who set the interval by hand. Pure.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from tiphys.checkpoint.settings import AUTO_BOUNDS, Bounds, Every
from tiphys.records import Cause, CheckpointManifest, Outcome, Record
from tiphys.store import Attempt

PRIOR_FAILURES = 0.1
PRIOR_SECONDS = 2.4 * 3600
"""What is believed before anything happened: one failure in a day of training, and not firmly.

To save too seldom where failures come every few minutes costs far more than to save too often where they do not; so
one real failure counts for ten times as much as the belief.
"""

UPLOAD_SLOWDOWN = 0.1
"""Share of the training's speed that an upload in the background takes at most."""

_REMEMBERED_SAVES = 5
_TOLD_CHANGE = 0.2


class History(NamedTuple):
    """How often attempts of a step have died, by cause, in how many seconds of training."""

    failures: Mapping[str, int] = {}
    training_seconds: float = 0.0

    def mtbf_seconds(self, more_seconds: float = 0.0) -> float:
        """Mean time between failures, if another ``more_seconds`` passed without any.

        The mean of a Poisson process under a Gamma prior of `PRIOR_FAILURES` in
        `PRIOR_SECONDS`: no failure yet does not mean never, and one in the first
        minute not one in every (Gelman et al., Bayesian Data Analysis, §2.6).
        """
        seconds = self.training_seconds + more_seconds + PRIOR_SECONDS
        return seconds / (sum(self.failures.values()) + PRIOR_FAILURES)


class SaveCost(NamedTuple):
    """What one save was measured to take."""

    stall_seconds: float
    """How long the training stood still."""
    upload_seconds: float = 0.0
    size_bytes: int = 0

    @property
    def cost_seconds(self) -> float:
        """Training time that the save cost: the stall, and what the upload slowed down."""
        return self.stall_seconds + UPLOAD_SLOWDOWN * self.upload_seconds


class Change(NamedTuple):
    """Saves are due more or less often from now on. ``data`` holds the numbers that led to it."""

    message: str
    data: dict[str, Any]


def history(attempts: Iterable[Attempt]) -> History:
    """What storage knows of the ends of ``attempts``, from claim to end.

    An attempt whose program had finished and only lacked an output lost nothing
    that a checkpoint could have kept. The times are those of the machines that
    wrote the records; a clock that ran backwards counts as no time.
    """
    failures: Counter[str] = Counter()
    seconds = 0.0
    for claim, end in attempts:
        if end is None:
            continue
        seconds += max(0.0, (end.written_at - claim.written_at).total_seconds())
        if end.outcome is not Outcome.DONE and end.cause is not Cause.OUTPUT_MISSING:
            failures[end.cause.value if end.cause else end.outcome.value] += 1
    return History(dict(failures), seconds)


def young(cost_seconds: float, mtbf_seconds: float) -> float:
    """√(2·C·M): Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974)."""
    return math.sqrt(2 * cost_seconds * mtbf_seconds)


def daly(cost_seconds: float, mtbf_seconds: float) -> float:
    """Seconds of training between two saves that lose the least time.

    Daly, A higher order estimate of the optimum checkpoint interval for restart
    dumps, Future Generation Computer Systems 22 (2006), equation 37. The time a
    restart takes is not in it: it is lost once per failure, however often one
    saves. From C = 2·M on, where no interval helps, the value at that point
    stands, so that the result never falls when M grows.
    """
    ratio = min(1.0, cost_seconds / (2 * mtbf_seconds))
    root = math.sqrt(ratio)
    return 2 * mtbf_seconds * (root * (1 + root / 3 + ratio / 9) - ratio)


def lost_share(interval_seconds: float, cost_seconds: float, restart_seconds: float, mtbf_seconds: float) -> float:
    """Time lost to saves, restarts and work done again, as a share of the useful time (Daly 2006, equation 20)."""
    exponent = (interval_seconds + cost_seconds) / mtbf_seconds
    if exponent + restart_seconds / mtbf_seconds > 500:  # beyond what a float holds
        return math.inf
    factor = mtbf_seconds / interval_seconds * math.exp(restart_seconds / mtbf_seconds)
    return factor * math.expm1(exponent) - 1


def advised(costs: Iterable[SaveCost], mtbf_seconds: float, lowest: float, highest: float) -> float:
    """The interval for saves that cost as the median of ``costs``, between ``lowest`` and ``highest`` seconds.

    Never shorter than the slowest upload, whatever ``highest`` says: the next
    save would meet it still under way.
    """
    measured = list(costs)
    best = daly(median(save.cost_seconds for save in measured), mtbf_seconds)
    return max(lowest, min(highest, best), *(save.upload_seconds for save in measured))


def begun(every: Every, past: History) -> Every:
    """What to follow until a save has been measured: sooner the more failures there were, by their root as in `young`.

    An attempt that dies before its first save learns nothing about what saves cost, and neither does the next.
    """
    if every.auto is None:
        return every
    expected = past.mtbf_seconds() / History().mtbf_seconds()
    return replace(every, amount=max(every.auto.lowest_seconds, every.amount * min(1.0, math.sqrt(expected))))


class Interval:
    """The interval that a session follows: as it was set, or by what was measured where that is ``auto``."""

    def __init__(
        self, every: Every, past: History | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._past = past or History()
        self._every = begun(every, self._past)
        self._clock = clock
        self._opened_at = clock()
        self._saves: deque[SaveCost] = deque(maxlen=_REMEMBERED_SAVES)
        self._told_seconds = self._every.amount

    @property
    def every(self) -> Every:
        """When the next save is due, for `tiphys.checkpoint.settings.is_due`."""
        return self._every

    @property
    def seconds(self) -> float | None:
        """Seconds between saves; None where steps were asked for."""
        return self._every.amount if self._every.unit == "seconds" else None

    def observe_save(self, stall_seconds: float, upload_seconds: float, size_bytes: int) -> Change | None:
        """Take a committed save into account; what there is to tell if the interval changed by over a fifth."""
        self._saves.append(SaveCost(stall_seconds, upload_seconds, size_bytes))
        if self._every.auto is None:
            return None
        mtbf = self._past.mtbf_seconds(self._clock() - self._opened_at)
        seconds = advised(self._saves, mtbf, *self._every.auto)
        self._every = replace(self._every, amount=seconds)
        if abs(seconds - self._told_seconds) <= _TOLD_CHANGE * self._told_seconds:
            return None
        before, self._told_seconds = self._told_seconds, seconds
        return self._change(before, seconds, mtbf)

    def _change(self, before: float, seconds: float, mtbf: float) -> Change:
        save = self._saves[-1]
        failures = sum(self._past.failures.values())
        message = (
            f"a save is due every {seconds:.0f} s from now on, {before:.0f} s until now: the last one stopped the "
            f"training for {save.stall_seconds:.2f} s and uploaded for {save.upload_seconds:.1f} s, and a failure is "
            f"expected every {mtbf / 3600:.1f} h ({failures} so far)"
        )
        data = {
            "interval_seconds": round(seconds, 3),
            "before_seconds": round(before, 3),
            "stall_seconds": round(save.stall_seconds, 6),
            "upload_seconds": round(save.upload_seconds, 6),
            "size_bytes": save.size_bytes,
            "cost_seconds": round(median(one.cost_seconds for one in self._saves), 6),
            "mtbf_seconds": round(mtbf, 1),
            "failures": dict(self._past.failures),
        }
        return Change(message, data)


class Advice(Record):
    """All times in seconds; medians where there were several."""

    saves: int
    stall_seconds: float
    """How long a save stopped the training."""
    upload_seconds: float
    size_bytes: int
    bytes_per_second: float | None
    """Of the uploads; None if they took no time that could be measured."""
    failures: Mapping[str, int]
    """Ends of attempts by cause."""
    training_seconds: float
    mtbf_seconds: float
    """Mean time between failures, the prior included."""
    restart_seconds: float
    """From the end of an attempt to the claim of the next one."""
    used_seconds: float | None
    """Between two commits of an attempt; None if none has two."""
    advised_seconds: float
    young_seconds: float
    """Young's first order, for comparison."""
    lost_share: float | None
    """Time lost to saves, restarts and work done again, as a share of the useful time, as it was used; None if that
    is unknown, or would never end."""
    advised_lost_share: float | None
    """The same with what is advised."""


def advise(manifests: Sequence[CheckpointManifest], attempts: Sequence[Attempt], bounds: Bounds | None) -> Advice:
    """Judge one training step by its committed checkpoints, at least one, and its attempts."""
    costs = [SaveCost(one.stage_seconds, one.upload_seconds, one.size_bytes) for one in manifests]
    cost = median(one.cost_seconds for one in costs)
    past = history(attempts)
    mtbf, restart = past.mtbf_seconds(), _restart_seconds(attempts)
    best = advised(costs, mtbf, *(bounds or AUTO_BOUNDS))
    used = _used_seconds(manifests)
    travelled = sum(one.upload_seconds for one in costs)
    return Advice(
        saves=len(costs),
        stall_seconds=median(one.stall_seconds for one in costs),
        upload_seconds=median(one.upload_seconds for one in costs),
        size_bytes=round(median(one.size_bytes for one in costs)),
        bytes_per_second=sum(one.size_bytes for one in costs) / travelled if travelled else None,
        failures=past.failures,
        training_seconds=past.training_seconds,
        mtbf_seconds=mtbf,
        restart_seconds=restart,
        used_seconds=used,
        advised_seconds=best,
        young_seconds=young(cost, mtbf),
        lost_share=_finite(lost_share(used, cost, restart, mtbf)) if used else None,
        advised_lost_share=_finite(lost_share(best, cost, restart, mtbf)),
    )


def _finite(share: float) -> float | None:
    return share if math.isfinite(share) else None


def _used_seconds(manifests: Iterable[CheckpointManifest]) -> float | None:
    """Median time between two commits of one attempt, which has one clock."""
    ordered = sorted(manifests, key=lambda one: (one.attempt, one.global_step))
    gaps = [
        (after.written_at - before.written_at).total_seconds()
        for before, after in pairwise(ordered)
        if before.attempt == after.attempt
    ]
    return max(median(gaps), 0.001) if gaps else None


def _restart_seconds(attempts: Sequence[Attempt]) -> float:
    waits = [
        max(0.0, (after.claim.written_at - before.end.written_at).total_seconds())
        for before, after in pairwise(sorted(attempts, key=lambda one: one.claim.attempt))
        if before.end is not None
    ]
    return median(waits) if waits else 0.0
