"""Names that appear in storage keys, and how a fan-out item gets one."""

import hashlib
import json
import re
from typing import Any

from tiphys.errors import UsageError

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_RUN = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?")
LONGEST_RUN_NAME = 63
# Made once: a plan of ten thousand steps hashes as many times.
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)
_ITEM = re.compile(r"[0-9a-f]{12}\.\d+")


def check_run(run: str) -> str:
    """Return ``run`` if it may name a run (DNS-1123, at most 63 characters)."""
    if not _RUN.fullmatch(run):
        raise UsageError(f"run name {run!r} is not valid: use lower-case letters, digits, '-' and '.', at most 63")
    return run


def run_name(text: str) -> str:
    """``text`` as a run name: lower case, any other character a ``-``, at most 63.

    An author's run name is made from parameters, so it may hold anything.
    """
    name = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:LONGEST_RUN_NAME].rstrip("-.")
    if not name:
        raise UsageError(f"run name {text!r} has no letter or digit; choose another")
    return name


def check_step(step: str) -> str:
    """Return ``step`` if it is a step id: ``name``, or ``name.<item hash>.<ordinal>``."""
    name, dot, item = step.partition(".")
    if not _LABEL.fullmatch(name) or (dot and not _ITEM.fullmatch(item)):
        raise UsageError(f"step id {step!r} is not valid: use a DNS label, or name.<item hash>.<ordinal>")
    return step


def canonical_json(value: Any) -> bytes:
    """The one JSON form used for hashing: sorted keys, no spaces, UTF-8."""
    return _CANONICAL.encode(value).encode(errors="surrogatepass")


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON of ``value``, in hex."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def item_hash(item: str) -> str:
    """Twelve hex digits that identify a fan-out item by its value.

    ``item`` is what Argo puts in place of ``{{item}}``. JSON is brought to its
    canonical form first, so that key order, spaces and the spelling of numbers
    (``1.0`` or ``1``) do not matter.
    """
    try:
        value = json.loads(item, parse_float=_number)
    except ValueError:
        value = item
    return digest(value)[:12]


def item_step(name: str, item: str, ordinal: int) -> str:
    """Step id of one item; equal items are told apart by ``ordinal``, from 0."""
    return check_step(f"{name}.{item_hash(item)}.{ordinal}")


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() else value
