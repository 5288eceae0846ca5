"""What this machine can do at best: the numbers beside which all others stand."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from bench.checkpoint.server import BUCKET, plain_client
from bench.checkpoint.workload import MIB, State, Workload
from bench.progress import say
from bench.samples import seconds, significant, summary

from tiphys.store.buckets.s3_client import make_client

STREAMS = (1, 2, 4, 8)
_PIECE_BYTES = 32 * MIB


def measure(work: Workload) -> dict[str, Any]:
    whole = joined(work.state)
    pieces = cut(whole)
    copy = WarmCopy(work.state)
    found: dict[str, Any] = {
        "memcpy_seconds": summary([copy.seconds() for _ in range(max(7, work.repeats))]),
        "sha256_seconds": {
            str(threads): summary([sha256_seconds(pieces, threads) for _ in range(work.repeats)]) for threads in (1, 2)
        },
    }
    say("sha256 and memcpy are measured; next, S3 PUT")
    with work.server.at(None):
        found["put_one_stream_seconds"] = summary([put_object(plain_client(), whole) for _ in range(work.repeats)])
        work.server.empty()
        found["put_parallel_bytes_per_second"] = {}
        client = make_client()  # that of the store; it sends no checksums, and nothing is hashed here
        for streams in STREAMS[: 2 if work.quick else None]:
            rate = _rate(len(whole), lambda streams=streams: _put_all(client, pieces, streams), work.repeats)
            found["put_parallel_bytes_per_second"][str(streams)] = rate
            work.server.empty()
    return found


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


def _put_all(client: Any, pieces: Sequence[bytes], streams: int) -> None:
    with ThreadPoolExecutor(streams) as pool:

        def put(index: int) -> None:
            client.put_object(Bucket=BUCKET, Key=f"pieces/{index}", Body=pieces[index])

        list(pool.map(put, range(len(pieces))))


def _rate(size_bytes: int, call: Callable[[], object], repeats: int) -> dict[str, Any]:
    return summary([significant(size_bytes / seconds(call)) for _ in range(repeats)])
