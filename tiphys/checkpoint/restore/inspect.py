"""What two checkpoints differ in: for the question of why a run went another way from there.

Facts and metrics come from the manifests, arrays are compared by the hash of
their bytes. How far numbers lie apart is computed for one array at a time, since
two whole models may not fit into memory.

What a stored checkpoint holds, by name, for whoever wants to look at it without the program that made it.

This is the one place beside the writer that knows the stored form: for each
rank a JSON document first, then safetensors files whose tensors are named
``<path>@<index of the array>.<offset in bytes>``. Every byte is verified on the
way. Only `numbers` needs NumPy.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from tiphys.checkpoint.restore.shard_reader import ShardReader
from tiphys.errors import IntegrityError, UsageError
from tiphys.records import CheckpointManifest, CheckpointRef, Record, Shard
from tiphys.records.checkpoint import Metric
from tiphys.store import Store

if TYPE_CHECKING:
    from numpy.typing import NDArray


READABLE = ("numpy",)
"""Frameworks whose checkpoints have this form."""
_FORMAT = 1


class Leaf(NamedTuple):
    """One array, or one other value, of a state."""

    path: str
    """Such as ``state.layers.0``; of all ranks but the first with ``rank 1:`` before it."""
    form: str
    """``float32[16, 4]`` for an array; the JSON of any other value."""
    sha256: str = ""
    """Of the bytes of an array; empty for any other value."""
    size_bytes: int = 0


class _Piece(NamedTuple):
    shard: Shard
    start: int
    end: int


@dataclass
class _Array:
    description: dict[str, Any]
    digest: Any = field(default_factory=hashlib.sha256)
    size_bytes: int = 0
    pieces: list[_Piece] = field(default_factory=list)


class Contents:
    """The leaves of one checkpoint. Making one reads every byte once and keeps no numbers.

    Raises:
        IntegrityError: bytes do not match the manifest.
        UsageError: another framework, or another version, wrote it in a form that is not known here.
    """

    def __init__(self, store: Store, manifest: CheckpointManifest) -> None:
        if manifest.framework not in READABLE:
            raise UsageError(
                f"checkpoint {manifest.ref} of {manifest.lineage} was written by the framework "
                f"{manifest.framework!r}, whose arrays Tiphys cannot name; compare sizes and facts with "
                "`tiphys checkpoint show`"
            )
        self._reader = ShardReader(store)
        self._arrays: dict[tuple[int, int], _Array] = {}
        self._paths: dict[str, tuple[int, int]] = {}
        self.leaves: dict[str, Leaf] = {}
        for rank, shards in _by_rank(manifest).items():
            self._read_rank(rank, shards)

    def numbers(self, path: str) -> "NDArray[Any]":
        """The array at ``path``, read again; needs NumPy and memory for that array and one shard."""
        import numpy as np

        array = self._arrays[self._paths[path]]
        form = array.description
        data = b"".join(bytes(self._reader.read(piece.shard)[piece.start : piece.end]) for piece in array.pieces)
        return np.frombuffer(data, dtype=np.dtype(form["dtype"])).reshape(form["shape"], order=form["order"])

    def _read_rank(self, rank: int, shards: list[Shard]) -> None:
        document = json.loads(bytes(self._reader.read(shards[0])))
        if document.get("format") != _FORMAT:
            raise UsageError(f"{shards[0].key} has format {document.get('format')!r}, this version reads {_FORMAT}")
        for index, description in enumerate(document["arrays"]):
            self._arrays[rank, index] = _Array(description)
        for shard in shards[1:]:
            self._read_shard(rank, shard)
        start = "state" if rank == 0 else f"rank {rank}: state"
        for path, node in _walk(document["state"], start):
            self._add(rank, path, node)

    def _read_shard(self, rank: int, shard: Shard) -> None:
        data = self._reader.read(shard)
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(bytes(data[8:begin])).items():
            if name == "__metadata__":
                continue
            index, offset = (int(number) for number in name.rpartition("@")[2].split("."))
            array = self._arrays.get((rank, index))
            if array is None or offset != array.size_bytes:
                raise IntegrityError(f"{shard.key} holds {name!r}, which does not follow what came before")
            start, end = (begin + place for place in entry["data_offsets"])
            array.digest.update(data[start:end])
            array.size_bytes += end - start
            array.pieces.append(_Piece(shard, start, end))

    def _add(self, rank: int, path: str, node: Any) -> None:
        if isinstance(node, dict) and ("array" in node or "scalar" in node):
            place = rank, int(node["array"] if "array" in node else node["scalar"])
            array = self._arrays[place]
            self._paths[path] = place
            self.leaves[path] = Leaf(path, _form(array.description), array.digest.hexdigest(), array.size_bytes)
        else:
            self.leaves[path] = Leaf(path, json.dumps(node, ensure_ascii=False))


def _by_rank(manifest: CheckpointManifest) -> Mapping[int, list[Shard]]:
    ranks: dict[int, list[Shard]] = {}
    for shard in manifest.shards:
        ranks.setdefault(shard.rank, []).append(shard)
    return dict(sorted(ranks.items()))


def _walk(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Leaves of a state's tree; an empty container is a leaf, so that it can be seen."""
    members: list[tuple[Any, Any]] = []
    if isinstance(node, list):
        members = list(enumerate(node))
    elif isinstance(node, dict) and "record" in node:
        members = list(node["fields"].items())
    elif isinstance(node, dict) and "tuple" in node:
        members = list(enumerate(node["tuple"]))
    elif isinstance(node, dict) and "dict" in node:
        members = [(key, item) for key, item in node["dict"]]
    if not members:
        yield path, node
    for key, item in members:
        yield from _walk(item, f"{path}.{key}")


def _form(description: dict[str, Any]) -> str:
    """``<f4`` and a shape as ``float32[16, 4]``, with the memory order where it is not the usual one."""
    order = " in Fortran order" if description["order"] == "F" else ""
    return f"{_dtype(description['dtype'])}{description['shape']}{order}"


def _dtype(text: str) -> str:
    kinds = {"f": "float", "i": "int", "u": "uint", "c": "complex", "b": "bool"}
    kind, size = text[1:2], text[2:]
    if text[:1] not in "<|=" or kind not in kinds or not size.isdecimal():
        return text
    return "bool" if kind == "b" else f"{kinds[kind]}{8 * int(size)}"


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
