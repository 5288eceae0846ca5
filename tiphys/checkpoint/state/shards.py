"""A state as a sequence of shards of bounded size, and back.

The first shard is the JSON document; the others are safetensors files, which
any tool of the field can open. What a shard will hold is planned before a byte
is copied, so that a copy of the state can be laid out as the very bytes that
are uploaded. Large arrays are cut into pieces.
Source of the format: safetensors, "Format" (8 bytes of length, a JSON header, the numbers).
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tiphys.checkpoint.state.serialization import Array, Bytes, Flat, contiguous, flat_bytes, read_document, unflatten
from tiphys.errors import IntegrityError

FRAMEWORK = "numpy"
SHARD_BYTES = 32 << 20
_LEAST_BYTES = 4 << 20
_FEWEST_SHARDS, _MOST_SHARDS = 64, 2_000
_ALIGNMENT = 8

_NAMES = {
    np.dtype("?"): "BOOL",
    np.dtype("i1"): "I8",
    np.dtype("u1"): "U8",
    **{np.dtype(f"<i{size}"): f"I{8 * size}" for size in (2, 4, 8)},
    **{np.dtype(f"<u{size}"): f"U{8 * size}" for size in (2, 4, 8)},
    **{np.dtype(f"<f{size}"): f"F{8 * size}" for size in (2, 4, 8)},
    np.dtype("<c8"): "C64",
}
"""What safetensors knows by name; everything else is kept as its bytes."""


class Piece(NamedTuple):
    """Consecutive bytes of one array, named ``<path>@<index of the array>.<offset in bytes>``."""

    array: Array
    start: int
    nbytes: int
    name: str
    dtype: str
    shape: list[int]


@dataclass(frozen=True)
class ShardPlan:
    """One shard to be: what it begins with, and the pieces that follow. ``suffix`` names its format."""

    suffix: str
    header: bytes
    pieces: tuple[Piece, ...] = ()

    @property
    def size_bytes(self) -> int:
        return len(self.header) + sum(piece.nbytes for piece in self.pieces)

    def write_into(self, buffer: bytearray) -> None:
        """Copy the shard into ``buffer``, which has its size."""
        buffer[: len(self.header)] = self.header
        target = np.frombuffer(buffer, dtype=np.uint8)
        offset = len(self.header)
        for piece in self.pieces:
            source = flat_bytes(piece.array)[piece.start : piece.start + piece.nbytes]
            np.copyto(target[offset : offset + piece.nbytes], source)
            offset += piece.nbytes

    def data(self) -> bytearray:
        """The shard's bytes, in memory of their own."""
        buffer = bytearray(self.size_bytes)
        self.write_into(buffer)
        return buffer


def plan_shards(state: Flat, shard_bytes: int | None = None) -> list[ShardPlan]:
    """Shards of at most about ``shard_bytes`` each; the same state gives the same bytes.

    By default 32 MiB: less where only a few would travel at a time, and more
    where there would be thousands.
    """
    usual = min(SHARD_BYTES, max(_LEAST_BYTES, state.nbytes // _FEWEST_SHARDS))
    size = shard_bytes or max(usual, state.nbytes // _MOST_SHARDS)
    batches = _batches(_pieces(state, size), size)
    return [ShardPlan("json", state.document()), *(ShardPlan("safetensors", _header(b), tuple(b)) for b in batches)]


class Assembly:
    """A state that is put together from its shards, in any order after the first."""

    def __init__(self, document: bytes) -> None:
        self._tree, self._arrays = read_document(document)
        self._targets = [flat_bytes(array) for array in self._arrays]
        self._missing = [len(target) for target in self._targets]

    def add(self, shard: bytes | bytearray | memoryview) -> None:
        """Copy the numbers of one safetensors shard to where they belong.

        Raises:
            IntegrityError: it holds what this state has no place for.
        """
        for index, offset, numbers in _read_pieces(shard):
            if index >= len(self._targets) or offset + len(numbers) > len(self._targets[index]):
                raise IntegrityError("a shard holds numbers that the state has no place for")
            np.copyto(self._targets[index][offset : offset + len(numbers)], numbers)
            self._missing[index] -= len(numbers)

    def state(self, like: Any = None) -> Any:
        """The state, once every shard was added.

        Raises:
            IntegrityError: shards are missing, or are not those of one state.
            UsageError: the classes of the state differ from those in ``like``.
        """
        if any(self._missing):
            raise IntegrityError("the shards do not hold every number of the state")
        return unflatten(self._tree, self._arrays, like)


def _pieces(state: Flat, shard_bytes: int) -> Iterator[Piece]:
    for index, (path, given) in enumerate(state.arrays):
        array = contiguous(given)
        name = f"{path.encode(errors='replace').decode()}@{index}"
        dtype = _NAMES.get(array.dtype)
        if dtype and array.nbytes <= shard_bytes and not array.flags.fnc:
            yield Piece(array, 0, array.nbytes, f"{name}.0", dtype, list(array.shape))
            continue
        unit = array.itemsize if dtype else 1
        length = max(1, shard_bytes // unit) * unit
        for start in range(0, array.nbytes, length):
            size = min(length, array.nbytes - start)
            yield Piece(array, start, size, f"{name}.{start}", dtype or "U8", [size // unit])


def _batches(pieces: Iterable[Piece], shard_bytes: int) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        if batch and size + piece.nbytes > shard_bytes:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece.nbytes
    if batch:
        yield batch


def _header(pieces: Sequence[Piece]) -> bytes:
    entries: dict[str, Any] = {}
    offset = 0
    for piece in pieces:
        end = offset + piece.nbytes
        entries[piece.name] = {"dtype": piece.dtype, "shape": piece.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _read_pieces(shard: bytes | bytearray | memoryview) -> Iterator[tuple[int, int, Bytes]]:
    """(index of the array, offset in its bytes, bytes) of each piece of a safetensors file."""
    numbers = np.frombuffer(shard, dtype=np.uint8)
    begin = 8 + int.from_bytes(numbers[:8].tobytes(), "little")
    for name, entry in json.loads(numbers[8:begin].tobytes()).items():
        if name == "__metadata__":
            continue
        index, offset = (int(number) for number in name.rpartition("@")[2].split("."))
        start, end = entry["data_offsets"]
        yield index, offset, numbers[begin + start : begin + end]
