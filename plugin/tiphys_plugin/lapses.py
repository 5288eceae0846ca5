"""Leases that nothing can use any more come back: those seen to be gone, and overdue ones after a declared time.

A node that is cut off keeps its pods in the API for as long as nobody says that
it is gone, and with them the GPUs of attempts that are over. Nobody can see
whether these still run. So no time takes their lease away unless the queue file
says after which (``force_release_after_seconds``); then the attempt is fenced
first, so that what it may still commit does not count, and each case is counted
and told.
"""

from functools import cached_property

import structlog

from tiphys.errors import IntegrityError, StoreError, UsageError
from tiphys.records import AttemptClaim, AttemptEnd, Event, Outcome
from tiphys.store import RunLayout, Store, append_events, claim, find_record
from tiphys_plugin.ledger import Lease, LeaseRequest
from tiphys_plugin.queues import Queues
from tiphys_plugin.services import Services
from tiphys_plugin.workflows import attempt_is_over, lease_is_gone

_FEWEST_LOOKS = 5
"""As often at least a lease is found overdue before it is taken back, whatever the clock says."""
_log = structlog.get_logger()


def sweep(services: Services) -> list[Lease]:
    """Have the leases looked at whose check is due; those that came back.

    Raises:
        StoreError: the ledger or the cluster did not answer.
    """
    look = _Look(services)
    back = services.ledger.sweep(look.is_over)
    for lease in back:
        if lease.id in look.forced:
            _tell(services, lease, look.limit_seconds or 0.0)
    return back


class _Look:
    """One sweep; ``forced`` are the ids of leases of which no pod was seen to end."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.forced: set[str] = set()

    def is_over(self, lease: Lease) -> bool:
        services, what = self._services, f"lease/{lease.id}"
        if lease_is_gone(services.stores, services.cluster, lease):
            services.waits.over(what)
            return True
        limit = self.limit_seconds
        if limit is None or not attempt_is_over(services.stores, services.cluster, lease):
            services.waits.over(what)
            return False
        if services.waits.seconds(what, services.clock(), limit / _FEWEST_LOOKS) < limit or not self._fence(lease):
            return False
        services.waits.over(what)
        self.forced.add(lease.id)
        return True

    @cached_property
    def limit_seconds(self) -> float | None:
        """After so long an overdue lease is taken back; None: never."""
        queues = self._services.ledger.snapshot().queues
        return queues.force_release_after_seconds if isinstance(queues, Queues) else None

    def _fence(self, lease: Lease) -> bool:
        """Whether nothing that the attempt still commits can count."""
        try:
            fence(self._services.stores.store(lease.request.namespace), lease.request)
        except (IntegrityError, StoreError, UsageError) as error:
            _log.warning("lease.not_forced", **_whose(lease), error=str(error))
            return False
        return True


def fence(store: Store, held: LeaseRequest) -> None:
    """End the attempt as fenced, unless it has an end; one that was never claimed has nothing to commit."""
    layout = RunLayout(held.run)
    claimed = find_record(store, layout.attempt(held.step, held.attempt), AttemptClaim)
    if claimed is None:
        return
    wanted = AttemptEnd(
        run=held.run,
        step=held.step,
        attempt=held.attempt,
        submission=claimed.submission,
        outcome=Outcome.FENCED,
        message="nobody saw its pods end, and its GPUs were taken back",
        step_key=claimed.step_key,
    )
    claim(store, layout.attempt_end(held.step, held.attempt), wanted)


def _tell(services: Services, lease: Lease, limit_seconds: float) -> None:
    held = lease.request
    services.metrics.forced_leases.inc()
    _log.warning("lease.forced", **_whose(lease), gpus=held.gpus, nodes=list(lease.nodes))
    event = Event(
        name="lease.forced",
        at=services.clock(),
        step=held.step,
        attempt=held.attempt,
        message=f"its {held.gpus} GPUs were taken back although nobody saw its pods end within {limit_seconds:g} s "
        "after it was over; look at their nodes",
        data={"gpus": held.gpus, "nodes": list(lease.nodes)},
    )
    try:
        append_events(services.stores.store(held.namespace), held.run, "plugin", [event])
    except StoreError as error:
        _log.warning("event.not_stored", **_whose(lease), error=str(error))


def _whose(lease: Lease) -> dict[str, object]:
    return {"run": lease.request.run, "step": lease.request.step, "attempt": lease.request.attempt}
