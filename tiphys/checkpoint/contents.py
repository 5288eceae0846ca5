"""What a stored checkpoint holds, by name, for whoever wants to look at it without the program that made it.

This is the one place beside the writer that knows the stored form: for each
rank a JSON document first, then safetensors files whose tensors are named
``<path>@<index of the array>.<offset in bytes>``. Every byte is verified on the
way. Only `numbers` needs NumPy.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tiphys.checkpoint.reading import ShardReader
from tiphys.errors import IntegrityError, UsageError
from tiphys.records import CheckpointManifest, Shard
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
