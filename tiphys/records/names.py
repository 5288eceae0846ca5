"""Names that appear in storage keys: runs, steps and fan-out items.

A fan-out item is named by a hash of its value, so that it keeps its name when
items are added, removed or reordered.
"""

import hashlib
import json
import re
from typing import Any

from tiphys.errors import UsageError

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_RUN = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?")
MAX_RUN_NAME_CHARACTERS = 63
LOCAL_CLUSTER_PREFIX = "local:"
"""Prefix of the names of local engines, whose Workflows have no namespace of Kubernetes."""
# One encoder for all calls: a plan of ten thousand steps computes as many hashes.
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)
_ITEM = re.compile(r"[0-9a-f]{12}\.\d+")


def check_run_name(run: str) -> str:
    """Return ``run`` if it is a valid run name (DNS-1123, at most 63 characters).

    Raises:
        UsageError: it is not.
    """
    if not _RUN.fullmatch(run):
        raise UsageError(f"run name {run!r} is not valid: use lower-case letters, digits, '-' and '.', at most 63")
    return run


def make_run_name(text: str) -> str:
    """``text`` as a run name: lower case, other characters replaced by ``-``, at most 63 characters.

    Authors build run names from parameters, so ``text`` may contain any character.

    Raises:
        UsageError: ``text`` has no letter or digit.
    """
    name = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:MAX_RUN_NAME_CHARACTERS].rstrip("-.")
    if not name:
        raise UsageError(f"run name {text!r} has no letter or digit; choose another")
    return name


def check_step_id(step: str) -> str:
    """Return ``step`` if it is a valid step id: ``name``, or ``name.<item hash>.<ordinal>``.

    Raises:
        UsageError: it is not.
    """
    name, dot, item = step.partition(".")
    if not _LABEL.fullmatch(name) or (dot and not _ITEM.fullmatch(item)):
        raise UsageError(f"step id {step!r} is not valid: use a DNS label, or name.<item hash>.<ordinal>")
    return step


def task_name(step: str) -> str:
    """The name of the task of a step id: ``fit``, also for an item ``fit.<item hash>.<ordinal>``."""
    return step.partition(".")[0]


def canonical_json(value: Any) -> bytes:
    """The JSON form used for hashing: sorted keys, no spaces, UTF-8."""
    return _CANONICAL.encode(value).encode(errors="surrogatepass")


def json_digest(value: Any) -> str:
    """SHA-256 of the canonical JSON of ``value``, in hex."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def item_hash(item: str) -> str:
    """Twelve hex digits that identify a fan-out item by its value.

    ``item`` is what Argo puts in place of ``{{item}}``. JSON is brought to its
    canonical form first, so that key order, spaces and the spelling of numbers
    (``1.0`` or ``1``) do not matter.

    Raises:
        UsageError: it is nested more deeply than can be hashed.
    """
    try:
        try:
            value = json.loads(item, parse_float=_parse_number)
        except ValueError:
            value = item
        return json_digest(value)[:12]
    except RecursionError as error:
        raise UsageError("the fan-out item is nested too deeply; pass it as a text, or in a file") from error


def item_step_id(name: str, item: str, ordinal: int) -> str:
    """Step id of one item of the fan-out ``name``; ``ordinal``, from 0, distinguishes equal items."""
    return check_step_id(f"{name}.{item_hash(item)}.{ordinal}")


def _parse_number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() else value
