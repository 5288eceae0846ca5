"""What a training would lose if it ended now: the GPU-seconds since its last committed checkpoint.

Only a commit counts, which is a manifest in storage. A training without one
would lose all that it has done since it got its GPUs; so would one whose
checkpoints lie on a volume that only its pods see, for all that is known here.

What a training is told that had to go.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

import structlog

from tiphys.errors import NotFoundError, StoreError, UsageError
from tiphys.lineage.select import newest_commit
from tiphys.records import Preemption
from tiphys.store import lineage_of
from tiphys.store.runs import concurrently
from tiphys_plugin.attempts.liveness import Stores
from tiphys_plugin.quota.lease import Lease
from tiphys_plugin.quota.scheduler.decide import clock

REMEMBERED = timedelta(seconds=10)
"""Trainings save every few minutes, and those who wait are looked at every few seconds."""
_log = structlog.get_logger()


class Losses:
    """Looks them up in the stores of the tenants; see `Lost`."""

    def __init__(self, stores: Stores, clock: Callable[[], datetime]) -> None:
        self._stores = stores
        self._clock = clock
        self._known: dict[str, tuple[datetime, datetime]] = {}

    def __call__(self, leases: Sequence[Lease]) -> Mapping[str, float]:
        """GPU-seconds by lease."""
        now = self._clock()
        self._known = {one: seen for one, seen in self._known.items() if now - seen[0] < REMEMBERED}
        unknown = [one for one in leases if one.id not in self._known]
        for lease, saved_at in zip(unknown, concurrently(self._saved_at, unknown), strict=True):
            self._known[lease.id] = (now, saved_at)
        return {one.id: one.request.gpus * seconds_since(self._known[one.id][1], now) for one in leases}

    def _saved_at(self, lease: Lease) -> datetime:
        held = lease.request
        try:
            manifest = newest_commit(self._stores.store(held.namespace), lineage_of(held.run, held.step), held.attempt)
        except (StoreError, NotFoundError, UsageError) as error:
            _log.warning("preemption.loss_unknown", run=held.run, step=held.step, error=str(error))
            return lease.granted_at
        return max(manifest.written_at, lease.granted_at) if manifest is not None else lease.granted_at


def seconds_since(then: datetime, now: datetime) -> float:
    """None are lost by clocks that disagree."""
    return max(0.0, (now - then).total_seconds())


def went(preempted: Preemption) -> str:
    """How it came that an attempt is over that was asked to go, and what is left of its work."""
    for_whom = f"{preempted.for_run}/{preempted.for_step}" if preempted.for_run else "another training"
    asked = f"it was asked at {clock(preempted.asked_at)} to save and go for {for_whom}"
    lost, gpu_seconds = preempted.seconds_lost, preempted.gpu_seconds_lost
    if lost is None or gpu_seconds is None:
        return f"{asked}; its checkpoints lie where only its pods see them, so what is lost is not known"
    if preempted.committed is None:
        return f"{asked}; it had committed no checkpoint: {lost:.0f} s ({gpu_seconds:.0f} GPU-seconds) of training lost"
    kept = f"{asked}; {preempted.committed.words} is committed"
    return f"{kept}, {lost:.0f} s ({gpu_seconds:.0f} GPU-seconds) of training lost since" if lost else f"{kept}"
