"""The room of the ledger, and the share of it that one namespace may take.

All namespaces share the ledger, which is bounded so that a service that starts
reads it in seconds. So a namespace that has used its share gets no new entries.
Its entries in the ledger stay: its leases, and its pending requests, each of
which may become a lease.
"""

from collections import Counter
from itertools import chain

from tiphys_plugin.quota.lease import Lease, LeaseRequest, LedgerState, PendingRequest
from tiphys_plugin.quota.queues import DEFAULT_LEDGER_SHARE, QueueRules, Queues
from tiphys_plugin.quota.scheduler.cache import SchedulerCache

ROOM_ENTRIES = 100_000
"""Leases and pending requests that namespaces share."""
NEARLY_USED = 0.8
"""Part of a share, or of the room, from which people are warned."""


def count_entries(ledger_state: LedgerState) -> Counter[str]:
    """Leases and pending requests of each namespace."""
    entries: chain[Lease | PendingRequest] = chain(ledger_state.leases, ledger_state.pending)
    return Counter(entry.request.namespace for entry in entries)


def measure_shares(ledger_state: LedgerState) -> dict[str, float]:
    """How much of its share each namespace has used, from 0; a restored lease may bring it above 1."""
    share = _share_entries(ledger_state.queues)
    return {name: count / share for name, count in sorted(count_entries(ledger_state).items())}


def find_room_objection(before: LedgerState, after: LedgerState) -> str | None:
    """Why the ledger has no room for the entry that ``after`` adds to ``before``; None if it has."""
    if _count(after) <= max(_count(before), ROOM_ENTRIES):
        return None
    return (
        f"the GPU ledger has no room for more: {len(before.leases)} leases and {len(before.pending)} waiting requests "
        f"are {_count(before)} of {ROOM_ENTRIES} entries; start fewer steps with GPUs at once, or release some"
    )


def find_share_objection(
    before: LedgerState, after: LedgerState, request: LeaseRequest, cache: SchedulerCache
) -> str | None:
    """Why the namespace of ``request`` may not get the entry that ``after`` adds to ``before``; None if it may.

    A lease in the place of its pending request is no new entry. It is never refused: a request that has its turn and
    cannot start would hold up those behind it.
    """
    share = _share_entries(after.queues)
    if _count(after) <= max(_count(before), share) or cache.count_entries(after, request.namespace) <= share:
        return None
    return (
        f"namespace {request.namespace} has used its share of the GPU ledger, {share} leases and waiting requests; "
        "this step is taken when one of them ends. The administrator can raise `ledger_share` in the queue file"
    )


def _count(ledger_state: LedgerState) -> int:
    return len(ledger_state.leases) + len(ledger_state.pending)


def _share_entries(rules: QueueRules) -> int:
    return round(ROOM_ENTRIES * (rules.ledger_share if isinstance(rules, Queues) else DEFAULT_LEDGER_SHARE))
