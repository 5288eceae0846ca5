"""A training program that runs out of memory: ``python -m support.programs.memory_hog WAY MEBIBYTES SAVED``.

Its state takes so many MEBIBYTES. Then the kernel gives it no more address
space, and it takes memory in one WAY: ``small`` pieces to the last, and lets go
of them; the same and ``held`` to the end; or one ``large`` piece that is never
there, with room for small ones. SAVED is ``saved`` if it waits for its first
save before that, and ``under-way`` if not. With HOARDER_SURVIVES it catches the
error outside of the session, and ends well.
"""

import contextlib
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tiphys import checkpoint

ROOM_BYTES = {"small": 4 << 20, "held": 4 << 20, "large": 256 << 20}
HELD: list[Any] = [None]


def limit_memory(room_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + room_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def hoard(way: str) -> None:
    chain: list[Any] = []
    while way == "small":
        chain = [chain]  # no piece is larger than another, so that the last byte goes, too
    while way == "held":
        HELD[0] = [HELD[0]]
    chain.append(bytearray(1 << 40))


def train(way: str, mebibytes: int, saved: str) -> None:
    with checkpoint.session() as session:
        state = session.restore(default={"weights": np.ones(mebibytes << 18, dtype=np.float32)})
        save = session.step(1, state)
        if save and saved == "saved":
            save.wait()
        limit_memory(ROOM_BYTES[way])
        hoard(way)


def main(way: str, mebibytes: str, saved: str) -> None:
    survives = "HOARDER_SURVIVES" in os.environ
    with contextlib.suppress(MemoryError) if survives else contextlib.nullcontext():
        train(way, int(mebibytes), saved)
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        sys.exit("it is to be ended although it goes on")


if __name__ == "__main__":
    main(*sys.argv[1:])
