"""The launcher's file in memory, held by the test in the launcher's place."""

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tiphys.checkpoint.state.near_copy import NearMemory
from tiphys.launch.near_memory import hold_near_memory, open_near_memory

KEEPS = {"TIPHYS_LINEAGE": "r/fit"}
"""What lets the launcher hold the file."""


@contextmanager
def held_memory() -> Iterator[Mapping[str, str]]:
    """Hold the file, whose variable the block gets."""
    variables = hold_near_memory(KEEPS)
    yield variables
    os.close(int(variables["TIPHYS_NEAR_MEMORY"].rpartition("/")[2]))


def opened(variables: Mapping[str, str], local_rank: int = 0, ranks: int = 1, *, sharded: bool = False) -> NearMemory:
    """The near memory of a rank, as each start of its program opens it."""
    descriptor = open_near_memory(variables, local_rank)
    assert descriptor is not None
    return NearMemory(descriptor, local_rank, ranks, sharded=sharded)


KINDS = ("bit flip", "zeros", "noise", "torn by the next save", "stale", "another training's", "swapped", "given back")


def read_image(variables: Mapping[str, str], size: int) -> bytes:
    """What the region of the first rank holds."""
    descriptor = os.open(variables["TIPHYS_NEAR_MEMORY"], os.O_RDONLY)
    try:
        return os.pread(descriptor, size, 0)
    finally:
        os.close(descriptor)


def write_image(variables: Mapping[str, str], image: bytes) -> None:
    """Let the region of the first rank hold ``image``."""
    descriptor = os.open(variables["TIPHYS_NEAR_MEMORY"], os.O_WRONLY)
    try:
        os.pwrite(descriptor, image, 0)
    finally:
        os.close(descriptor)


def damaged_image(
    kind: str, chance: random.Random, image: bytes, other: Mapping[str, bytes], spans: Sequence[tuple[int, int]]
) -> bytes:
    """The image after damage of ``kind``.

    Args:
        kind: One of `KINDS`.
        chance: Draws where.
        image: That of the newest commit.
        other: Images of the same size, by the kinds that name them.
        spans: Offset and size of each shard.
    """
    begin, size = chance.choice(spans)
    start = begin + chance.randrange(size)
    length = chance.randint(1, len(image) - start)
    match kind:
        case "bit flip":
            piece = bytes([image[start] ^ 1 << chance.randrange(8)])
        case "zeros" | "given back":
            start, length = (0, len(image)) if kind == "given back" else (start, length)
            piece = bytes(length)
        case "noise":
            piece = chance.randbytes(length)
        case "torn by the next save":  # by several threads, each of which writes a shard from its begin
            torn = bytearray(image)
            for place, whole in chance.sample(spans, chance.randint(1, len(spans))):
                written = chance.randint(1, whole)
                torn[place : place + written] = other[kind][place : place + written]
            return bytes(torn)
        case "swapped":
            place = chance.choice([place for place, _ in spans if place != begin])
            start, piece = begin, image[place : place + size]
        case _:
            return other[kind]
    return image[:start] + piece + image[start + len(piece) :]
