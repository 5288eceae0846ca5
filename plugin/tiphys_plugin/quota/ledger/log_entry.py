"""What a write adds to the log of a `GPULedger`: the difference of two ledger states, in the stored form.

A transition keeps the objects of all leases and requests that it does not change,
so the difference is found by identity (`find_changes`). Times of checks and of repeated requests
change often and alone; an entry groups them by time.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from operator import attrgetter
from typing import Any

from tiphys_plugin.quota.lease import EndedUsage, Lease, PendingRequest
from tiphys_plugin.quota.ledger import status_codec
from tiphys_plugin.quota.ledger.state import LedgerState
from tiphys_plugin.quota.ledger.status_codec import JsonObject
from tiphys_plugin.quota.scheduler.changes import find_changes


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


def encode_changes(before: LedgerState, after: LedgerState) -> dict[str, Any]:
    """The entry that leads from ``before`` to ``after``, see `tiphys.kube.ledger_log.apply_entries`."""
    changes = {**_lease_changes(before, after), **_pending_changes(before, after)}
    if after.history != before.history:
        changes["history"] = status_codec.encode_history(after.history)
    return {name: value for name, value in changes.items() if value or name == "history"}


def _lease_changes(before: LedgerState, after: LedgerState) -> dict[str, Any]:
    removed, added = find_changes(before.leases, after.leases)
    old, new = {one.id: one for one in removed}, {one.id: one for one in added}
    checked: defaultdict[datetime, list[str]] = defaultdict(list)
    written = []
    for one in new.values():
        earlier = old.get(one.id)
        if earlier is None or replace(earlier, check_at=one.check_at) != one:
            written.append(status_codec.encode_lease(one))
        elif earlier.check_at != one.check_at:
            checked[one.check_at].append(one.id)
    return {
        "leases": written,
        "ended": [lease_id for lease_id in old if lease_id not in new],
        "checked": {status_codec.format_timestamp(at): ids for at, ids in checked.items()},
    }


def _pending_changes(before: LedgerState, after: LedgerState) -> dict[str, Any]:
    removed, added = find_changes(before.pending, after.pending)
    old, new = {one.arrival: one for one in removed}, {one.arrival: one for one in added}
    seen: defaultdict[datetime, list[int]] = defaultdict(list)
    written = []
    for one in new.values():
        earlier = old.get(one.arrival)
        if earlier is None or replace(earlier, seen_at=one.seen_at) != one:
            written.append(status_codec.encode_pending(one))
        elif earlier.seen_at != one.seen_at:
            seen[one.seen_at].append(one.arrival)
    return {
        "waiting": written,
        "left": [arrival for arrival in old if arrival not in new],
        "seen": {status_codec.format_timestamp(at): arrivals for at, arrivals in seen.items()},
    }
