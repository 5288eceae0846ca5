"""What a write adds to the log of a `GPULedger`: the difference of two ledger states, in the stored form.

A transition keeps the objects of all leases and requests that it does not change,
so the difference is found by identity (`find_changes`). Times of checks and of repeated requests
change often and alone; an entry groups them by time.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

from tiphys_plugin.quota.lease import EndedUsage, Lease, LedgerState, PendingRequest
from tiphys_plugin.quota.ledger import status_codec
from tiphys_plugin.quota.ledger.status_codec import JsonObject
from tiphys_plugin.quota.scheduler.cache import SchedulerCache

_Record = TypeVar("_Record", Lease, PendingRequest)


class StateCodec:
    """`BookCodec` of a `LedgerState`. A book has tens of thousands of keys, which the interpreter reads by itself."""

    lease_id = attrgetter("id")
    arrival = attrgetter("arrival")

    lease = staticmethod(status_codec.LEASES.decode)
    pending = staticmethod(status_codec.PENDING.decode)

    def history(self, raw: Sequence[JsonObject]) -> tuple[EndedUsage, ...]:
        return tuple(map(status_codec.HISTORY.decode, raw))

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
    leases = _find_record_changes(*cache.find_changes(before.leases, after.leases), StateCodec.lease_id, "check_at")
    pending = _find_record_changes(*cache.find_changes(before.pending, after.pending), StateCodec.arrival, "seen_at")
    changes: dict[str, Any] = {
        "leases": list(map(status_codec.LEASES.encode, leases.written)),
        "ended": leases.gone,
        "checked": leases.moved,
        "waiting": list(map(status_codec.PENDING.encode, pending.written)),
        "left": pending.gone,
        "seen": pending.moved,
    }
    if after.history != before.history:
        changes["history"] = list(map(status_codec.HISTORY.encode, after.history))
    return {name: value for name, value in changes.items() if value or name == "history"}


class _RecordChanges(NamedTuple, Generic[_Record]):
    """New and changed records, keys of those that are gone, and by time, keys of those in which it alone changed."""

    written: list[_Record]
    gone: list[object]
    moved: dict[str, list[object]]


def _find_record_changes(
    removed: Sequence[_Record], added: Sequence[_Record], key_of: Callable[[_Record], object], time_field: str
) -> _RecordChanges[_Record]:
    old, new = {key_of(record): record for record in removed}, {key_of(record): record for record in added}
    moved: defaultdict[str, list[object]] = defaultdict(list)
    written = []
    for key, record in new.items():
        earlier, time = old.get(key), getattr(record, time_field)
        if earlier is None or replace(earlier, **{time_field: time}) != record:
            written.append(record)
        elif getattr(earlier, time_field) != time:
            moved[status_codec.format_timestamp(time)].append(key)
    return _RecordChanges(written, [key for key in old if key not in new], dict(moved))
