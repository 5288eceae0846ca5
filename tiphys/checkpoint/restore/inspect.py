"""Inspects stored checkpoints without the program that wrote them: lists their values, and compares two of them.

A comparison shows why two runs diverged. Provenance and metrics come from the
manifests; arrays are compared by the hash of their bytes. Numeric differences
are computed for one array at a time, because two whole models may not fit into
memory.

Besides the writer this is the only module that knows the stored form: for each
rank a JSON document, then safetensors files whose tensors are named
``<path>@<index of the array>.<offset in bytes>``. Every byte is verified. Only
`CheckpointContents.read_array` and `compute_statistics` need NumPy.
"""

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from tiphys.checkpoint.restore.shard_reader import ShardReader
from tiphys.errors import IntegrityError, UsageError
from tiphys.records import CheckpointManifest, CheckpointRef, Record, Shard
from tiphys.records.checkpoint import AS_JSON, Metric
from tiphys.store import Store

if TYPE_CHECKING:
    from numpy.typing import NDArray


READABLE_FRAMEWORKS = ("numpy",)
"""Frameworks whose checkpoints have the form that this module reads."""
_FORMAT = 1
_NUMBER_CODES = {"<f2": "<e", "<f4": "<f", "<f8": "<d", "<i4": "<i", "<i8": "<q", "<u4": "<I", "<u8": "<Q"}
"""The usual dtypes of NumPy scalars, and their codes in `struct`."""


class StateLeaf(NamedTuple):
    """One array, or one other value, of a state."""

    path: str
    """Such as ``state.layers.0``; with the prefix ``rank 1:`` for ranks above 0."""
    form: str
    """``float32[16, 4]`` for an array; the JSON of any other value."""
    sha256: str = ""
    """Hash of the bytes of an array; empty for any other value."""
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


class CheckpointContents:
    """The leaves of one checkpoint. The constructor reads every byte once and keeps no array.

    Args:
        store: Store of the checkpoint.
        manifest: The checkpoint.

    Raises:
        IntegrityError: a shard does not match the manifest.
        UsageError: another framework or a newer version wrote the checkpoint.
    """

    def __init__(self, store: Store, manifest: CheckpointManifest) -> None:
        if manifest.framework not in READABLE_FRAMEWORKS:
            raise UsageError(
                f"checkpoint {manifest.ref} of {manifest.lineage} was written by the framework "
                f"{manifest.framework!r}, whose arrays Tiphys cannot name; compare sizes and facts with "
                "`tiphys checkpoint show`"
            )
        self._reader = ShardReader(store)
        self._arrays: dict[tuple[int, int], _Array] = {}
        self._paths: dict[str, tuple[int, int]] = {}
        self.leaves: dict[str, StateLeaf] = {}
        for rank, shards in _shards_by_rank(manifest).items():
            self._read_rank(rank, shards)

    def read_array(self, path: str) -> "NDArray[Any]":
        """Read the array at ``path`` again; needs NumPy, and memory for the array and one shard."""
        from tiphys.checkpoint.state.arrays import allocate_array, flat_bytes, lay_out

        stored = self._arrays[self._paths[path]]
        array = allocate_array(stored.description)
        data = b"".join(bytes(self._reader.read(piece.shard)[piece.start : piece.end]) for piece in stored.pieces)
        flat_bytes(array)[:] = bytearray(data)
        return lay_out(array, stored.description)

    def _read_rank(self, rank: int, shards: list[Shard]) -> None:
        document = json.loads(bytes(self._reader.read(shards[0])))
        if document.get("format") != _FORMAT:
            raise UsageError(f"{shards[0].key} has format {document.get('format')!r}, this version reads {_FORMAT}")
        for index, description in enumerate(document["arrays"]):
            self._arrays[rank, index] = _Array(description)
        for shard in shards[1:]:
            self._read_shard(rank, shard)
        start = "state" if rank == 0 else f"rank {rank}: state"
        for path, node in _walk_leaves(document["state"], start):
            self._add_leaf(rank, path, node, document["views"])

    def _read_shard(self, rank: int, shard: Shard) -> None:
        data = self._reader.read(shard)
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(bytes(data[8:begin])).items():
            if name == "__metadata__":
                continue
            index, offset = (int(number) for number in name.rpartition("@")[2].split("."))
            array = self._arrays.get((rank, index))
            if array is None or offset != array.size_bytes:
                raise IntegrityError(f"{shard.key} contains {name!r}, which does not continue its array")
            start, end = (begin + offset_in_data for offset_in_data in entry["data_offsets"])
            array.digest.update(data[start:end])
            array.size_bytes += end - start
            array.pieces.append(_Piece(shard, start, end))

    def _add_leaf(self, rank: int, path: str, node: Any, views: list[dict[str, Any]]) -> None:
        if isinstance(node, dict) and "array" in node:
            array_key = rank, int(node["array"])
            array = self._arrays[array_key]
            self._paths[path] = array_key
            self.leaves[path] = StateLeaf(
                path, _format_array(array.description), array.digest.hexdigest(), array.size_bytes
            )
        else:
            self.leaves[path] = StateLeaf(path, _format_leaf(node, views))


