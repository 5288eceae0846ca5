"""Splits a state into shards of bounded size, and puts it together again.

The first shard is the JSON document; the others are safetensors files, which
other tools can open. `plan_shards` plans every shard before a byte is copied, so
that a copy of the state is laid out as the bytes that are uploaded. Large arrays
are cut into pieces.
Source of the format: safetensors, "Format" (8 bytes of length, a JSON header, the data).
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tiphys.checkpoint.state.arrays import Array, Bytes, flat_bytes, to_contiguous
from tiphys.checkpoint.state.serialization import FlatState, read_document, unflatten_state
from tiphys.errors import IntegrityError

FRAMEWORK = "numpy"
SHARD_BYTES = 32 << 20
_MIN_SHARD_BYTES = 4 << 20
_MIN_SHARDS, _MAX_SHARDS = 64, 2_000
_ALIGNMENT = 8

_SAFETENSORS_DTYPES = {
    np.dtype("?"): "BOOL",
    np.dtype("i1"): "I8",
    np.dtype("u1"): "U8",
    **{np.dtype(f"<i{size}"): f"I{8 * size}" for size in (2, 4, 8)},
    **{np.dtype(f"<u{size}"): f"U{8 * size}" for size in (2, 4, 8)},
    **{np.dtype(f"<f{size}"): f"F{8 * size}" for size in (2, 4, 8)},
    np.dtype("<c8"): "C64",
}
"""Types that safetensors has names for; arrays of other types are stored as bytes."""


class PieceCopy(NamedTuple):
    """The bytes of a piece in its array, and their place in the buffer of a shard."""

    name: str
    array: Array
    source: Bytes
    target: Bytes

    def run(self) -> None:
        np.copyto(self.target, self.source)


class ArrayPiece(NamedTuple):
    """Consecutive bytes of one array, named ``<path>@<index of the array>.<offset in bytes>``."""

    array: Array
    start: int
    nbytes: int
    name: str
    dtype: str
    shape: list[int]


@dataclass(frozen=True)
class ShardPlan:
    """A planned shard: its header, and the pieces that follow. ``suffix`` is its file extension."""

    suffix: str
    header: bytes
    pieces: tuple[ArrayPiece, ...] = ()

    @property
    def size_bytes(self) -> int:
        return len(self.header) + sum(piece.nbytes for piece in self.pieces)

    def lay_out(self, buffer: bytearray | memoryview) -> Iterator[PieceCopy]:
        """Write the header into ``buffer``, which has the size of the shard; yield the copies that complete it."""
        buffer[: len(self.header)] = self.header
        target = np.frombuffer(buffer, dtype=np.uint8)
        offset = len(self.header)
        for piece in self.pieces:
            source = flat_bytes(piece.array)[piece.start : piece.start + piece.nbytes]
            yield PieceCopy(piece.name, piece.array, source, target[offset : offset + piece.nbytes])
            offset += piece.nbytes

    def data(self) -> bytearray:
        """Return the bytes of the shard in a new buffer."""
        buffer = bytearray(self.size_bytes)
        for copy in self.lay_out(buffer):
            copy.run()
        return buffer


def plan_shards(state: FlatState, shard_bytes: int | None = None) -> list[ShardPlan]:
    """Plan the shards of a state; equal states give equal bytes.

    Without ``shard_bytes`` a shard has about 32 MiB: less if there would be too few to upload in parallel, more if
    there would be thousands.
    """
    usual = min(SHARD_BYTES, max(_MIN_SHARD_BYTES, state.nbytes // _MIN_SHARDS))
    size = shard_bytes or max(usual, state.nbytes // _MAX_SHARDS)
    batches = _batch_pieces(_split_arrays(state, size), size)
    return [
        ShardPlan("json", state.encode_document()),
        *(ShardPlan("safetensors", _encode_header(b), tuple(b)) for b in batches),
    ]


class StateAssembly:
    """Rebuilds a state from its shards, in any order after the document."""

    def __init__(self, document: bytes) -> None:
        self._tree, self._arrays = read_document(document)
        self._targets = [flat_bytes(array) for array in self._arrays]
        self._missing_bytes = [len(target) for target in self._targets]

    def add_shard(self, shard: bytes | bytearray | memoryview) -> None:
        """Copy the pieces of one safetensors shard into the arrays.

        Raises:
            IntegrityError: a piece is outside of the arrays of this state.
        """
        for index, offset, numbers in _read_pieces(shard):
            if index >= len(self._targets) or offset + len(numbers) > len(self._targets[index]):
                raise IntegrityError("a shard contains data outside of the arrays of the state")
            np.copyto(self._targets[index][offset : offset + len(numbers)], numbers)
            self._missing_bytes[index] -= len(numbers)

    def state(self, like: Any = None) -> Any:
        """Return the state after every shard was added; ``like`` as in `unflatten_state`.

        Raises:
            IntegrityError: shards are missing, or belong to another state.
            UsageError: the classes of the state differ from those in ``like``.
        """
        if any(self._missing_bytes):
            raise IntegrityError("the shards do not hold every number of the state")
        return unflatten_state(self._tree, self._arrays, like)


def _split_arrays(state: FlatState, shard_bytes: int) -> Iterator[ArrayPiece]:
    for index, (path, original) in enumerate(state.arrays):
        array = to_contiguous(original)
        name = f"{path.encode(errors='replace').decode()}@{index}"
        dtype = _SAFETENSORS_DTYPES.get(array.dtype)
        if dtype and array.nbytes <= shard_bytes and not array.flags.fnc:
            yield ArrayPiece(array, 0, array.nbytes, f"{name}.0", dtype, list(array.shape))
            continue
        unit = array.itemsize if dtype else 1
        length = max(1, shard_bytes // unit) * unit
        for start in range(0, array.nbytes, length):
            size = min(length, array.nbytes - start)
            yield ArrayPiece(array, start, size, f"{name}.{start}", dtype or "U8", [size // unit])


def _batch_pieces(pieces: Iterable[ArrayPiece], shard_bytes: int) -> Iterator[list[ArrayPiece]]:
    batch: list[ArrayPiece] = []
    size = 0
    for piece in pieces:
        if batch and size + piece.nbytes > shard_bytes:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece.nbytes
    if batch:
        yield batch


def _encode_header(pieces: Sequence[ArrayPiece]) -> bytes:
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
    """Yield (index of the array, offset in bytes, content) of each piece of a safetensors file."""
    numbers = np.frombuffer(shard, dtype=np.uint8)
    begin = 8 + int.from_bytes(numbers[:8].tobytes(), "little")
    for name, entry in json.loads(numbers[8:begin].tobytes()).items():
        if name == "__metadata__":
            continue
        index, offset = (int(number) for number in name.rpartition("@")[2].split("."))
        start, end = entry["data_offsets"]
        yield index, offset, numbers[begin + start : begin + end]
