"""What this machine can do at best: that beside which all others stand."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from bench.checkpoint.server import BUCKET
from bench.checkpoint.workload import MIB, State
from bench.samples import seconds

_PIECE_BYTES = 32 * MIB


class WarmCopy:
    """Copies of the same arrays into one buffer that was touched before."""

    def __init__(self, state: State) -> None:
        self._sources = [array.view(np.uint8) for array in state.values()]
        self._buffer = np.zeros(sum(source.nbytes for source in self._sources), dtype=np.uint8)
        self._copy()

    def seconds(self) -> float:
        return seconds(self._copy)

    def _copy(self) -> None:
        offset = 0
        for source in self._sources:
            np.copyto(self._buffer[offset : offset + source.nbytes], source)
            offset += source.nbytes


def cut(whole: bytes) -> list[bytes]:
    """Pieces of the size of a shard."""
    return [whole[start : start + _PIECE_BYTES] for start in range(0, len(whole), _PIECE_BYTES)]


def sha256_seconds(pieces: Sequence[bytes], threads: int) -> float:
    """One pass over all pieces."""
    with ThreadPoolExecutor(threads) as pool:
        return seconds(lambda: list(pool.map(lambda piece: hashlib.sha256(piece).digest(), pieces)))


def put_object(client: Any, data: bytes) -> float:
    """Seconds of one blocking request."""
    return seconds(lambda: client.put_object(Bucket=BUCKET, Key="plain/state", Body=data))


def joined(state: State) -> bytes:
    return b"".join(array.tobytes() for array in state.values())
