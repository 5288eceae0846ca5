"""Idempotency keys: who asks twice under one key, because the answer was lost, gets the same run and no second one.

The key is kept as its hash, so that it may hold anything, and is no secret that
a reader of the store learns.
"""

import hashlib

from tiphys.errors import UsageError

_LONGEST_KEY = 255


def key_digest(key: str) -> str:
    """SHA-256 of a key, in hex.

    Raises:
        UsageError: it is empty, longer than 255 characters, or holds control characters.
    """
    if not 0 < len(key) <= _LONGEST_KEY or not key.isprintable():
        raise UsageError(
            f"idempotency key {key[:40]!r} is not valid: use 1 to {_LONGEST_KEY} printable characters, such as a UUID"
        )
    return hashlib.sha256(key.encode()).hexdigest()
