"""What a write adds to the log of a `GPULedger`: the difference of two ledger states, in the stored form.

A transition keeps the objects of all leases and requests that it does not change,
so the difference is found by identity (`find_changes`). Times of checks and of repeated requests
change often and alone; an entry groups them by time.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any

from tiphys_plugin.quota.lease import EndedUsage, Lease, LedgerState, PendingRequest
from tiphys_plugin.quota.ledger import status_codec
from tiphys_plugin.quota.ledger.status_codec import JsonObject
from tiphys_plugin.quota.scheduler.cache import SchedulerCache


class StateCodec:
    """`BookCodec` of a `LedgerState`. A book has tens of thousands of keys, which the interpreter reads by itself."""

    lease_id = attrgetter("id")
    arrival = attrgetter("arrival")

    def lease(self, raw: JsonObject) -> Lease:
        return status_codec.decode_lease(raw)

    def pending(self, raw: JsonObject) -> PendingRequest:
        return status_codec.decode_pending(raw)

    def history(self, raw: Sequence[JsonObject]) -> tuple[EndedUsage, ...]:
        return status_codec.decode_history(raw)

    def checked(self, lease: Lease, check_at: str) -> Lease:
        return replace(lease, check_at=status_codec.parse_timestamp(check_at))

    def seen(self, pending: PendingRequest, seen_at: str) -> PendingRequest:
        return replace(pending, seen_at=status_codec.parse_timestamp(seen_at))


def needs_write(before: LedgerState, after: LedgerState, refresh_after: timedelta, cache: SchedulerCache) -> bool:
    """Whether the states differ by more than ``seen_at`` times that moved less than ``refresh_after``."""
    if before.leases != after.leases or len(before.pending) != len(after.pending):
        return True
    removed, added = cache.find_changes(before.pending, after.pending)
    return len(removed) != len(added) or any(
        replace(pending, seen_at=earlier.seen_at) != earlier or abs(pending.seen_at - earlier.seen_at) >= refresh_after
        for pending, earlier in zip(added, removed, strict=True)
    )


def encode_changes(before: LedgerState, after: LedgerState, cache: SchedulerCache) -> dict[str, Any]:
    """The entry that leads from ``before`` to ``after``, see `tiphys.kube.ledger_log.apply_entries`."""
    leases, pending = cache.find_changes(before.leases, after.leases), cache.find_changes(before.pending, after.pending)
    changes = {**_encode_lease_changes(*leases), **_encode_pending_changes(*pending)}
    if after.history != before.history:
        changes["history"] = status_codec.encode_history(after.history)
    return {name: value for name, value in changes.items() if value or name == "history"}


def _encode_lease_changes(removed: Sequence[Lease], added: Sequence[Lease]) -> dict[str, Any]:
    old, new = {lease.id: lease for lease in removed}, {lease.id: lease for lease in added}
    checked: defaultdict[datetime, list[str]] = defaultdict(list)
    written = []
    for lease in new.values():
        earlier = old.get(lease.id)
        if earlier is None or replace(earlier, check_at=lease.check_at) != lease:
            written.append(status_codec.encode_lease(lease))
        elif earlier.check_at != lease.check_at:
            checked[lease.check_at].append(lease.id)
    return {
        "leases": written,
        "ended": [lease_id for lease_id in old if lease_id not in new],
        "checked": {status_codec.format_timestamp(at): ids for at, ids in checked.items()},
    }


def _encode_pending_changes(removed: Sequence[PendingRequest], added: Sequence[PendingRequest]) -> dict[str, Any]:
    old, new = {pending.arrival: pending for pending in removed}, {pending.arrival: pending for pending in added}
    seen: defaultdict[datetime, list[int]] = defaultdict(list)
    written = []
    for pending in new.values():
        earlier = old.get(pending.arrival)
        if earlier is None or replace(earlier, seen_at=pending.seen_at) != pending:
            written.append(status_codec.encode_pending(pending))
        elif earlier.seen_at != pending.seen_at:
            seen[pending.seen_at].append(pending.arrival)
    return {
        "waiting": written,
        "left": [arrival for arrival in old if arrival not in new],
        "seen": {status_codec.format_timestamp(at): arrivals for at, arrivals in seen.items()},
    }
