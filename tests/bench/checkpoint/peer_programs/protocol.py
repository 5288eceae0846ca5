"""How a peer is measured, whatever it is: ``python PEER.py MIB REPEATS`` prints stalls and times to durable as JSON.

Peers run in environments of their own, so this needs nothing but NumPy.
"""

import json
import sys
import time
from collections.abc import Callable

import numpy as np

BUCKET = "bench"
TENSORS = 64
SEED = 5

Wait = Callable[[], object]


def arrays() -> dict[str, np.ndarray]:
    """The state that all save."""
    random = np.random.default_rng(SEED)
    size = int(sys.argv[1]) * (1 << 20) // TENSORS // 4
    return {f"layer{index:02}": random.random(size, dtype=np.float32) for index in range(TENSORS)}


def report(save: Callable[[int], Wait]) -> None:
    """Measure ``save``, which returns once training may go on, and gives what waits until the save is durable.

    The first save is printed apart, since some prepare themselves in it.
    """
    stalls, durable = [], []
    for number in range(int(sys.argv[2]) + 1):
        before = time.perf_counter()
        wait = save(number)
        stalls.append(time.perf_counter() - before)
        wait()
        durable.append(time.perf_counter() - before)
    sys.stdout.write(json.dumps({"stall": stalls, "durable": durable}) + "\n")


def is_over() -> None:
    """What to wait for where the save has done everything."""
