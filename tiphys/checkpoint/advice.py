"""What a run has measured about its checkpoints, and how often it had better saved.

The trainer decides by the same numbers where it may (`tiphys.checkpoint.interval`);
this is for the person who set the interval by hand. Pure.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median

from tiphys.checkpoint.interval import SaveCost, advised, history, lost_share, young
from tiphys.checkpoint.settings import AUTO_BOUNDS, Bounds
from tiphys.records import CheckpointManifest, Record
from tiphys.store import Attempt


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