def _shards_by_rank(manifest: CheckpointManifest) -> Mapping[int, list[Shard]]:
    ranks: dict[int, list[Shard]] = {}
    for shard in manifest.shards:
        ranks.setdefault(shard.rank, []).append(shard)
    return dict(sorted(ranks.items()))


def _walk_leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a state's tree; an empty container is a leaf, so that it is listed."""
    members: list[tuple[Any, Any]] = []
    if isinstance(node, list):
        members = list(enumerate(node))
    elif isinstance(node, dict):
        pairs = [*node.get("attributes", {}).items(), *node.get("pairs", ()), *node.get("dict", ())]
        members = [(_format_key(key), item) for key, item in pairs]
        members += enumerate([*node.get("items", ()), *node.get("tuple", ())])
    if not members:
        yield path, node
    for key, item in members:
        yield from _walk_leaves(item, f"{path}.{key}")


def _format_key(key: Any) -> Any:
    return key if isinstance(key, str | int) else json.dumps(key, ensure_ascii=False)


def _format_leaf(node: Any, views: list[dict[str, Any]]) -> str:
    """Format a leaf whose content is in the document: as its JSON, or as a part of other leaves."""
    for tag, content in node.items() if isinstance(node, dict) else ():
        code = _NUMBER_CODES.get(tag)
        if code and math.isfinite(value := struct.unpack(code, bytes.fromhex(content))[0]):
            return f"{_format_dtype(tag)} {value}"
    if isinstance(node, dict) and "same" in node:
        return f"the same as {node['path']}"
    if isinstance(node, dict) and "view" in node:
        form = views[node["view"]]
        return f"{_format_dtype(form['dtype'])}{form['shape']} at byte {form['offset']} of {form['path']}"
    return json.dumps(node, ensure_ascii=False)


def _format_array(description: dict[str, Any]) -> str:
    """Format ``<f4`` and a shape as ``float32[16, 4]``, with the memory order if it is not C's."""
    shape, strides = description.get("layout", (description["shape"], None))
    order = f" with strides {strides}" if strides else " in Fortran order" if description["order"] == "F" else ""
    return f"{_format_dtype(description['dtype'])}{shape}{order}"


def _format_dtype(text: str | list[str]) -> str:
    if isinstance(text, list):
        return ".".join(text)
    kinds = {"f": "float", "i": "int", "u": "uint", "c": "complex", "b": "bool"}
    kind, size = text[1:2], text[2:]
    if text[:1] not in "<|=" or kind not in kinds or not size.isdecimal():
        return text
    return "bool" if kind == "b" else f"{kinds[kind]}{8 * int(size)}"


class DifferenceKind(StrEnum):
    """How a leaf of the state differs."""

    ADDED = "added"
    REMOVED = "removed"
    FORM = "form"
    """Another type or shape."""
    VALUE = "value"
    """The same form with other content."""


class ArrayStatistics(Record):
    """Numeric differences of two arrays of one form, over the elements that are finite in both."""

    changed: int
    """Elements that differ."""
    total: int
    largest: Metric
    """Largest absolute difference."""
    mean: Metric
    """Mean absolute difference."""
    relative: Metric
    """Norm of the difference, divided by the norm of the first array."""
    not_finite: int
    """Elements of the second array that are NaN or infinite."""


class LeafDifference(Record):
    """One leaf that differs."""

    path: str
    kind: DifferenceKind
    before: str = ""
    after: str = ""
    statistics: ArrayStatistics | None = None


class ValueDifference(Record):
    """A fact or metric of both checkpoints; None if it is unknown."""

    name: str
    before: Annotated[Any, AS_JSON] = None
    after: Annotated[Any, AS_JSON] = None


class CheckpointDifference(Record):
    """The differences of two checkpoints; ``same`` counts the leaves that are equal."""

    before: CheckpointRef
    after: CheckpointRef
    facts: tuple[ValueDifference, ...]
    metrics: tuple[ValueDifference, ...]
    size_bytes: ValueDifference
    changes: tuple[LeafDifference, ...] = ()
    same: int = 0
    note: str = ""
    """Why the states could not be compared; empty if they were."""


