"""Preview of preemption for ``tiphys why``: the victims that the service would select now, without evicting them."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

from rich.text import Text
from tiphys_plugin.attempts.liveness import NamespaceStores
from tiphys_plugin.eviction.cost import CheckpointLossEstimator
from tiphys_plugin.quota.lease import Lease, LedgerState, PendingRequest
from tiphys_plugin.quota.ledger.transitions import find_preemptor
from tiphys_plugin.quota.preemption.victims import LossEstimator, NoVictims, VictimSelection, select_victims
from tiphys_plugin.quota.queues import Queues, format_gpus
from tiphys_plugin.quota.scheduler.cache import SchedulerCache
from tiphys_plugin.quota.scheduler.decide import format_clock_time, format_step_name
from tiphys_plugin.quota.scheduler.fair_share import held_gpu_seconds
from tiphys_plugin.quota.scheduler.queue_order import movable_from
from tiphys_plugin.runtime.context import SingleStore

from tiphys.protocol.quantities import format_duration
from tiphys.records import utc_now
from tiphys.store import TenantStores, open_store
from tiphys.store.open import PLACEHOLDER


def build_loss_estimate(url: str | None, now: datetime) -> LossEstimator:
    """Estimate the lost GPU-seconds of an eviction: since the last checkpoint in the store, or without a store, all."""
    if url is None:
        return lambda leases: {lease.id: held_gpu_seconds(lease, now) for lease in leases}
    return CheckpointLossEstimator(open_tenant_stores(url), utc_now)


def open_tenant_stores(url: str) -> NamespaceStores:
    """Open the stores of all tenants; ``{namespace}`` in the URL is replaced by each tenant's namespace."""
    return TenantStores(url, None) if PLACEHOLDER in url else SingleStore(open_store(url, must_exist=True))


def preview_preemption(
    state: LedgerState, pending: PendingRequest, lost: LossEstimator, now: datetime, cache: SchedulerCache
) -> VictimSelection | NoVictims:
    """Select the victims that the service would evict now for ``pending``."""
    # The request counts as pending even if its last call is older than the service's own limit.
    seen = tuple(replace(other, seen_at=now) if other is pending else other for other in state.pending)
    preemptor = find_preemptor(replace(state, pending=seen), pending.request.workflow_step, now, cache)
    if preemptor is None:
        return NoVictims("it is no longer pending")
    selection = select_victims(*preemptor, lost, now, cache=cache)
    if isinstance(selection, NoVictims) and (later := _find_later_moves(*preemptor, now, cache)) is not None:
        moment, leases = later
        names = " and ".join(format_step_name(lease.request) for lease in leases)
        time = f"from {format_clock_time(moment)} on, once a checkpoint has just been saved"
        moves = f"{names} would be moved to other nodes {time}"
        return replace(selection, message=f"{selection.message}; {moves}")
    return selection


def _find_later_moves(
    state: LedgerState, preemptor: PendingRequest, now: datetime, cache: SchedulerCache
) -> tuple[datetime, tuple[Lease, ...]] | None:
    """The trainings that would be moved if they have saved, and when, if nothing else changes until then."""
    queue = state.queues.find(preemptor.request.queue) if isinstance(state.queues, Queues) else None
    if queue is None:
        return None
    moments = ((lease.id, movable_from(queue, lease, preemptor)) for lease in state.leases)
    movable_at = {lease_id: moment for lease_id, moment in moments if moment is not None}
    latest = max([now, *movable_at.values()])
    selection = select_victims(
        state, preemptor, lambda leases: dict.fromkeys((lease.id for lease in leases), 0.0), latest, cache=cache
    )
    if isinstance(selection, NoVictims) or not selection.moved_leases:
        return None
    moved = tuple(lease for lease in selection.leases if lease.id in selection.moved_leases)
    return max(now, *(movable_at[lease.id] for lease in moved)), moved


def describe_preemption(selection: VictimSelection | NoVictims, *, is_exact: bool) -> Iterator[Text]:
    """Describe a selection for people; ``is_exact`` means that losses count from the last checkpoint."""
    if isinstance(selection, NoVictims):
        reason = f"{selection.reason}: " if selection.reason else ""
        yield Text(f"  no lease would be preempted for it: {reason}{selection.message}")
        return
    for lease in selection.leases:
        request, lost = lease.request, selection.gpu_seconds_by_lease[lease.id]
        gpus = format_gpus(request.gpus, request.type_text)
        seconds = format_duration(round(lost / request.gpus))
        is_moved = lease.id in selection.moved_leases
        amount = f"{'' if is_exact else 'at most '}{seconds}, {lost:.0f} GPU-seconds"
        yield Text(
            f"  {format_step_name(request)} ({gpus} of queue {request.queue}, priority {request.priority}) "
            f"would be {'moved to other nodes' if is_moved else 'preempted'}, and lose {amount} if it saved nothing"
        )


def preemption_document(selection: VictimSelection | NoVictims) -> dict[str, Any]:
    """Describe a selection as JSON types."""
    if isinstance(selection, NoVictims):
        reason = {"reason": str(selection.reason)} if selection.reason else {}
        return {"victims": [], **reason, "message": selection.message}
    return {
        "victims": [
            {
                "run": lease.request.run,
                "step": lease.request.step,
                "gpus": lease.request.gpus,
                "queue": lease.request.queue,
                "gpuSecondsLost": round(selection.gpu_seconds_by_lease[lease.id], 1),
                "movesToOtherNodes": lease.id in selection.moved_leases,
            }
            for lease in selection.leases
        ]
    }


def describe_eviction(lease: Lease) -> str:
    """Describe the eviction of a lease that is being preempted; empty for other leases."""
    preemption = lease.preemption
    if preemption is None:
        return ""
    return (
        f"; {'asked to move to other nodes' if preemption.moves else 'preempted'} "
        f"at {format_clock_time(preemption.asked_at)}, "
        f"must save and exit by {format_clock_time(preemption.deadline)}"
    )
