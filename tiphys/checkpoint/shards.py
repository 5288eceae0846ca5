"""A state as a sequence of shards of bounded size, and back.

The first shard is the JSON document; the others are safetensors files, which
any tool of the field can open. Large arrays are cut into pieces, so that saving
needs memory for one shard, not for a second copy of the model.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load, save

from tiphys.checkpoint.arrays import Array, contiguous, flat, flat_bytes
from tiphys.checkpoint.state import Flat, flatten, read_document, unflatten
from tiphys.errors import IntegrityError

FRAMEWORK = "numpy"
SHARD_BYTES = 64 << 20

_NATIVE = {np.dtype(name) for name in ("?", "i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8")} | {
    np.dtype(name) for name in ("<f2", "<f4", "<f8", "<c8")
}
"""What safetensors knows by name; everything else is kept as its bytes."""


class PackedShard(NamedTuple):
    """Bytes ready to be stored; ``suffix`` names their format."""

    suffix: str
    data: bytes


class _Piece(NamedTuple):
    """Consecutive numbers of one array, named ``<path>@<index of the array>.<offset in bytes>``."""

    name: str
    numbers: Array


def pack(state: Any, shard_bytes: int = SHARD_BYTES) -> Iterator[PackedShard]:
    """Shards of at most about ``shard_bytes`` each; the same state gives the same bytes.

    Raises:
        UsageError: the state holds something that cannot be kept exactly.
    """
    flattened = flatten(state)
    yield PackedShard("json", flattened.document())
    for pieces in _batches(_pieces(flattened, shard_bytes), shard_bytes):
        yield PackedShard("safetensors", save({piece.name: piece.numbers for piece in pieces}))


def unpack(shards: Iterable[bytes], like: Any = None) -> Any:
    """The state whose shards these are, in the order of `pack`.

    Raises:
        IntegrityError: shards are missing, or are not those of one state.
        UsageError: the classes of the state differ from those in ``like``.
    """
    rest = iter(shards)
    tree, arrays = read_document(next(rest))
    targets = [flat_bytes(array) for array in arrays]
    missing = [len(target) for target in targets]
    for shard in rest:
        for name, piece in load(shard).items():
            index, offset = (int(number) for number in name.rpartition("@")[2].split("."))
            targets[index][offset : offset + piece.nbytes] = flat_bytes(piece)
            missing[index] -= piece.nbytes
    if any(missing):
        raise IntegrityError("the shards do not hold every number of the state")
    return unflatten(tree, arrays, like)


def _pieces(flattened: Flat, shard_bytes: int) -> Iterator[_Piece]:
    for index, (path, array) in enumerate(flattened.arrays):
        name = f"{path.encode(errors='replace').decode()}@{index}"
        whole = contiguous(array)
        native = whole.dtype in _NATIVE
        if native and whole.nbytes <= shard_bytes and not whole.flags.fnc:
            yield _Piece(f"{name}.0", whole)
            continue
        numbers = flat(whole) if native else flat_bytes(whole)
        length = max(1, shard_bytes // numbers.itemsize)
        for start in range(0, len(numbers), length):
            yield _Piece(f"{name}.{start * numbers.itemsize}", numbers[start : start + length])


def _batches(pieces: Iterable[_Piece], shard_bytes: int) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        if batch and size + piece.numbers.nbytes > shard_bytes:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece.numbers.nbytes
    if batch:
        yield batch