def compare_checkpoints(
    before: tuple[Store, CheckpointManifest], after: tuple[Store, CheckpointManifest], *, values: bool = False
) -> CheckpointDifference:
    """Compare two checkpoints; reads every byte of both.

    Args:
        before: The first checkpoint and its store.
        after: The second checkpoint and its store.
        values: Whether to compute `ArrayStatistics`, which reads the arrays that differ again.

    Raises:
        IntegrityError: a shard does not match its manifest.
        UsageError: a newer version of Tiphys wrote one of them.
    """
    first, second = before[1], after[1]
    result = CheckpointDifference(
        before=first.ref,
        after=second.ref,
        facts=compare_values(flatten_provenance(first), flatten_provenance(second)),
        metrics=compare_values(first.metrics, second.metrics),
        size_bytes=ValueDifference(name="size_bytes", before=first.size_bytes, after=second.size_bytes),
    )
    unreadable = {manifest.framework for manifest in (first, second)}.difference(READABLE_FRAMEWORKS)
    if unreadable:
        return result.model_copy(update={"note": f"the states were written by {', '.join(sorted(unreadable))}"})
    old, new = CheckpointContents(*before), CheckpointContents(*after)
    changes = compare_leaves(old.leaves, new.leaves)
    if values:
        changes = [_with_statistics(change, old, new) for change in changes]
    same = len(old.leaves.keys() & new.leaves.keys()) - sum(
        change.kind in (DifferenceKind.FORM, DifferenceKind.VALUE) for change in changes
    )
    return result.model_copy(update={"changes": tuple(changes), "same": same})


def compare_leaves(before: Mapping[str, StateLeaf], after: Mapping[str, StateLeaf]) -> list[LeafDifference]:
    """Return the leaves that differ, in the order of their paths. Pure."""
    changes = []
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if old is None and new is not None:
            changes.append(LeafDifference(path=path, kind=DifferenceKind.ADDED, after=new.form))
        elif new is None and old is not None:
            changes.append(LeafDifference(path=path, kind=DifferenceKind.REMOVED, before=old.form))
        elif old is not None and new is not None and old != new:
            same_form = bool(old.sha256) == bool(new.sha256) and (old.form == new.form or not old.sha256)
            kind = DifferenceKind.VALUE if same_form else DifferenceKind.FORM
            changes.append(LeafDifference(path=path, kind=kind, before=old.form, after=new.form))
    return changes


def flatten_provenance(manifest: CheckpointManifest) -> dict[str, Any]:
    """Return the provenance of a manifest as a flat mapping, without unknown values."""
    facts = manifest.facts.model_dump(mode="json")
    nested = {f"versions.{name}": version for name, version in facts.pop("versions").items()}
    nested |= {f"data_position.{name}": value for name, value in facts.pop("data_position").items()}
    own = {"global_step": manifest.global_step, "attempt": manifest.attempt, "framework": manifest.framework}
    flat = {**own, "saved_because": manifest.reason, **facts, **nested}
    return {name: value for name, value in flat.items() if value not in (None, "")}


def compare_values(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[ValueDifference, ...]:
    """Return the names whose values differ, in the order of ``before``, then of ``after``. Pure."""
    names = dict.fromkeys([*before, *after])
    return tuple(
        ValueDifference(name=name, before=before.get(name), after=after.get(name))
        for name in names
        if not _is_equal(before.get(name), after.get(name))
    )


def compute_statistics(before: "NDArray[Any]", after: "NDArray[Any]") -> ArrayStatistics | None:
    """Compute the numeric differences of two arrays of one shape; None if they are empty or not numeric."""
    import numpy as np

    if before.dtype.kind not in "biufc" or after.dtype.kind not in "biufc" or not before.size:
        return None
    wide = np.complex128 if "c" in (before.dtype.kind, after.dtype.kind) else np.float64
    old, new = before.astype(wide), after.astype(wide)
    finite = np.isfinite(old) & np.isfinite(new)
    distances = np.abs(new[finite] - old[finite])
    norm = float(np.linalg.norm(old[finite]))
    distance = float(np.linalg.norm(distances))
    return ArrayStatistics(
        changed=int(np.count_nonzero((before != after) & ~((before != before) & (after != after)))),
        total=before.size,
        largest=float(distances.max(initial=0.0)),
        mean=float(distances.mean()) if distances.size else 0.0,
        relative=distance / norm if norm else (math.inf if distance else 0.0),
        not_finite=int(np.count_nonzero(~np.isfinite(new))),
    )


def _with_statistics(change: LeafDifference, before: CheckpointContents, after: CheckpointContents) -> LeafDifference:
    leaf = before.leaves.get(change.path)
    if change.kind is not DifferenceKind.VALUE or leaf is None or not leaf.sha256:
        return change
    statistics = compute_statistics(before.read_array(change.path), after.read_array(change.path))
    return change.model_copy(update={"statistics": statistics})


def _is_equal(before: Any, after: Any) -> bool:
    return bool(before == after) or (before != before and after != after)  # NaN equals NaN here
