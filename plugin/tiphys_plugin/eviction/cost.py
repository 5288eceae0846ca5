"""Estimates the work that a preemption destroys: GPU-seconds since the last committed checkpoint.

Only a commit counts, which is a manifest in storage. A training without a commit
loses all work since the grant of its lease. The same estimate holds for
checkpoints on a volume, because the service cannot read them.
`format_preemption` describes the loss to the author of the training.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

import structlog

from tiphys.errors import NotFoundError, StoreError, UsageError
from tiphys.lineage.select import read_newest_commit
from tiphys.protocol.quantities import format_duration
from tiphys.records import Preemption
from tiphys.store import lineage_name
from tiphys.store.runs import read_concurrently
from tiphys_plugin.attempts.liveness import NamespaceStores
from tiphys_plugin.quota.lease import Lease
from tiphys_plugin.quota.scheduler.decide import format_clock_time

CACHE_DURATION = timedelta(seconds=10)
"""Trainings save every few minutes, but the preemption loop estimates losses every few seconds."""
_log = structlog.get_logger()


class CheckpointLossEstimator:
    """A `LossEstimator` that reads the newest commit of each attempt from the store of its namespace."""

    def __init__(self, stores: NamespaceStores, clock: Callable[[], datetime]) -> None:
        self._stores = stores
        self._clock = clock
        self._saved_at_by_lease: dict[str, tuple[datetime, datetime]] = {}

    def __call__(self, leases: Sequence[Lease]) -> Mapping[str, float]:
        """GPU-seconds that each lease would lose now, by lease id."""
        now = self._clock()
        self._saved_at_by_lease = {
            lease_id: entry for lease_id, entry in self._saved_at_by_lease.items() if now - entry[0] < CACHE_DURATION
        }
        unknown = [lease for lease in leases if lease.id not in self._saved_at_by_lease]
        for lease, saved_at in zip(unknown, read_concurrently(self._saved_at, unknown), strict=True):
            self._saved_at_by_lease[lease.id] = (now, saved_at)
        return {
            lease.id: lease.request.gpus * elapsed_seconds(self._saved_at_by_lease[lease.id][1], now)
            for lease in leases
        }

    def _saved_at(self, lease: Lease) -> datetime:
        request = lease.request
        try:
            manifest = read_newest_commit(
                self._stores.store(request.namespace), lineage_name(request.run, request.step), request.attempt
            )
        except (StoreError, NotFoundError, UsageError) as error:
            _log.warning("preemption.loss_unknown", run=request.run, step=request.step, error=str(error))
            return lease.granted_at
        return max(manifest.written_at, lease.granted_at) if manifest is not None else lease.granted_at


def elapsed_seconds(since: datetime, now: datetime) -> float:
    """Seconds from ``since`` to ``now``; 0 if the clocks disagree and ``since`` is later."""
    return max(0.0, (now - since).total_seconds())


def format_preemption(preempted: Preemption) -> str:
    """Text for the end of a preempted attempt: why it had to go, its newest commit and the lost training time."""
    what = "move to other nodes" if preempted.moves else "go"
    preemption = (
        f"it was asked at {format_clock_time(preempted.asked_at)} to save and {what}{_format_reason(preempted)}"
    )
    seconds_lost, gpu_seconds_lost = preempted.seconds_lost, preempted.gpu_seconds_lost
    if seconds_lost is None or gpu_seconds_lost is None:
        return f"{preemption}; its checkpoints are on a volume, which the service cannot read, so the loss is unknown"
    loss = f"{format_duration(round(seconds_lost))} ({gpu_seconds_lost:.0f} GPU-seconds) of training lost"
    if preempted.committed is None:
        return f"{preemption}; it had committed no checkpoint: {loss}"
    committed = f"{preemption}; {preempted.committed.display_name} is committed"
    return f"{committed}, {loss} since" if seconds_lost else committed


def _format_reason(preempted: Preemption) -> str:
    """The reason, in parentheses, or the preemptor; empty for an evacuation, whose evidence the end states anyway."""
    if preempted.nodes:
        return ""
    if preempted.reason:
        return f" ({preempted.reason})"
    if preempted.for_run:
        return f" for {preempted.for_run}/{preempted.for_step_name or preempted.for_step}"
    return " for another training"
