"""The room of the ledger object, and the share of it that one namespace may take.

etcd limits the size of an object, and all namespaces share the ledger. So a
namespace that has used its share gets no new entries. Its entries in the ledger
stay: its leases, and its pending requests, each of which may become a lease.

Entries are measured for every new request, so only their requests are encoded,
and once. The rest is counted by its longest form: an entry takes at most as much
as it counts for.
"""

import json
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from tiphys_plugin.quota.lease import Lease, LeaseRequest, PendingRequest
from tiphys_plugin.quota.ledger.state import LedgerState
from tiphys_plugin.quota.ledger.status_codec import encode_request
from tiphys_plugin.quota.queues import DEFAULT_LEDGER_SHARE, QueueRules, Queues

MAX_STATUS_BYTES = 1_300_000
"""Largest status. etcd takes 1.5 MiB for a whole object; the rest is for the spec and what the API server adds."""
RESERVED_BYTES = 200_000
"""Free bytes that a new pending request must leave in the status, so that there is room for the leases."""
ROOM_BYTES = MAX_STATUS_BYTES - RESERVED_BYTES
"""Bytes that namespaces share."""
NEARLY_USED = 0.8
"""Part of a share, or of the room, from which people are warned."""

_LEASE_BYTES = 115
"""What a lease adds to its request, without the values of id, pool and nodes."""
_PENDING_BYTES = 150
"""What a pending request adds to its request."""
_NOTICE_BYTES = 160
"""A preemption notice, without the values of uid and step."""


def measure_namespaces(ledger_state: LedgerState) -> Counter[str]:
    """Bytes that the entries of each namespace take in the ledger."""
    sizes: Counter[str] = Counter()
    for entry in _entries(ledger_state):
        sizes[entry.request.namespace] += _entry_bytes(entry)
    return sizes


def measure_shares(rules: QueueRules, ledger_state: LedgerState) -> dict[str, float]:
    """How much of its share each namespace has used, from 0; a restored lease may bring it above 1."""
    return {name: size / _share_bytes(rules) for name, size in sorted(measure_namespaces(ledger_state).items())}


def find_share_objection(
    rules: QueueRules, before: LedgerState, after: LedgerState, request: LeaseRequest
) -> str | None:
    """Why the namespace of ``request`` may not get the entry that ``after`` adds to ``before``; None if it may.

    A lease in the place of its pending request is no new entry. It is never refused: a request that has its turn and
    cannot start would hold up those behind it.
    """
    if len(after.leases) + len(after.pending) <= len(before.leases) + len(before.pending):
        return None
    most = _share_bytes(rules)
    if sum(_entry_bytes(one) for one in _entries(after) if one.request.namespace == request.namespace) <= most:
        return None
    return (
        f"namespace {request.namespace} has used its share of the GPU ledger, {most:.0f} bytes, with its other leases "
        f"and waiting requests; this step is taken when one of them ends. The administrator can raise `ledger_share` "
        "in the queue file"
    )


def _entries(ledger_state: LedgerState) -> Iterator[Lease | PendingRequest]:
    yield from ledger_state.leases
    yield from ledger_state.pending


def _share_bytes(rules: QueueRules) -> float:
    return ROOM_BYTES * (rules.ledger_share if isinstance(rules, Queues) else DEFAULT_LEDGER_SHARE)


def _entry_bytes(entry: Lease | PendingRequest) -> int:
    if isinstance(entry, PendingRequest):
        return _PENDING_BYTES + _request_bytes(entry.request)
    notice = entry.preemption
    preempted = 0 if notice is None else _NOTICE_BYTES + len(notice.uid) + len(notice.step)
    nodes = sum(map(len, entry.nodes)) + 3 * len(entry.nodes)
    return _LEASE_BYTES + _request_bytes(entry.request) + len(entry.id) + len(entry.pool) + nodes + preempted


@lru_cache(maxsize=8192)
def _request_bytes(request: LeaseRequest) -> int:
    return len(json.dumps(encode_request(request), separators=(",", ":"), ensure_ascii=False).encode())
