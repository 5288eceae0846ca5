"""Leases of GPUs that nobody counts on any more and that are held all the same.

They are told and counted, and nothing more: whether pods of an attempt still
run, and so whether its GPUs are free, is for the ledger's own service to say.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from tiphys.records import AttemptEnd
from tiphys.store import RunLayout, Store, find_record
from tiphys_controller.cleaning.ages import in_words
from tiphys_controller.cleaning.found import Found, What

OVERDUE = timedelta(minutes=10)
"""So long an attempt may take to go after its end: it ends its pods, and somebody has to look."""


class HeldLease(NamedTuple):
    """What a `GPULedger` says of one lease."""

    namespace: str
    run: str
    step: str
    attempt: int
    uid: str
    """Of the Workflow."""
    gpus: int
    granted_at: datetime
    limit_seconds: int | None
    """After so long GPUs come back although nobody saw the pods end; None: never."""


def held_leases(ledger: Mapping[str, Any] | None) -> list[HeldLease]:
    """The leases in a `GPULedger` as it is stored; of none, none."""
    held = (ledger or {}).get("status") or {}
    limit = ((ledger or {}).get("spec") or {}).get("force_release_after_seconds")
    return [
        HeldLease(
            one["namespace"],
            one["run"],
            one["step"],
            one["attempt"],
            one["uid"],
            one["gpus"],
            datetime.fromisoformat(one["grantedAt"]),
            limit,
        )
        for one in held.get("leases") or ()
    ]


def orphaned(lease: HeldLease, store: Store, alive: bool, now: datetime) -> Found | None:
    """Why nobody counts on a lease any more, in words; None while somebody may.

    Args:
        lease: Which one.
        store: That of its namespace.
        alive: Whether its Workflow exists and is not over.
        now: The time.

    Raises:
        StoreError: storage is out of reach.
        IntegrityError: the end of the attempt is damaged.
    """
    if now - lease.granted_at <= OVERDUE:
        return None
    end = find_record(store, RunLayout(lease.run).attempt_end(lease.step, lease.attempt), AttemptEnd)
    if end is not None and now - end.written_at <= OVERDUE:
        return None
    if end is None and alive:
        return None
    over = f"the attempt ended {in_words(now - end.written_at)} ago" if end else "its Workflow is over or gone"
    back = "they come back when somebody waits for GPUs and its pods are seen to be gone"
    if lease.limit_seconds is not None:
        back += f", or {lease.limit_seconds} s later by force"
    why = f"{over}, and it holds {lease.gpus} {'GPU' if lease.gpus == 1 else 'GPUs'}; {back}"
    return Found(What.LEASE, lease.namespace, f"{lease.run}/{lease.step}/{lease.attempt}", why)
