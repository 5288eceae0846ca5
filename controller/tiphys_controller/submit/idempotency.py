"""Idempotency keys: however often a call under one key is repeated, it starts one run.

The key names the run before any record of the run is written. Every later write
is create-only and names the key, so a repeated call finds what exists and adds
what a crash left out. Storage holds only the hash of a key: a key may contain
any text, and a reader of the store does not learn it.
"""

import hashlib
from typing import NamedTuple

from tiphys.errors import ConflictError, UsageError
from tiphys.records import IdempotencyKeyRecord
from tiphys.store import Store, claim_record, find_record, idempotency_record_key

_LONGEST_KEY = 255


def digest_idempotency_key(key: str) -> str:
    """SHA-256 of a key, in hex.

    Raises:
        UsageError: it is empty, longer than 255 characters, or holds control characters.
    """
    if not 0 < len(key) <= _LONGEST_KEY or not key.isprintable():
        raise UsageError(
            f"idempotency key {key[:40]!r} is not valid: use 1 to {_LONGEST_KEY} printable characters, such as a UUID"
        )
    return hashlib.sha256(key.encode()).hexdigest()


class StartRequest(NamedTuple):
    """The start requested under a key: a digest of all other arguments, and a description for messages."""

    key: str | None
    """None: each call starts a run of its own."""
    content_digest: str
    description: str

    @property
    def key_digest(self) -> str:
        """`digest_idempotency_key`; empty without a key."""
        return "" if self.key is None else digest_idempotency_key(self.key)


def find_started_run(store: Store, request: StartRequest) -> IdempotencyKeyRecord | None:
    """The run begun under the key; None for none, or without a key.

    Raises:
        UsageError: the key is not valid.
        ConflictError: the key was used for another request.
    """
    if request.key is None:
        return None
    reservation = find_record(store, idempotency_record_key(request.key_digest), IdempotencyKeyRecord)
    return reservation and _check_same_request(reservation, request)


def reserve_run(store: Store, request: StartRequest, run: str, namespace: str) -> IdempotencyKeyRecord:
    """Let the key name the run, unless it names one already; returns the run that it names. Raises as above."""
    own = IdempotencyKeyRecord(run=run, namespace=namespace, content=request.content_digest)
    stored = claim_record(store, idempotency_record_key(request.key_digest), own).record
    return _check_same_request(stored, request)


def _check_same_request(reservation: IdempotencyKeyRecord, request: StartRequest) -> IdempotencyKeyRecord:
    if reservation.content == request.content_digest:
        return reservation
    raise ConflictError(
        f"idempotency key {request.key!r} was used at {reservation.written_at:%Y-%m-%d %H:%M:%S} UTC to start run "
        f"{reservation.run} "
        f"(content {reservation.content[:12]}), and this call asks for something else ({request.description}, content "
        f"{request.content_digest[:12]}); repeat the call with the same arguments, or choose another key"
    )
