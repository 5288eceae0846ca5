"""What two checkpoints differ in: for the question of why a run went another way from there.

Facts and metrics come from the manifests, arrays are compared by the hash of
their bytes. How far numbers lie apart is computed for one array at a time, since
two whole models may not fit into memory.
"""

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from tiphys.checkpoint.contents import READABLE, Contents, Leaf
from tiphys.records import CheckpointManifest, CheckpointRef, Record
from tiphys.records.manifest import Metric
from tiphys.store import Store

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Kind(StrEnum):
    """How a leaf of the state differs."""

    ADDED = "added"
    REMOVED = "removed"
    FORM = "form"
    """Another type or shape."""
    VALUE = "value"
    """The same form with other bytes, or another number or text."""


class Statistics(Record):
    """How far the numbers of two arrays of one form lie apart, over those that are finite in both."""

    changed: int
    """Elements that differ at all."""
    total: int
    largest: Metric
    """Largest absolute difference."""
    mean: Metric
    """Mean absolute difference."""
    relative: Metric
    """Norm of the difference over the norm of the first."""
    not_finite: int
    """Elements of the second that are NaN or infinite."""


class Change(Record):
    """One leaf that differs."""

    path: str
    kind: Kind
    before: str = ""
    after: str = ""
    statistics: Statistics | None = None


class Pair(Record):
    """One fact or metric in both; None where it is not known."""

    name: str
    before: Any = None
    after: Any = None


class Difference(Record):
    """``facts`` and ``metrics`` hold those that differ; so do ``changes``, beside ``same`` leaves that do not."""

    before: CheckpointRef
    after: CheckpointRef
    facts: tuple[Pair, ...]
    metrics: tuple[Pair, ...]
    size_bytes: Pair
    changes: tuple[Change, ...] = ()
    same: int = 0
    note: str = ""
    """Why there are no ``changes``, where the states could not be compared."""


def difference(
    before: tuple[Store, CheckpointManifest], after: tuple[Store, CheckpointManifest], *, values: bool = False
) -> Difference:
    """Compare two checkpoints; reads every byte of both, with ``values`` of arrays that differ twice.

    Raises:
        IntegrityError: bytes of one do not match its manifest.
        UsageError: another version of Tiphys wrote one in a form that is not known here.
    """
    one, other = before[1], after[1]
    result = Difference(
        before=one.ref,
        after=other.ref,
        facts=pairs(facts_of(one), facts_of(other)),
        metrics=pairs(one.metrics, other.metrics),
        size_bytes=Pair(name="size_bytes", before=one.size_bytes, after=other.size_bytes),
    )
    unknown = {manifest.framework for manifest in (one, other)}.difference(READABLE)
    if unknown:
        return result.model_copy(update={"note": f"the states were written by {', '.join(sorted(unknown))}"})
    left, right = Contents(*before), Contents(*after)
    changes = compare(left.leaves, right.leaves)
    if values:
        changes = [_with_statistics(change, left, right) for change in changes]
    same = len(left.leaves.keys() & right.leaves.keys()) - sum(c.kind in (Kind.FORM, Kind.VALUE) for c in changes)
    return result.model_copy(update={"changes": tuple(changes), "same": same})


def compare(before: Mapping[str, Leaf], after: Mapping[str, Leaf]) -> list[Change]:
    """Leaves that differ, by path. Pure."""
    changes = []
    for path in sorted(before.keys() | after.keys()):
        one, other = before.get(path), after.get(path)
        if one is None and other is not None:
            changes.append(Change(path=path, kind=Kind.ADDED, after=other.form))
        elif other is None and one is not None:
            changes.append(Change(path=path, kind=Kind.REMOVED, before=one.form))
        elif one is not None and other is not None and one != other:
            same_form = bool(one.sha256) == bool(other.sha256) and (one.form == other.form or not one.sha256)
            kind = Kind.VALUE if same_form else Kind.FORM
            changes.append(Change(path=path, kind=kind, before=one.form, after=other.form))
    return changes


def facts_of(manifest: CheckpointManifest) -> dict[str, Any]:
    """What a manifest says that its checkpoint was made with, flat; what is not known is left out."""
    facts = manifest.facts.model_dump(mode="json")
    nested = {f"versions.{name}": version for name, version in facts.pop("versions").items()}
    nested |= {f"data_position.{name}": value for name, value in facts.pop("data_position").items()}
    own = {"global_step": manifest.global_step, "attempt": manifest.attempt, "framework": manifest.framework}
    flat = {**own, "saved_because": manifest.reason, **facts, **nested}
    return {name: value for name, value in flat.items() if value not in (None, "")}


def pairs(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Pair, ...]:
    """Names whose values differ, in the order of ``before``, then of ``after``. Pure."""
    names = dict.fromkeys([*before, *after])
    return tuple(
        Pair(name=name, before=before.get(name), after=after.get(name))
        for name in names
        if not _equal(before.get(name), after.get(name))
    )


def statistics(before: "NDArray[Any]", after: "NDArray[Any]") -> Statistics | None:
    """How far two arrays of one shape lie apart; None if they hold no numbers."""
    import numpy as np

    if before.dtype.kind not in "biufc" or after.dtype.kind not in "biufc" or not before.size:
        return None
    wide = np.complex128 if "c" in (before.dtype.kind, after.dtype.kind) else np.float64
    one, other = before.astype(wide), after.astype(wide)
    finite = np.isfinite(one) & np.isfinite(other)
    apart = np.abs(other[finite] - one[finite])
    norm = float(np.linalg.norm(one[finite]))
    distance = float(np.linalg.norm(apart))
    return Statistics(
        changed=int(np.count_nonzero((before != after) & ~((before != before) & (after != after)))),
        total=before.size,
        largest=float(apart.max(initial=0.0)),
        mean=float(apart.mean()) if apart.size else 0.0,
        relative=distance / norm if norm else (math.inf if distance else 0.0),
        not_finite=int(np.count_nonzero(~np.isfinite(other))),
    )


def _with_statistics(change: Change, before: Contents, after: Contents) -> Change:
    leaf = before.leaves.get(change.path)
    if change.kind is not Kind.VALUE or leaf is None or not leaf.sha256:
        return change
    found = statistics(before.numbers(change.path), after.numbers(change.path))
    return change.model_copy(update={"statistics": found})


def _equal(one: Any, other: Any) -> bool:
    return bool(one == other) or (one != one and other != other)
